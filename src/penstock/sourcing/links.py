"""How every source and mirror of a server stands: mode, origin, consumer, lag, and whether it gets on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from penstock.broker.jetstream import JetStream
from penstock.broker.model import ConsumerInfo, Json, SourceInfo, StreamInfo, parse_time
from penstock.errors import AccessDenied, ApiError, MessageNotFound, NotFound, Unavailable
from penstock.sourcing import modes
from penstock.sourcing.modes import Mode

SILENT_AFTER = timedelta(seconds=10)
"""A source hears a heartbeat every second; so long without one, it is stalled."""


class State(StrEnum):
    """Whether a source gets on."""

    ACTIVE = "active"
    STALLED = "stalled"
    """Not heard for a while, or never."""
    PAUSED = "paused"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class Link:
    """One source, or the mirror, of a stream."""

    stream: str
    origin: str
    api: str | None
    kind: str
    """`source` or `mirror`."""
    mode: Mode
    consumer: str | None
    """Its name on the origin; also of one that the server made itself, where it can be seen."""
    lag: int
    """Messages that wait at the origin."""
    lag_time: timedelta | None
    """Age of the oldest of them; None when the origin cannot be asked."""
    state: State
    heard_ago: timedelta | None
    paused_for: timedelta | None
    acknowledged: int | None
    """Origin sequence up to which the origin knows that it is stored."""
    arrived: int | None
    """Origin sequence of the last message that is stored here, as the server says."""
    problem: str | None


async def links(js: JetStream, only: str | None = None) -> list[Link]:
    """All of them, or those of one stream; origins are asked where they can be reached."""
    streams = [await js.stream_info(only)] if only else await js.streams()
    return [
        await _link(js, stream, source, config, kind) for stream in streams for source, config, kind in _each(stream)
    ]


def _each(stream: StreamInfo) -> Iterable[tuple[SourceInfo, Json, str]]:
    if stream.mirror:
        yield stream.mirror, stream.config["mirror"], "mirror"
    configs = list(stream.config.get("sources") or ())
    for source in stream.sources:
        config = next((one for one in configs if _same(one, source.raw)), None)
        if config is not None:
            configs.remove(config)
            yield source, config, "source"


def _same(config: Json, shown: Json) -> bool:
    """Whether the server's report is about this source: several may have one origin."""
    keys = ("name", "external", "filter_subject")
    return all((config.get(key) or None) == (shown.get(key) or None) for key in keys)


async def _link(js: JetStream, stream: StreamInfo, source: SourceInfo, config: Json, kind: str) -> Link:
    api = (config.get("external") or {}).get("api")
    there = js.at_prefix(api) if api else js
    consumer, problem = await _consumer(there, stream.name, config)
    age = await _age(there, config["name"], consumer) if consumer else None
    named = (config.get("consumer") or {}).get("name")
    return Link(
        stream=stream.name,
        origin=config["name"],
        api=api,
        kind=kind,
        mode=_mode(stream.name, config, consumer),
        consumer=consumer.name if consumer else named,
        lag=consumer.unprocessed if consumer else source.lag,
        lag_time=age,
        state=_state(source, consumer, problem),
        heard_ago=source.active,
        paused_for=consumer.paused_for if consumer else None,
        acknowledged=consumer.ack_floor_stream_seq if consumer else None,
        # A mirror keeps the sequences of its origin, and the server says them for sources only.
        arrived=stream.state.last_seq if kind == "mirror" else source.raw.get("seq"),
        problem=problem or source.error,
    )


def _mode(stream: str, config: Json, consumer: ConsumerInfo | None) -> Mode:
    """By the consumer's mark; where the consumer is gone or out of sight, by where the source listens."""
    wanted = config.get("consumer")
    if consumer is None and wanted:
        ours = modes.is_default_deliver_subject(wanted["deliver_subject"], stream, config, wanted["name"])
        return Mode.SERVER_MANAGED if ours else Mode.USER_MANAGED
    return modes.mode_of(config, consumer.config if consumer else None)


async def _consumer(there: JetStream, stream: str, config: Json) -> tuple[ConsumerInfo | None, str | None]:
    """The consumer that the source reads through, and what is wrong with it."""
    wanted = config.get("consumer")
    try:
        if not wanted:
            return await automatic(there, config["name"], stream), None
        found = await there.consumer_info(config["name"], wanted["name"])
    except NotFound as exc:
        return None, f"{exc.what} does not exist" if wanted else None
    except (Unavailable, AccessDenied, ApiError) as exc:
        return None, f"the origin cannot be asked: {exc}"
    wrong = list(modes.misfits(found.config, wanted["deliver_subject"]))
    return found, "; ".join(wrong) or unacknowledged(found)


def unacknowledged(consumer: ConsumerInfo) -> str | None:
    """Says so when the origin has delivered, and waits in vain to hear that it is stored. By the origin's clock."""
    now = parse_time(consumer.raw.get("ts", ""))
    idle = now is not None and consumer.last_delivered is not None and now - consumer.last_delivered > SILENT_AFTER
    if not (idle and consumer.ack_pending and consumer.push_bound and not consumer.paused):
        return None
    return (
        f"{consumer.ack_pending} messages are delivered, and nobody says that they are stored; "
        f"`penstock consumer reset {consumer.stream} {consumer.name} --yes` has the reader begin anew"
    )


async def automatic(there: JetStream, origin: str, stream: str) -> ConsumerInfo | None:
    """The durable that the server made itself for a WorkQueue or Interest origin; ephemeral ones are not listed."""
    for consumer in await there.consumers(origin):
        if consumer.name.startswith(modes.AUTOMATIC) and modes.reader_of(consumer.config) in (stream, None):
            return consumer
    return None


async def _age(there: JetStream, origin: str, consumer: ConsumerInfo) -> timedelta | None:
    if not consumer.unprocessed:
        return timedelta()
    subject = consumer.filters[0] if len(consumer.filters) == 1 else ">"
    try:
        oldest = await there.get_message(origin, consumer.ack_floor_stream_seq + 1, next_of=subject)
    except (MessageNotFound, Unavailable):
        return None
    return datetime.now(UTC) - oldest.time if oldest.time else None


def _state(source: SourceInfo, consumer: ConsumerInfo | None, problem: str | None) -> State:
    if consumer and consumer.paused:
        return State.PAUSED
    if source.error or problem:
        return State.FAILING
    heard = source.active is not None and source.active < SILENT_AFTER
    return State.ACTIVE if heard else State.STALLED
