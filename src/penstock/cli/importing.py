"""`penstock import`: a platform file from a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml

from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_OK,
    PLATFORM_FILE,
    Context,
    err,
    json_option,
    out,
    print_json,
    progress,
    sync,
)
from penstock.errors import UsageError
from penstock.jetstream import JetStream, connect
from penstock.topology import actual, lint
from penstock.topology import apply as carrying_out
from penstock.topology import plan as planning
from penstock.topology.importing import imported
from penstock.topology.load import load
from penstock.topology.model import DEFAULT_NAME, Platform
from penstock.topology.resource import Desired
from penstock.topology.rules.rule import Severity
from penstock.units import counted

HEAD = (
    "# Written by `penstock import`. From here on this file says what the server has: edit it, then plan and apply.\n"
)
EXCUSE = "so it was when it was imported"


@click.command("import", epilog="Exit code 2: something could not be taken in.")
@click.argument("file", default=PLATFORM_FILE, type=click.Path(dir_okay=False))
@click.option("--name", default=DEFAULT_NAME, metavar="NAME", help="Name of the platform, which marks what it owns.")
@click.option("--env", default="dev", show_default=True, metavar="NAME", help="Environment that these servers are.")
@click.option("--buckets", is_flag=True, help="Take in the streams of KV and object buckets too.")
@click.option("--no-mark", is_flag=True, help="Write the file, and leave the server as it is.")
@click.option("--force", is_flag=True, help="Write over a file that exists.")
@json_option
@click.pass_obj
@sync
async def import_command(
    context: Context, /, file: str, name: str, env: str, buckets: bool, no_mark: bool, force: bool, as_json: bool
) -> int:
    """Write what a server has as a platform FILE, and mark it as owned by that platform.

    Streams and durable consumers with every option that they have. Afterwards `penstock plan` has nothing to do. What
    another platform owns is left out, and so is what workers and sources make for themselves.

    \b
    Example:
      penstock --servers nats://127.0.0.1:4222 import penstock.yaml
    """
    path, settings = _free(file, force), context.settings()
    async with connect(settings) as broker:
        js = broker.jetstream
        with progress() as bar:
            streams = await js.streams()
            task = bar.add_task("reading consumers", total=len(streams))
            consumers = []
            for stream in streams:
                consumers += await js.consumers(stream.name) if stream.state.consumers else []
                bar.advance(task)
        found = imported(streams, consumers, name, buckets)
        document: dict[str, Any] = {
            **({"name": name} if name != DEFAULT_NAME else {}),
            "environments": {env: {"servers": list(settings.servers)}},
            "streams": found.streams,
            "consumers": found.consumers,
        }
        _write(path, document)
        if _excuse(document, load(path, env)):
            _write(path, document)
        left = [] if no_mark else await _mark(js, path, env)
    told = found.left_out + left
    if as_json:
        print_json({"file": file, "streams": len(found.streams), "consumers": len(found.consumers), "left_out": told})
    else:
        count = f"{counted(len(found.streams), 'stream')} and {counted(len(found.consumers), 'consumer')}"
        out.print(f"{file}: {count}; look at it with `penstock lint {file}`", markup=False, soft_wrap=True)
        for line in told:
            err.print(f"left out: {line}", markup=False, soft_wrap=True)
    return EXIT_ATTENTION if told else EXIT_OK


def _free(file: str, force: bool) -> Path:
    path = Path(file)
    if path.exists() and not force:
        raise UsageError(f"{file} exists; name another file, or --force to write over it")
    return path


def _write(path: Path, document: dict[str, Any]) -> None:
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
    path.write_text(HEAD + text, encoding="utf-8")


def _excuse(document: dict[str, Any], platform: Platform) -> bool:
    """Let what lint calls an error stand as it is on the server, and say so in the file; whether there is some."""
    errors = [finding for finding in lint.lint(platform) if finding.severity is Severity.ERROR]
    for finding in errors:
        section, name = finding.path.split(".")[:2]
        document[section][name].setdefault("ignore", {})[finding.code] = EXCUSE
    return bool(errors)


async def _mark(js: JetStream, path: Path, env: str) -> list[str]:
    """Mark what the file declares as owned by it, and make what Penstock keeps beside it.

    What differs in more than the marks is told, and left alone.
    """
    platform = load(path, env)
    desired = Desired.of(platform)
    plan = planning.plan(desired, await actual.read(js, desired))
    safe = [one for one in plan.changes if one.only_marks or one.resource.stream not in platform.streams]
    await carrying_out.apply(js, planning.Plan(plan.platform, tuple(safe)))
    return [
        f"{one.resource} differs from what the file can say: {', '.join(field.name for field in one.fields)}"
        for one in plan.changes
        if one not in safe
    ]
