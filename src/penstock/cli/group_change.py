"""`penstock group pause`, `resume`, `move`, `seek` and `delete`: what an operator does with a group."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import click

from penstock.cli.common import EXIT_OK, Context, Read, err, json_option, show_result, sync, usage
from penstock.publish.control import Control
from penstock.units import counted
from penstock.workers.group.operations import Groups
from penstock.workers.options import group_name

GROUP = Read("name", group_name)
FORCE = "Go on although the group still lists workers; only if they are dead."


@asynccontextmanager
async def groups(context: Context) -> AsyncIterator[Groups]:
    """The groups of the server that the settings name."""
    control = await Control.connect(context.settings())
    try:
        yield Groups(control)
    finally:
        await control.close()


def _say(as_json: bool, text: str, **facts: Any) -> int:
    show_result(as_json, {"schema": 1, **facts}, text)
    return EXIT_OK


def _ask(yes: bool, question: str) -> None:
    if not yes and not sys.stdin.isatty():
        usage("this asks first, but there is no terminal: add --yes")
    if not yes:
        click.confirm(question, abort=True, err=True)


@click.command()
@click.argument("name", type=GROUP)
@json_option
@click.pass_obj
@sync
async def pause(context: Context, name: str, as_json: bool) -> int:
    """Stop the workers of the group NAME from starting new messages, until `resume`.

    They keep their partitions, finish what they are handling, and see this within a second. Workers that join later
    are paused too.

    \b
    Example:
      penstock group pause billing
    """
    async with groups(context) as operating:
        await operating.pause(name)
    return _say(
        as_json, f"group {name} is paused; `penstock group resume {name}` lets it go on", group=name, paused=True
    )


@click.command()
@click.argument("name", type=GROUP)
@json_option
@click.pass_obj
@sync
async def resume(context: Context, name: str, as_json: bool) -> int:
    """Have the workers of the group NAME go on after `pause`.

    \b
    Example:
      penstock group resume billing
    """
    async with groups(context) as operating:
        await operating.resume(name)
    return _say(as_json, f"group {name} goes on", group=name, paused=False)


@click.command()
@click.argument("name", type=GROUP)
@click.argument("partition")
@click.argument("worker", required=False)
@click.option("--anywhere", is_flag=True, help="Let the strategy choose the worker again.")
@json_option
@click.pass_obj
@sync
async def move(context: Context, name: str, partition: str, worker: str | None, anywhere: bool, as_json: bool) -> int:
    """Have WORKER own a PARTITION of the group NAME, for as long as that worker is there.

    The partition changes hands in the usual way: nothing is lost, and its order holds. The leader acts once the
    window for planned changes is over.

    \b
    Example:
      penstock group move billing eu worker-2
      penstock group move billing eu --anywhere
    """
    if bool(worker) == anywhere:
        usage("name the worker that is to have the partition, or say --anywhere")
    async with groups(context) as operating:
        await operating.move(name, partition, worker)
    where = f"goes to {worker}" if worker else "goes wherever the strategy wants it"
    return _say(as_json, f"partition {partition} {where}", group=name, partition=partition, worker=worker)


@click.command()
@click.argument("name", type=GROUP)
@click.option("--to", "first", type=click.IntRange(1), required=True, metavar="SEQUENCE",
              help="The stream sequence to go on with.")  # fmt: skip
@click.option("--partition", "partitions", multiple=True, metavar="ID", help="Only these; repeatable.  [default: all]")
@click.option("--force", is_flag=True, help=FORCE)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
@sync
async def seek(
    context: Context, name: str, first: int, partitions: tuple[str, ...], force: bool, yes: bool, as_json: bool
) -> int:
    """Have partitions of the group NAME go on with another message.

    Going back repeats messages, as far as the stream has them; going forward skips some, for good. The group's workers
    must have stopped. Not for work queues, which keep nothing that is done.

    \b
    Example:
      penstock group seek billing --to 1 --partition eu
    """
    which = f"partitions {', '.join(partitions)}" if partitions else "all partitions"
    _ask(yes, f"Have {which} of group {name} go on with sequence {first}?")
    async with groups(context) as operating:
        found = await operating.seek(name, first, partitions, force=force)
    return _say(
        as_json,
        f"{counted(len(found), 'partition')} of group {name} will go on with sequence {first}",
        group=name,
        partitions=[asdict(one) for one in found],
    )


@click.command()
@click.argument("name", type=GROUP)
@click.option("--force", is_flag=True, help=FORCE)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
@sync
async def delete(context: Context, name: str, force: bool, yes: bool, as_json: bool) -> int:
    """Delete the group NAME: its consumers, and its recorded progress.

    Its workers must have stopped. The stream's messages stay, except those that an Interest stream kept for this group
    only. Workers that are started later begin anew.

    \b
    Example:
      penstock group delete billing
    """
    err.print(f"deletes the consumers of group {name}, and how far its partitions are", markup=False)
    _ask(yes, f"Delete group {name}?")
    async with groups(context) as operating:
        gone = await operating.delete(name, force=force)
    text = f"group {name} is deleted, with {counted(len(gone.consumers), 'consumer')}"
    return _say(as_json, text, group=name, consumers=list(gone.consumers), bucket=gone.bucket)


COMMANDS = (pause, resume, move, seek, delete)
