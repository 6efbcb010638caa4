"""The examples of docs/dead-letters.md run as they are, in their order, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.server.embedded import EmbeddedServer

PAGE = Path(__file__).parents[3] / "docs" / "dead-letters.md"
BLOCK = re.compile(r"```(yaml|python|console)\n(.*?)```(?:\s+```text\n(.*?)```)?", re.DOTALL)


VARYING = re.compile(r"\d+s|[0-9a-f]{8}|[0-9a-f]{16}|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d")
"""Ages, fingerprints, ids and times."""


def same(printed: str, expected: str) -> bool:
    """Whether it is what the page says, whatever the ids and times, and however wide the columns."""
    return _words(printed) == _words(expected)


def _words(text: str) -> list[list[str]]:
    return [["*" if VARYING.fullmatch(word) else word for word in line.split()] for line in text.split("\n")]


def command(line: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        run(shlex.split(line)[1:])
    assert ended.value.code in (0, 2)
    return printed.getvalue()


def test_the_examples_print_what_the_page_says(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    found = BLOCK.findall(PAGE.read_text())
    assert [kind for kind, _, _ in found] == ["yaml", "python", "console", "console", "console", "console"]
    for kind, text, expected in found:
        if kind == "yaml":
            (tmp_path / "penstock.yaml").write_text(text)
            command(f"penstock apply {tmp_path}/penstock.yaml")
        elif kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(PAGE), "exec"), {"__name__": "dead_letters_page"})
            assert printed.getvalue() == expected
        else:
            line, _, wanted = text.partition("\n")
            printed_text = command(line.removeprefix("$ "))
            assert same(printed_text, wanted), f"{line} printed:\n{printed_text}"
