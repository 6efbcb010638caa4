"""The examples of docs/facts.md run as they are, on the page's own platform, and print what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.pages import apply_platform, check_examples

from penstock.server.embedded import EmbeddedServer


def test_the_examples_print_what_the_page_says(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    apply_platform("facts.md", tmp_path, nats_server)
    check_examples("facts.md")
