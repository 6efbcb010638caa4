"""`penstock group`: look at groups of partitioned workers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import click

from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_OK,
    SECONDS,
    Column,
    Context,
    Read,
    json_option,
    out,
    print_json,
    sync,
    table,
)
from penstock.workers.group_options import bucket_name, group_name
from penstock.workers.kv import Bucket, Control
from penstock.workers.migration import Migration, Parity
from penstock.workers.options import part_of_name
from penstock.workers.overview import GroupOverview, PartitionOverview, WorkerOverview, look

WORKERS: list[Column] = [
    "worker", "state", "process", ("partitions", "right"), ("lag", "right"), ("again", "right"), ("version", "right"),
]  # fmt: skip
PARITY: list[Column] = [
    "partition", ("consumer", "name"), ("not done", "right"), ("in flight", "right"), ("seen by group", "right"),
    ("left to group", "right"), "",
]  # fmt: skip
STEPS = ["shadow", "compare", "overlap", "drain", "switch", "cleanup", "rollback"]
LOOK = 0.2  # seconds
NAME, GROUP = Read("name", part_of_name), Read("name", group_name)
PARTITIONS: list[Column] = ["partition", ("owner", "name"), ("handoff", "right"), ("token", "right"), "on the move"]


@click.group()
def group() -> None:
    """Look at groups of partitioned workers, and bring partitions over from consumers of their own.

    \b
    Example:
      penstock group show billing
    """


@group.command()
@click.argument("name", type=GROUP)
@click.option("--partitions", "all_partitions", is_flag=True, help="List every partition, not only those on the move.")
@json_option
@click.pass_obj
@sync
async def show(context: Context, name: str, all_partitions: bool, as_json: bool) -> int:
    """Show the group NAME: its workers, who owns what, lag, and what is on the move.

    Exits 2 when nothing is assigned yet, when a partition has no settled owner, or a worker is degraded.

    \b
    Example:
      penstock group show billing --partitions
      penstock group show billing --json | jq '.partitions[] | select(.move)'
    """
    control = await Control.connect(context.settings())
    try:
        found = await look(control, name)
    finally:
        await control.close()
    if as_json:
        print_json(overview_json(found))
    else:
        _print(found, all_partitions)
    return EXIT_ATTENTION if needs_attention(found) else EXIT_OK


@group.command()
@click.argument("name", type=GROUP)
@click.argument("step", type=click.Choice(STEPS))
@click.option("--stream", type=NAME, required=True, metavar="STREAM", help="The stream of the old consumers.")
@click.option("--legacy", type=NAME, required=True, metavar="PREFIX", help="What the old consumers' names begin with.")
@click.option(
    "--within", type=SECONDS, default=30.0, show_default=True, metavar="SECONDS", help="How long `drain` waits."
)
@json_option
@click.pass_obj
@sync
async def migrate(
    context: Context, name: str, step: str, stream: str, legacy: str, within: float, as_json: bool
) -> int:
    """Bring partitions from one consumer each to the group NAME, one STEP at a time.

    The steps are shadow, compare, drain, switch and cleanup; rollback leads back from any of them but the last. While
    the migration is not at `switch`, workers of the group may run and get nothing. `compare` exits 2 when the group
    would miss messages, `drain` when some are still in flight: finish or stop their old pull loops, and drain again.
    With overlap before drain the group works while the old ones do; both sides handle through workers.overlap then.

    \b
    Example:
      penstock group migrate billing shadow --stream BILLING --legacy billing-part-
      penstock group migrate billing compare --stream BILLING --legacy billing-part-
      penstock group migrate billing drain --stream BILLING --legacy billing-part-
      penstock group migrate billing switch --stream BILLING --legacy billing-part-
    """
    control = await Control.connect(context.settings())
    try:
        migration = Migration(control, Bucket(control, bucket_name(name), like=stream), stream, legacy)
        return await _migrate(migration, step, within, as_json)
    finally:
        await control.close()


async def _migrate(migration: Migration, step: str, within: float, as_json: bool) -> int:
    if step == "compare":
        return _print_parity(await migration.compare(), as_json)
    if step == "drain":
        left = await _drained(migration, within)
        _say(as_json, step, left, "messages in flight")
        return EXIT_ATTENTION if left else EXIT_OK
    if step == "shadow":
        _say(as_json, step, len(await migration.shadow()), "partitions")
        return EXIT_OK
    steps = {
        "overlap": migration.overlap,
        "switch": migration.switch,
        "cleanup": migration.clean_up,
        "rollback": migration.roll_back,
    }
    _say(as_json, step, await steps[step](), "partitions" if step in ("overlap", "switch") else "consumers")
    return EXIT_OK


async def _drained(migration: Migration, within: float) -> int:
    deadline = asyncio.get_running_loop().time() + within
    while True:
        left = await migration.drain()
        if not left or asyncio.get_running_loop().time() >= deadline:
            return left
        await asyncio.sleep(LOOK)


def _say(as_json: bool, step: str, count: int, what: str) -> None:
    if as_json:
        print_json({"schema": 1, "step": step, "count": count, "of": what})
    else:
        out.print(f"{step}: {count} {what}")


def _print_parity(found: list[Parity], as_json: bool) -> int:
    missing = any(one.missing for one in found)
    if as_json:
        print_json({"schema": 1, "missing": missing, "partitions": [asdict(one) for one in found]})
    else:
        rows = [
            (
                one.partition,
                one.consumer,
                one.unprocessed,
                one.in_flight,
                one.counted,
                one.left_to_group,
                "missing" if one.missing else "",
            )
            for one in found
        ]
        out.print(table(None, PARITY, rows))
    return EXIT_ATTENTION if missing else EXIT_OK


def needs_attention(found: GroupOverview) -> bool:
    """Whether somebody should look: something waits or moves, or works without coordination."""
    waits = found.waits_for is not None or bool(found.moves)
    return waits or not found.workers or any(worker.mode == "degraded" for worker in found.workers)


def overview_json(found: GroupOverview) -> dict[str, Any]:
    return {"schema": 1, **asdict(found)}


def _print(found: GroupOverview, all_partitions: bool) -> None:
    title = f"group {found.group} on stream {found.stream or '(none yet)'}, assignment {found.version}"
    out.print(table(title, WORKERS, (_worker_row(worker) for worker in found.workers)))
    shown = found.partitions if all_partitions else found.moves
    if shown:
        out.print()
        out.print(table(None, PARTITIONS, (_partition_row(partition) for partition in shown)))
    total, moving = len(found.partitions), len(found.moves)
    out.print(f"\n{total} partitions, {moving} on the move; {found.leader or 'nobody'} leads", soft_wrap=True)
    if found.waits_for:
        out.print(f"the group waits for {found.waits_for}", soft_wrap=True, markup=False)


def _worker_row(worker: WorkerOverview) -> tuple[Any, ...]:
    state = worker.mode if worker.state == "active" else worker.state
    leads = " (leads)" if worker.leads else ""
    labels = f" [{', '.join(worker.labels)}]" if worker.labels else ""
    lag = "" if worker.lag is None else f"{worker.lag:,}"
    place = f"{worker.host}:{worker.pid}"
    return f"{worker.id}{leads}", f"{state}{labels}", place, worker.partitions, lag, worker.redelivered, worker.applied


def _partition_row(partition: PartitionOverview) -> tuple[Any, ...]:
    return partition.id, partition.owner or "", partition.handoff, partition.token or "", partition.move or ""
