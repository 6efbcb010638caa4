"""The state of every source and mirror of a server: mode, origin, consumer, lag, and whether it makes progress."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from penstock.errors import AccessDenied, ApiError, MessageNotFound, NotFound, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, Json, SourceInfo, StreamInfo, parse_time
from penstock.sourcing import modes
from penstock.sourcing.modes import Mode

SILENT_AFTER = timedelta(seconds=10)
"""A source receives a heartbeat every second; without one for this long, it is stalled."""


class State(StrEnum):
    """Whether a source makes progress."""

    ACTIVE = "active"
    STALLED = "stalled"
    """No heartbeat for a while, or never."""
    PAUSED = "paused"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class SourceLink:
    """One source, or the mirror, of a stream."""

    stream: str
    origin: str
    api: str | None
    kind: str
    """`source` or `mirror`."""
    mode: Mode
    consumer: str | None
    """Its name on the origin; also of one that the server made itself, where it can be seen."""
    lag: int | None
    """Messages of the origin that are not stored here yet; None when the origin cannot be asked."""
    lag_time: timedelta | None
    """Age of the oldest of them; None when the origin cannot be asked."""
    state: State
    heard_ago: timedelta | None
    paused_for: timedelta | None
    acknowledged: int | None
    """Origin sequence up to which the origin knows that it is stored."""
    arrived: int | None
    """Origin sequence of the last message that is stored here, as the server says; None where it does not say it, or
    where it says it of several sources of one origin that its report does not tell apart."""
    problem: str | None


async def links(js: JetStream, only: str | None = None) -> list[SourceLink]:
    """Return all links, or those of one stream; origins are queried where they can be reached."""
    streams = [await js.stream_info(only)] if only else await js.streams()
    return [await _link(js, stream, report) for stream in streams for report in reports(stream)]


@dataclass(frozen=True, slots=True)
class Report:
    """What the reading server says about one of its sources."""

    source: SourceInfo
    config: Json
    kind: str
    arrived: int | None


def reports(stream: StreamInfo) -> Iterator[Report]:
    """The mirror or the sources of a stream, each with what the server says about it."""
    if stream.mirror:
        # A mirror keeps the sequences of its origin, and the server says them for sources only.
        yield Report(stream.mirror, stream.config["mirror"], "mirror", stream.state.last_seq)
    configs = list(stream.config.get("sources") or ())
    for source in stream.sources:
        same = [one for one in configs if _same(one, source.raw)]
        twins = sum(_same(one, source.raw) for one in stream.config.get("sources") or ())
        if same:
            configs.remove(same[0])
            yield Report(source, same[0], "source", source.raw.get("seq") if twins == 1 else None)


def _same(config: Json, shown: Json) -> bool:
    """Whether the server's report may be about this source. It does not name the consumer: there may be several."""
    keys = ("name", "external", "filter_subject", "subject_transforms")
    return all((config.get(key) or None) == (shown.get(key) or None) for key in keys)


async def _link(js: JetStream, stream: StreamInfo, report: Report) -> SourceLink:
    source, config = report.source, report.config
    api = (config.get("external") or {}).get("api")
    there = js.at_prefix(api) if api else js
    consumer, problem, asked = await _consumer(there, stream.name, config)
    lag = lag_of(consumer, report.arrived) if consumer else source.lag if asked else None
    age = await _age(there, config["name"], consumer, lag, report.arrived) if consumer and lag is not None else None
    named = (config.get("consumer") or {}).get("name")
    return SourceLink(
        stream=stream.name,
        origin=config["name"],
        api=api,
        kind=report.kind,
        mode=_mode(stream.name, config, consumer),
        consumer=consumer.name if consumer else named,
        lag=lag,
        lag_time=age,
        state=_state(source, consumer, problem if asked else None),
        heard_ago=source.active,
        paused_for=consumer.paused_for if consumer else None,
        acknowledged=consumer.ack_floor_stream_seq if consumer else None,
        arrived=report.arrived,
        problem=problem or source.error,
    )


def _mode(stream: str, config: Json, consumer: ConsumerInfo | None) -> Mode:
    """By the consumer's mark; where the consumer is gone or out of sight, by where the source listens."""
    wanted = config.get("consumer")
    if consumer is None and wanted:
        ours = modes.is_default_deliver_subject(wanted["deliver_subject"], stream, config, wanted["name"])
        return Mode.SERVER_MANAGED if ours else Mode.USER_MANAGED
    return modes.mode_of(config, consumer.config if consumer else None)


def lag_of(consumer: ConsumerInfo, arrived: int | None) -> int:
    """Messages that the origin has and the copy has not. What arrived and is not acknowledged yet does not count."""
    under_way = consumer.ack_pending
    if arrived is not None:
        under_way = min(under_way, max(consumer.delivered_stream_seq - arrived, 0))
    return consumer.pending + under_way


async def _consumer(there: JetStream, stream: str, config: Json) -> tuple[ConsumerInfo | None, str | None, bool]:
    """The consumer that the source reads through, what is wrong with it, and whether the origin could be asked."""
    wanted = config.get("consumer")
    try:
        if not wanted:
            return await automatic(there, config["name"], stream), None, True
        found = await there.consumer_info(config["name"], wanted["name"])
    except NotFound as exc:
        return None, f"{exc.what} does not exist" if wanted else None, True
    except (Unavailable, AccessDenied, ApiError) as exc:
        return None, f"the origin cannot be asked: {exc}", not wanted
    wrong = list(modes.misfits(found.config, wanted["deliver_subject"]))
    return found, "; ".join(wrong) or unacknowledged(found, (config.get("external") or {}).get("api")), True


def unacknowledged(consumer: ConsumerInfo, api: str | None = None) -> str | None:
    """Describe the problem when the origin has delivered, and gets no acknowledgement. By the origin's clock."""
    now = parse_time(consumer.raw.get("ts", ""))
    idle = now is not None and consumer.last_delivered is not None and now - consumer.last_delivered > SILENT_AFTER
    if not (idle and consumer.ack_pending and consumer.push_bound and not consumer.paused):
        return None
    there = modes.DOMAIN_API.fullmatch(api or "")
    domain = f"--domain {there[1]} " if there else ""
    return (
        f"{consumer.ack_pending} messages are delivered, and nobody says that they are stored; "
        f"`penstock {domain}consumer reset {consumer.stream} {consumer.name} --yes` has the reader begin anew"
    )


async def automatic(there: JetStream, origin: str, stream: str) -> ConsumerInfo | None:
    """The durable that the server made itself for a WorkQueue or Interest origin; ephemeral ones are not listed."""
    for consumer in await there.consumers(origin):
        if consumer.name.startswith(modes.AUTOMATIC) and modes.reader_of(consumer.config) in (stream, None):
            return consumer
    return None


async def _age(
    there: JetStream, origin: str, consumer: ConsumerInfo, lag: int, arrived: int | None
) -> timedelta | None:
    if not lag:
        return timedelta()
    subject = consumer.filters[0] if len(consumer.filters) == 1 else ">"
    try:
        behind = max(consumer.ack_floor_stream_seq, arrived or 0)
        oldest = await there.get_message(origin, behind + 1, next_of=subject)
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
