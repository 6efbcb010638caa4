"""`penstock`: finds the command, runs it, and turns every error into one line and an exit code."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from penstock import __version__
from penstock.cli.common import EXIT_ERROR, EXIT_USAGE, Context, connection_options, fail
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
    "pipeline": "penstock.cli.pipeline:pipeline",
    "server": "penstock.cli.server:server",
    "sources": "penstock.cli.sources:sources",
    "status": "penstock.cli.status:status",
}
"""Command name to `module:attribute`. Modules are imported when their command is used, so that start-up stays fast."""


class LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


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
    ctx.obj = Context(connection=connection)


def run(arguments: list[str] | None = None) -> None:
    """The entry point: exit 0 fine, 1 error, 2 something needs attention, 64 wrong usage."""
    try:
        code = penstock.main(arguments, prog_name="penstock", standalone_mode=False, auto_envvar_prefix="PENSTOCK")
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
        sys.stderr.close()  # the reader of our output went away, as `| head` does
        sys.exit(EXIT_ERROR)
    sys.exit(code if isinstance(code, int) else 0)
