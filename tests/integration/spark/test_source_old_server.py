"""The source against a real server that is too old for some of it: told on the driver, with the version needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.streams import Streams

from penstock.errors import FeatureMissing
from penstock.server.embedded import EmbeddedServer
from penstock.spark.datasource import COLUMNS, JetStreamDataSource


@pytest.fixture
def old_server(tmp_path: Path, old_nats_server_binary: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(data=tmp_path / "old", binary=old_nats_server_binary) as server:
        yield server


@pytest.fixture
def source(old_server: EmbeddedServer, open_streams: Callable[[Any], Streams]) -> Callable[..., JetStreamDataSource]:
    """The source on a server with a Limits stream and a WorkQueue stream."""
    streams = open_streams(old_server.settings)
    streams.make("S")
    streams.number("s.a", 1, 10)
    streams.make("W", retention="workqueue")
    return lambda **options: JetStreamDataSource({"servers": old_server.url, "stream": "S", **options})


def test_a_batch_read_of_a_limits_stream_works(source: Callable[..., JetStreamDataSource]) -> None:
    reader: Any = source(partitions="2").reader(COLUMNS)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert [n for batch in batches for n in batch.column("sequence").to_pylist()] == list(range(1, 11))


def test_a_query_without_a_durable_can_start(source: Callable[..., JetStreamDataSource]) -> None:
    reader: Any = source().streamReader(COLUMNS)
    assert reader.initialOffset()["sequence"] == 0
    reader.stop()


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"consumer": "d"}, r"resetting a consumer needs nats-server 2\.14\.0"),
        ({"startingOffsets": "2020-01-01T00:00:00Z"}, r"finding a message by time needs nats-server 2\.11\.0"),
        ({"stream": "W", "consumer": "d"}, r"batched direct get needs nats-server 2\.11\.0"),
    ],
)
def test_what_the_server_lacks_is_told_before_a_job_starts(
    source: Callable[..., JetStreamDataSource], options: dict[str, str], needs: str
) -> None:
    reader: Any = source(**options).streamReader(COLUMNS)
    with pytest.raises(FeatureMissing, match=needs):
        reader.initialOffset()
