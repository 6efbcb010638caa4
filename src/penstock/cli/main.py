"""`penstock`: finds the command, runs it, and turns every error into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from typing import Any

import click
from click.core import ParameterSource

from penstock import __version__
from penstock.cli.common import EXIT_ERROR, EXIT_USAGE, Context, connection_options, fail, takes_platform
from penstock.errors import PenstockError

COMMANDS = {
    "quickstart": "penstock.cli.quickstart:quickstart",
    "lint": "penstock.cli.lint:lint_command",
    "plan": "penstock.cli.platform:plan",
    "apply": "penstock.cli.platform:apply",
    "verify": "penstock.cli.platform:verify",
    "asyncapi": "penstock.cli.lint:asyncapi_command",
    "bench": "penstock.cli.bench:bench",
    "bridge": "penstock.cli.bridge:bridge",
    "publish": "penstock.cli.publish:publish",
    "consumer": "penstock.cli.consumer:consumer",
    "group": "penstock.cli.group:group",
    "fetch": "penstock.cli.facts:fetch",
    "confirm": "penstock.cli.facts:confirm",
    "rotate-key": "penstock.cli.facts:rotate_key",
    "dlq": "penstock.cli.dlq:dlq",
    "gateway": "penstock.cli.gateway:gateway",
    "pipeline": "penstock.cli.pipeline:pipeline",
    "server": "penstock.cli.server:server",
    "sources": "penstock.cli.sources:sources",
    "status": "penstock.cli.status:status",
    "work": "penstock.cli.work:work",
}
"""Command name to `module:attribute`. Modules are imported when their command is used, so that start-up stays fast."""


TAKE_PLATFORM = frozenset({"consumer", "fetch", "confirm", "dlq", "rotate-key", "status"})
"""Commands about a server that may take it from a platform file: `--file` and `--env`."""
ENV_PREFIX = "PENSTOCK"


class LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if name in TAKE_PLATFORM:
            takes_platform(command)
        name_twins(command, f"{ENV_PREFIX}_{name.upper()}")
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


def run(arguments: list[str] | None = None) -> None:
    """The entry point: exit 0 fine, 1 error, 2 something needs attention, 64 wrong usage."""
    try:
        code = penstock.main(arguments, prog_name="penstock", standalone_mode=False, auto_envvar_prefix=ENV_PREFIX)
        flush()
    except click.UsageError as exc:
        exc.show()
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
