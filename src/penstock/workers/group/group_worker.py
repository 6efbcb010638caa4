"""What a member of a group needs of its worker, and what it tells about itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.consume.metrics import WorkerMetrics
from penstock.workers.group.claims import Reached
from penstock.workers.partitions import Partition


class GroupWorker(Protocol):
    """What a member needs of its worker; `workers.worker.Worker` is one."""

    @property
    def metrics(self) -> WorkerMetrics: ...
    @property
    def behind(self) -> Collection[str]:
        """Partitions that wait for `catch_up`."""
        ...

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def update(self, partitions: Iterable[Partition]) -> object: ...
    async def drain(self, partition_ids: Collection[str]) -> Mapping[str, Reached]: ...
    def pause(self, paused: bool) -> None: ...
    async def resume(self, partition_ids: Collection[str]) -> None: ...
    async def catch_up(self, partition: Partition, first_sequence: int, last_sequence: int) -> None: ...
    def done_through(self, partition_id: str) -> int: ...
    def floor(self, partition_id: str) -> int: ...
    def reached(self) -> Mapping[str, Reached]: ...

    told: Callable[[], Mapping[str, Reached]]
    """What it writes down before it handles a message that may kill it."""

    def fitting(self, partitions: Collection[Partition], kept: Collection[str]) -> Collection[Partition]:
        """As many of these as its consumers have room for, those that are kept first."""
        ...

    def troubles(self) -> list[str]:
        """What somebody should look at."""
        ...

    @property
    def strained(self) -> bool: ...
    @property
    def stream(self) -> str:
        """When the stream was made that it works on; empty while that is not known."""
        ...

    @property
    def remade(self) -> bool:
        """Whether the stream was made anew."""
        ...

    @property
    def failure(self) -> BaseException | None: ...


@dataclass(frozen=True, slots=True)
class MemberStatistics:
    """How a member stands."""

    worker_id: str
    mode: str
    leads: bool
    version: int
    """Of the assignment it works by."""
    partitions: tuple[str, ...]
    waiting_for: tuple[str, ...]
    held: tuple[str, ...]
    catching_up: tuple[str, ...]
    claims: int
    claims_lost: int
    handed_over: int
    caught_up: int
    leader_changes: int
    assignments: int
    freed: int
    kv_writes: int
