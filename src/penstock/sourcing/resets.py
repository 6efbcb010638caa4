"""Pauses and resets a consumer that a stream reads through, safely for sourcing.

The reading server counts deliveries, and hears of a reset only when it compares its count in an idle second. Until then
it drops what has a lower number than its own, and goes on where the numbers meet: under a steady load, a bare reset
loses as many messages as were delivered before it (nats-server 2.15, sources; mirrors compare sequences). So the reader
is brought to begin anew before anything is moved, while the origin stands still:
1. pause for a short while, and wait until what was delivered is acknowledged (crash after: the pause ends by itself);
2. reset, let a single message through, and pause again: its number is not the one that the reader expects, so it
   begins anew, at the ack floor (crash after: it does that too, but the consumer keeps `max_ack_pending: 1`, which
   makes it slow, until the next reset finds in its metadata what it was);
3. reset to where it is to go, with the reader at the beginning of a numbering, and resume.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from penstock.errors import AccessDenied, ApiError, Unavailable
from penstock.facts import Facts
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, ConsumerReset, Json
from penstock.jetstream.resets import ResetEffect
from penstock.settings import Settings
from penstock.sourcing import modes
from penstock.units import counted

PAUSE = timedelta(seconds=60)
"""How long the pause around a reset may last at most."""
STILL_FOR = 2.5
"""Seconds: the origin asks every second, so without a move in so many, nothing is on its way."""
NOTICED_WITHIN = 20.0
"""Seconds in which a reader has noticed a number that it did not expect."""
LOOK = 0.05
WIDTH = "penstock.max_ack_pending"


def is_sourcing(consumer: ConsumerInfo) -> bool:
    """Whether a stream, or a receiver of ours, reads through this consumer: nothing else acknowledges in this way."""
    return consumer.config.get("ack_policy") == "flow_control"


def reader(consumer: ConsumerInfo) -> str:
    """Return the stream that reads through it, as far as its metadata says."""
    stream = modes.reader_of(consumer.config)
    return f"stream {stream}" if stream else f"whoever listens on {consumer.config.get('deliver_subject')}"


def pause_words(consumer: ConsumerInfo, retention: str) -> str:
    """Describe the effect of a pause on sourcing."""
    waits = f"messages wait in {consumer.stream}"
    kept = f"{waits}, unless one of its limits removes them" if retention == "limits" else waits
    return f"{reader(consumer)} copies nothing from {consumer.stream} until then; {kept}"


def resume_words(consumer: ConsumerInfo) -> str:
    waiting = counted(consumer.unprocessed, "message")
    return f"{reader(consumer)} goes on copying behind sequence {consumer.ack_floor_stream_seq}: {waiting} to go"


def reset_words(consumer: ConsumerInfo, foreseen: ResetEffect) -> str:
    """Describe the effect of a reset on sourcing."""
    who, parts = reader(consumer), []
    if foreseen.target <= consumer.ack_floor_stream_seq:
        parts.append(f"what {who} has already is passed over: going back copies nothing twice")
    elif not foreseen.skipped:
        parts.append(f"what was on its way is sent again, and {who} takes it once")
    if foreseen.skipped:
        parts.append(f"{who} will not have the skipped messages, unless it had them already")
    if foreseen.skipped and foreseen.fate == "left behind":
        parts.append("--remove-skipped removes them from the origin")
    return "; ".join(parts)


async def moved(settings: Settings, js: JetStream, consumer: ConsumerInfo, seq: int | None) -> ConsumerReset:
    """Reset any consumer as its kind needs it.

    What a named reader has confirmed counts no more: all that the reset repeats is handed out again. Where its books
    are not ours to change, it finds out about the reset by itself.
    """
    if is_sourcing(consumer):
        done = await reset(js, consumer, seq)
    else:
        done = await js.reset_consumer(consumer.stream, consumer.name, seq)
    with suppress(AccessDenied):
        async with Facts(settings, "penstock consumer") as facts:
            await facts.forget_pages(consumer.name, stream=consumer.stream)
    return done


async def reset(js: JetStream, consumer: ConsumerInfo, seq: int | None) -> ConsumerReset:
    """Reset a consumer that a stream reads through, as the head of this module has it.

    Where there is nothing to deliver again and nothing to skip, nothing is done. Raises `Unavailable` when the reader
    does not take part; the consumer is then at its ack floor.
    """
    stream, name = consumer.stream, consumer.name
    ends = datetime.now(UTC) + consumer.paused_for if consumer.paused_for else None
    await js.pause_consumer(stream, name, PAUSE)
    try:
        now = await _still(js, consumer)
        if WIDTH in (now.config.get("metadata") or {}):
            await js.update_consumer(stream, name, _widened)  # an earlier reset was interrupted
        if await _is_void(js, now, seq):
            return ConsumerReset(now.ack_floor_stream_seq + 1, now)
        if now.push_bound and now.unprocessed and now.delivered_consumer_seq == 1:
            now = await _second_let_through(js, now)
        if now.push_bound and now.delivered_consumer_seq > 1:
            await _begin_anew(js, now, seq)
        return await js.reset_consumer(stream, name, seq)
    finally:
        await (js.pause_consumer(stream, name, ends) if ends else js.resume_consumer(stream, name))


async def _still(js: JetStream, consumer: ConsumerInfo) -> ConsumerInfo:
    """The consumer, once nothing is on its way, or nothing moves any more."""
    seen, since = (-1, -1), 0.0
    while True:
        now = await js.consumer_info(consumer.stream, consumer.name)
        state = (now.ack_floor_stream_seq, now.ack_pending)
        if state != seen:
            seen, since = state, time.monotonic()
        if not now.ack_pending or not now.push_bound or time.monotonic() - since > STILL_FOR:
            return now
        await asyncio.sleep(LOOK)


async def _is_void(js: JetStream, now: ConsumerInfo, seq: int | None) -> bool:
    """Whether a reset would deliver nothing again, and skip nothing."""
    if now.unprocessed:
        return False
    state = (await js.stream_info(now.stream)).state
    return seq is None or seq > min(now.ack_floor_stream_seq, state.last_seq) or not state.messages


async def _second_let_through(js: JetStream, now: ConsumerInfo) -> ConsumerInfo:
    """A reader that has taken a single message would take the single one of step 2 for the same, and notice nothing."""
    await js.resume_consumer(now.stream, now.name)
    await _until(js, now, lambda one: one.delivered_consumer_seq > 1)
    await js.pause_consumer(now.stream, now.name, PAUSE)
    return await _still(js, now)


async def _begin_anew(js: JetStream, now: ConsumerInfo, seq: int | None) -> None:
    """Step 2. What a reset back would deliver again serves as the single message, where nothing else is left."""
    stream, name = now.stream, now.name
    await js.update_consumer(stream, name, _narrowed)
    try:
        await js.reset_consumer(stream, name, None if now.unprocessed else seq)
    except ApiError:
        await js.update_consumer(stream, name, _widened)  # refused: nothing was moved
        raise
    await js.resume_consumer(stream, name)
    await _until(js, now, lambda one: one.delivered_consumer_seq > 0)
    await js.pause_consumer(stream, name, PAUSE)
    await _until(js, now, _numbers_agree)
    # Not if that fails: one message at a time, the reader notices sooner or later, and loses nothing until then.
    await js.update_consumer(stream, name, _widened)


def _narrowed(config: Json) -> Json:
    """One message at a time; the metadata keeps how many it was."""
    kept = config.get("metadata") or {}
    return {**config, "max_ack_pending": 1, "metadata": {WIDTH: str(config["max_ack_pending"]), **kept}}


def _widened(config: Json) -> Json:
    kept = dict(config.get("metadata") or {})
    return {**config, "max_ack_pending": int(kept.pop(WIDTH, config["max_ack_pending"])), "metadata": kept}


def _numbers_agree(now: ConsumerInfo) -> bool:
    """Whether the reader has restarted its numbering, or has adopted the new one at once, as mirrors and our receiver
    can."""
    begun = not now.delivered_consumer_seq
    return begun or (not now.ack_pending and now.ack_floor_consumer_seq <= now.delivered_consumer_seq)


async def _until(js: JetStream, consumer: ConsumerInfo, condition: Callable[[ConsumerInfo], bool]) -> None:
    deadline = time.monotonic() + NOTICED_WITHIN
    while not condition(await js.consumer_info(consumer.stream, consumer.name)):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{reader(consumer)} does not notice the reset of consumer {consumer.name!r} of {consumer.stream!r}; "
                "is it up? See `penstock sources ls`; until the next reset, messages go one by one"
            )
        await asyncio.sleep(LOOK)


async def remove_skipped(js: JetStream, consumer: ConsumerInfo, target: int) -> int:
    """Remove from a WorkQueue stream what a reset forward has left behind: below `target`, of its filters alone.

    No other consumer can want them: on such a stream filters do not overlap.
    """
    filters = consumer.filters or (None,)
    return sum([await js.purge_stream(consumer.stream, subject=one, before_seq=target) for one in filters])
