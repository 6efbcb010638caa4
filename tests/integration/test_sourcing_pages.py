"""The examples of docs/sourcing.md and docs/bridge.md: the code prints what the pages say, the platform is sound."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedServer
from penstock.topology.lint import require_sound
from penstock.topology.load import load

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["sourcing.md", "bridge.md"])
def test_the_examples_print_what_the_page_says(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    text = (DOCS / page).read_text()
    found = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", text, re.DOTALL)
    assert found
    assert len(found) == text.count("```python")
    names: dict[str, object] = {"__name__": "page"}
    for code, expected in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert printed.getvalue() == expected


def test_the_declared_platform_is_sound(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "sourcing.md").read_text(), re.DOTALL)
    path = tmp_path / "penstock.yaml"
    path.write_text(block)
    require_sound(load(path))
