"""What the JetStream API answers, as typed values.

Configurations stay plain dictionaries in the server's own shape: a newer server's fields pass through untouched, and
an update writes back what it read. Everything computed by the server (state, progress, health) is typed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Self

Json = dict[str, Any]
NANOSECONDS = 1_000_000_000
SILENT_AFTER = timedelta(seconds=5)


NO_ADVISORY = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions of parsing a message that is no advisory: any publisher with permission can write anything there."""


def parse_time(text: str) -> datetime | None:
    """The server's RFC 3339 time, cut to microseconds; None for Go's zero time."""
    if not text or text.startswith("0001-01-01"):
        return None
    return datetime.fromisoformat(text).astimezone(UTC)


def seconds(nanoseconds: int) -> float:
    """A duration as JetStream writes it, in seconds."""
    return nanoseconds / NANOSECONDS


class Retention(StrEnum):
    """When a stream deletes messages."""

    LIMITS = "limits"
    WORKQUEUE = "workqueue"
    INTEREST = "interest"


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One peer of a stream's or consumer's group."""

    name: str
    current: bool
    offline: bool
    lag: int
    silent_for: timedelta = timedelta()
    """Time since the leader last heard of it; a healthy one is heard every second."""

    @property
    def silent(self) -> bool:
        """Whether the leader no longer hears it; the server itself reports it as current for some seconds more."""
        return self.silent_for > SILENT_AFTER

    @classmethod
    def parse(cls, raw: Json) -> Self:
        silent_for = timedelta(microseconds=raw.get("active", 0) / 1000)
        return cls(raw["name"], raw.get("current", False), raw.get("offline", False), raw.get("lag", 0), silent_for)


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """One source, or the mirror, of a stream, as the sourcing server sees it."""

    name: str
    lag: int
    active: timedelta | None
    """Time since the origin was last heard; None when it never was."""
    error: str | None
    raw: Json = field(repr=False)

    @classmethod
    def parse(cls, raw: Json) -> Self:
        active = raw.get("active", -1)
        heard = None if active < 0 else timedelta(microseconds=active / 1000)
        error = raw.get("error", {}).get("description")
        return cls(raw["name"], raw.get("lag", 0), heard, error, raw)


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream holds."""

    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    first_time: datetime | None
    last_time: datetime | None
    consumers: int
    deleted: int
    """Messages missing between first and last."""
    subjects: dict[str, int] = field(default_factory=dict)
    """Messages by subject; only when asked for."""

    @classmethod
    def parse(cls, raw: Json) -> Self:
        return cls(
            messages=raw["messages"],
            bytes=raw["bytes"],
            first_seq=raw["first_seq"],
            last_seq=raw["last_seq"],
            first_time=parse_time(raw.get("first_ts", "")),
            last_time=parse_time(raw.get("last_ts", "")),
            consumers=raw.get("consumer_count", 0),
            deleted=raw.get("num_deleted", 0),
            subjects=raw.get("subjects") or {},
        )


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream: its configuration, its state, and its replicas."""

    name: str
    config: Json
    created: datetime | None
    state: StreamState
    leader: str | None
    replicas: tuple[ReplicaInfo, ...]
    """The followers; the leader is not among them. Empty on a single server."""
    mirror: SourceInfo | None
    sources: tuple[SourceInfo, ...]
    raw: Json = field(repr=False)

    @classmethod
    def parse(cls, raw: Json) -> Self:
        cluster = raw.get("cluster") or {}
        return cls(
            name=raw["config"]["name"],
            config=raw["config"],
            created=parse_time(raw.get("created", "")),
            state=StreamState.parse(raw["state"]),
            leader=cluster.get("leader"),
            replicas=tuple(ReplicaInfo.parse(r) for r in cluster.get("replicas") or ()),
            mirror=SourceInfo.parse(raw["mirror"]) if raw.get("mirror") else None,
            sources=tuple(SourceInfo.parse(s) for s in raw.get("sources") or ()),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A consumer: its configuration and how far it has come."""

    stream: str
    name: str
    config: Json
    created: datetime | None
    delivered_stream_seq: int
    delivered_consumer_seq: int
    ack_floor_stream_seq: int
    ack_floor_consumer_seq: int
    last_delivered: datetime | None
    last_acked: datetime | None
    pending: int
    """Matching messages not delivered yet."""
    ack_pending: int
    """Delivered and not acknowledged."""
    redelivered: int
    waiting: int
    """Pull requests waiting for messages."""
    paused_for: timedelta | None
    push_bound: bool
    leader: str | None
    replicas: tuple[ReplicaInfo, ...]
    raw: Json = field(repr=False)

    @property
    def filters(self) -> tuple[str, ...]:
        """Its filter subjects, from either of the server's two fields; empty when it reads the whole stream."""
        single = self.config.get("filter_subject")
        return (single,) if single else tuple(self.config.get("filter_subjects") or ())

    @property
    def paused(self) -> bool:
        return self.paused_for is not None

    @property
    def unprocessed(self) -> int:
        """Matching messages that are not acknowledged yet, delivered or not."""
        return self.pending + self.ack_pending

    @classmethod
    def parse(cls, raw: Json) -> Self:
        cluster = raw.get("cluster") or {}
        delivered, floor = raw["delivered"], raw["ack_floor"]
        paused = timedelta(microseconds=raw.get("pause_remaining", 0) / 1000) if raw.get("paused") else None
        return cls(
            stream=raw["stream_name"],
            name=raw["name"],
            config=raw["config"],
            created=parse_time(raw.get("created", "")),
            delivered_stream_seq=delivered["stream_seq"],
            delivered_consumer_seq=delivered["consumer_seq"],
            ack_floor_stream_seq=floor["stream_seq"],
            ack_floor_consumer_seq=floor["consumer_seq"],
            last_delivered=parse_time(delivered.get("last_active", "")),
            last_acked=parse_time(floor.get("last_active", "")),
            pending=raw["num_pending"],
            ack_pending=raw["num_ack_pending"],
            redelivered=raw["num_redelivered"],
            waiting=raw.get("num_waiting", 0),
            paused_for=paused,
            push_bound=raw.get("push_bound", False),
            leader=cluster.get("leader"),
            replicas=tuple(ReplicaInfo.parse(r) for r in cluster.get("replicas") or ()),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class ConsumerReset:
    """The answer to a reset: where the consumer continues, and its state afterwards."""

    reset_seq: int
    consumer: ConsumerInfo


@dataclass(frozen=True, slots=True)
class AccountInfo:
    """The account's JetStream usage and limits, and the server's API level."""

    api_level: int
    domain: str | None
    streams: int
    consumers: int
    memory_bytes: int
    storage_bytes: int
    limits: Json
    raw: Json = field(repr=False)

    @classmethod
    def parse(cls, raw: Json) -> Self:
        return cls(
            api_level=raw.get("api", {}).get("level", 0),
            domain=raw.get("domain"),
            streams=raw.get("streams", 0),
            consumers=raw.get("consumers", 0),
            memory_bytes=raw.get("memory", 0),
            storage_bytes=raw.get("storage", 0),
            limits=raw.get("limits", {}),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message as stored in a stream."""

    stream: str
    subject: str
    sequence: int
    time: datetime | None
    data: bytes
    headers: dict[str, list[str]]
