"""What is wanted and what is there: the two sides a plan compares. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from penstock.deadletter import streams as deadletter
from penstock.jetstream.model import ConsumerInfo, Json, StreamInfo
from penstock.publish import advisories
from penstock.sourcing import modes
from penstock.subjects import any_overlap
from penstock.topology import ownership
from penstock.topology.model import DEFAULT_NAME, Platform, SourceSpec, StreamSpec

STREAM = "stream"
CONSUMER = "consumer"


@dataclass(frozen=True, slots=True)
class Resource:
    """A stream, or a consumer of a stream."""

    stream: str
    consumer: str | None = None
    api: str | None = None
    """The API prefix through which it is reached; None: it is at home. Only the consumers of sources live elsewhere."""

    @property
    def type(self) -> str:
        return STREAM if self.consumer is None else CONSUMER

    @property
    def name(self) -> str:
        return self.consumer or self.stream

    def __str__(self) -> str:
        where = f" at {self.api}" if self.api else ""
        return (
            f"stream {self.stream}{where}"
            if self.consumer is None
            else f"consumer {self.consumer} of {self.stream}{where}"
        )

    @property
    def its_stream(self) -> Resource:
        """The stream itself, where it lives."""
        return Resource(self.stream, None, self.api)


Configs = Mapping[Resource, Json]
"""Configurations in the server's own shape."""


@dataclass(frozen=True, slots=True)
class Desired:
    """What one platform declares."""

    platform: str
    """The name that marks what this platform owns."""
    configs: Configs
    """Only what is declared; every other field is left as the server has it."""
    domain: str | None = None
    """The JetStream domain where it lives; None when that is not known, or has no name."""
    chosen: frozenset[Resource] = frozenset()
    """Consumers of sources whose deliver subject the file leaves to us."""
    groups: frozenset[tuple[str, str]] = frozenset()
    """Stream and name of declared groups, whose workers make consumers `<group>-…` of their own."""

    @property
    def is_named(self) -> bool:
        """Whether the file says whose it is; what a file without a name owns, any other such file owns too."""
        return self.platform != DEFAULT_NAME

    @classmethod
    def of(cls, platform: Platform, domain: str | None = None) -> Self:
        """What the platform file declares, in the order of the file, for the server of that JetStream domain."""
        domain = domain or platform.environment.domain
        streams: Configs = {Resource(name): bound(spec, domain) for name, spec in platform.streams.items()}
        consumers = {
            Resource(spec.stream, name): ownership.described(spec) for name, spec in platform.consumers.items()
        }
        managed = managed_consumers(platform, domain)
        chosen = frozenset(
            source_consumer(source)
            for spec in platform.streams.values()
            for source in spec.origins
            if source.consumer and source.server_managed and not source.consumer.deliver_subject
        )
        configs = {**streams, **implied_streams(platform), **consumers, **managed}
        groups = frozenset((spec.stream, name) for name, spec in platform.groups.items())
        return cls(platform.name, configs, domain, chosen, groups)


def implied_streams(platform: Platform) -> Configs:
    """What dead letters and atomic batches need beside their own streams, as far as no declared stream does it already.

    The server tells once that a consumer has given up on a message, or that it dropped a batch: somebody must keep it,
    from the first day on.
    """
    captured = [subject for spec in platform.streams.values() for subject in spec.subjects]
    replicas = platform.environment.replicas
    wanted: list[Json] = []
    if any(consumer.dlq for consumer in platform.consumers.values()):
        wanted += [deadletter.advisories_config(replicas), deadletter.audit_config(replicas)]
    if any(spec.config.get("allow_atomic") for spec in platform.streams.values()):
        wanted.append(advisories.keeper(replicas=replicas))
    return {
        Resource(config["name"]): config
        for config in wanted
        if config["name"] not in platform.streams and not any_overlap(config["subjects"], captured)
    }


def bound(spec: StreamSpec, domain: str | None = None) -> Json:
    """The stream's configuration with its server-managed sources bound to their consumers."""
    config = dict(spec.config)
    if spec.sources:
        config["sources"] = [_bound(spec, source, domain) for source in spec.sources]
    if spec.mirror:
        config["mirror"] = _bound(spec, spec.mirror, domain)
    return config


def _bound(spec: StreamSpec, source: SourceSpec, domain: str | None) -> Json:
    return source.bound(deliver_subject(spec.name, source, domain)) if source.server_managed else source.config


def deliver_subject(stream: str, source: SourceSpec, domain: str | None = None) -> str:
    """Where the consumer of a source delivers: as declared, or as chosen for a server-managed one."""
    assert source.consumer is not None, "a source without a consumer has no deliver subject"
    chosen = source.consumer.deliver_subject
    return chosen or modes.default_deliver_subject(stream, source.config, source.consumer.name, domain)


def source_consumer(source: SourceSpec) -> Resource:
    """The consumer that a source names."""
    assert source.consumer is not None, "a source without a consumer names none"
    return Resource(source.name, source.consumer.name, (source.config.get("external") or {}).get("api"))


def managed_consumers(platform: Platform, domain: str | None = None) -> Configs:
    """The consumers that server-managed sources need, where their origins live."""
    return {
        source_consumer(source): modes.managed_consumer(
            spec.name, source.config, source.consumer.name, deliver_subject(spec.name, source, domain)
        )
        for spec in platform.streams.values()
        for source in spec.origins
        if source.consumer and source.server_managed
    }


@dataclass(frozen=True, slots=True)
class Actual:
    """What the server has: every stream that matters, and the consumers of those."""

    streams: Mapping[str, StreamInfo] = field(default_factory=dict)
    consumers: Mapping[Resource, ConsumerInfo] = field(default_factory=dict)
    unanswered: frozenset[Resource] = frozenset()
    """What exists, but nobody answers for it: a group without a leader, an origin whose link is down."""
    origins: Mapping[Resource, StreamInfo] = field(default_factory=dict)
    """Streams that live elsewhere, and whose consumers matter."""

    def stream_of(self, resource: Resource) -> StreamInfo | None:
        """The stream of a consumer, wherever it lives."""
        return self.origins.get(resource.its_stream) if resource.api else self.streams.get(resource.stream)

    def config(self, resource: Resource) -> Json | None:
        """The configuration the server shows; None when there is no such resource."""
        info = self.streams.get(resource.stream) if resource.consumer is None else self.consumers.get(resource)
        return None if info is None else info.config

    def resources(self) -> list[Resource]:
        return [*map(Resource, self.streams), *self.consumers]
