"""What every command shares: exit codes, connection flags, tables, JSON, and the bridge into asyncio."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO, TypeVar

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text as RichText

from penstock.cli.terminal import Terminal, Text, echo
from penstock.errors import BadSetting, ConfigError, UsageError
from penstock.printable import json_text
from penstock.settings import Settings, without_login

if TYPE_CHECKING:  # not part of the start of every command: `penstock --help` takes at most a quarter of a second
    from rich.progress import Progress

    from penstock.topology.model import Platform

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_ATTENTION = 2
"""There are differences, or something needs attention."""
EXIT_USAGE = 64

T = TypeVar("T")

PLATFORM_FILE = "penstock.yaml"
PIPE_WIDTH = 120
"""Columns of a table that goes to a file or a pipe, where no terminal says how wide it is."""


FOLDED_WIDTH = 16
"""Columns that text keeps, at least, in a table that is too wide for the terminal."""


def _width(stream: TextIO | None) -> int | None:
    terminal = stream is not None and stream.isatty()
    return None if terminal or "COLUMNS" in os.environ else PIPE_WIDTH


class Output(Terminal):
    """Cuts nothing off: a line that is wider than the terminal goes on in the next one."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})


out = Output(width=_width(sys.stdout))
err = Terminal(stderr=True)


@dataclass(slots=True)
class Context:
    """What the global flags said; commands read it with `@click.pass_obj`."""

    connection: dict[str, Any] = field(default_factory=dict)
    from_variables: frozenset[str] = frozenset()
    """The names of `connection` whose values come from `PENSTOCK_*` variables, not from flags."""
    file: str | None = None
    """The platform file that a command was told to take its servers from."""
    env: str | None = None
    """Its environment."""

    def settings(self, **overrides: Any) -> Settings:
        """Settings from flags, environment and file; flags of a command win over global ones.

        With `--file` or `--env`, those of that environment of the platform file.
        """
        given = {k: v for k, v in overrides.items() if v is not None}
        if self.file or self.env:
            from penstock.topology.load import load  # only for commands that were given a platform file

            declared = load(self.file or PLATFORM_FILE, self.env).environment.settings_overrides()
            return self._told(declared, self._loaded({**declared, **self._given(), **given}))
        return self._loaded({**self.connection, **given})

    def platform(self) -> Platform | None:
        """The platform file that was named, or the one in this folder; None when there is none."""
        from penstock.topology.load import load

        if self.file or self.env or Path(PLATFORM_FILE).exists():
            return load(self.file or PLATFORM_FILE, self.env)
        return None

    def settings_below_flags(self, **values: Any) -> Settings:
        """Settings with values that win over the settings file, and give way to flags and `PENSTOCK_*` variables."""
        return self._told(values, self._loaded({**values, **self._given()}))

    def overriding(self, declared: Mapping[str, Any], used: Settings) -> list[str]:
        """The `PENSTOCK_*` variables that send a command to another cluster than the platform file names."""
        return [
            f"PENSTOCK_{name.upper()}"
            for name in ("servers", "domain")
            if name in self.from_variables
            and name in declared
            and _shown(declared[name]) != _shown(getattr(used, name))
        ]

    def _told(self, declared: Mapping[str, Any], used: Settings) -> Settings:
        """Warn when a variable that nobody thinks of decides which cluster it is."""
        for name in self.overriding(declared, used):
            key = name.removeprefix("PENSTOCK_").lower()
            ours, theirs = _shown(getattr(used, key)), _shown(declared[key])
            line = f"warning: {name} overrides the platform file: {ours}, not {theirs}"
            err.print(Text(line, style="yellow"), soft_wrap=True)
        return used

    def _given(self) -> dict[str, Any]:
        return {k: v for k, v in self.connection.items() if v is not None}

    def _loaded(self, values: dict[str, Any]) -> Settings:
        """A flag, or the variable that is its twin, with a wrong value is wrong usage; a settings file is not."""
        try:
            return Settings.load(**values)
        except BadSetting as exc:
            if any(self.connection.get(name) is not None for name in exc.names):
                raise UsageError(str(exc)) from exc
            raise


def _shown(value: Any) -> str:
    """Servers, without logins, or a domain."""
    return ", ".join(map(without_login, value)) if isinstance(value, tuple) else str(value)


class Seconds(click.ParamType[float]):
    """A number of seconds that one can wait."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = click.FLOAT.convert(value, param, ctx)
        if not (seconds > 0 and math.isfinite(seconds)):
            self.fail(f"{value} is not a number of seconds above 0", param, ctx)
        return seconds


SECONDS = Seconds()


class Read(click.ParamType[T]):
    """A value that a function of ours reads. What that refuses with `ConfigError` is wrong usage of its flag."""

    def __init__(self, name: str, read: Callable[[str], T]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            return self._read(value)
        except ConfigError as exc:
            self.fail(str(exc), param, ctx)


def _resource_name(text: str) -> str:
    if re.search(r"[.*>/\\\s]|^$", text):
        raise ConfigError(f"{text!r} cannot be a name: spaces and . * > / \\ are not allowed")
    return text


RESOURCE_NAME = Read("name", _resource_name)
"""The name of a stream or consumer."""


@contextmanager
def flag_values(flag: str = "") -> Iterator[None]:
    """What is refused in this block came from the command line, in `flag` if it is given: wrong usage."""
    try:
        yield
    except ConfigError as exc:
        raise UsageError(f"{flag} {exc}".lstrip()) from exc


CONNECTION_OPTIONS = [
    click.option("--context", metavar="NAME", help="A context of the `nats` command.  [env: PENSTOCK_CONTEXT]"),
    click.option("--servers", metavar="URLS", help="Comma-separated server URLs.  [env: PENSTOCK_SERVERS]"),
    click.option("--credentials", metavar="FILE", help="A .creds file.  [env: PENSTOCK_CREDENTIALS]"),
    click.option("--user", metavar="NAME", help="User name.  [env: PENSTOCK_USER]"),
    click.option("--password", metavar="SECRET", help="Password; better in the environment.  [env: PENSTOCK_PASSWORD]"),
    click.option("--token", metavar="SECRET", help="Token; better in the environment.  [env: PENSTOCK_TOKEN]"),
    click.option("--tls-ca", metavar="FILE", help="CA of the servers' certificates.  [env: PENSTOCK_TLS_CA]"),
    click.option("--tls-cert", metavar="FILE", help="Client certificate.  [env: PENSTOCK_TLS_CERT]"),
    click.option("--tls-key", metavar="FILE", help="Key of the client certificate.  [env: PENSTOCK_TLS_KEY]"),
    click.option("--domain", metavar="NAME", help="JetStream domain.  [env: PENSTOCK_DOMAIN]"),
    click.option("--inbox-prefix", metavar="SUBJECT", help="Where answers come to.  [env: PENSTOCK_INBOX_PREFIX]"),
    click.option("--timeout", type=SECONDS, metavar="SECONDS", help="Deadline of a request.  [env: PENSTOCK_TIMEOUT]"),
]

F = TypeVar("F", bound=Callable[..., Any])


def connection_options(command: F) -> F:
    """The flags that say where the servers are and how to log in."""
    for option in reversed(CONNECTION_OPTIONS):
        command = option(command)
    return command


def _keep(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(ctx: click.Context, _: click.Parameter, value: Any) -> None:
        if value is not None:
            setattr(ctx.ensure_object(Context), name, value)

    return keep


def takes_platform(command: click.Command) -> None:
    """Let a command, or every command of a group, take its servers from a platform file: `--file` and `--env`."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            takes_platform(inner)
        return
    if any("--env" in one.opts for one in command.params):
        return  # asked for once before
    for flag, metavar, text in (
        ("--env", "NAME", "Connect as this environment of the platform file says."),
        ("--file", "FILE", f"The platform file.  [default: {PLATFORM_FILE}, with --env]"),
    ):
        keep = _keep(flag.removeprefix("--"))
        command.params.append(click.Option([flag], metavar=metavar, help=text, expose_value=False, callback=keep))


def takes_connection(command: click.Command) -> None:
    """Let the flags of the connection follow a command too, unless it has one of that name itself."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            takes_connection(inner)
        return
    taken = {flag for one in command.params for flag in one.opts}
    for option in connection_options(click.Command("connection")).params:
        if taken.isdisjoint(option.opts) and isinstance(option, click.Option):
            command.params.append(
                click.Option(option.opts, type=option.type, expose_value=False, callback=_connect, hidden=True)
            )


def _connect(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    if value is not None and option.name:
        given = ctx.ensure_object(Context)
        given.connection[option.name] = value
        given.from_variables -= {option.name}


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of tables.")


def sync(command: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """Run an async command to its end. A command returns its exit code, or None for 0."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> T:
        return run_async(command(*args, **kwargs))

    return wrapper


def run_async(call: Coroutine[Any, Any, T]) -> T:
    """Run an async call of a command to its end."""
    import asyncio

    return asyncio.run(call)


def fail(message: str) -> None:
    """One line on stderr that a person can act on."""
    err.print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)


def usage(message: str) -> NoReturn:
    raise UsageError(message)


def print_json(value: Any) -> None:
    """Stable, machine-readable output: sorted keys, one document."""
    echo(json_text(value, indent=2, sort_keys=True, default=_plain))


def show_result(as_json: bool, document: Any, *texts: RenderableType | Callable[[], None]) -> None:
    """Print what a command found: the document as JSON, or else the texts and tables, or what a function prints."""
    if as_json:
        print_json(document)
        return
    for text in texts:
        if isinstance(text, str):
            out.print(text, markup=False, soft_wrap=True)
        elif callable(text):
            text()
        else:
            out.print(text)


def _plain(value: Any) -> str:
    """Times as RFC 3339 has them."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


Column = str | tuple[str, str]
"""A heading, or a heading and `left`, `right` or `name`. Names, numbers (`right`) and the first column stay whole."""


class WholeTable(Table):
    """A table that folds its texts to fit the terminal, but no name and no number: before that it gets wider."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return super().__rich_console__(console, options.update(width=max(options.max_width, self._needed())))

    def _needed(self) -> int:
        return sum(column.min_width or 0 for column in self.columns) + len(self.columns) - 1


def table(title: str | None, columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> Table:
    """A table for a terminal, or for `grep`."""
    made = WholeTable(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    cells = [[_cell(value) for value in row] for row in rows]
    for index, column in enumerate(columns):
        heading, kind = (column, "left") if isinstance(column, str) else column
        whole = index == 0 or kind in ("right", "name")  # half a name finds nothing; a number cut in two is two others
        width = max(Text(heading).cell_len, *(_cell_width(row[index]) for row in cells if index < len(row)), 0)
        least = width if whole else min(width, FOLDED_WIDTH)
        justify: Literal["left", "right"] = "right" if kind == "right" else "left"
        made.add_column(heading, justify=justify, overflow="fold", no_wrap=whole, min_width=least)
    for row in cells:
        made.add_row(*row)
    return made


def _cell(value: Any) -> RichText:
    return value if isinstance(value, RichText) else Text("" if value is None else str(value))


def _cell_width(cell: RichText) -> int:
    return max((cell_len(line) for line in cell.plain.splitlines()), default=0)


def progress() -> Progress:
    """A progress bar for work that takes longer than a second; it draws on stderr and leaves nothing behind."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
