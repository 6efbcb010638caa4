"""The Spark examples of the README and of the docs run as they are: only addresses and folders are the test's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.broker.embedded import EmbeddedServer
from penstock.testing import eventually
from penstock.testing.contents import stream_messages

ROOT = Path(__file__).parents[3]
ADDRESSES = re.compile(r"nats://[\w.-]+:4222(,nats://[\w.-]+:4222)*")
CHECKPOINT = re.compile(r'(checkpointLocation"?\s*[=,]\s*")(?=\w)')
METERED = "platform.billing.usage.metered"
OTHER = "platform.billing.balance_changed"


@pytest.fixture
def names(jetstream: SparkSession, streams: Any) -> Iterator[dict[str, Any]]:
    """What the examples find there: a session, and streams with a few events."""
    streams.make("BILLING", subjects=["platform.billing.>"], allow_atomic=True)
    streams.make("COPY", subjects=["copy.>"], allow_atomic=True)
    streams.number(METERED, 1, 5)
    streams.number(OTHER, 6, 8)
    yield {"__name__": "page", "spark": jetstream}
    for query in jetstream.streams.active:
        query.stop()


def blocks(page: str) -> list[str]:
    """The Python examples of a page that are about Spark."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [code for code in found if "spark" in code]


def execute(page: str, names: dict[str, Any], server: EmbeddedServer, folder: Path) -> None:
    """Run the page's only example."""
    (code,) = blocks(page)
    code = CHECKPOINT.sub(rf"\g<1>{folder}/", ADDRESSES.sub(server.url, code))
    exec(compile(code, page, "exec"), names)


def until_stored(server: EmbeddedServer, stream: str, expected: list[tuple[str, bytes]], start: str = "") -> None:
    def stored() -> list[tuple[str, bytes]]:
        found = [(one.subject, one.data) for one in stream_messages(server.settings, stream)]
        return sorted(one for one in found if one[0].startswith(start))

    eventually(lambda: stored() == sorted(expected), within=300, what=f"{len(expected)} rows in {stream}", state=stored)


def test_the_readmes_query_copies_a_stream(names: dict[str, Any], nats_server: EmbeddedServer, tmp_path: Path) -> None:
    execute("README.md", names, nats_server, tmp_path)
    wanted = [(METERED, n) for n in range(1, 6)] + [(OTHER, n) for n in range(6, 9)]
    until_stored(nats_server, "COPY", [(f"copy.{subject}", b"%d" % n) for subject, n in wanted])


def test_the_queries_of_the_source_and_sink_pages_work_together(
    names: dict[str, Any], nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    execute("docs/spark-source.md", names, nats_server, tmp_path)
    names["results"] = names["events"].selectExpr("'p1' AS project_id", "CAST(CAST(data AS STRING) AS BIGINT) AS n")
    execute("docs/spark-sink.md", names, nats_server, tmp_path)
    rows = [b'{"project_id":"p1","n":%d}' % n for n in range(1, 6)]
    wanted = [("platform.billing.rolled_up.p1", row) for row in rows]
    until_stored(nats_server, "BILLING", wanted, start="platform.billing.rolled_up.")


def test_no_page_has_an_example_that_is_not_run() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
    assert {page: len(blocks(page)) for page in pages if blocks(page)} == {
        "README.md": 1,
        "docs/spark-sink.md": 1,
        "docs/spark-source.md": 1,
    }
