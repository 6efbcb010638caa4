"""Nothing that others chose acts on the terminal."""

from __future__ import annotations

import ast
import io
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.text import Text as RichText

from penstock.cli import common
from penstock.cli.terminal import Terminal, Text, echo_data, log_to_stderr
from penstock.printable import ACTED_ON, json_text, visible

CLI = Path(common.__file__).parent
HOSTILE = "a\x1b]0;owned\x07\x1b[2Jb\rc\x9bd\u202ee\x08\x0b\x7f"
SHOWN = "a\\x1b]0;owned\\x07\\x1b[2Jb\\x0dc\\x9bd\\u202ee\\x08\\x0b\\x7f"


WAYS_ROUND = {"print", "click.echo", "click.secho", "Console", "RichText", "logging.basicConfig"}
WAYS_ROUND |= {f"sys.{name}.{way}" for name in ("stdout", "stderr") for way in ("write", "buffer.write", "writelines")}


def printed(*objects: object, **options: object) -> str:
    file = io.StringIO()
    Terminal(file=file, width=200).print(*objects, **options)  # type: ignore[arg-type]
    return file.getvalue()


def test_control_characters_are_shown_wherever_they_come_from() -> None:
    assert visible(HOSTILE) == SHOWN
    assert printed(HOSTILE, markup=False) == f"{SHOWN}\n"
    assert printed(Text(HOSTILE)) == f"{SHOWN}\n"
    assert printed(Text.assemble("x ", (HOSTILE, "red"))) == f"x {SHOWN}\n"
    assert printed(Group(Text(HOSTILE), HOSTILE)) == f"{SHOWN}\n{SHOWN}\n"
    assert "\x1b" not in printed(RichText(HOSTILE))
    assert printed("[/x] [red]a :bomb:") == "[/x] [red]a :bomb:\n"
    assert visible("one\ttwo\nthree ✓ \udc80") == "one\ttwo\nthree ✓ \\udc80"


def test_tables_have_room_for_what_they_show() -> None:
    shown = printed(common.table(HOSTILE, [HOSTILE, "next"], [(HOSTILE, "P"), ("short", "Q")])).splitlines()
    assert [line.count(SHOWN) for line in shown] == [1, 1, 1, 0]
    assert len({line.index(number) for line, number in zip(shown[2:], "PQ", strict=True)}) == 1


@given(st.text(alphabet=st.characters(codec=None), max_size=50))
def test_no_text_reaches_a_terminal_with_a_control_character(text: str) -> None:
    for shown in (printed(text, markup=False), printed(Text(text)), printed(common.table(text, [text], [[text]]))):
        assert not ACTED_ON.search(shown)


@given(st.text(alphabet=st.characters(codec=None), max_size=50))
def test_json_stays_json_and_has_no_control_character(text: str) -> None:
    shown = json_text({"subject": text})
    assert json.loads(shown) == {"subject": text}
    assert visible(shown) == shown


@pytest.mark.parametrize("terminal", [True, False])
def test_data_is_visible_on_a_terminal_and_as_it_is_in_a_pipe(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
    monkeypatch.setattr(stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stdout", stdout)
    echo_data(b"\xff\x1b[31mred")
    assert written.getvalue() == (b"\\xff\\x1b[31mred\n" if terminal else b"\xff\x1b[31mred\n")


def test_styles_are_still_styles() -> None:
    file = io.StringIO()
    Terminal(file=file, force_terminal=True, color_system="standard", width=80).print(Text("plan", style="red"))
    assert file.getvalue() == "\x1b[31mplan\x1b[0m\n"


def test_the_log_shows_them_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as a command finds it
    log_to_stderr("%(message)s")
    logging.getLogger("penstock.test").warning("refused %s", HOSTILE)
    assert capsys.readouterr().err == f"refused {SHOWN}\n"


def test_commands_print_through_this_one_place() -> None:
    """A `print`, a `click.echo` or a `Text` of Rich's own would go round it."""
    found = []
    for path in sorted(CLI.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in WAYS_ROUND:
                    found.append((path.name, name))
    allowed = ("click.echo", "logging.basicConfig", "sys.stdout.buffer.write")
    assert set(found) == {("terminal.py", name) for name in allowed}
