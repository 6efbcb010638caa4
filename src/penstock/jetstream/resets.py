"""Computes what a reset of a consumer would repeat or skip, before it is done."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Literal

from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, StreamInfo
from penstock.units import counted

COUNTER_LIVES = 5_000_000_000  # nanoseconds until the server itself removes a counting consumer that we left behind


Fate = Literal["kept", "left behind", "deleted"]
"""Limits: kept, for other readers and until a limit. WorkQueue: left in the stream permanently, since only an
acknowledgement would remove them. Interest: deleted at once, unless another consumer still needs them."""


FATES: dict[Fate, str] = {
    "kept": "the stream keeps them for other readers",
    "left behind": "a WorkQueue stream keeps them: they stay behind until they are purged or a limit removes them",
    "deleted": "an Interest stream deletes those that no other consumer needs",
}


@dataclass(frozen=True, slots=True)
class ResetCounts:
    """Messages that match the consumer's filters, from a sequence to the stream's end."""

    from_target: int
    from_floor: int
    """After the ack floor."""
    from_delivered: int
    """After the last one delivered."""


@dataclass(frozen=True, slots=True)
class ResetEffect:
    """What happens to messages when a consumer continues at `target`."""

    target: int
    repeated: int
    """Delivered before, and delivered again."""
    repeated_acked: int
    """Those of them that were acknowledged already, or may have been."""
    skipped: int
    """Not acknowledged, and never delivered again."""
    exact: bool
    """False: the figures are upper bounds."""
    fate: Fate
    """What happens to the skipped messages."""


def effect(consumer: ConsumerInfo, target: int, counts: ResetCounts) -> ResetEffect:
    """Pure: the effect of a reset on a Limits stream.

    Up to the ack floor everything is acknowledged, after the last one delivered nothing is. In between, only the number
    of unacknowledged messages is known, not which ones they are.
    """
    repeated = max(0, counts.from_target - counts.from_delivered)
    if target > consumer.delivered_stream_seq:
        skipped, acked, exact = consumer.ack_pending + counts.from_delivered - counts.from_target, 0, True
    elif target > consumer.ack_floor_stream_seq + 1:
        skipped, acked, exact = min(counts.from_floor - counts.from_target, consumer.ack_pending), repeated, False
    else:
        skipped, acked, exact = 0, repeated - consumer.ack_pending, True
    return ResetEffect(target, repeated, max(0, acked), max(0, skipped), exact, fate="kept")


def bounds(consumer: ConsumerInfo, target: int, stream: StreamInfo) -> ResetEffect:
    """Pure: the effect on a WorkQueue or Interest stream, where counting would need a second consumer and so disturb
    what the stream keeps. What was acknowledged is gone there, and cannot be repeated."""
    state, floor = stream.state, consumer.ack_floor_stream_seq
    end, below = state.last_seq, max(floor, state.first_seq - 1)
    skipped = min(consumer.unprocessed, max(0, min(target - 1, end) - below))
    # Without filters and holes, every sequence between is a message that it has not acknowledged.
    whole = not consumer.filters and state.messages == end - state.first_seq + 1
    in_order = consumer.config.get("ack_policy") in ("all", "flow_control")
    return ResetEffect(
        target=target,
        repeated=consumer.ack_pending if target <= consumer.delivered_stream_seq else 0,
        repeated_acked=0,
        skipped=skipped,
        exact=skipped == 0 or target > end or (whole and in_order),
        fate="left behind" if stream.config.get("retention") == "workqueue" else "deleted",
    )


async def foresee(js: JetStream, stream: StreamInfo, consumer: ConsumerInfo, target: int) -> ResetEffect:
    """Return the effect of resetting `consumer` to `target` now."""
    if stream.config.get("retention", "limits") != "limits":
        return bounds(consumer, target, stream)
    floor, delivered = consumer.ack_floor_stream_seq, consumer.delivered_stream_seq
    counts = ResetCounts(*[await _count_from(js, stream, consumer, seq) for seq in (target, floor + 1, delivered + 1)])
    return effect(consumer, target, counts)


async def _count_from(js: JetStream, stream: StreamInfo, consumer: ConsumerInfo, seq: int) -> int:
    """Count matching messages at or above `seq`: the pending messages of a consumer that starts there."""
    if seq > stream.state.last_seq:
        return 0
    config = {
        "name": f"penstock_count_{uuid.uuid4().hex}",
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": max(seq, 1),
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": COUNTER_LIVES,
        **{k: v for k in ("filter_subject", "filter_subjects") if (v := consumer.config.get(k))},
    }
    counter = await js.create_consumer(stream.name, config)
    await js.delete_consumer(stream.name, counter.name)
    return counter.pending


def reset_words(foreseen: ResetEffect, info: ConsumerInfo) -> str:
    """Describe the effect of a reset."""
    up_to = "" if foreseen.exact else "up to "
    waiting = counted(info.unprocessed, "message")
    parts = [f"now behind sequence {info.ack_floor_stream_seq} with {waiting} not acknowledged"]
    if foreseen.repeated:
        acked = f", {up_to}{foreseen.repeated_acked} of them acknowledged before" if foreseen.repeated_acked else ""
        parts.append(f"repeats {counted(foreseen.repeated, 'message')} that were delivered before{acked}")
    if foreseen.skipped:
        parts.append(f"skips {up_to}{counted(foreseen.skipped, 'message')} that are not acknowledged")
        parts.append(FATES[foreseen.fate])
    if not foreseen.repeated and not foreseen.skipped:
        parts.append("repeats and skips nothing")
    return f"reset {info.stream} / {info.name} to sequence {foreseen.target}: " + "; ".join(parts)
