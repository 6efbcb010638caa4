"""What every command shares: exit codes, connection flags, tables, JSON, and the bridge into asyncio."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TextIO, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from penstock.errors import UsageError
from penstock.settings import Settings

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_ATTENTION = 2
"""There are differences, or something needs attention."""
EXIT_USAGE = 64

T = TypeVar("T")

PIPE_WIDTH = 120
"""Columns of a table that goes to a file or a pipe, where no terminal says how wide it is."""


def _width(stream: TextIO) -> int | None:
    return None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH


out = Console(highlight=False, width=_width(sys.stdout))
err = Console(stderr=True, highlight=False)


@dataclass(slots=True)
class Context:
    """What the global flags said; commands read it with `@click.pass_obj`."""

    connection: dict[str, Any] = field(default_factory=dict)

    def settings(self, **overrides: Any) -> Settings:
        """Settings from flags, environment and file; flags of a command win over global ones."""
        given = {k: v for k, v in overrides.items() if v is not None}
        return Settings.load(**{**self.connection, **given})

    def settings_below_flags(self, **values: Any) -> Settings:
        """Settings with values that win over the settings file, and give way to flags and `PENSTOCK_*` variables."""
        given = {k: v for k, v in self.connection.items() if v is not None}
        return Settings.load(**{**values, **given})


CONNECTION_OPTIONS = [
    click.option("--servers", metavar="URLS", help="Comma-separated server URLs.  [env: PENSTOCK_SERVERS]"),
    click.option("--credentials", metavar="FILE", help="A .creds file.  [env: PENSTOCK_CREDENTIALS]"),
    click.option("--user", metavar="NAME", help="User name.  [env: PENSTOCK_USER]"),
    click.option("--password", metavar="SECRET", help="Password; better in the environment.  [env: PENSTOCK_PASSWORD]"),
    click.option("--token", metavar="SECRET", help="Token; better in the environment.  [env: PENSTOCK_TOKEN]"),
    click.option("--tls-ca", metavar="FILE", help="CA of the servers' certificates.  [env: PENSTOCK_TLS_CA]"),
    click.option("--tls-cert", metavar="FILE", help="Client certificate.  [env: PENSTOCK_TLS_CERT]"),
    click.option("--tls-key", metavar="FILE", help="Key of the client certificate.  [env: PENSTOCK_TLS_KEY]"),
    click.option("--domain", metavar="NAME", help="JetStream domain.  [env: PENSTOCK_DOMAIN]"),
    click.option("--timeout", type=float, metavar="SECONDS", help="Deadline of a request.  [env: PENSTOCK_TIMEOUT]"),
]

F = TypeVar("F", bound=Callable[..., Any])


def connection_options(command: F) -> F:
    """The flags that say where the servers are and how to log in."""
    for option in reversed(CONNECTION_OPTIONS):
        command = option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of tables.")


def sync(command: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """Run an async command to its end. A command returns its exit code, or None for 0."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> T:
        return asyncio.run(command(*args, **kwargs))

    return wrapper


def fail(message: str) -> None:
    """One line on stderr that a person can act on."""
    err.print(f"[bold red]error:[/] {_escaped(message)}", soft_wrap=True)


def usage(message: str) -> NoReturn:
    raise UsageError(message)


def print_json(value: Any) -> None:
    """Stable, machine-readable output: sorted keys, one document."""
    json.dump(value, sys.stdout, indent=2, sort_keys=True, default=str)
    sys.stdout.write("\n")


Column = str | tuple[str, str]
"""A heading, or a heading and `left` or `right`."""


def table(title: str | None, columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> Table:
    """A table that fits a terminal."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        heading, justify = (column, "left") if isinstance(column, str) else column
        numbers = justify == "right"  # a number cut in two is two wrong numbers
        made.add_column(heading, justify=justify, overflow="fold", no_wrap=numbers)  # type: ignore[arg-type] # a literal
    for row in rows:
        made.add_row(*("" if cell is None else cell if isinstance(cell, Text) else _escaped(str(cell)) for cell in row))
    return made


def progress() -> Progress:
    """A progress bar for work that takes longer than a second; it draws on stderr and leaves nothing behind."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
