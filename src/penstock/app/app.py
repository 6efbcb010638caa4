"""`App`: handlers of a service, on the consumers that the platform declares and in groups of partitioned workers.

app = penstock.App("penstock.yaml")

@app.consumer("billing_worker_usage_metered")
async def charge(usage: Usage, message: penstock.Message) -> None: ...

app.run()
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from penstock.app import arguments
from penstock.app.groups import GroupMember, OnPartitions, Resolved
from penstock.app.handled import Handled
from penstock.app.message import Message
from penstock.app.once import Once, ResultOrigin
from penstock.consume import messages
from penstock.consume.durable import Durable, DurableOptions
from penstock.consume.handlers import is_async, place_of
from penstock.consume.messages import MessageContext
from penstock.consume.verdicts import described
from penstock.errors import ConfigError, PenstockError, StreamNotFound, Unavailable
from penstock.jetstream.api import JetStream
from penstock.publish.atomic import Publisher
from penstock.retry import retrying
from penstock.settings import Settings
from penstock.topology.load import load
from penstock.topology.model import ConsumerSpec, Platform
from penstock.units import parse_duration
from penstock.workers.dispatch.dispatcher import CONCURRENCY

log = logging.getLogger(__name__)

Hook = Callable[[], Any]
Next = Callable[[Message], Awaitable[Any]]
Middleware = Callable[[Message, Next], Awaitable[Any]]
F = TypeVar("F", bound=Callable[..., Any])
SIGNALS = (signal.SIGINT, signal.SIGTERM)
START_WITHIN = 15.0
"""Seconds in which the server must have answered for the first time."""
WITHIN = 1.0
"""Default seconds in which a batch is collected."""
KEEP = 24 * 3600.0
"""Default seconds that the id of a handled event is kept."""


@dataclass(frozen=True, slots=True)
class OnConsumer:
    """A handler on a durable consumer."""

    name: str
    stream: str | None
    handler: Callable[..., Any]
    call: arguments.Call
    options: DurableOptions
    once: bool = False
    keep: float = 0.0
    """With `once`: seconds that the id of a handled event is kept."""


Running = Durable | GroupMember


class HookFailed(PenstockError):
    """A startup or shutdown hook raised; its error is the cause of this one."""


@dataclass(slots=True)
class App:
    """The handlers of a service, and what they share.

    `file` is a platform file, `env` its environment; without a file the server of `settings`, or of the environment
    variables, is taken as it is.
    """

    file: str | Path | None = None
    env: str | None = None
    settings: Settings | None = None
    state: SimpleNamespace = field(default_factory=SimpleNamespace)
    """Shared state of the handlers, such as a pool of database connections."""
    consumers: list[OnConsumer] = field(default_factory=list)
    groups: list[OnPartitions] = field(default_factory=list)
    _startup: list[Hook] = field(default_factory=list)
    _shutdown: list[Hook] = field(default_factory=list)
    _middleware: list[Middleware] = field(default_factory=list)

    # -- declaring -------------------------------------------------------------------------------------------------

    def consumer(
        self,
        name: str,
        *,
        stream: str | None = None,
        concurrency: int = 16,
        ordered_by: Callable[[messages.Message], Hashable] | str | None = None,
        batch: int = 0,
        within: float | str | None = None,
        dlq: str | None = None,
        timeout: float | str | None = None,
        stop_within: float | str = 60.0,
        once: bool = False,
        keep: float | str | None = None,
    ) -> Callable[[F], F]:
        """The decorated function handles the messages of a declared or existing durable consumer.

        The consumer's own ack_wait, max_deliver and backoff apply, and the `dlq` that the platform file names for it.
        Instances compete for its messages. `ordered_by="subject"`, or a function of the message: this instance handles
        messages with one key in order. `batch`: it handles lists of up to this many, collected for `within` (a second).
        `once`: skips events whose handler has finished before, by their id, for as long as `keep` says (a day).
        """
        options = DurableOptions(
            concurrency=concurrency,
            ordered_by=_key(ordered_by),
            batch=batch,
            within=WITHIN if within is None else _seconds(within),
            dlq=dlq,
            timeout=None if timeout is None else _seconds(timeout),
            stop_within=_seconds(stop_within),
        )
        if once and batch:
            raise ConfigError("once is for single messages; in batches use message.atomic")
        if within is not None and not batch:
            raise ConfigError("within is the time in which a batch is collected: say with batch= how large it may be")
        if keep is not None and not once:
            raise ConfigError("keep says how long ids of handled events are kept: give once=True too")
        kept = KEEP if keep is None else _seconds(keep)
        if kept <= 0:
            raise ConfigError(f"keep must be more than 0, got {keep}")

        def register(handler: F) -> F:
            if any((one.name, one.stream) == (name, stream) for one in self.consumers):
                raise ConfigError(f"consumer {name!r} has a handler already: two would each get a part of its messages")
            call = arguments.bind(handler, self.state, in_batches=batch > 0, threads=concurrency)
            self.consumers.append(OnConsumer(name, stream, handler, call, options, once, kept))
            return handler

        return register

    def workers(
        self,
        stream: str,
        *,
        group: str,
        partitions: str | Sequence[str] | None = None,
        dlq: str | None = None,
        concurrency: int = CONCURRENCY,
        timeout: float | str | None = None,
        max_deliver: int | None = None,
        instance: str | None = None,
    ) -> Callable[[F], F]:
        """The decorated function handles the partitions of a stream, each in order, shared with every other process of
        the group.

        `partitions`: a pattern such as `tele.{device}`, or a list of subjects; what is not given here is taken from the
        group's declaration in the platform file. `message.partition` and `message.token` say which partition a message
        belongs to, and fence off earlier owners. `instance`: a name that stays over restarts.
        """

        def register(handler: F) -> F:
            one = OnPartitions(
                group,
                stream,
                handler,
                arguments.bind(handler, self.state, threads=concurrency),
                partitions if partitions is None or isinstance(partitions, str) else tuple(partitions),
                dlq,
                max_deliver,
                concurrency,
                None if timeout is None else _seconds(timeout),
                instance,
            )
            if any(other.group == group for other in self.groups):
                raise ConfigError(f"group {group!r} has a handler already: two would each get a part of its partitions")
            if self.file is None:
                one.resolved(None)  # raise errors where the handler is declared
            self.groups.append(one)
            return handler

        return register

    def on_startup(self, hook: F) -> F:
        """Called, and awaited, before the first message."""
        self._startup.append(hook)
        return hook

    def on_shutdown(self, hook: F) -> F:
        """Called, and awaited, after the last message."""
        self._shutdown.append(hook)
        return hook

    def middleware(self, call: F) -> F:
        """`async def m(message, call_next)` around every handler of single messages; the first is the outermost."""
        if not is_async(call):
            raise ConfigError(
                f"middleware {getattr(call, '__qualname__', call)!r} must be an async def: it awaits call_next"
            )
        self._middleware.append(call)
        return call

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, services: Collection[str] = ()) -> None:
        """Handle messages until SIGINT or SIGTERM, then finish running handlers. `services`: only the handlers on
        consumers of these."""

        async def until_signal() -> None:
            with stopped_by_signals() as stop:
                await self.serve(stop, services)

        asyncio.run(until_signal())

    async def serve(
        self,
        stop: asyncio.Event,
        services: Collection[str] = (),
        on_start: Callable[[list[Running]], None] | None = None,
    ) -> None:
        """Handle messages until `stop` is set, then finish running handlers. `on_start` gets what is about to run."""
        async with self.started(services) as running:
            if on_start:
                on_start(running)
            waiting = [asyncio.create_task(one.run(stop), name=one.consumer) for one in running]
            try:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
            finally:
                stop.set()
                await asyncio.gather(*waiting, return_exceptions=True)

    @asynccontextmanager
    async def started(self, services: Collection[str] = ()) -> AsyncIterator[list[Running]]:
        """Yield the consumers and members, ready to run, between the hooks of startup and shutdown."""
        platform = load(self.file, self.env) if self.file else None
        settings = self.settings or _settings(platform)
        async with AsyncExitStack() as stack:
            publisher = await stack.enter_async_context(await _connected(settings))
            chosen = await _chosen(self.consumers, platform, publisher.jetstream, services)
            groups = [one for one in self.groups if not services or _service_of(one, platform) in services]
            members = [(one, one.resolved(platform)) for one in groups]
            if not chosen and not members:
                which = f" on consumers or in groups of {', '.join(services)}" if services else ""
                raise ConfigError(f"the app has no handlers{which}: declare one with @app.consumer or @app.workers")
            running: list[Running] = []
            once = Once(publisher, lambda name: max(one.stood_still for one in running if one.consumer == name))
            await self._start_up()
            stack.push_async_callback(self._shut_down)
            for declared, stream in chosen:
                running.append(await self._durable(settings, declared, stream, publisher, once))
            for one, resolved in members:
                running.append(await self._member(settings, one, resolved, publisher, once))
            tidying = asyncio.create_task(once.keep_tidy())
            stack.callback(tidying.cancel)
            yield running

    async def _start_up(self) -> None:
        for hook in self._startup:
            await _called(hook)

    async def _shut_down(self) -> None:
        for hook in reversed(self._shutdown):
            await _called(hook)

    async def _durable(
        self, settings: Settings, declared: OnConsumer, stream: str, publisher: Publisher, once: Once
    ) -> Durable:
        origin = ResultOrigin.named(stream, await _created(publisher, stream), declared.name)

        def wrapped(delivery: messages.Message) -> Message:
            return Message(delivery, origin, once.batch)

        if declared.options.batch:

            async def handle(unit: Any) -> Any:
                return await declared.call([wrapped(one) for one in unit])
        else:
            call = self._around(declared.call)
            if declared.once:
                call = await Handled.around(publisher, declared.name, declared.keep, call)

            async def handle(unit: Any) -> Any:
                return await call(wrapped(unit))

        return Durable(settings, stream, declared.name, handle, declared.options)

    async def _member(
        self, settings: Settings, declared: OnPartitions, resolved: Resolved, publisher: Publisher, once: Once
    ) -> GroupMember:
        options = resolved.options
        origin = ResultOrigin.named(
            options.stream, await _created(publisher, options.stream), options.group, group=True
        )

        def wrapped(delivery: messages.Message, context: MessageContext) -> Message:
            return Message(delivery, origin, once.batch, context)

        return GroupMember(settings, resolved, self._around(declared.call), wrapped)

    def _around(self, call: Next) -> Next:
        for middleware in reversed(self._middleware):
            call = _Wrapped(middleware, call)
        return call


async def _connected(settings: Settings) -> Publisher:
    """Return a publisher. Waits for a server that does not answer yet, since it is started together with the app."""
    try:
        return await Publisher.connect(settings)
    except Unavailable as exc:
        log.warning("%s; trying for %g s", exc, START_WITHIN)
        return await retrying(lambda: Publisher.connect(settings), START_WITHIN)


@contextmanager
def stopped_by_signals(tell: Callable[[], object] = lambda: None) -> Iterator[asyncio.Event]:
    """Yield an event that SIGINT and SIGTERM set. A second signal has its default effect: it ends the process.

    `tell` is called with the first one.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        tell()  # not before: whoever sends the second signal when told to must not be passed over

    for number in SIGNALS:
        loop.add_signal_handler(number, first)
    try:
        yield stop
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A handler with a middleware around it."""

    middleware: Middleware
    inner: Next

    async def __call__(self, message: Message) -> Any:
        return await self.middleware(message, self.inner)


async def _chosen(
    declared: list[OnConsumer], platform: Platform | None, jetstream: JetStream, services: Collection[str]
) -> list[tuple[OnConsumer, str]]:
    """The handlers to run, each with its stream and what the platform says about its consumer."""
    found: list[tuple[OnConsumer, str]] = []
    for one in declared:
        spec = platform.consumers.get(one.name) if platform else None
        if services and (spec is None or spec.service not in services):
            continue
        stream = one.stream or (spec.stream if spec else None) or await _stream_of(one.name, jetstream, platform)
        found.append((_with_dlq(one, spec), stream))
    return found


async def _created(publisher: Publisher, stream: str) -> datetime | None:
    """Return the creation time of a stream, which distinguishes it from a later one of its name."""
    try:
        return (await publisher.jetstream.stream_info(stream)).created
    except StreamNotFound as exc:
        raise ConfigError(
            f"the server has no stream {stream!r}: run `penstock apply`, or is it another server?"
        ) from exc


def _service_of(declared: OnPartitions, platform: Platform | None) -> str | None:
    spec = platform.groups.get(declared.group) if platform else None
    return spec.service if spec else None


def _with_dlq(declared: OnConsumer, spec: ConsumerSpec | None) -> OnConsumer:
    if declared.options.dlq is not None or spec is None or spec.dlq is None:
        return declared
    return replace(declared, options=replace(declared.options, dlq=spec.dlq))


async def _stream_of(consumer: str, jetstream: JetStream, platform: Platform | None) -> str:
    """The only stream that has a consumer of this name."""
    names = [name for name in await jetstream.stream_names() if consumer in await jetstream.consumer_names(name)]
    if len(names) == 1:
        return names[0]
    if names:
        raise ConfigError(f"several streams have a consumer {consumer!r} ({', '.join(names)}): name one with stream=")
    where = f"{platform.path} declares no consumer {consumer!r}, and the server has none" if platform else (
        f"the server has no consumer {consumer!r}"
    )  # fmt: skip
    raise ConfigError(f"{where}: declare it and run `penstock apply`")


def _settings(platform: Platform | None) -> Settings:
    return Settings.load(declared=platform.environment.settings_overrides() if platform else None)


async def _called(hook: Hook) -> None:
    try:
        answer = hook()
        if inspect.isawaitable(answer):
            await answer
    except PenstockError:
        raise
    except Exception as exc:
        name = getattr(hook, "__qualname__", repr(hook))
        raise HookFailed(f"{name!r} failed: {described(exc)}{place_of(exc)}") from exc


def _seconds(value: float | str) -> float:
    return parse_duration(value).total_seconds() if isinstance(value, str) else float(value)


def _key(ordered_by: Callable[[messages.Message], Hashable] | str | None) -> Callable[..., Hashable] | None:
    if isinstance(ordered_by, str):
        if ordered_by != "subject":
            raise ConfigError(f"ordered_by is 'subject' or a function of the message, not {ordered_by!r}")
        return lambda message: message.subject
    if ordered_by is not None and not callable(ordered_by):
        raise ConfigError(f"ordered_by is 'subject' or a function of the message, not {ordered_by!r}")
    return ordered_by
