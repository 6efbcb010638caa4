"""`penstock batches`: the atomic batches that the server has dropped."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime

import click

from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_OK,
    RESOURCE_NAME,
    Column,
    Context,
    err,
    json_option,
    out,
    print_json,
    sync,
    table,
)
from penstock.deadletter import inventory
from penstock.errors import StreamNotFound
from penstock.jetstream import StreamInfo, connect
from penstock.publish import advisories
from penstock.publish.advisories import Abandonment
from penstock.settings import Settings

NOBODY_KEEPS_THEM = (
    "no stream keeps what the server says about abandoned batches: `penstock apply` creates one for a platform with "
    "`allow_atomic` streams, and `penstock batches --keep` does without a platform"
)


@click.command(epilog="Exit code 2: no stream stores the advisories of the server, so that nothing is known.")
@click.option("--stream", type=RESOURCE_NAME, metavar="NAME", help="Only batches for this stream.")
@click.option("--keep", is_flag=True, help="Create the stream that stores the server's advisories from now on.")
@json_option
@click.pass_obj
@sync
async def batches(context: Context, stream: str | None, keep: bool, as_json: bool) -> int:
    """List atomic batches that the server has dropped. Nothing of them is stored.

    The server says once why it dropped a batch: `timeout` (10 s without a message), `incomplete` (a message did not
    arrive, or its publisher dropped it), `large`, `unsupported`. It does not say who published it: the publisher
    is shown only if it has a name, with which the ids of its batches begin.

    \b
    Example:
      penstock batches --stream BILLING
    """
    settings = context.settings()
    async with connect(settings) as broker:
        infos = await broker.jetstream.streams()
        names = advisories.keepers(infos)
        keepers = [info for info in infos if info.name in names]
        if keep and not keepers:
            keepers = [await broker.jetstream.create_stream(advisories.keeper())]
    found = await asyncio.to_thread(_read, settings, keepers)
    shown = [one for one in found if stream in (None, one.stream)]
    if stream and not shown and stream not in {info.name for info in infos}:
        raise StreamNotFound(f"stream {stream!r}", 404, 10059, "stream not found, and no batch for it was dropped")
    if as_json:
        rows = [{**asdict(one), "publisher": one.publisher} for one in shown]
        print_json({"version": 1, "kept": bool(keepers), "batches": rows})
    elif keepers:
        columns: list[Column] = ["time", ("stream", "name"), ("batch", "name"), "reason", "publisher"]
        rows_ = [(_when(one), one.stream, one.batch_id, one.reason, one.publisher or "not told") for one in shown]
        out.print(table(f"Abandoned batches ({len(shown)})", columns, rows_) if rows_ else "no abandoned batches")
    else:
        err.print(NOBODY_KEEPS_THEM, markup=False, soft_wrap=True)
    return EXIT_OK if keepers else EXIT_ATTENTION


def _read(settings: Settings, keepers: list[StreamInfo]) -> list[Abandonment]:
    found = [
        one
        for info in keepers
        if info.state.messages
        for message in inventory.messages(
            settings, info, info.state.first_seq, info.state.last_seq, (advisories.SUBJECT,)
        )
        if (one := Abandonment.parse(message.data))
    ]
    return sorted(found, key=lambda one: one.time or datetime.min.replace(tzinfo=UTC))


def _when(one: Abandonment) -> str:
    return f"{one.time:%Y-%m-%d %H:%M:%S}" if one.time else "?"
