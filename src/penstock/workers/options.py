"""What a worker and a group are told: stream, names, and how hard they may work. Validated once."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
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
from penstock.workers.partitions import Partition, PartitionSource

Positions = Callable[[Collection[Partition]], Awaitable[Mapping[str, int]]]
"""Asked when a consumer must be made, or a partition is added: the last sequence of each partition that is done.

A partition that is left out was never handled.
"""

_NAME = re.compile(r"[^\s.*>/\\]+")


def part_of_name(text: str) -> str:
    """The text itself. Raises `ConfigError` when no stream and no consumer can have it in its name."""
    if not _NAME.fullmatch(text):
        raise ConfigError(f"{text!r} cannot be a name: it is empty, or has white space or one of . * > / \\ in it")
    return text


def no_positions() -> Positions:
    """For partitions that nobody has handled before."""

    async def none(partitions: Collection[Partition]) -> Mapping[str, int]:
        return {}

    return none


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerOptions:
    """The durable consumer of one worker, and how its filters are kept up to date."""

    stream: str
    worker_id: str
    """Stable: a worker that comes back with it finds its consumer again."""
    prefix: str = "penstock"
    """The consumer is called `<prefix>-<worker_id>`."""
    ack_wait: float = 30.0
    """Seconds after which the server delivers again what was not answered."""
    max_ack_pending: int = 500
    """Messages delivered and not acknowledged, at most. One budget for all partitions of the worker."""
    max_waiting: int = 256
    inactive_threshold: float = 24 * 3600.0
    """Seconds without a pull after which the server removes the consumer: longer than any outage you plan for."""
    replicas: int = 0
    """0: as many as the stream has."""
    max_subjects: int = 500
    """Filter subjects of one consumer, at most."""
    max_consumers: int = 1
    """More than 1: subjects beyond `max_subjects` go to `<prefix>-<worker_id>-2` and so on."""
    universe: frozenset[str] = frozenset()
    """Every subject the stream may have. When given, wildcards replace subjects once there are too many."""
    window: float = 0.1
    """Seconds that changes are collected before they become one update."""
    min_interval: float = 0.5
    """Seconds between two updates, at least."""
    attempts: int = 6
    """Tries before `update` gives up waiting; the change is still tried from time to time."""
    retry: Backoff = field(default_factory=lambda: Backoff(first=0.2, factor=1.6, most=5.0))
    escalate_after: int = 3
    """Failures in a row after which somebody is told."""

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
        """The name of the worker's first consumer (shard 0), of its second, and so on."""
        return self.consumer if shard == 0 else f"{self.consumer}-{shard + 1}"

    def mutable(self) -> Json:
        """The fields that an update may change, besides the filters."""
        return {
            "ack_wait": int(self.ack_wait * NANOSECONDS),
            "inactive_threshold": int(self.inactive_threshold * NANOSECONDS),
        }

    def created(self, shard: int, subjects: Collection[str], start: int | None) -> Json:
        """The configuration of a consumer that is made. `start`: its first sequence, None for everything there is."""
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
            # Tries are counted here, where a message that waits for its turn does not use one up; see `verdicts`.
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
    """Subject for messages that are given up; a stream must take it. Without one they are tried again for ever."""
    concurrency: int = 256
    """Partitions whose handlers run at the same time, at most."""
    handler_timeout: float | None = None
    """Seconds a handler may take; then it is cancelled, and that counts as a failure."""
    processes: int = 0
    """For a handler that is a plain function and computes: processes that run it."""
    threads: int = 0
    """For a handler that is a plain function and waits, as for a database: threads that run it."""
    max_in_flight: int = 64
    """Messages that a slow partition may hold here once there is no room for others."""
    max_bytes: int = 64 * 2**20
    """Bytes of messages that may wait here or be under way to here, about; a single message may always come."""
    max_parked: int = 50_000
    """Messages of slow partitions that may wait at the server, unacknowledged, without taking others' places."""
    stop_within: float = 60.0
    """Seconds that handlers have to finish when the worker stops, or when their partition goes to another worker. Then
    they are cancelled, and whoever goes on begins with their messages."""
    measure_every: float = 15.0
    """Seconds between two looks at how far each partition is behind; 0: never."""
    batch: int = 0
    """0: the handler takes a message. Else it takes a list of messages of one partition, so many at most."""
    hooks: Hooks = field(default_factory=Hooks)
    """What the program does as the worker begins and ends, and as partitions come and go."""

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
"""Makes the source of partitions from a member's connection and the group's bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOptions:
    """A group of workers on one stream."""

    group: str
    """Its name: consumers are called `<group>-<worker id>`, and the KV bucket `penstock_<group>`."""
    stream: str
    source: SourceMaker
    """Where the partitions come from; asked by whoever leads."""
    start: Literal["all", "new"] = "all"
    """Where a partition begins that nobody has ever owned: with all there is, or with what comes."""
    strategy: Strategy = field(default_factory=ConsistentHash)
    windows: Windows = field(default_factory=Windows)
    ttl: float = 15.0
    """Seconds after which a worker that is not heard of is given up. Shorter than any `inactive_threshold`."""
    look_every: float = 1.0
    """Seconds between two looks at the assignment while nothing moves."""
    look_soon: float = 0.1
    """The same while partitions change hands."""
    replicas: int = 0
    """Of the bucket; 0: as many as the stream has."""
    pool: IdPool = field(default_factory=IdPool)
    instance: str = field(default_factory=new_instance)
    """A name that stays over restarts, such as that of a pod: with it a worker has its id back at once."""
    labels: frozenset[str] = frozenset()
    capacity: int = 1
    leave_within: float = 75.0
    """Seconds that a worker that stops may take to hand over its partitions: longer than its handlers may take to end
    (`WorkerOptions.stop_within`), so that it is heard of until they have."""
    rejoin: bool = True
    """Whether a worker that has lost its id takes part again under another; else it ends with `ClaimLost`."""

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
"""Groups of these names would share a bucket with what Penstock keeps for facts, Spark's ledger and pipelines."""


def group_name(text: str) -> str:
    """The name itself. Raises `ConfigError` for one that no group can have."""
    if not text.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{text!r} cannot be a group's name: letters, digits, - and _ can")
    if text in RESERVED:
        raise ConfigError(
            f"{text!r} cannot be a group's name: Penstock keeps something else in the bucket of that name"
        )
    return text


def bucket_name(group: str) -> str:
    """The KV bucket of a group."""
    return f"penstock_{group}"


def overlap_bucket(group: str) -> str:
    """The KV bucket of an overlap on the way to a group. No group's own bucket can have that name."""
    return f"penstock-overlap_{group}"
