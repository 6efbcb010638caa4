"""The tables a person wants of a platform, computed from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from penstock.topology.model import ConsumerSpec, Platform, StreamSpec
from penstock.units import format_duration, format_size, from_nanoseconds

NO_SERVICE = "(not said)"


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A stream, as people read it."""

    stream: str
    subjects: tuple[str, ...]
    retention: str
    storage: str
    max_age: str
    max_bytes: str
    discard: str
    replicas: int
    consumers: int


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """A consumer, as people read it."""

    stream: str
    consumer: str
    filters: tuple[str, ...]
    service: str
    ack_wait: str
    max_deliver: str
    deliver: str
    dlq: str | None


@dataclass(frozen=True, slots=True)
class Catalog:
    """All streams, all consumers by stream, and how many consumers each service has."""

    streams: tuple[StreamRow, ...]
    consumers: tuple[ConsumerRow, ...]
    services: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "streams": [asdict(row) for row in self.streams],
            "consumers": [asdict(row) for row in self.consumers],
            "services": [{"service": name, "consumers": number} for name, number in self.services],
            "total": len(self.consumers),
        }


def catalog(platform: Platform) -> Catalog:
    """The tables of this platform. Pure."""
    consumers = [row for name in platform.streams for row in map(_consumer, platform.consumers_of(name))]
    services = Counter(row.service for row in consumers)
    return Catalog(
        streams=tuple(_stream(spec, len(platform.consumers_of(spec.name))) for spec in platform.streams.values()),
        consumers=tuple(consumers),
        services=tuple(sorted(services.items(), key=lambda item: (-item[1], item[0]))),
    )


def _stream(spec: StreamSpec, consumers: int) -> StreamRow:
    age, size = spec.config.get("max_age", 0), spec.config.get("max_bytes", -1)
    return StreamRow(
        stream=spec.name,
        subjects=spec.subjects,
        retention=spec.retention,
        storage=spec.config.get("storage", "file"),
        max_age=format_duration(from_nanoseconds(age)) if age else "unlimited",
        max_bytes=format_size(size) if size > 0 else "unlimited",
        discard=spec.config.get("discard", "old"),
        replicas=spec.replicas,
        consumers=consumers,
    )


def _consumer(spec: ConsumerSpec) -> ConsumerRow:
    most = spec.max_deliver
    return ConsumerRow(
        stream=spec.stream,
        consumer=spec.name,
        filters=spec.filters,
        service=spec.service or NO_SERVICE,
        ack_wait="default" if spec.ack_wait is None else format_duration(spec.ack_wait),
        max_deliver="unlimited" if most in (None, -1) else str(most),
        deliver=_start(spec),
        dlq=spec.dlq,
    )


def _start(spec: ConsumerSpec) -> str:
    config = spec.config
    start = config.get("opt_start_seq") or config.get("opt_start_time")
    return f"from {start}" if start else str(config["deliver_policy"])
