"""The examples of docs/groups.md run as they are, and print what the page says."""

from __future__ import annotations

import pytest
from tests.support.pages import check_examples
from tests.support.streams import Streams

from penstock.broker.embedded import EmbeddedServer


def test_the_examples_print_what_the_page_says(
    nats_server: EmbeddedServer, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    streams.make("DC")
    streams.make("BILLING")
    check_examples("groups.md")
