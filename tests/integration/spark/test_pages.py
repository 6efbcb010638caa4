"""The Spark examples of the README and of the docs run as they are: only addresses and folders are the test's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.support.commands import ended

from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually
from penstock.testing.contents import stream_messages

ROOT = Path(__file__).parents[3]
ADDRESSES = re.compile(r"nats://[\w.-]+:4222(,nats://[\w.-]+:4222)*")
CHECKPOINT = re.compile(r'(checkpointLocation"?\s*[=,]\s*")(?=\w)')
METERED = "platform.billing.usage.metered"
LINE = '{"project_id": "p1", "n": 1}'


@pytest.fixture
def folder(jetstream: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """Where everything lies. The session of the examples is the one that there is."""
    yield tmp_path
    for query in jetstream.streams.active:
        query.stop()


def blocks(page: str) -> list[str]:
    """The Python examples of a page that are about Spark."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [code for code in found if "spark" in code]


def declare(page: str, server: EmbeddedServer, folder: Path) -> None:
    """Make the streams that the page declares, and publish what it says."""
    text = (ROOT / page).read_text()
    (declared,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "streams:" in block]
    (folder / "penstock.yaml").write_text(declared)
    ended("--servers", server.url, "apply", folder / "penstock.yaml")
    (folder / "lines").write_text(f"{LINE}\n")
    for subject in re.findall(rf"`echo '{re.escape(LINE)}' \| penstock publish (\S+) --file -`", text):
        ended("--servers", server.url, "publish", subject, "--file", folder / "lines")


def execute(page: str, server: EmbeddedServer, folder: Path) -> dict[str, Any]:
    """Run the page's only example on an empty server with that page's own files."""
    declare(page, server, folder)
    (code,) = blocks(page)
    code = CHECKPOINT.sub(rf"\g<1>{folder}/", ADDRESSES.sub(server.url, code))
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, page, "exec"), names)
    return names


def until_stored(server: EmbeddedServer, stream: str, expected: list[tuple[str, bytes]], start: str = "") -> None:
    def stored() -> list[tuple[str, bytes]]:
        found = [(one.subject, one.data) for one in stream_messages(server.settings, stream)]
        return sorted(one for one in found if one[0].startswith(start))

    eventually(lambda: stored() == sorted(expected), within=300, what=f"{len(expected)} rows in {stream}", state=stored)


def test_the_readmes_query_copies_a_stream(nats_server: EmbeddedServer, folder: Path) -> None:
    """After the commands and the publisher that come before it on the page."""
    apply, *_ = re.findall(r"^penstock (apply) +(\S+)(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    ended("--servers", nats_server.url, apply[0], ROOT / apply[1], *apply[2].split())
    (folder / "line").write_text(LINE)
    ended("--servers", nats_server.url, "publish", METERED, "--file", folder / "line")
    execute("README.md", nats_server, folder)
    until_stored(nats_server, "COPY", [(f"copy.{METERED}", LINE.encode())])


def test_the_query_of_the_source_page_reads(nats_server: EmbeddedServer, folder: Path) -> None:
    events = execute("docs/spark-source.md", nats_server, folder)["events"]
    query = events.writeStream.format("memory").queryName("page").trigger(availableNow=True)
    query.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination(300)
    (row,) = events.sparkSession.sql("SELECT * FROM page").collect()
    assert (row.subject, bytes(row.data)) == (METERED, LINE.encode())


def test_the_query_of_the_sink_page_writes(nats_server: EmbeddedServer, folder: Path) -> None:
    execute("docs/spark-sink.md", nats_server, folder)
    until_stored(nats_server, "BILLING", [("platform.billing.rolled_up.p1", b'{"project_id":"p1","n":1}')])


def test_no_page_has_an_example_that_is_not_run() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
    assert {page: len(blocks(page)) for page in pages if blocks(page)} == {
        "README.md": 1,
        "docs/packs.md": 4,  # in test_packs.py
        "docs/spark-sink.md": 1,
        "docs/spark-source.md": 1,
        "docs/spark.md": 1,  # in test_doors.py
    }
