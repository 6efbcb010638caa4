"""The examples of docs/workers.md run as they are, print what the page says, and it names every metric there is."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from penstock.broker import JetStream
from penstock.broker.embedded import EmbeddedServer
from penstock.wire import blocking
from penstock.workers.metrics import METRICS

PAGE = Path(__file__).parents[3] / "docs" / "workers.md"


def examples() -> list[tuple[str, str]]:
    """Each Python block with the output that follows it."""
    found = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == PAGE.read_text().count("```python")
    return found


def test_the_examples_print_what_the_page_says(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    with blocking.connect(nats_server.settings) as connection:
        jetstream = JetStream(connection.requester())
        blocking.run(jetstream.create_stream({"name": "FAB", "subjects": ["dc.>"]}))
    names: dict[str, object] = {"__name__": "workers_page"}
    for code, expected in examples():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), names)
        assert printed.getvalue() == expected


def test_the_page_names_every_metric_and_no_other() -> None:
    assert set(re.findall(r"`(parti_\w+)`", PAGE.read_text())) == set(METRICS)
