"""The examples of docs/publishing.md run as they are, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from penstock.broker import JetStream
from penstock.broker.embedded import EmbeddedServer
from penstock.wire import blocking

PAGE = Path(__file__).parents[2] / "docs" / "publishing.md"


def examples() -> list[tuple[str, str]]:
    """Each Python block with the output that follows it."""
    found = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == PAGE.read_text().count("```python")
    return found


def test_the_examples_print_what_the_page_says(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    with blocking.connect(nats_server.settings) as connection:
        config = {"name": "BILLING", "subjects": ["billing.>"], "allow_atomic": True, "allow_batched": True}
        blocking.run(JetStream(connection.requester()).create_stream(config))
    names: dict[str, object] = {"__name__": "publishing_page"}
    for code, expected in examples():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), names)
        assert printed.getvalue() == expected
