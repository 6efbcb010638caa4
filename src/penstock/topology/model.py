"""The declared platform as values: what the file says for one environment.

`config` of a stream or consumer is in the server's own shape and holds only what is declared, plus the names and the
environment's replicas; durations are nanoseconds. Everything here is plain data without I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from penstock import packs, subjects, units
from penstock.workers.partitions import SubjectPattern

Json = dict[str, Any]
EVERY_STREAM = "*"
UNPACKED = "none"
"""The kind of packing that is none: a message a row."""
DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One place where the platform lives. Secrets are left out of `repr`."""

    name: str
    servers: tuple[str, ...] = field(default=(), repr=False)
    """They may hold logins. Empty: whatever the settings say."""
    replicas: int = 1
    nodes: int | None = None
    """Servers in the cluster; None when the file does not say."""
    credentials: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    domain: str | None = None
    timeout: float | None = None
    """Seconds."""
    inbox_prefix: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    line: int = 0

    def settings_overrides(self) -> dict[str, Any]:
        """The connection fields that this environment sets, for `Settings.load` or `Context.settings`."""
        names = (
            "servers",
            "credentials",
            "user",
            "password",
            "token",
            "tls_ca",
            "tls_cert",
            "tls_key",
            "domain",
            "timeout",
            "inbox_prefix",
        )
        return {name: value for name in names if (value := getattr(self, name))}


@dataclass(frozen=True, slots=True)
class SourceConsumer:
    """The durable consumer a source or mirror reads through."""

    name: str
    server_managed: bool = False
    """Penstock makes and keeps the consumer; the server itself knows no such field."""
    deliver_subject: str | None = None


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One source, or the mirror, of a stream."""

    name: str
    config: Json
    """The server's form, without a `consumer` when that is server-managed: then the sourcing code binds one later."""
    consumer: SourceConsumer | None = None
    domain: str | None = None
    line: int = 0

    @property
    def server_managed(self) -> bool:
        return self.consumer is not None and self.consumer.server_managed

    @property
    def is_external(self) -> bool:
        """Whether the origin lives in another account or domain, so that this file need not declare it."""
        return "external" in self.config

    def bound(self, deliver_subject: str) -> Json:
        """The server's form once the durable consumer exists: its filter and start moved into that consumer."""
        assert self.consumer is not None, "only a source with a consumer can be bound to one"
        moved = ("filter_subject", "opt_start_seq", "opt_start_time")
        kept = {key: value for key, value in self.config.items() if key not in moved}
        return {**kept, "consumer": {"name": self.consumer.name, "deliver_subject": deliver_subject}}


@dataclass(frozen=True, slots=True)
class PackingSpec:
    """How pipelines put rows together; what is None is left to the sink."""

    kind: str = packs.ROWS
    """`packs.ROWS`, `packs.TYPED` or `UNPACKED`."""
    rows: int | None = None
    bytes: int | None = None
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A declared stream."""

    name: str
    config: Json
    line: int = 0
    sources: tuple[SourceSpec, ...] = ()
    mirror: SourceSpec | None = None
    packing: PackingSpec = PackingSpec(UNPACKED)
    owner: str | None = None
    purpose: str | None = None
    ignore: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each key of the file, by its name in the file."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """What it captures; the server takes the name where neither subjects nor an origin are given."""
        given = tuple(self.config.get("subjects", ()))
        return given if given or self.origins else (self.name,)

    @property
    def retention(self) -> str:
        return str(self.config.get("retention", "limits"))

    @property
    def packs(self) -> bool:
        """Whether pipelines write packs to it, unless their sinks say otherwise."""
        return self.packing.kind != UNPACKED

    @property
    def is_dead_letters(self) -> bool:
        """Whether all that it captures are dead letters."""
        return subjects.holds_dead_letters(self.subjects)

    @property
    def replicas(self) -> int:
        return int(self.config.get("num_replicas", 1))

    @property
    def origins(self) -> tuple[SourceSpec, ...]:
        """Its sources, or its mirror as the only one."""
        return (self.mirror,) if self.mirror else self.sources

    def line_of(self, key: str) -> int:
        """Line of a key of the file, or of the stream itself."""
        return self.lines.get(key, self.line)


@dataclass(frozen=True, slots=True)
class Contract:
    """What an AsyncAPI document says about a consumer, in `x-nats-config` and as the address of its channel."""

    where: str
    """File and line, for people."""
    subject: str | None = None
    """What the channel's address means; None when it has none."""
    ack_wait: int | None = None
    """Nanoseconds."""
    max_deliver: int | None = None
    dlq_subject: str | None = None


DEDICATED = "dedicated"
"""What `reader:` says of a named reader that gets its facts in order, one page at a time."""


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A declared durable consumer."""

    name: str
    stream: str
    config: Json
    service: str | None = None
    owner: str | None = None
    purpose: str | None = None
    dlq: str | None = None
    reader: str | None = None
    """For named readers: `dedicated` or `shared`."""
    why: str | None = None
    """Why it is not a pull consumer with explicit acks."""
    may_miss: bool = False
    renamed_from: str | None = None
    """What it was called before: it goes on where that one is, which is deleted."""
    asyncapi: str | None = None
    """The channel that describes it, as `file#/channels/name`; by default the one with its subject."""
    contract: Contract | None = None
    """What that channel says; it has already filled in what the platform file leaves out."""
    line: int = 0
    ignore: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each key of the file, by its name in the file."""

    @property
    def filters(self) -> tuple[str, ...]:
        """Its filters, however they are written; empty when it reads everything."""
        return filters_of(self.config)

    @property
    def is_push(self) -> bool:
        return bool(self.config.get("deliver_subject"))

    @property
    def is_dedicated(self) -> bool:
        return self.reader == DEDICATED

    @property
    def ack_policy(self) -> str:
        return str(self.config["ack_policy"])

    @property
    def ack_wait(self) -> timedelta | None:
        """As declared; None when the file does not say."""
        wait = self.config.get("ack_wait")
        return None if wait is None else units.from_nanoseconds(wait)

    @property
    def max_deliver(self) -> int | None:
        """As declared; None when the file does not say, -1 for no limit."""
        return self.config.get("max_deliver")

    def line_of(self, key: str) -> int:
        """Line of a key of the file, or of the consumer itself."""
        return self.lines.get(key, self.line)


def filters_of(config: Json) -> tuple[str, ...]:
    """The filters of a consumer's configuration, from either of the server's two fields."""
    one = config.get("filter_subject")
    return (one,) if one else tuple(config.get("filter_subjects") or ())


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A declared group of partitioned workers. Its workers make its consumers; `apply` makes nothing for it."""

    name: str
    stream: str
    partitions: tuple[str, ...]
    """A pattern alone, or the subjects that are partitions."""
    hashed: int | None = None
    service: str | None = None
    owner: str | None = None
    purpose: str | None = None
    dlq: str | None = None
    max_deliver: int | None = None
    backoff: tuple[timedelta, ...] = ()
    ack_wait: timedelta | None = None
    max_ack_pending: int | None = None
    start: str = "all"
    strategy: str = "consistent_hash"
    line: int = 0
    ignore: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    @property
    def pattern(self) -> str | None:
        """The pattern that finds partitions; None when they are listed."""
        return self.partitions[0] if len(self.partitions) == 1 and "{" in self.partitions[0] else None

    @property
    def filters(self) -> tuple[str, ...]:
        """What its consumers read, together."""
        return (SubjectPattern(self.pattern).filter,) if self.pattern else self.partitions

    def line_of(self, key: str) -> int:
        """Line of a key of the file, or of the group itself."""
        return self.lines.get(key, self.line)


@dataclass(frozen=True, slots=True)
class PipelineSource:
    """What a pipeline reads."""

    streams: tuple[str, ...]
    """Stream names; `*` alone stands for every declared stream (`Platform.streams_read_by` names them)."""
    subjects: tuple[str, ...] = ()
    consumer: str | None = None
    start: str | None = None
    max_rows: int | None = None
    max_bytes: int | None = None
    partitions: int | None = None
    fail_on_data_loss: bool = True
    keep_batches_whole: bool = False
    line: int = 0


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """How a message becomes a row."""

    format: str = "json"
    schema: str | None = None
    """None: the rows are the messages as they are."""
    message: str | None = None
    check: str | None = None


@dataclass(frozen=True, slots=True)
class Dedupe:
    """Events with the same key, no further apart than `within`, are one event."""

    key: str
    within: timedelta


@dataclass(frozen=True, slots=True)
class PipelineSink:
    """One place a pipeline writes to: files (`format`, `path`) or a stream (`stream`, `subject`)."""

    format: str | None = None
    path: str | None = None
    stream: str | None = None
    subject: str | None = None
    delivery: str = "atomic"
    packing: PackingSpec | None = None
    """None: as the stream says."""
    mode: str | None = None
    """None: `upsert` for an aggregation, else `append`."""
    key: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a pipeline runs: once over what is there, or again and again."""

    available_now: bool = True
    every: timedelta | None = None


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A declared Spark pipeline."""

    name: str
    source: PipelineSource
    sinks: tuple[PipelineSink, ...]
    event: PipelineEvent = PipelineEvent()
    dedupe: Dedupe | None = None
    sql: str | None = None
    function: str | None = None
    each_batch: str | None = None
    bad_records: str | None = None
    trigger: Trigger = Trigger()
    checkpoint: str | None = None
    owner: str | None = None
    purpose: str | None = None
    line: int = 0
    ignore: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    @property
    def consumer(self) -> str:
        """The durable consumer that holds its position, on each stream that it reads."""
        return self.source.consumer or f"pipeline_{self.name}"

    def line_of(self, key: str) -> int:
        """Line of a key of the file, or of the pipeline itself."""
        return self.lines.get(key, self.line)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What a service writes; what it reads is said by the consumers that name it."""

    name: str
    publishes: tuple[str, ...] = ()
    """Filters of the subjects that it publishes to."""
    appends: tuple[str, ...] = ()
    """Filters of the subjects that it appends facts to."""
    owner: str | None = None
    line: int = 0


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """What the gateway lets one caller do."""

    page: int = 500
    """Facts of a page, at most."""
    page_bytes: int = 4 * 1024 * 1024
    body: int = 2 * 1024 * 1024
    """Bytes of a request, at most, after decompression."""
    rate: int = 500
    """Calls a second of one identity."""
    concurrent: int = 32
    """Calls of one identity at the same time."""
    wait: timedelta = timedelta(seconds=30)
    """Longest that a fetch may wait for a first fact."""
    connections: int = 512
    """Open connections, in all; fewer where the process may open fewer descriptors."""
    connections_per_address: int = 128
    """Open connections from one address; raise it to `connections` behind a load balancer."""


@dataclass(frozen=True, slots=True)
class GatewayToken:
    """A bearer token, known by its SHA-256 only."""

    sha256: str = field(repr=False)
    expires: datetime | None = None


@dataclass(frozen=True, slots=True)
class GatewayIdentity:
    """A caller of the gateway, and what it is granted."""

    name: str
    certificates: tuple[str, ...] = ()
    """Names (DNS or URI) in the client certificates that prove it."""
    tokens: tuple[GatewayToken, ...] = ()
    consumers: tuple[tuple[str, str], ...] = ()
    """Stream and consumer of everything it may fetch and confirm."""
    subjects: tuple[str, ...] = ()
    """Filters of the subjects that it may append to."""
    owner: str | None = None
    line: int = 0


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """Who may call the gateway."""

    limits: GatewayLimits = GatewayLimits()
    identities: Mapping[str, GatewayIdentity] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True, slots=True)
class Platform:
    """Everything the file declares, for one environment."""

    path: Path
    environment: Environment
    streams: Mapping[str, StreamSpec]
    consumers: Mapping[str, ConsumerSpec]
    pipelines: Mapping[str, PipelineSpec]
    asyncapi: str | None = None
    """The AsyncAPI document of the whole platform, relative to the file."""
    name: str = DEFAULT_NAME
    """Marks what the platform owns. Platforms that share a server need different names."""
    gateway: GatewaySpec | None = None
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    """Those that write something."""
    groups: Mapping[str, GroupSpec] = field(default_factory=dict)
    history: timedelta | None = None
    """How long `penstock ui` keeps what it sees, for its time machine; None: it keeps nothing."""

    def consumers_of(self, stream: str) -> tuple[ConsumerSpec, ...]:
        """The consumers of a stream, in the order of the file."""
        return tuple(consumer for consumer in self.consumers.values() if consumer.stream == stream)

    @property
    def handled(self) -> tuple[ConsumerSpec | GroupSpec, ...]:
        """The consumers and the groups: whatever programs handle messages of."""
        return (*self.consumers.values(), *self.groups.values())

    def groups_of(self, stream: str) -> tuple[GroupSpec, ...]:
        """The groups on a stream, in the order of the file."""
        return tuple(group for group in self.groups.values() if group.stream == stream)

    def packing_of(self, sink: PipelineSink) -> PackingSpec | None:
        """How a pipeline puts rows together for this sink; None where it writes messages, or files."""
        if sink.stream is None:
            return None
        found = sink.packing or self.streams[sink.stream].packing
        return None if found.kind == UNPACKED else found

    def streams_read_by(self, pipeline: PipelineSpec) -> tuple[str, ...]:
        """The streams a pipeline reads, in the order of the file."""
        return tuple(self.streams) if pipeline.source.streams == (EVERY_STREAM,) else pipeline.source.streams
