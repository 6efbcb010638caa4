"""What the members of a group have to agree on, and what each says about itself. Validated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from penstock.consume.instance import new_instance
from penstock.errors import ConfigError
from penstock.jetstream.kv import Bucket
from penstock.publish.control import Control
from penstock.workers.group.assignment import ConsistentHash, Strategy
from penstock.workers.group.identity import Pool
from penstock.workers.group.stabilization import Windows
from penstock.workers.sources import PartitionSource

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
    pool: Pool = field(default_factory=Pool)
    instance: str = field(default_factory=new_instance)
    """A name that stays over restarts, such as that of a pod: with it a worker has its id back at once."""
    labels: frozenset[str] = frozenset()
    capacity: int = 1
    leave_within: float = 75.0
    """Seconds that a worker that stops may take to hand over its partitions: longer than its handlers may take to end
    (`WorkerOptions.stop_within`), so that it is heard of until they have."""
    rejoin: bool = True
    """Whether a worker that has lost its id takes part again under another; else it ends with `ClaimLost`."""
    hand_over: bool = True
    """Whether a new owner catches up from the handoff sequence. Without it messages are lost: for tests only."""

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
