"""Reading a range of a partition's messages without a consumer: in order, from any kind of stream.

A second consumer would hold messages back on an Interest stream, and is refused on a work queue. So messages are asked
for one by one, of the stream's leader, the next one while the last is handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from penstock.broker.jetstream import JetStream
from penstock.broker.model import StoredMessage
from penstock.errors import MessageNotFound
from penstock.wire import headers
from penstock.workers.messages import EPOCH, Message


async def stored(
    jetstream: JetStream, stream: str, subjects: tuple[str, ...], first: int, last: int
) -> AsyncIterator[Message]:
    """The messages of these subjects from sequence `first` to `last`, in order. Those that are gone are left out."""
    ahead = {subject: _asked(jetstream, stream, subject, first, last) for subject in subjects}
    try:
        while ahead:
            found = {subject: message for subject, task in ahead.items() if (message := await task)}
            if not found:
                return
            subject, message = min(found.items(), key=lambda item: item[1].sequence)
            ahead = {name: task for name, task in ahead.items() if name in found}
            ahead[subject] = _asked(jetstream, stream, subject, message.sequence + 1, last)
            yield _message(message)
    finally:
        for task in ahead.values():
            task.cancel()
        await asyncio.gather(*ahead.values(), return_exceptions=True)


def _asked(
    jetstream: JetStream, stream: str, subject: str, first: int, last: int
) -> asyncio.Task[StoredMessage | None]:
    return asyncio.create_task(_next(jetstream, stream, subject, first, last))


async def _next(jetstream: JetStream, stream: str, subject: str, first: int, last: int) -> StoredMessage | None:
    if first > last:
        return None
    try:
        message = await jetstream.get_message(stream, max(first, 1), next_of=subject)
    except MessageNotFound:
        return None
    return message if message.sequence <= last else None


def _message(message: StoredMessage) -> Message:
    time = message.time or EPOCH
    nanoseconds = int((time - EPOCH).total_seconds() * 1_000_000) * 1000
    return Message(
        message.subject,
        message.data,
        message.sequence,
        1,
        "",
        datetime.now(UTC),
        _block(message.headers),
        stored_ns=nanoseconds,
    )


def _block(values: dict[str, list[str]]) -> bytes:
    """The header block as it was; anybody may have written it, so nothing of it is refused here."""
    lines = "".join(f"{name}: {value}\r\n" for name, all_ in values.items() for value in all_)
    return headers.block(lines.encode("utf-8", "surrogateescape")) if lines else b""
