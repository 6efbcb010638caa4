"""Snapshots as bytes, and a stream that keeps those of the last day.

The stream is small: snapshots are compressed, and its limits let the oldest go.
"""

from __future__ import annotations

import json
import zlib
from datetime import datetime, timedelta

from penstock.errors import AlreadyExists, MessageNotFound, StreamNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import NANOSECONDS, Json, StreamInfo
from penstock.observe.snapshot import Snapshot
from penstock.records import plain, typed

STREAM = "PENSTOCK_HISTORY"
SUBJECT = "penstock.history"
VERSION = 1
MAX_BYTES = 64 * 2**20


def encode(snapshot: Snapshot) -> bytes:
    """A snapshot for the stream."""
    return zlib.compress(json.dumps({"version": VERSION, **plain(snapshot)}, separators=(",", ":")).encode(), 6)


def decode(data: bytes) -> Snapshot:
    """A snapshot from the stream; fields of a later version are passed over."""
    found: Snapshot = typed(Snapshot, json.loads(zlib.decompress(data)))
    return found


def config(keep: timedelta) -> Json:
    """The stream of snapshots, which are kept for so long."""
    return {
        "name": STREAM,
        "description": "Penstock: what `penstock ui` saw, for its time machine",
        "subjects": [SUBJECT],
        "max_age": int(keep.total_seconds() * NANOSECONDS),
        "max_bytes": MAX_BYTES,
        "discard": "old",
        "allow_direct": True,
    }


async def ensure(js: JetStream, keep: timedelta) -> None:
    """Make the stream, if it is not there."""
    try:
        await js.create_stream(config(keep))
    except AlreadyExists:
        return


async def kept(js: JetStream) -> StreamInfo | None:
    """The stream; None when nothing is recorded."""
    try:
        info = await js.stream_info(STREAM)
    except StreamNotFound:
        return None
    return info if info.state.messages else None


async def at(js: JetStream, moment: datetime) -> tuple[Snapshot | None, Snapshot]:
    """What was seen at that moment or next after it, and what was seen before that, where that is kept.

    Raises `MessageNotFound` when nothing was seen since.
    """
    found = await js.get_message(STREAM, since=moment)
    try:
        before = decode((await js.get_message(STREAM, found.sequence - 1)).data) if found.sequence > 1 else None
    except MessageNotFound:
        before = None
    return before, decode(found.data)
