"""The one place where text goes to the terminal. Whoever chose it, it moves no cursor and sets no title.

Subjects, ids, bodies and a server's errors may hold any character. Those that a terminal acts on are printed as Python
writes them: `\\x1b`. JSON has escapes of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any, Self

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text as RichText

from penstock.printable import visible


class Text(RichText):
    """Styled text. Rich would leave out some control characters, and print others."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(visible(text), *args, **options)

    @classmethod
    def assemble(cls, *parts: Any, **options: Any) -> Self:
        """Text of several parts; a pair is a text and its style."""
        made = cls(**options)
        for part in parts:
            made.append(*part) if isinstance(part, tuple) else made.append(part)
        return made

    def append(self, text: RichText | str, style: Any = None) -> Self:
        super().append(visible(text) if isinstance(text, str) else text, style)
        return self


class Terminal(Console):
    """A console that prints its own styles, and nobody else's control characters, markup and emoji codes.

    Styles are given by `Text`: a name such as `[/x]` in a string is printed as it is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> RichText:
        """Strings, among them titles and headings of tables."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything else; a segment with `control` is Rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def echo(text: str, *, to_stderr: bool = False, newline: bool = True) -> None:
    """Print text as it is: no styles, no folding."""
    click.echo(visible(text), nl=newline, err=to_stderr)


def echo_data(data: bytes) -> None:
    """Print a message's data on a line of its own: visible on a terminal, and as it is into a file or a pipe."""
    if sys.stdout.isatty():
        echo(data.decode(errors="backslashreplace"))
    else:
        sys.stdout.buffer.write(data + b"\n")


class LogLines(logging.Formatter):
    """Records for the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_to_stderr(form: str, level: int | str = logging.WARNING) -> None:
    """Send the log of this process to stderr, in the words of `form`."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines(form))
    logging.basicConfig(level=level, handlers=[handler])
