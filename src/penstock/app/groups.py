"""A handler of an app in a group of partitioned workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.app.message import Message
from penstock.consume import messages
from penstock.consume.durable import HandledCounts
from penstock.consume.instance import new_instance
from penstock.consume.messages import MessageContext
from penstock.consume.metrics import WorkerMetrics
from penstock.consume.verdicts import BACKOFF, MAX_DELIVER, Retries
from penstock.errors import ConfigError
from penstock.metrics.endpoint import Health
from penstock.settings import Settings
from penstock.topology.model import GroupSpec, Platform
from penstock.workers.dispatch.dispatcher import CONCURRENCY
from penstock.workers.group.assignment import STRATEGIES
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import GroupOptions, SourceMaker, WorkerOptions
from penstock.workers.partitions import Hashed, Listed, Partition, SeenInStream, SubjectPattern

Wrap = Callable[[messages.Message, MessageContext], Message]


@dataclass(frozen=True, slots=True)
class OnPartitions:
    """A handler in a group of partitioned workers. None: taken from the platform file, or the default."""

    group: str
    stream: str
    handler: Callable[..., Any]
    call: Callable[[Any], Awaitable[Any]]
    partitions: str | tuple[str, ...] | None = None
    dlq: str | None = None
    max_deliver: int | None = None
    concurrency: int = CONCURRENCY
    timeout: float | None = None
    instance: str | None = None

    def resolved(self, platform: Platform | None) -> Resolved:
        """With what the platform file declares. Raises `ConfigError` when it says something else, or nothing."""
        spec = platform.groups.get(self.group) if platform else None
        if spec and spec.stream != self.stream:
            where = f"{platform.path} declares it" if platform else ""
            raise ConfigError(f"group {self.group!r} works on {self.stream!r}, but {where} on {spec.stream!r}")
        partitions = self.partitions or (spec and (spec.pattern or spec.partitions))
        if not partitions:
            raise ConfigError(
                f"group {self.group!r} has no partitions: give partitions='tele.{{device}}', or a list of subjects, or "
                "declare the group under `groups:` in the platform file"
            )
        spec = spec or GroupSpec(self.group, self.stream, ())
        pattern = SubjectPattern(partitions) if isinstance(partitions, str) else None
        hashed = spec.hashed if not self.partitions else None
        waits = {"ack_wait": spec.ack_wait and spec.ack_wait.total_seconds(), "max_ack_pending": spec.max_ack_pending}
        return Resolved(
            GroupOptions(
                group=self.group,
                stream=self.stream,
                source=source_of(self.stream, partitions, hashed),
                start="new" if spec.start == "new" else "all",
                strategy=STRATEGIES[spec.strategy.replace("_", "-")],
                instance=self.instance or new_instance(),
            ),
            WorkerOptions(
                dlq=self.dlq or spec.dlq,
                concurrency=self.concurrency,
                retries=Retries(
                    max_deliver=self.max_deliver or spec.max_deliver or MAX_DELIVER,
                    backoff=tuple(one.total_seconds() for one in spec.backoff) or BACKOFF,
                ),
                handler_timeout=self.timeout,
            ),
            {name: value for name, value in waits.items() if value},
            pattern,
            (pattern.filter,) if pattern else tuple(partitions),
        )


@dataclass(frozen=True, slots=True)
class Resolved:
    """The resolved options of a group's handler."""

    options: GroupOptions
    worker: WorkerOptions
    consumer: dict[str, Any]
    """Fields of `ConsumerOptions`."""
    pattern: SubjectPattern | None
    """None: each subject is a partition."""
    filters: tuple[str, ...]
    """What matches the subjects of the group."""


def source_of(stream: str, partitions: str | Sequence[str], hashed: int | None = None) -> SourceMaker:
    """Where a group's partitions come from: a pattern such as `tele.{device}`, or a list of subjects."""
    if isinstance(partitions, str):
        if hashed:
            fixed = Hashed(hashed, partitions)
            return lambda *_: fixed
        pattern = SubjectPattern(partitions)
        return lambda control, _: SeenInStream(control.jetstream, stream, pattern)
    listed = Listed(tuple(Partition(subject, (subject,)) for subject in partitions))
    return lambda *_: listed


class GroupMember:
    """One worker of a group, which calls a handler of an app."""

    def __init__(
        self,
        settings: Settings,
        resolved: Resolved,
        call: Callable[[Message], Awaitable[Any]],
        wrap: Wrap,
    ) -> None:
        async def handle(message: messages.Message, context: MessageContext) -> None:
            await call(wrap(message, context))

        self.stream = resolved.options.stream
        self.consumer = resolved.options.group
        self.filters = resolved.filters
        self._group = WorkerGroup(
            settings, resolved.options, handle, consumer=resolved.consumer, worker=resolved.worker
        )

    @property
    def counts(self) -> HandledCounts:
        found = self._group.metrics()
        failures, dead = sum(one.failures for one in found), sum(one.dead_letters for one in found)
        return HandledCounts(sum(one.done for one in found), failures, dead)

    def metrics(self) -> list[WorkerMetrics]:
        return self._group.metrics()

    def health(self) -> Health:
        return self._group.health()

    @property
    def stood_still(self) -> float:
        """Always 0: previous owners of a partition store results only once too, so there is nothing to watch."""
        return 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then hand over."""
        async with self._group:
            stopped, ended = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._group.until_stopped())
            try:
                await asyncio.wait((stopped, ended), return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ended.result()
            finally:
                stopped.cancel()
                ended.cancel()

    async def done(self) -> bool:
        """Whether all messages of our partitions are handled; without partitions, those of all other workers."""
        return await self._group.has_nothing_left()
