"""`penstock`: finds the command, runs it, and turns every error into one line and an exit code."""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any

import click
from click.core import ParameterSource

from penstock import __version__
from penstock.cli.common import (
    EXIT_ERROR,
    EXIT_USAGE,
    Context,
    connection_options,
    fail,
    takes_connection,
    takes_platform,
)
from penstock.cli.terminal import LogLines, echo
from penstock.errors import PenstockError

COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("penstock.cli.quickstart:quickstart", "Run a full demo on an embedded broker in ./.penstock."),
    "init": ("penstock.cli.init:init", "Write a project that runs: platform file, service, test."),
    "lint": ("penstock.cli.lint:lint_command", "Look over a platform file without asking any server."),
    "plan": ("penstock.cli.platform:plan", "Show what `apply` would do, and what each change would cost."),
    "apply": ("penstock.cli.platform:apply", "Make the server as the file declares it."),
    "import": ("penstock.cli.importing:import_command", "Write a platform file from a running server."),
    "verify": ("penstock.cli.platform:verify", "Check that the server is as the file declares it, and well."),
    "asyncapi": ("penstock.cli.lint:asyncapi_command", "Write a platform file as an AsyncAPI 3.0 document."),
    "bench": ("penstock.cli.bench:bench", "Run benchmarks, each beside its peers, in turns, in one run."),
    "bridge": ("penstock.cli.bridge:bridge", "Carry a stream into another cluster, each message once."),
    "publish": ("penstock.cli.publish:publish", "Publish every line of a file or of standard input."),
    "batches": ("penstock.cli.batches:batches", "List atomic batches that the server has dropped."),
    "consumer": ("penstock.cli.consumer:consumer", "Look at consumers; pause, resume, reset and prune them."),
    "group": ("penstock.cli.group:group", "Groups of partitioned workers: status and operations."),
    "fetch": ("penstock.cli.facts:fetch", "Fetch the next page of facts of a named reader."),
    "confirm": ("penstock.cli.facts:confirm", "Confirm a page of facts by its receipt."),
    "append": ("penstock.cli.append:append", "Append a fact, or all of a file."),
    "replicate": (
        "penstock.cli.replicate:replicate",
        "Carry the facts of a named reader to another place.",
    ),
    "rotate-key": ("penstock.cli.facts:rotate_key", "Sign receipts with a new key from now on."),
    "dlq": ("penstock.cli.dlq:dlq", "Dead letters: what consumers gave up on."),
    "gateway": ("penstock.cli.gateway:gateway", "Serve the gateway that a platform file declares."),
    "run": ("penstock.cli.run:run", "Run the handlers of an app on their declared consumers."),
    "permissions": (
        "penstock.cli.permissions:permissions_command",
        "Print the NATS permissions that each part of a platform needs.",
    ),
    "pipeline": ("penstock.cli.pipeline:pipeline", "Spark pipelines of the declared platform."),
    "server": ("penstock.cli.server:server", "Run the embedded nats-server in the foreground."),
    "sources": ("penstock.cli.sources:sources", "Sources and mirrors: status, and their consumers."),
    "view": ("penstock.cli.view:view", "Look at the messages of any stream."),
    "status": ("penstock.cli.status:status", "Show streams and consumers, and how far behind they are."),
    "ui": ("penstock.cli.ui:ui", "See what flows, live in a browser."),
    "work": ("penstock.cli.work:work", "Run one function on a consumer, or on partitions in a group."),
}
"""Where a command is, as `module:attribute`, and its line in `penstock --help`. Modules are imported when their command
is used, so that start-up stays fast."""


TAKE_PLATFORM = frozenset({"batches", "consumer", "fetch", "confirm", "dlq", "rotate-key", "status", "view", "work"})
"""Commands about a server that may take it from a platform file: `--file` and `--env`."""
ENV_PREFIX = "PENSTOCK"
EXTRAS = {
    "numpy": "spark",
    "pyarrow": "spark",
    "pyspark": "spark",
    "deltalake": "delta",
    "pyiceberg": "iceberg",
    "connectrpc": "gateway",
    "uvicorn": "gateway",
}
"""What brings a module that is not part of every installation."""


class LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if name in TAKE_PLATFORM:
            takes_platform(command)
        name_twins(command, f"{ENV_PREFIX}_{name.upper()}")
        takes_connection(command)
        return command


def name_twins(command: click.Command, prefix: str) -> None:
    """Call the variable of every option after its flag: click would call it after the parameter of the function."""
    for option in command.params:
        if isinstance(option, click.Option) and not option.envvar:
            flag = max(option.opts, key=len).lstrip("-")
            option.envvar = f"{prefix}_{flag}".replace("-", "_").upper()
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            name_twins(inner, f"{prefix}_{name.upper()}")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="penstock")
@connection_options
@click.pass_context
def penstock(ctx: click.Context, /, **connection: Any) -> None:
    """Carry NATS JetStream streams into Spark and partitioned workers and back.

    \b
    Example:
      penstock quickstart
      penstock --servers nats://127.0.0.1:4222 status
    """
    variables = {name for name in connection if ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT}
    ctx.obj = Context(connection=connection, from_variables=frozenset(variables))


NATIVE_THREADS = frozenset({"pyqwest"})
"""Modules that leave threads of machine code running. When one of these asks for the interpreter while that is ending,
the process is aborted (SIGABRT) although the command has done its work."""


def main() -> None:
    """The program: `run`, and then the end of the process."""
    try:
        run()
    except SystemExit as exc:
        if NATIVE_THREADS.isdisjoint(sys.modules):
            raise
        with suppress(OSError, ValueError):
            sys.stderr.flush()
            flush()
        os._exit(exc.code if isinstance(exc.code, int) else 0)


def run(arguments: list[str] | None = None) -> None:
    """A command: exit 0 fine, 1 error, 2 something needs attention, 64 wrong usage."""
    if logging.lastResort:
        logging.lastResort.setFormatter(LogLines())  # warnings of commands that set up no log
    try:
        code = penstock.main(arguments, prog_name="penstock", standalone_mode=False, auto_envvar_prefix=ENV_PREFIX)
        flush()
    except click.UsageError as exc:
        said = io.StringIO()
        exc.show(said)
        echo(said.getvalue(), to_stderr=True, newline=False)
        sys.exit(EXIT_USAGE)
    except click.ClickException as exc:
        fail(exc.format_message())
        sys.exit(EXIT_ERROR)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted")
        sys.exit(EXIT_ERROR)
    except PenstockError as exc:
        fail(str(exc))
        sys.exit(exc.exit_code)
    except BrokenPipeError:
        drop_output()  # its reader went away, as `| head` does
        sys.exit(EXIT_ERROR)
    except ModuleNotFoundError as exc:
        if (extra := EXTRAS.get((exc.name or "").partition(".")[0])) is None:
            raise
        fail(f"this needs {exc.name}, which is not installed: pip install 'penstock-nats[{extra}]'")
        sys.exit(EXIT_ERROR)
    except OSError as exc:  # a disk that is full, a directory that may not be written: the machine's "no", not a bug
        drop_output()
        fail(f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror or str(exc))
        sys.exit(EXIT_ERROR)
    sys.exit(code if isinstance(code, int) else 0)


def flush() -> None:
    """Write what is buffered while somebody can still say that it failed."""
    if sys.stdout:
        sys.stdout.flush()


def drop_output() -> None:
    """Send what is still buffered nowhere: Python would try to write it once more at its end, and complain."""
    with suppress(OSError, AttributeError):  # stdout is no file, or closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
