"""From what is declared and what is there to what has to be done. Pure: values in, values out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.errors import ConfigError
from penstock.jetstream import metadata
from penstock.jetstream.model import Json, StreamInfo
from penstock.sourcing import modes, standins
from penstock.topology import compare, defaults, delivery, order, ownership, renames, risk
from penstock.topology.compare import FieldChange
from penstock.topology.resource import Actual, Desired, Resource
from penstock.topology.risk import Risk, Surroundings, Verdict
from penstock.units import counted

UNREACHED = (
    "nobody answers there: is the link to its origin up? Where this login may not reach it, leave out `server_managed` "
    "and hand over what `penstock sources create-consumer` prints"
)
UNREACHED_UNUSED = "nobody answers there, and it is not declared any more: delete it when the link is up again"


class ChangeKind(StrEnum):
    """What is done with a resource."""

    CREATE = "create"
    UPDATE = "update"
    RECREATE = "recreate"
    DELETE = "delete"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to one resource, what that costs, and why."""

    kind: ChangeKind
    risk: Risk
    resource: Resource
    fields: tuple[FieldChange, ...] = ()
    reason: str = ""
    config: Json | None = None
    """What is wanted, with the marks of its owner; None for a deletion."""
    owner: str | None = None
    """The other platform that owns it: then it can only be taken over."""

    @property
    def destroys(self) -> bool:
        """Whether a position or messages are lost."""
        return self.risk in (Risk.LOSES_POSITION, Risk.LOSES_DATA)

    @property
    def only_marks(self) -> bool:
        """Whether nothing but the marks of the owner changes."""
        return self.kind is ChangeKind.UPDATE and all(ownership.is_mark(field.name) for field in self.fields)


@dataclass(frozen=True, slots=True)
class Unreached:
    """A resource that is left out of a plan, since it lives where nobody answers, or needs one that does."""

    resource: Resource
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that has to be done, in an order in which it can be done."""

    platform: str
    changes: tuple[Change, ...]
    """Without what is unchanged."""
    unchanged: tuple[Resource, ...] = ()
    orphans: tuple[Resource, ...] = ()
    """Owned by this platform and no longer declared, but left alone: nobody asked to prune."""
    unreached: tuple[Unreached, ...] = ()
    """What could not be looked at, and what waits for it."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.changes)

    def with_risk(self, *risks: Risk) -> list[Change]:
        return [change for change in self.changes if change.risk in risks]

    def counts(self) -> Counter[Risk]:
        return Counter(change.risk for change in self.changes)


def plan(
    desired: Desired, actual: Actual, *, allow_destroy: bool = False, prune: bool = False, take_over: bool = False
) -> Plan:
    """What brings the server from `actual` to `desired`.

    Without `allow_destroy` a stream that could only be had by deleting it first is `impossible`; with it, the stream
    is recreated, which loses its data. With `prune`, what this platform owns and no longer declares is deleted. What
    another platform owns is not changed without `take_over`, which makes this platform its owner.
    """
    if prune and not desired.is_named:
        raise ConfigError(
            "--prune needs to know what belongs to this file and to no other: add `name: <platform>` to the file, "
            "and apply it once"
        )
    unreached = _unreached(desired, actual)
    desired = delivery.keeping_subjects(_without(desired, unreached), actual)
    changes = _stream_changes(desired, actual, allow_destroy, take_over)
    renewed = {change.resource for change in changes if change.kind is ChangeKind.RECREATE and change.destroys}
    orphans = _orphans(desired, actual)
    changes += _consumer_changes(desired, actual, renewed, take_over)
    changes = [_noticed(change, orphans, actual) for change in changes]
    changes += _renamed(desired, actual, take_over)
    going = [resource for resource in orphans if prune or _went_with_its_source(resource, actual)]
    changes += [_deletion(resource, actual, desired.platform) for resource in going]
    todo = [change for change in changes if change.kind is not ChangeKind.UNCHANGED]
    return Plan(
        platform=desired.platform,
        changes=tuple(order.ordered(todo, actual)),
        unchanged=tuple(change.resource for change in changes if change.kind is ChangeKind.UNCHANGED),
        orphans=tuple(resource for resource in orphans if resource not in going),
        unreached=unreached,
    )


# -- what cannot be looked at ------------------------------------------------------------------------------------------


def _unreached(desired: Desired, actual: Actual) -> tuple[Unreached, ...]:
    """Consumers of sources whose origin does not answer, and what cannot be had without them.

    A stream that reads through such a consumer already can be changed; one that does not yet would wait for it.
    """
    away = {resource for resource in actual.unanswered if resource.api}
    found = [Unreached(one, UNREACHED if one in desired.configs else UNREACHED_UNUSED) for one in sorted(away, key=str)]
    held: set[Resource] = set(away)
    while True:
        waiting = [
            Unreached(resource, f"waits for {missing}")
            for resource, config in desired.configs.items()
            if resource not in held and (missing := _missing(resource, config, actual, held))
        ]
        if not waiting:
            return tuple(found)
        found += waiting
        held |= {one.resource for one in waiting}


def _missing(resource: Resource, config: Json, actual: Actual, held: set[Resource]) -> Resource | None:
    there = actual.config(resource)
    bound = set(order.needs(resource, there)) if there is not None else set()
    return next((one for one in order.needs(resource, config) if one in held and one not in bound), None)


def _without(desired: Desired, unreached: Sequence[Unreached]) -> Desired:
    left_out = {one.resource for one in unreached}
    configs = {resource: config for resource, config in desired.configs.items() if resource not in left_out}
    return replace(desired, configs=configs)


# -- streams -----------------------------------------------------------------------------------------------------------


def _stream_changes(desired: Desired, actual: Actual, allow_destroy: bool, take_over: bool) -> list[Change]:
    return [
        _stream_change(resource, config, desired, actual, allow_destroy, take_over)
        for resource, config in desired.configs.items()
        if resource.consumer is None and resource not in actual.unanswered
    ]


def _stream_change(
    resource: Resource, config: Json, desired: Desired, actual: Actual, allow_destroy: bool, take_over: bool
) -> Change:
    stream = actual.streams.get(resource.stream)
    if stream is None:
        return _creation(resource, config, desired.platform)
    wanted = _fitting(_marked(config, desired.platform, stream.config, take_over), stream.config)
    wanted = standins.in_place(wanted, stream.config)
    after = {**stream.config, **wanted}
    fields = compare.differences(wanted, stream.config, defaults.of_stream(after))
    around = Surroundings(stream, after, _other_subjects(resource, desired) if fields else ())
    change = _change(resource, wanted, fields, risk.stream_verdict(fields, around))
    if change.kind is ChangeKind.RECREATE and allow_destroy:
        change = replace(change, risk=Risk.LOSES_DATA, reason=f"{change.reason}; {_lost_with(stream)}")
    return _guarded(change, stream.config, desired.platform, take_over)


def _marked(config: Json, platform: str, actual: Json, take_over: bool) -> Json:
    return ownership.marked(config, platform) if take_over or ownership.may_change(actual, platform) else config


def _guarded(change: Change, actual: Json, platform: str, take_over: bool) -> Change:
    """The change of what another platform owns is impossible, unless it is taken over."""
    owner = ownership.other_owner(actual, platform)
    if owner is None or change.kind is ChangeKind.UNCHANGED or take_over:
        return replace(change, owner=owner)
    reason = f"owned by platform {owner!r}; change it in that platform's file, or take it over with --take-over"
    return replace(change, kind=ChangeKind.UPDATE, risk=Risk.IMPOSSIBLE, reason=reason, owner=owner)


def _fitting(wanted: Json, actual: Json) -> Json:
    """With a duplicate window that fits: the server refuses one above max_age, and shortens it only on creation."""
    age, window = wanted.get("max_age"), actual.get("duplicate_window", 0)
    if not age or window <= age or "duplicate_window" in wanted:
        return wanted
    return {**wanted, "duplicate_window": age}


def _other_subjects(resource: Resource, desired: Desired) -> tuple[str, ...]:
    return tuple(
        subject
        for other, config in desired.configs.items()
        if other.consumer is None and other != resource
        for subject in config.get("subjects") or ()
    )


def _lost_with(stream: StreamInfo) -> str:
    messages, consumers = counted(stream.state.messages, "message"), counted(stream.state.consumers, "consumer")
    return f"{messages} and {consumers} go with it"


def _creation(resource: Resource, config: Json, platform: str) -> Change:
    wanted = ownership.marked(config, platform)
    return Change(ChangeKind.CREATE, Risk.CREATE, resource, tuple(compare.differences(wanted, {})), config=wanted)


def _change(resource: Resource, wanted: Json, fields: list[FieldChange], verdict: Verdict) -> Change:
    if not fields:
        return Change(ChangeKind.UNCHANGED, Risk.SAFE, resource, config=wanted)
    kind = ChangeKind.RECREATE if verdict.recreate else ChangeKind.UPDATE
    return Change(kind, verdict.risk, resource, tuple(fields), verdict.reason, wanted)


# -- consumers ---------------------------------------------------------------------------------------------------------


def _consumer_changes(desired: Desired, actual: Actual, renewed: set[Resource], take_over: bool) -> list[Change]:
    return [
        _consumer_change(resource, config, desired.platform, actual, resource.its_stream in renewed, take_over)
        for resource, config in desired.configs.items()
        if resource.consumer is not None and resource not in actual.unanswered
    ]


def _consumer_change(
    resource: Resource, config: Json, platform: str, actual: Actual, renewed: bool, take_over: bool
) -> Change:
    found, stream = actual.consumers.get(resource), actual.stream_of(resource)
    if found is None or stream is None:
        return _succession(resource, config, platform, actual)
    wanted = _marked(renames.as_continued(config, found.config), platform, found.config, take_over)
    fields = compare.differences(wanted, found.config, defaults.of_consumer(stream.config))
    around = Surroundings(stream, {**found.config, **wanted})
    change = (
        _renewal(resource, wanted, fields)
        if renewed
        else _change(resource, wanted, fields, risk.consumer_verdict(fields, around))
    )
    return _guarded(change, found.config, platform, take_over)


def _renewal(resource: Resource, wanted: Json, fields: list[FieldChange]) -> Change:
    reason = "its stream is recreated, its position is lost"
    return Change(ChangeKind.RECREATE, Risk.LOSES_POSITION, resource, tuple(fields), reason, wanted)


# -- consumers with a former name --------------------------------------------------------------------------------------


def _succession(resource: Resource, config: Json, platform: str, actual: Actual) -> Change:
    """A new consumer, which goes on where its predecessor is, when it has one."""
    former = renames.predecessor(resource, config)
    old = actual.consumers.get(former) if former else None
    change = _creation(resource, renames.successor_config(config, old, actual.stream_of(resource)), platform)
    if old is None:
        return change
    return replace(change, reason=f"goes on behind sequence {old.ack_floor_stream_seq}, the ack floor of {old.name}")


def _renamed(desired: Desired, actual: Actual, take_over: bool) -> list[Change]:
    """The deletion of each consumer that goes on under another name."""
    found = []
    for resource, config in desired.configs.items():
        former = renames.predecessor(resource, config)
        if former is None or former not in actual.consumers or former in desired.configs:
            continue
        found.append(_guarded_deletion(former, resource, desired, actual, take_over))
    return found


def _guarded_deletion(
    former: Resource, resource: Resource, desired: Desired, actual: Actual, take_over: bool
) -> Change:
    old, new = actual.consumers[former].config, actual.config(resource)
    owner = ownership.other_owner(old, desired.platform)
    if owner and not take_over:
        reason = f"owned by platform {owner!r}, so it cannot be renamed to {resource.name}; add --take-over"
        return Change(ChangeKind.DELETE, Risk.IMPOSSIBLE, former, reason=reason, owner=owner)
    if new is None or renames.is_successor(new, former):
        return Change(
            ChangeKind.DELETE, Risk.SAFE, former, reason=f"renamed to {resource.name}, which goes on where it is"
        )
    reason = f"{resource.name} exists and was not created from it, so its position is lost"
    return Change(ChangeKind.DELETE, Risk.LOSES_POSITION, former, reason=reason)


def _noticed(change: Change, orphans: list[Resource], actual: Actual) -> Change:
    """A new consumer with the filters of one that is no longer declared was probably renamed, and would start over."""
    if change.kind is not ChangeKind.CREATE or change.resource.consumer is None or change.reason:
        return change
    reads = compare.normal(change.config or {}).get(compare.FILTER)
    for orphan in orphans:
        config = actual.config(orphan) or {}
        alike = compare.normal(config).get(compare.FILTER) == reads
        if orphan.consumer and orphan.its_stream == change.resource.its_stream and alike:
            if metadata.SOURCING in (config.get("metadata") or {}):
                continue
            reason = (
                f"looks renamed from {orphan.name}, and would start over; write `renamed_from: {orphan.name}` to go on "
                "where that one is"
            )
            return replace(change, risk=Risk.LOSES_POSITION, reason=reason)
    return change


# -- what is no longer declared ----------------------------------------------------------------------------------------


def _orphans(desired: Desired, actual: Actual) -> list[Resource]:
    kept = {needed for resource, config in desired.configs.items() for needed in order.needs(resource, config)}
    kept |= {former for r, config in desired.configs.items() if (former := renames.predecessor(r, config))}
    return [
        resource
        for resource in actual.resources()
        if resource not in desired.configs
        and resource not in kept  # a source's own consumer that Penstock made once, and now somebody else keeps
        and _is_ours(actual.config(resource) or {}, desired, actual)
    ]


def _is_ours(config: Json, desired: Desired, actual: Actual) -> bool:
    """Whether this platform and no other owns it; of a file without a name, only what it made for its own streams."""
    reader = (config.get("metadata") or {}).get(metadata.SOURCING)
    clear = desired.is_named or (reader is not None and Resource(reader) in desired.configs)
    if reader is not None and not _reads_here(config, reader, desired, actual):
        return False
    return clear and ownership.owner(config) == desired.platform


def _reads_here(config: Json, reader: str, desired: Desired, actual: Actual) -> bool:
    """Whether the stream that reads through a managed consumer is one of this server, and not of another domain."""
    there = modes.reader_place(config)
    if there and desired.domain and there != modes.place(desired.domain):
        return False
    return Resource(reader) in desired.configs or reader in actual.streams


def _went_with_its_source(resource: Resource, actual: Actual) -> bool:
    """A consumer that Penstock made for a source goes with it: nobody else would find it, and it holds messages."""
    return metadata.SOURCING in ((actual.config(resource) or {}).get("metadata") or {})


def _deletion(resource: Resource, actual: Actual, platform: str) -> Change:
    """A stream that never held a message has nothing to lose, nor have its consumers; but others' consumers go too.

    Adopted or made does not matter: what the platform has declared once is its own.
    """
    stream = actual.stream_of(resource)
    assert stream is not None, "whoever read the consumer has read its stream"
    if foreign := _foreign_consumers(resource, actual, platform):
        names = f"consumers that this platform does not own go with it: {', '.join(foreign)}"
        lost = f"{_lost_with(stream)}; " if stream.state.last_seq else ""
        worst = Risk.LOSES_DATA if stream.state.last_seq else Risk.LOSES_POSITION
        return Change(ChangeKind.DELETE, worst, resource, reason=f"no longer declared; {lost}{names}")
    if stream.state.last_seq == 0:
        return Change(
            ChangeKind.DELETE, Risk.SAFE, resource, reason="no longer declared; its stream never held a message"
        )
    if resource.consumer is None:
        return Change(ChangeKind.DELETE, Risk.LOSES_DATA, resource, reason=f"no longer declared; {_lost_with(stream)}")
    loss = risk.consumer_removal(stream)
    why = "its source is gone" if _went_with_its_source(resource, actual) else "no longer declared"
    return Change(ChangeKind.DELETE, loss.risk, resource, reason=f"{why}; {loss.reason}")


def _foreign_consumers(resource: Resource, actual: Actual, platform: str) -> list[str]:
    """The consumers of a stream that somebody else owns, or nobody."""
    return sorted(
        other.name
        for other, info in actual.consumers.items()
        if resource.consumer is None and other.its_stream == resource and ownership.owner(info.config) != platform
    )
