"""The examples of docs/workers.md run as they are, print what the page says, and it names every metric there is."""

from __future__ import annotations

import re

import pytest
from tests.support.pages import DOCS, check_examples
from tests.support.streams import Streams

from penstock.broker.embedded import EmbeddedServer
from penstock.workers.metrics import METRICS


def test_the_examples_print_what_the_page_says(
    nats_server: EmbeddedServer, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    streams.make("FAB", subjects=["dc.>"])
    check_examples("workers.md")


def test_the_page_names_every_metric_and_no_other() -> None:
    assert set(re.findall(r"`(parti_\w+)`", (DOCS / "workers.md").read_text())) == set(METRICS)
