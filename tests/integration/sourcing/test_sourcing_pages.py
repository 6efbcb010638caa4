"""The examples of docs/sourcing.md and docs/bridge.md: the code prints what the pages say, the platform is sound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.pages import DOCS, check_examples

from penstock.broker.embedded import EmbeddedServer
from penstock.topology.lint import require_sound
from penstock.topology.load import load


@pytest.mark.parametrize("page", ["sourcing.md", "bridge.md"])
def test_the_examples_print_what_the_page_says(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    check_examples(page)


def test_the_declared_platform_is_sound(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "sourcing.md").read_text(), re.DOTALL)
    path = tmp_path / "penstock.yaml"
    path.write_text(block)
    require_sound(load(path))
