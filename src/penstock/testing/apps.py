"""`TestApp`: the handlers of an app in a test, without a broker or with a real one.

async with TestApp(app) as test:                # in memory
    await test.send("usage.metered", {"project": "a", "seconds": 21})
    await test.done()
    assert [one.data for one in await test.stored("BILLING")] == [b'{"project":"a","cents":42}']

`TestApp(app, nats_server)` runs the same test on a server. In a test without asyncio it is `with` instead of `async
with`, and nothing is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import fields, replace
from typing import Any, Self

from penstock import subjects
from penstock.app import App
from penstock.app.app import OnConsumer, Running
from penstock.app.blocking import Blocking, own_loop
from penstock.app.client import Client, connect
from penstock.app.groups import GroupMember, OnPartitions, Resolved
from penstock.app.message import Message
from penstock.app.once import MARKERS
from penstock.app.payloads import encode
from penstock.deadletter import letters
from penstock.deadletter.inventory import letter_streams
from penstock.deadletter.letters import DeadLetter
from penstock.jetstream.connection import connect as connect_broker
from penstock.jetstream.model import StoredMessage
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing.memory import MemoryBroker
from penstock.testing.polling import eventually_async
from penstock.topology import actual
from penstock.topology import apply as carrying_out
from penstock.topology import plan as planning
from penstock.topology.load import load
from penstock.topology.model import Platform
from penstock.topology.resource import Desired
from penstock.wire.headers import Headers
from penstock.workers.group.assignment import Windows

SOON = 0.01
"""Seconds before a further try on a real server: a test should not wait as long as a service does."""
WITHIN = 30.0


class TestApp:
    """Runs the handlers of an app on messages that a test sends, and keeps what became of them."""

    __test__ = False  # pytest takes classes with such a name for tests

    def __init__(self, app: App, server: EmbeddedServer | Settings | str | None = None) -> None:
        """`server`: where to run, such as the fixture `nats_server`; what the platform file declares is made there.
        None: in memory."""
        self.app = app
        self.handled: list[Message] = []
        """Messages whose handler returned, in that order."""
        self.failed: list[tuple[Message, Exception]] = []
        """Tries that raised, each with its error."""
        self._settings = _settings(server)
        self._memory: MemoryBroker | None = None
        self._client: Client | None = None
        self._running: list[Running] = []
        self._serving: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()
        self._outer = ExitStack()
        self._blocking: Blocking | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        platform = load(self.app.file, self.app.env) if self.app.file else None
        self._watch()
        try:
            if self._settings:
                await self._start(self._settings, platform)
            else:
                await self._start_in_memory(platform)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def __enter__(self) -> Any:
        """The same for a test without asyncio: its methods wait."""
        loop = self._outer.enter_context(own_loop())
        self._blocking = Blocking(self, loop)
        self._outer.callback(lambda: self._blocking and self._blocking._wait(self.__aexit__()))
        self._blocking._wait(self.__aenter__())
        return self._blocking

    def __exit__(self, *_: object) -> None:
        self._outer.close()

    def _watch(self) -> None:
        """Look over the shoulder of every handler until the test ends."""
        app, before = self.app, (self.app.consumers, self.app.groups, self.app.settings)
        app.consumers = [self._watched(one) for one in app.consumers]
        app.groups = [_Quick(**{one.name: getattr(group, one.name) for one in fields(group)}) for group in app.groups]
        app._middleware.insert(0, self._note)

        def restore() -> None:
            app.consumers, app.groups, app.settings = before
            app._middleware.remove(self._note)

        self._stack.callback(restore)

    def _watched(self, one: OnConsumer) -> OnConsumer:
        quick = replace(one, options=replace(one.options, backoff=(SOON,), within=min(one.options.within, 0.05)))
        if not one.options.batch:
            return quick

        async def call(batch: list[Message]) -> Any:
            return await self._noted(batch, one.call(batch))

        return replace(quick, call=call)

    async def _note(self, message: Message, call_next: Callable[[Message], Awaitable[Any]]) -> Any:
        return await self._noted([message], call_next(message))

    async def _noted(self, batch: Sequence[Message], running: Awaitable[Any]) -> Any:
        try:
            answer = await running
        except Exception as exc:
            self.failed += [(message, exc) for message in batch]
            raise
        self.handled += batch
        return answer

    async def _start_in_memory(self, platform: Platform | None) -> None:
        self._memory = MemoryBroker(self.app, platform)
        await self.app._start_up()
        self._stack.push_async_callback(self.app._shut_down)

    async def _start(self, settings: Settings, platform: Platform | None) -> None:
        self.app.settings = settings
        if platform:
            await _apply(settings, platform)
        self._client = await self._stack.enter_async_context(connect(settings))
        stop, started = asyncio.Event(), asyncio.Event()

        def began(running: list[Running]) -> None:
            self._running += running
            started.set()

        self._serving = serving = asyncio.create_task(self.app.serve(stop, (), began))

        async def ended() -> None:
            stop.set()
            await serving

        self._stack.push_async_callback(ended)
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if serving.done():
            serving.result()

    # -- what a test does ------------------------------------------------------------------------------------------

    async def send(self, subject: str, value: Any, *, headers: Headers | None = None) -> None:
        """Store a message where the platform has a stream for it. `value`: bytes, text, or what becomes JSON."""
        if self._memory:
            self._memory.publish(subject, encode(value), headers)
        elif self._client:
            await self._client.publish(subject, value, headers=headers)

    async def done(self, within: float = WITHIN) -> None:
        """Wait until every message is handled or given up."""
        if self._memory:
            async with asyncio.timeout(within):
                await self._memory.handle_all()
            return
        seen = -1

        async def settled() -> bool:
            nonlocal seen
            if self._serving and self._serving.done():
                self._serving.result()
            before, seen = seen, len(self.handled) + len(self.failed)
            return all([await self._is_done(one) for one in self._running]) and before == seen

        await eventually_async(settled, within, "every message to be handled", self._state)

    async def _is_done(self, one: Running) -> bool:
        if not isinstance(one, GroupMember):
            return await one.done()
        assert self._client  # a group finds new partitions now and then only: count what it has to handle
        info = await self._client.jetstream.stream_info(one.stream, subjects_filter=subjects.REST)
        counts = info.state.subjects.items()
        left = sum(count for subject, count in counts if any(subjects.matches(wide, subject) for wide in one.filters))
        if info.config.get("retention", "limits") == "limits":
            left -= one.counts.handled + one.counts.dead
        return left <= 0

    def _state(self) -> object:
        return {"handled": self.handled, "failed": self.failed, "counts": [one.counts for one in self._running]}

    async def stored(self, stream: str) -> list[StoredMessage]:
        """What is in a stream, without Penstock's own markers."""
        if self._memory:
            found = list(self._memory.stored(stream))
        else:
            assert self._client
            found = [one async for one in self._client.stream(stream).messages()]
        return [one for one in found if not one.subject.startswith(f"{MARKERS}.")]

    async def letters(self) -> list[DeadLetter]:
        """The dead letters, oldest first: `subject`, `body`, `consumer`, `deliveries`, `failure` …"""
        if self._memory:
            return [letters.read(one).letter for one in self._memory.letters()]
        assert self._client
        streams = await letter_streams(self._client.jetstream)
        found = [one for stream in streams for one in await self.stored(stream.name)]
        return [letters.read(one).letter for one in found]


class _Quick(OnPartitions):
    """A handler in a group that does not wait for others, since nobody else takes part."""

    def resolved(self, platform: Platform | None) -> Resolved:
        found = OnPartitions.resolved(self, platform)
        windows = Windows(cold_start=0.05, planned=0.05, min_interval=0.05)
        return replace(
            found,
            options=replace(found.options, windows=windows, look_every=0.1, look_soon=0.05),
            worker=replace(found.worker, retries=replace(found.worker.retries, backoff=(SOON,))),
            consumer={**found.consumer, "window": 0.02, "min_interval": 0.05},
        )


async def _apply(settings: Settings, platform: Platform) -> None:
    """Make what the platform declares."""
    async with connect_broker(settings) as broker:
        desired = Desired.of(platform)
        plan = planning.plan(desired, await actual.read(broker.jetstream, desired))
        await carrying_out.apply(broker.jetstream, plan)


def _settings(server: EmbeddedServer | Settings | str | None) -> Settings | None:
    if isinstance(server, str):
        return Settings.load(servers=[server])
    return server.settings if isinstance(server, EmbeddedServer) else server
