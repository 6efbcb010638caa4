"""What a pipeline has read of a work queue is purged where the whole queue is its own, and acknowledged elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from tests.support.guarded import Guarded, started

from penstock.spark.datasource import COLUMNS, JetStreamDataSource
from penstock.spark.link import Link
from penstock.wire.blocking import connect

FILE = """
environments: {dev: {servers: ["nats://localhost:4222"], replicas: 1}}
streams:
  WHOLE: {subjects: [whole.>], retention: workqueue, storage: file, max_age: 7d, max_bytes: 64MiB, allow_direct: true}
  SHARED: {subjects: [shared.>], retention: workqueue, storage: file, max_age: 7d, max_bytes: 64MiB, allow_direct: true}
pipelines:
  whole:
    from: {stream: WHOLE, consumer: whole}
    event: {format: json, schema: "n bigint"}
    sql: "SELECT n FROM events"
    to: [{format: parquet, path: lake/whole}]
  shared:
    from: {stream: SHARED, subjects: [shared.a], consumer: shared}
    event: {format: json, schema: "n bigint"}
    sql: "SELECT n FROM events"
    to: [{format: parquet, path: lake/shared}]
"""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    file = tmp_path / "penstock.yaml"
    file.write_text(FILE)
    yield from started(tmp_path, file)


@pytest.mark.parametrize(("name", "purges"), [("whole", True), ("shared", False)])
def test_a_work_queue_is_emptied_under_the_permissions_of_its_pipeline(
    guarded: Guarded, name: str, purges: bool
) -> None:
    login = guarded.settings(f"pipeline-{name}")
    given: dict[str, Any] = {"servers": guarded.server.url, "user": login.user, "password": login.password}
    given |= {"inboxPrefix": login.inbox_prefix, "stream": name.upper(), "consumer": name}
    reader = JetStreamDataSource(given | ({} if purges else {"subjects": "shared.a"})).streamReader(COLUMNS)
    start = reader.initialOffset()
    with connect(guarded.operator) as connection:
        for _ in range(20):
            connection.request(f"{name}.a", b"{}")
    half = reader.latestOffset(start, ReadMaxRows(5))
    reader.commit(half)
    reader.commit(reader.latestOffset(half, ReadMaxRows(10)))
    reader.stop()
    with Link(guarded.operator) as link:
        assert link.stream_info(name.upper()).state.messages == 5
    refused = [line for line in guarded.violations() if "STREAM.PURGE" in line]
    assert len(refused) == (0 if purges else 1), "asked once"
