"""`penstock group`: look at groups of partitioned workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import click

from penstock.cli import group_change
from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_OK,
    SECONDS,
    Column,
    Context,
    Read,
    err,
    json_option,
    out,
    print_json,
    show_result,
    sync,
    table,
)
from penstock.jetstream.kv import Bucket
from penstock.metrics import endpoint
from penstock.observe.migration import MigrationReading, MigrationWatch, RollbackRule
from penstock.publish.control import Control
from penstock.workers.group.migration import Migration, Parity
from penstock.workers.group.overview import GroupOverview, PartitionOverview, WorkerOverview, look
from penstock.workers.options import bucket_name, group_name, part_of_name

WORKERS: list[Column] = [
    "worker", "state", "process", ("partitions", "right"), ("lag", "right"), ("again", "right"), ("version", "right"),
]  # fmt: skip
PARITY: list[Column] = [
    "partition", ("consumer", "name"), ("not done", "right"), ("in flight", "right"), ("seen by group", "right"),
    ("left to group", "right"), "",
]  # fmt: skip
STEPS = ["shadow", "compare", "overlap", "drain", "switch", "watch", "cleanup", "rollback"]
LOOK = 0.2  # seconds
NAME, GROUP = Read("name", part_of_name), Read("name", group_name)
GROUPS: list[Column] = [
    "group", ("stream", "name"), "state", ("workers", "right"), ("partitions", "right"), ("moving", "right"),
    ("lag", "right"), ("leader", "name"),
]  # fmt: skip
PARTITIONS: list[Column] = ["partition", ("owner", "name"), ("handoff", "right"), ("token", "right"), "on the move"]


@click.group()
def group() -> None:
    """Look at groups of partitioned workers, operate them, and bring partitions over from consumers of their own.

    \b
    Example:
      penstock group ls
      penstock group show billing
    """


for command in group_change.COMMANDS:
    group.add_command(command)


@group.command()
@json_option
@click.pass_obj
@sync
async def ls(context: Context, as_json: bool) -> int:
    """List the groups of this server.

    \b
    Example:
      penstock group ls --json | jq '.groups[].group'
    """
    async with group_change.groups(context) as operating:
        found = await operating.all()
    show_result(
        as_json,
        {"schema": 1, "groups": [summary_json(one) for one in found]},
        table(None, GROUPS, (tuple(summary_json(one).values()) for one in found)) if found else "there are no groups",
    )
    return EXIT_OK


def summary_json(found: GroupOverview) -> dict[str, Any]:
    """A group in a line."""
    return {
        "group": found.group, "stream": found.stream, "state": found.state, "workers": found.active,
        "partitions": len(found.partitions), "moving": len(found.moves), "lag": found.lag, "leader": found.leader,
    }  # fmt: skip


@group.command()
@click.argument("name", type=GROUP)
@click.option("--partitions", "all_partitions", is_flag=True, help="List every partition, not only those on the move.")
@json_option
@click.pass_obj
@sync
async def show(context: Context, name: str, all_partitions: bool, as_json: bool) -> int:
    """Show the group NAME: its workers, who owns what, lag, and what is on the move.

    Exits 2 when nothing is assigned yet, when the group is paused, when a partition has no settled owner, when a worker
    is degraded or has troubles (partitions that do not fit, updates that fail, handlers that do not end), or partitions
    overlap.

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
    show_result(as_json, overview_json(found), lambda: _print(found, all_partitions))
    return EXIT_ATTENTION if needs_attention(found) else EXIT_OK


@group.command()
@click.argument("name", type=GROUP)
@click.argument("step", type=click.Choice(STEPS))
@click.option("--stream", type=NAME, required=True, metavar="STREAM", help="The stream of the old consumers.")
@click.option("--legacy", type=NAME, required=True, metavar="PREFIX", help="What the old consumers' names begin with.")
@click.option(
    "--within",
    type=SECONDS,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long `drain` waits for what is in flight, and `rollback` for the group.",
)
@click.option("--force", is_flag=True, help="drain: nobody will acknowledge what is still in flight then.")
@click.option("--every", type=SECONDS, default=10.0, show_default=True, metavar="SECONDS", help="watch: a window.")
@click.option(
    "--windows", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="watch: bad ones in a row."
)
@click.option(
    "--max-lag", type=click.IntRange(0), default=10_000, show_default=True, metavar="N", help="watch: messages."
)
@click.option(
    "--max-redelivered", type=click.FloatRange(0, 1), default=0.03, show_default=True, metavar="RATIO",
    help="watch: share of what the group has out that is out again.",
)  # fmt: skip
@click.option("--until", type=SECONDS, metavar="SECONDS", help="watch: end when all was well for so long.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), metavar="PORT", help="watch: serve parity as metrics.")
@json_option
@click.pass_obj
@sync
async def migrate(context: Context, name: str, step: str, stream: str, legacy: str, as_json: bool, **more: Any) -> int:
    """Bring partitions from one consumer each to the group NAME, one STEP at a time.

    The steps are shadow, compare, drain, switch and cleanup; rollback leads back from any of them but the last. While
    the migration is not at `switch`, workers of the group may run and get nothing. `compare` exits 2 when the group
    would miss messages, `drain` when some are still in flight: finish or stop their old pull loops, and drain again,
    or add --force, and the group handles them once more. With overlap before drain the group works while the old ones
    do; both sides handle through workers.overlap then. After `switch` or `overlap`, `watch` looks at both sides once a
    window, and rolls back, with exit code 2, when the group is too far behind for several windows in a row.

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
        if step == "watch":
            rule = RollbackRule(
                max_lag=more["max_lag"], max_redelivered=more["max_redelivered"], windows=more["windows"]
            )
            return await _watch(migration, MigrationWatch(migration, name, rule), more, as_json)
        return await _migrate(migration, step, more["within"], more["force"], as_json)
    finally:
        await control.close()


async def _watch(migration: Migration, watch: MigrationWatch, more: dict[str, Any], as_json: bool) -> int:
    """Look once a window until it was well for long enough, or the rule says to go back."""
    loop = asyncio.get_running_loop()
    well_since, end = loop.time(), None
    if more["metrics_port"] is not None:
        port, end = endpoint.serve(more["metrics_port"], "127.0.0.1", endpoint.always_well, watch.numbers())
        err.print(f"metrics: http://127.0.0.1:{port}/metrics", markup=False)
    try:
        while True:
            now = await watch.look()
            err.print(_window(now), markup=False, soft_wrap=True)
            if watch.is_over:
                count = await migration.roll_back(more["within"])
                _say(as_json, "rollback", count, "consumers")
                return EXIT_ATTENTION
            well_since = loop.time() if now.why else well_since
            if more["until"] is not None and loop.time() - well_since >= more["until"]:
                _say(as_json, "watch", now.lag, "messages behind")
                return EXIT_OK
            await asyncio.sleep(more["every"])
    finally:
        if end:
            end()


def _window(now: MigrationReading) -> str:
    bad = f"; bad for {now.breaches} windows: {now.why}" if now.why else ""
    return f"{now.lag:,} messages behind, {now.redelivered:.1%} out again{bad}"


async def _migrate(migration: Migration, step: str, within: float, force: bool, as_json: bool) -> int:
    if step == "compare":
        return _print_parity(await migration.compare(), as_json)
    if step == "drain":
        left = await _drained(migration, within)
        if left and force:
            left = await migration.drain(force=True)
        _say(as_json, step, left, "messages in flight")
        return EXIT_ATTENTION if left and not force else EXIT_OK
    if step == "shadow":
        _say(as_json, step, len(await migration.shadow()), "partitions")
        return EXIT_OK
    steps: dict[str, Callable[[], Awaitable[int]]] = {
        "overlap": migration.overlap,
        "switch": migration.switch,
        "cleanup": migration.clean_up,
        "rollback": lambda: migration.roll_back(within),
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
    show_result(as_json, {"schema": 1, "step": step, "count": count, "of": what}, f"{step}: {count} {what}")


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
    wrong = bool(found.problems) or any(worker.mode == "degraded" or worker.troubles for worker in found.workers)
    return waits or wrong or found.paused or not found.workers


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
    for worker in found.workers:
        for trouble in worker.troubles:
            out.print(f"{worker.id}: {trouble}", soft_wrap=True, markup=False)
    for problem in found.problems:
        out.print(f"the partitions: {problem}", soft_wrap=True, markup=False)
    for partition, pinned in sorted(found.pins.items()):
        out.print(f"{partition} was moved to {pinned}, and stays there", soft_wrap=True, markup=False)
    if found.paused:
        out.print(f"the group is paused: `penstock group resume {found.group}` lets it go on", soft_wrap=True)
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
