"""Options of a worker and of a group: stream, names and limits. Validated once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from penstock import subjects
from penstock.consume.hooks import Hooks
from penstock.consume.instance import new_instance
from penstock.consume.verdicts import Retries
from penstock.errors import ConfigError
from penstock.jetstream.kv import Bucket
from penstock.jetstream.model import NANOSECONDS, Json
from penstock.publish.control import Control
from penstock.retry import Backoff
from penstock.workers.group.assignment import ConsistentHash, Strategy, Windows
from penstock.workers.group.identity import IdPool
from penstock.workers.partitions import PartitionSource

_NAME = re.compile(r"[^\s.*>/\\]+")


def part_of_name(text: str) -> str:
    """Return the text. Raises `ConfigError` when a stream or consumer name cannot contain it."""
    if not _NAME.fullmatch(text):
        raise ConfigError(f"{text!r} cannot be a name: it is empty, or has white space or one of . * > / \\ in it")
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerOptions:
    """Options of the durable consumer of one worker, and of the updates of its filters."""

    stream: str
    worker_id: str
    """Stable: a worker that restarts with it finds its consumer again."""
    prefix: str = "penstock"
    """The consumer is named `<prefix>-<worker_id>`."""
    ack_wait: float = 30.0
    """Seconds after which the server redelivers a message that was not acknowledged."""
    max_ack_pending: int = 500
    """Maximum number of unacknowledged messages. One limit for all partitions of the worker."""
    max_waiting: int = 256
    inactive_threshold: float = 24 * 3600.0
    """Seconds without a pull after which the server deletes the consumer: longer than any outage you plan for."""
    replicas: int = 0
    """0: as many as the stream has."""
    max_subjects: int = 500
    """Maximum number of filter subjects of one consumer."""
    max_consumers: int = 1
    """More than 1: subjects beyond `max_subjects` go to `<prefix>-<worker_id>-2` and so on."""
    universe: frozenset[str] = frozenset()
    """Every subject the stream may have. When given, wildcards replace subjects once there are too many."""
    window: float = 0.1
    """Seconds that changes are collected before they become one update."""
    min_interval: float = 0.5
    """Minimum seconds between two updates."""
    attempts: int = 6
    """Attempts before `update` raises; the change is still retried in the background."""
    retry: Backoff = field(default_factory=lambda: Backoff(first=0.2, factor=1.6, most=5.0))
    escalate_after: int = 3
    """Consecutive failures after which the failure is reported."""

    def __post_init__(self) -> None:
        for name in ("stream", "worker_id", "prefix"):
            if not _NAME.fullmatch(getattr(self, name)):
                raise ConfigError(f"{name}: {getattr(self, name)!r} has characters that a consumer's name cannot have")
        least = {"ack_wait": 0.1, "max_ack_pending": 1, "max_waiting": 1, "max_subjects": 1, "max_consumers": 1,
                 "attempts": 1, "escalate_after": 1, "window": 0.0, "min_interval": 0.0}  # fmt: skip
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name} must be at least {minimum:g}, got {getattr(self, name):g}")

    @property
    def consumer(self) -> str:
        return f"{self.prefix}-{self.worker_id}"

    def name(self, shard: int) -> str:
        """Return the name of the worker's first consumer (shard 0), of its second, and so on."""
        return self.consumer if shard == 0 else f"{self.consumer}-{shard + 1}"

    def mutable(self) -> Json:
        """Return the fields that an update may change, besides the filters."""
        return {
            "ack_wait": int(self.ack_wait * NANOSECONDS),
            "inactive_threshold": int(self.inactive_threshold * NANOSECONDS),
        }

    def created(self, shard: int, subjects: Collection[str], start: int | None) -> Json:
        """Return the configuration of a new consumer. `start`: its first sequence, None for all stored messages."""
        position: Json = {"deliver_policy": "all"}
        if start is not None and start > 1:
            position = {"deliver_policy": "by_start_sequence", "opt_start_seq": start}
        return {
            "name": self.name(shard),
            "durable_name": self.name(shard),
            "filter_subjects": sorted(subjects),
            "ack_policy": "explicit",
            "max_ack_pending": self.max_ack_pending,
            "max_waiting": self.max_waiting,
            # The worker counts attempts: a message that only waits for its turn does not use one up; see `verdicts`.
            "max_deliver": -1,
            "num_replicas": self.replicas,
            "metadata": {"penstock.worker": self.worker_id, "penstock.group": self.prefix},
            **position,
            **self.mutable(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """How a worker treats its messages."""

    retries: Retries = field(default_factory=Retries)
    dlq: str | None = None
    """Subject for dead letters; a stream must store it. Without one, failed messages are retried forever."""
    concurrency: int = 256
    """Maximum number of partitions whose handlers run at the same time."""
    handler_timeout: float | None = None
    """Seconds a handler may take; then it is cancelled, and that counts as a failure."""
    processes: int = 0
    """Number of processes that run a CPU-bound handler that is a plain function."""
    threads: int = 0
    """Number of threads that run a blocking handler that is a plain function, such as one that queries a database."""
    max_in_flight: int = 64
    """Messages that a slow partition may hold in memory once there is no room for others."""
    max_bytes: int = 64 * 2**20
    """Approximate bytes of messages that may be in memory or requested; a single message is always allowed."""
    max_parked: int = 50_000
    """Messages of slow partitions that may wait unacknowledged at the server without using up the others' limit."""
    stop_within: float = 60.0
    """Seconds that handlers have to finish when the worker stops, or when their partition moves to another worker. Then
    they are cancelled, and the next owner starts with their messages."""
    measure_every: float = 15.0
    """Seconds between two measurements of the lag of each partition; 0: never."""
    batch: int = 0
    """0: the handler takes one message. Otherwise it takes a list of at most this many messages of one partition."""
    hooks: Hooks = field(default_factory=Hooks)
    """Callbacks of the program for start and stop of the worker, and for added and removed partitions."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_in_flight", "max_bytes", "stop_within"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name):g}")
        if self.handler_timeout is not None and self.handler_timeout <= 0:
            raise ConfigError(f"handler_timeout must be above 0 seconds, got {self.handler_timeout:g}")
        for name in ("processes", "threads", "batch"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.dlq is not None and (wrong := subjects.problem(self.dlq)):
            raise ConfigError(f"dlq: {self.dlq!r} is no subject for dead letters: {wrong}")
        if self.dlq is not None and not subjects.is_literal(self.dlq):
            raise ConfigError(f"dlq: {self.dlq!r} has a wildcard: name the one subject below which dead letters go")


SourceMaker = Callable[[Control, Bucket], PartitionSource]
"""Creates the source of partitions from a member's connection and the group's bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOptions:
    """Options of a group of workers on one stream."""

    group: str
    """Name of the group: consumers are named `<group>-<worker id>`, and the KV bucket `penstock_<group>`."""
    stream: str
    source: SourceMaker
    """Where the partitions come from; only the leader queries it."""
    start: Literal["all", "new"] = "all"
    """Where a partition starts that was never owned: with all stored messages, or with new ones."""
    strategy: Strategy = field(default_factory=ConsistentHash)
    windows: Windows = field(default_factory=Windows)
    ttl: float = 15.0
    """Seconds without a heartbeat after which a worker is declared dead. Shorter than any `inactive_threshold`."""
    look_every: float = 1.0
    """Seconds between two reads of the assignment while no partition moves."""
    look_soon: float = 0.1
    """The same while partitions move."""
    replicas: int = 0
    """Replicas of the bucket; 0: as many as the stream has."""
    pool: IdPool = field(default_factory=IdPool)
    instance: str = field(default_factory=new_instance)
    """A stable name over restarts, such as that of a pod: with it a worker gets its id back at once."""
    labels: frozenset[str] = frozenset()
    capacity: int = 1
    leave_within: float = 75.0
    """Seconds that a stopping worker may take to hand over its partitions: longer than its handlers may take to end
    (`WorkerOptions.stop_within`), so that its heartbeat continues until they have."""
    rejoin: bool = True
    """Whether a worker that has lost its id rejoins under another; otherwise it ends with `ClaimLost`."""

    def __post_init__(self) -> None:
        group_name(self.group)
        if not 0 < self.look_soon <= self.look_every <= self.ttl:
            raise ConfigError(
                f"a group needs look_soon ({self.look_soon:g} s) <= look_every ({self.look_every:g} s) <= "
                f"ttl ({self.ttl:g} s), all above 0"
            )
        if self.capacity < 1:
            raise ConfigError(f"capacity must be at least 1, got {self.capacity}")

    @property
    def bucket(self) -> str:
        return bucket_name(self.group)

    @property
    def renew_every(self) -> float:
        """Seconds between two heartbeats: two may be lost before the lease ends."""
        return self.ttl / 4


RESERVED = frozenset({"facts", "ledger", "pipelines"})
"""Reserved group names: their buckets are used for facts, Spark's ledger and pipelines."""


def group_name(text: str) -> str:
    """Return the name. Raises `ConfigError` when it is not a valid group name."""
    if not text.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{text!r} cannot be a group's name: letters, digits, - and _ can")
    if text in RESERVED:
        raise ConfigError(
            f"{text!r} cannot be a group's name: Penstock keeps something else in the bucket of that name"
        )
    return text


def bucket_name(group: str) -> str:
    """Return the KV bucket of a group."""
    return f"penstock_{group}"


def overlap_bucket(group: str) -> str:
    """Return the KV bucket of the overlap of a migration to a group. No group's own bucket can have that name."""
    return f"penstock-overlap_{group}"
