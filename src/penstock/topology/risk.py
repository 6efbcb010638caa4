"""What a change of one field costs on a living stream or consumer. Pure; the server's rules in one place.

The rules were found by trying each field on nats-server 2.15: what it updates in place, what it refuses, and what it
accepts although something is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from penstock import subjects
from penstock.jetstream.model import Json, StreamInfo, parse_time
from penstock.topology import effects
from penstock.topology.compare import FieldChange
from penstock.topology.fields import CONSUMER_BY_WIRE, STREAM_BY_WIRE
from penstock.topology.kinds import Field
from penstock.units import counted, format_duration, format_size, from_nanoseconds


class Risk(StrEnum):
    """What a change costs."""

    CREATE = "create"
    """Something new; nothing that exists is touched."""
    SAFE = "safe"
    """The server changes it in place, and nothing is lost."""
    LOSES_POSITION = "loses position"
    """A consumer or a source starts over, or skips what it should have seen."""
    LOSES_DATA = "loses data"
    """Stored messages are deleted, or messages will no longer be stored."""
    IMPOSSIBLE = "impossible"
    """The server refuses; only a new stream can have the value."""

    @property
    def severity(self) -> int:
        return list(Risk).index(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one field's change costs, and why."""

    risk: Risk = Risk.SAFE
    reason: str = ""
    recreate: bool = False
    """Whether only a new resource can have the value."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a verdict depends on besides the field itself."""

    stream: StreamInfo
    """The stream, or the consumer's stream, as it is."""
    after: Json
    """The resource's whole configuration once the change is made."""
    other_subjects: tuple[str, ...] = ()
    """What the platform's other streams will capture."""


Rule = Callable[[FieldChange, Surroundings], Verdict]
SAFE = Verdict()


def stream_verdict(changes: Sequence[FieldChange], around: Surroundings) -> Verdict:
    """What a change of some fields of a stream costs."""
    return _combined([_verdict(change, STREAM_BY_WIRE, around) for change in changes])


def consumer_verdict(changes: Sequence[FieldChange], around: Surroundings) -> Verdict:
    """What a change of some fields of a consumer costs."""
    return _combined([_verdict(change, CONSUMER_BY_WIRE, around) for change in changes])


def _verdict(change: FieldChange, table: Mapping[str, Field], around: Surroundings) -> Verdict:
    word = table[change.name].change if change.name in table else effects.EDITABLE
    return RULES[word](change, around)


def _combined(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of several, with the reasons of all; where the resource is recreated, only the reasons for that."""
    worst = max((v.risk for v in verdicts), key=lambda risk: risk.severity, default=Risk.SAFE)
    anew = [v for v in verdicts if v.recreate]
    reasons = dict.fromkeys(v.reason for v in anew or verdicts if v.reason)
    return Verdict(worst, "; ".join(reasons), bool(anew))


def _editable(change: FieldChange, around: Surroundings) -> Verdict:
    return SAFE


# -- streams -----------------------------------------------------------------------------------------------------------


def _impossible(why: str) -> Verdict:
    return Verdict(Risk.IMPOSSIBLE, f"{why}: it has to be deleted and recreated", recreate=True)


def _immutable(change: FieldChange, around: Surroundings) -> Verdict:
    return _impossible(f"the server never changes {change.name} of a stream")


def _one_way(change: FieldChange, around: Surroundings) -> Verdict:
    if change.after:
        return Verdict(Risk.SAFE, f"{change.name} cannot be switched off again")
    return _impossible(f"the server never switches {change.name} off")


def _sealed(change: FieldChange, around: Surroundings) -> Verdict:
    if change.after:
        return Verdict(Risk.LOSES_DATA, "a sealed stream takes no message any more, and cannot be unsealed")
    return _impossible("a sealed stream cannot be unsealed")


def _retention(change: FieldChange, around: Surroundings) -> Verdict:
    old, new = change.before or "limits", change.after or "limits"
    if "workqueue" in (old, new):
        return _impossible(f"the server never changes retention from {old} to {new}")
    if new == "interest":
        return Verdict(Risk.LOSES_DATA, "interest deletes at once what no consumer still waits for")
    return SAFE


def _content(change: FieldChange, around: Surroundings) -> Verdict:
    """A limit on what the stream holds. At once, the server deletes the oldest messages above it."""
    limit, state = change.after or 0, around.stream.state
    match change.name:
        case "max_age":
            return _max_age(limit, around.stream)
        case "max_msgs_per_subject":
            return _per_subject(limit, around.stream)
        case "max_msgs":
            return _whole(limit, state.messages, counted(state.messages, "message"), around)
        case _:
            return _whole(limit, state.bytes, format_size(state.bytes), around)


def _whole(limit: int, held: int, shown: str, around: Surroundings) -> Verdict:
    if limit <= 0 or held <= limit or around.after.get("discard") == "new":  # then the server only takes no more
        return SAFE
    return Verdict(Risk.LOSES_DATA, f"the stream holds {shown} now: the oldest are deleted")


def _per_subject(limit: int, stream: StreamInfo) -> Verdict:
    others = max(stream.raw["state"].get("num_subjects", 1) - 1, 0)
    fullest = stream.state.messages - others  # every other subject holds one message at least
    if limit <= 0 or fullest <= limit:
        return SAFE
    return Verdict(Risk.LOSES_DATA, f"a subject may hold up to {fullest} messages now: its oldest are deleted")


def _max_age(limit: int, stream: StreamInfo) -> Verdict:
    oldest = _oldest(stream)
    if limit <= 0 or oldest is None or oldest <= from_nanoseconds(limit):
        return SAFE
    return Verdict(Risk.LOSES_DATA, f"the oldest message is {_rounded(oldest)} old: what is too old is deleted")


def _oldest(stream: StreamInfo) -> timedelta | None:
    now, first = parse_time(stream.raw.get("ts", "")), stream.state.first_time
    return now - first if now and first and stream.state.messages else None


def _rounded(age: timedelta) -> str:
    return format_duration(timedelta(seconds=round(age.total_seconds())))


def _discard(change: FieldChange, around: Surroundings) -> Verdict:
    if change.after == "new":
        return SAFE
    limits = [FieldChange(name, None, around.after.get(name)) for name in ("max_msgs", "max_bytes")]
    return _combined([_content(limit, around) for limit in limits])


def _captures(change: FieldChange, around: Surroundings) -> Verdict:
    kept = (*(change.after or ()), *around.other_subjects)
    dropped = [subject for subject in change.before or () if not subjects.covered(subject, kept)]
    if not dropped:
        return SAFE
    return Verdict(Risk.LOSES_DATA, f"messages published to {', '.join(dropped)} are no longer stored")


def _mirror(change: FieldChange, around: Surroundings) -> Verdict:
    if change.after:
        return _impossible(
            "the server never changes the mirror of a stream; `penstock sources migrate` exchanges how a mirror reads"
        )
    return Verdict(Risk.LOSES_POSITION, "the stream stops following its origin, for good")


def _sources(change: FieldChange, around: Surroundings) -> Verdict:
    before, after = change.before or [], change.after or []
    kept_names = {source["name"] for source in before} & {source["name"] for source in after}
    changed = sorted(name for name in kept_names if _identities(name, before) != _identities(name, after))
    if not changed:
        return SAFE
    return Verdict(
        Risk.LOSES_POSITION,
        f"the source {', '.join(changed)} starts over: what was copied may be copied again; "
        "`penstock sources migrate` changes how a source reads without that",
    )


def _identities(name: str, sources: list[Json]) -> list[Json]:
    """The sources of a name as the server knows them again: where their consumers deliver does not matter to it."""
    named = [source for source in sources if source["name"] == name]
    return [
        {**source, "consumer": {"name": source["consumer"]["name"]}} if source.get("consumer") else source
        for source in named
    ]


# -- consumers ---------------------------------------------------------------------------------------------------------


def consumer_removal(stream: StreamInfo) -> Verdict:
    """What it costs to delete a consumer, to make it anew or for good."""
    if stream.config.get("retention") == "interest" and stream.state.messages:
        return Verdict(Risk.LOSES_DATA, "its position is lost, and the interest stream deletes what only it waited for")
    return Verdict(Risk.LOSES_POSITION, "its position is lost")


def _recreated(change: FieldChange, around: Surroundings) -> Verdict:
    loss = consumer_removal(around.stream)
    why = f"the server never changes {change.name} of a consumer: it is recreated, {loss.reason}"
    return Verdict(loss.risk, why, recreate=True)


def _filters(change: FieldChange, around: Surroundings) -> Verdict:
    before, after = change.before or [">"], change.after or [">"]
    if any(not subjects.covered(subject, after) for subject in before) and _is_interest(around):
        return Verdict(Risk.LOSES_DATA, "the interest stream deletes what only this consumer waited for")
    added = [subject for subject in after if not subjects.covered(subject, before)]
    if not added:
        return SAFE
    return Verdict(
        Risk.LOSES_POSITION,
        f"the backlog of {', '.join(added)} before the consumer's position is skipped without a word; "
        "`penstock consumer reset` can bring it back",
    )


def _is_interest(around: Surroundings) -> bool:
    return around.stream.config.get("retention") == "interest"


def _delivery(change: FieldChange, around: Surroundings) -> Verdict:
    return SAFE if bool(change.before) == bool(change.after) else _recreated(change, around)


def _expiry(change: FieldChange, around: Surroundings) -> Verdict:
    if not change.after:
        return SAFE
    return Verdict(Risk.SAFE, "the server will delete the consumer, with its position, once it is inactive for so long")


RULES: Mapping[str, Rule] = {
    effects.EDITABLE: _editable,
    effects.RECREATE: _recreated,
    effects.IMMUTABLE: _immutable,
    effects.CONTENT: _content,
    effects.ONE_WAY: _one_way,
    effects.SEALS: _sealed,
    effects.RETENTION: _retention,
    effects.DISCARD: _discard,
    effects.CAPTURES: _captures,
    effects.MIRROR: _mirror,
    effects.SOURCES: _sources,
    effects.FILTERS: _filters,
    effects.DELIVERY: _delivery,
    effects.EXPIRY: _expiry,
    effects.AT_CREATION: _editable,
}
"""The rule behind each word of the field tables."""
