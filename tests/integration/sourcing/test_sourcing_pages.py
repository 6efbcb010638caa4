"""The examples of docs/sourcing.md and docs/bridge.md: the code prints what the pages say, the platform is sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.commands import ended
from tests.support.pages import apply_platform, check_examples

from penstock.server.embedded import EmbeddedServer


@pytest.mark.parametrize("page", ["sourcing.md", "bridge.md"])
def test_the_examples_print_what_the_page_says(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    check_examples(page)


def test_the_declared_platform_is_applied_but_for_the_domain_that_is_not_there(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    path = apply_platform("sourcing.md", tmp_path, nats_server, code=2)
    told = json.loads(ended("--servers", nats_server.url, "plan", path, "--json", code=2).stdout)
    assert ({one["name"] for one in told["unreached"]}, told["changes"]) == ({"hub-orders", "ORDERS"}, [])
