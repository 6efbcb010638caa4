"""The examples of the documentation's pages: run as they stand there, they print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from tests.support.commands import ended

from penstock.server.embedded import EmbeddedServer

DOCS = Path(__file__).parents[2] / "docs"


def apply_platform(page: str, folder: Path, server: EmbeddedServer, code: int = 0) -> Path:
    """Apply the page's own platform file, its only YAML block, to a server; nothing else is made for its examples."""
    (declared,) = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    path = folder / "penstock.yaml"
    path.write_text(declared)
    ended("--servers", server.url, "apply", path, code=code)
    return path


def check_examples(page: str) -> None:
    """Run each Python block of the page, in order and in one namespace, and compare with the output that follows it."""
    text = (DOCS / page).read_text()
    found = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", text, re.DOTALL)
    assert found, f"{page} has no examples"
    assert len(found) == text.count("```python"), f"an example of {page} does not show what it prints"
    names: dict[str, object] = {"__name__": page.removesuffix(".md").replace("-", "_") + "_page"}
    for code, expected in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert printed.getvalue() == expected
