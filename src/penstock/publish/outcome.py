"""Finds out whether a batch was stored, by reading the stream.

The members of a batch are adjacent and carry its id. So reading every `count`-th sequence is enough to find it,
whatever other publishers write in between; only where messages were removed must the neighbours be read too.
"""

from __future__ import annotations

import time

from penstock.coroutines import sleep
from penstock.errors import MessageNotFound, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import StoredMessage
from penstock.publish.batch import BATCH_ID, BATCH_SEQUENCE
from penstock.publish.errors import BatchOutcomeUnknown
from penstock.publish.model import BatchAck, BatchRef
from penstock.retry import Backoff
from penstock.wire import frames

SETTLE = 1.0
"""Seconds after which a batch that is not there is taken for not stored, when its connection was lost: the server may
have received bytes that it has not read yet."""


async def look(jetstream: JetStream, ref: BatchRef, given_out: int = 0) -> BatchAck | None:
    """The ack of the batch if it is in the stream now, None if it is not.

    `given_out` is the last sequence that the stream's leader has given out, as far as known: the look waits until the
    stream has stored that much. Raises `BatchOutcomeUnknown` when it does not in time, or when so many messages were
    removed since that the batch could have been among them.
    """
    last = await _stored_up_to(jetstream, ref, given_out)
    below = ref.after if ref.after <= last else 0  # the stream was recreated
    """The last sequence that is looked at, and is not of the batch."""
    erased = False
    while (probe := below + ref.count) <= last:
        found = await _at_or_above(jetstream, ref.stream, probe)
        if found and (ack := _ack(ref, found)):
            return ack
        next_below = found.sequence if found else last + 1
        if next_below > probe:  # the message at the probe is gone: those before it may be left
            survivor = await _walk(jetstream, ref, below, probe)
            if isinstance(survivor, BatchAck):
                return survivor
            erased = erased or next_below - survivor > ref.count
        below = next_below
    if erased:
        raise BatchOutcomeUnknown(ref, "messages that could be the batch were removed from the stream since")
    return None


async def check_heard(jetstream: JetStream, ref: BatchRef, *answers: frames.Message) -> None:
    """Raise when no server answered for the stream: it is deleted, or has no leader now."""
    if any(answer.status for answer in answers):
        await jetstream.stream_info(ref.stream)
        raise Unavailable(f"nobody answers for stream {ref.stream!r} on {ref.subject!r}; try again later")


async def _stored_up_to(jetstream: JetStream, ref: BatchRef, given_out: int) -> int:
    deadline = time.monotonic() + jetstream.timeout
    for delay in Backoff().delays():
        last = (await jetstream.stream_info(ref.stream)).state.last_seq
        if last >= given_out:
            return last
        if time.monotonic() >= deadline:
            reason = f"the stream has given out sequence {given_out} and stored {last}; has its cluster a majority?"
            raise BatchOutcomeUnknown(ref, reason)
        await sleep(delay)
    raise AssertionError("delays() never ends")


async def _walk(jetstream: JetStream, ref: BatchRef, below: int, end: int) -> BatchAck | int:
    """Look at every message above `below` and under `end`; without the batch, the last sequence that exists."""
    while (found := await _at_or_above(jetstream, ref.stream, below + 1)) and found.sequence < end:
        if ack := _ack(ref, found):
            return ack
        below = found.sequence
    return below


async def _at_or_above(jetstream: JetStream, stream: str, sequence: int) -> StoredMessage | None:
    try:
        return await jetstream.get_message(stream, sequence, next_of=">")
    except MessageNotFound:
        return None


def _ack(ref: BatchRef, message: StoredMessage) -> BatchAck | None:
    """The ack of the batch, from any one of its members."""
    if message.headers.get(BATCH_ID) != [ref.batch_id]:
        return None
    number = int(message.headers[BATCH_SEQUENCE][0])
    return BatchAck(ref.stream, message.sequence - number + ref.count, ref.batch_id, ref.count)
