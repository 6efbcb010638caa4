"""`penstock group`: look at groups of partitioned workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from penstock.cli.common import EXIT_ATTENTION, EXIT_OK, Column, Context, json_option, out, print_json, sync, table
from penstock.workers.kv import Control
from penstock.workers.overview import GroupOverview, PartitionOverview, WorkerOverview, look

WORKERS: list[Column] = [
    "worker", "state", "process", ("partitions", "right"), ("lag", "right"), ("again", "right"), ("version", "right"),
]  # fmt: skip
PARTITIONS: list[Column] = ["partition", ("owner", "name"), ("handoff", "right"), ("token", "right"), "on the move"]


@click.group()
def group() -> None:
    """Look at groups of partitioned workers, and bring partitions over from consumers of their own.

    \b
    Example:
      penstock group show billing
    """


@group.command()
@click.argument("name")
@click.option("--partitions", "all_partitions", is_flag=True, help="List every partition, not only those on the move.")
@json_option
@click.pass_obj
@sync
async def show(context: Context, name: str, all_partitions: bool, as_json: bool) -> int:
    """Show the group NAME: its workers, who owns what, lag, and what is on the move.

    Exits 2 when a partition has no settled owner, or a worker is degraded.

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


def needs_attention(found: GroupOverview) -> bool:
    """Whether somebody should look: something moves, or works without coordination."""
    return bool(found.moves) or not found.workers or any(worker.mode == "degraded" for worker in found.workers)


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


def _worker_row(worker: WorkerOverview) -> tuple[Any, ...]:
    state = worker.mode if worker.state == "active" else worker.state
    leads = " (leads)" if worker.leads else ""
    labels = f" [{', '.join(worker.labels)}]" if worker.labels else ""
    lag = "" if worker.lag is None else f"{worker.lag:,}"
    place = f"{worker.host}:{worker.pid}"
    return f"{worker.id}{leads}", f"{state}{labels}", place, worker.partitions, lag, worker.redelivered, worker.applied


def _partition_row(partition: PartitionOverview) -> tuple[Any, ...]:
    return partition.id, partition.owner or "", partition.handoff, partition.token or "", partition.move or ""
