"""The examples of docs/publishing.md run as they are, and print what the page says."""

from __future__ import annotations

import pytest
from tests.support.pages import check_examples

from penstock.broker import JetStream
from penstock.broker.embedded import EmbeddedServer
from penstock.wire import blocking


def test_the_examples_print_what_the_page_says(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    with blocking.connect(nats_server.settings) as connection:
        config = {"name": "BILLING", "subjects": ["billing.>"], "allow_atomic": True, "allow_batched": True}
        blocking.run(JetStream(connection.requester()).create_stream(config))
    check_examples("publishing.md")
