"""The page about Python: its examples on a server with its own streams."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.pages import apply_platform, check_examples

from penstock.server.embedded import EmbeddedServer


def test_the_examples_of_the_page_print_what_it_says(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_platform("python.md", tmp_path, nats_server)
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    check_examples("python.md")
