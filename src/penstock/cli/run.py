"""`penstock run`: the handlers of an app, until it is told to stop."""

from __future__ import annotations

from typing import Any

import click

from penstock.app import App
from penstock.cli.common import Context, flag_values, json_option, sync
from penstock.cli.reload import run_reloading
from penstock.cli.serving import Serving, serve_app, serving_options
from penstock.consume.handlers import find
from penstock.errors import UsageError
from penstock.topology.load import load


@click.command(epilog="Exit code 2 says that messages became dead letters.")
@click.argument("app", metavar="MODULE:APP")
@click.option(
    "--service",
    "services",
    multiple=True,
    metavar="NAME",
    help="Only the handlers on consumers and in groups of this service of the platform file. Repeatable.",
)
@click.option(
    "--reload", is_flag=True, help="While developing: start again when a source file below this folder changes."
)
@serving_options
@json_option
@click.pass_obj
@sync
async def run(
    context: Context, /, app: str, services: tuple[str, ...], reload: bool, as_json: bool, **given: Any
) -> int:
    """Run the handlers of an app until SIGINT or SIGTERM, then finish what runs.

    APP is a `penstock.App` of a module, which may lie in the current directory. Start the same command several times,
    anywhere: instances compete for the messages of each consumer.

    \b
    Example:
      penstock run services:app --service billing-worker
      penstock run services:app --reload
    """
    if reload:
        if given["until_done"]:
            raise UsageError("--reload runs until it is stopped: leave out --until-done")
        return await run_reloading()
    with flag_values():
        found = find(app, "APP", "services:app")
    if not isinstance(found, App):
        raise UsageError(f"{app!r} is no penstock.App, but a {type(found).__name__}")
    if found.settings is None:
        declared = load(found.file, found.env).environment.settings_overrides() if found.file else {}
        found.settings = context.settings_below_flags(**declared)
    return await serve_app(found, services, Serving.of(given), as_json)
