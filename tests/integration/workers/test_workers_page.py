"""The examples of docs/workers.md run as they are, print what the page says, and it names every metric there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.pages import DOCS, apply_platform, check_examples

from penstock.consume.metrics import METRICS
from penstock.server.embedded import EmbeddedServer


def test_the_examples_print_what_the_page_says(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    apply_platform("workers.md", tmp_path, nats_server)
    check_examples("workers.md")


def test_the_page_names_every_metric_and_no_other() -> None:
    assert set(re.findall(r"`(parti_\w+)`", (DOCS / "workers.md").read_text())) == set(METRICS)
