"""A stream, a tracker that knows every message, and workers on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from tests.support.streams import make_stream

from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import Retries
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo
from penstock.publish import Publisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.workers.options import ConsumerOptions, WorkerOptions
from penstock.workers.partitions import Partition, SubjectPattern
from penstock.workers.worker import Worker

STREAM = "W"
PATTERN = SubjectPattern("w.{partition}")


def partitions(*ids: str) -> list[Partition]:
    return [PATTERN.partition(id_) for id_ in ids]


class World:
    """A stream of numbered messages, and what became of them."""

    def __init__(self, server: EmbeddedServer, publisher: Publisher) -> None:
        self.server = server
        self.publisher = publisher
        self.js: JetStream = publisher.jetstream
        self.published: dict[str, list[bytes]] = defaultdict(list)
        self.handled: dict[str, list[bytes]] = defaultdict(list)
        self.contexts: list[MessageContext] = []
        self.open = AsyncExitStack()

    async def create(self, retention: str = "limits", **config: Any) -> None:
        await make_stream(self.js, STREAM, retention=retention, **{"allow_atomic": True, **config})
        await make_stream(self.js, "DLQ", allow_direct=True)

    async def publish(self, partition: str, count: int = 1) -> None:
        """So many more messages of a partition; their data is their number."""
        first = len(self.published[partition]) + 1
        data = [b"%d" % n for n in range(first, first + count)]
        await self.publisher.publish_batch(STREAM, f"w.{partition}", data)
        self.published[partition] += data

    async def handle(self, message: Message, context: MessageContext) -> None:
        self.handled[context.partition_id].append(message.data)
        self.contexts.append(context)

    async def worker(
        self,
        handler: Callable[..., Awaitable[None]] | Callable[..., None] | None = None,
        worker_id: str = "1",
        consumer: dict[str, Any] | None = None,
        **rest: Any,
    ) -> Worker:
        """A worker that is stopped with the test."""
        retries = rest.pop("retries", Retries(max_deliver=3, backoff=(0.05, 0.1)))
        choices = {"window": 0.01, "min_interval": 0.02, **(consumer or {})}
        outer = {k: rest.pop(k) for k in ("ownership", "before", "begins", "on_trouble") if k in rest}
        made = Worker(
            self.server.settings,
            ConsumerOptions(stream=STREAM, worker_id=worker_id, prefix="test", **choices),
            handler or self.handle,
            options=WorkerOptions(**{"retries": retries, "dlq": "dlq.w", "stop_within": 2.0, **rest}),
            **outer,
        )
        return await self.open.enter_async_context(made)

    async def consumer(self, name: str = "test-1") -> ConsumerInfo:
        return await self.js.consumer_info(STREAM, name)

    async def all_handled(self, within: float = 60.0) -> None:
        """Wait until every message was handled, in order, once; and acknowledged."""
        await eventually_async(
            lambda: self.handled == self.published, within, "every message to be handled, in order, once", self.state
        )

    async def all_acknowledged(self, name: str = "test-1") -> None:
        async def clean() -> bool:
            return (await self.consumer(name)).unprocessed == 0

        await eventually_async(clean, 60, f"everything of {name} to be acknowledged", lambda: self.consumer(name))

    def state(self) -> dict[str, str]:
        return {key: self._state_of(data, self.handled.get(key, [])) for key, data in self.published.items()}

    def _state_of(self, published: list[bytes], handled: list[bytes]) -> str:
        """How far it came, and where it first differs from what was published."""
        told = f"published {len(published)}, handled {len(handled)}, last {handled[-5:]}"
        wrong = next((i for i, (want, got) in enumerate(zip(published, handled, strict=False)) if want != got), None)
        if wrong is None:
            return told
        around = handled[max(wrong - 3, 0) : wrong + 4]
        return f"{told}, {published[wrong]!r} was due and {handled[wrong]!r} was handled: …{around}…"
