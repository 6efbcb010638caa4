"""The examples of docs/facts.md run as they are, and print what the page says."""

from __future__ import annotations

import pytest
from tests.support.pages import check_examples
from tests.support.streams import Streams

from penstock.broker.embedded import EmbeddedServer
from penstock.wire import blocking

READER = {"ack_policy": "explicit", "ack_wait": 1_000_000_000, "metadata": {"penstock.reader": "dedicated"}}


def test_the_examples_print_what_the_page_says(
    nats_server: EmbeddedServer, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    streams.make("FACTS")
    for name in ("edge_reader", "other_reader"):
        blocking.run(streams.api.create_consumer("FACTS", {"durable_name": name, **READER}))
    check_examples("facts.md")
