"""What handlers are called with."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.app import App
from penstock.app.arguments import bind
from penstock.app.message import Message
from penstock.app.once import ResultOrigin
from penstock.consume import messages
from penstock.consume.verdicts import Reject
from penstock.errors import ConfigError

STATE = SimpleNamespace(db="there")


def message(data: bytes = b'{"id": 1}') -> Message:
    delivery = messages.Message("s.a", data, 7, 1, "", datetime.now(UTC))

    def never(*_: Any) -> Any:
        raise AssertionError

    return Message(delivery, ResultOrigin("S", "0", "c"), never)


async def called(handler: Any, given: Any = None, in_batches: bool = False) -> Any:
    return await bind(handler, STATE, in_batches)(message() if given is None else given)


async def test_arguments_come_by_annotation_and_by_name() -> None:
    async def one(event: dict[str, Any], message: Message, state: SimpleNamespace) -> Any:
        return event, message.sequence, state.db

    async def other(raw: bytes, it: Message) -> Any:
        return raw, it.subject

    async def bare(message, state):  # type: ignore[no-untyped-def]
        return message.sequence, state.db

    def plain(text: str) -> str:
        return text

    assert await called(one) == ({"id": 1}, 7, "there")
    assert await called(other) == (b'{"id": 1}', "s.a")
    assert await called(bare) == (7, "there")
    assert await called(plain) == '{"id": 1}'


async def test_a_handler_of_a_group_works_on_a_consumer_as_it_is() -> None:
    async def typed(message: messages.Message, context: messages.MessageContext) -> Any:
        return type(message), message.sequence, context.partition_id, context.delivery_count

    def bare(message, context):  # type: ignore[no-untyped-def]
        return message.json(), context.subject

    assert await called(typed) == (messages.Message, 7, "s.a", 1)
    assert await called(bare) == ({"id": 1}, "s.a")


async def test_as_many_plain_functions_run_at_a_time_as_there_are_threads_for() -> None:
    together = threading.Barrier(12, timeout=10)

    def waits(message: Message) -> None:
        together.wait()

    call = bind(waits, STATE, threads=12)
    await asyncio.gather(*(call(message()) for _ in range(12)))


def test_what_would_do_nothing_is_refused_where_it_is_declared() -> None:
    async def streams(message: Message) -> Any:
        yield 1

    def generates(message: Message) -> Any:
        yield 1

    def around(message: Message, call_next: Any) -> Any: ...

    async def handles(message: Message) -> None: ...

    for handler in (streams, generates):
        with pytest.raises(ConfigError, match="has a yield in it"):
            bind(handler, STATE)
    app = App()
    with pytest.raises(ConfigError, match="must be an async def"):
        app.middleware(around)
    app.consumer("c")(handles)
    app.consumer("c", stream="OTHER")(handles)
    with pytest.raises(ConfigError, match="'c' has a handler already"):
        app.consumer("c")(handles)
    app.workers("S", group="g", partitions="s.{x}")(handles)
    with pytest.raises(ConfigError, match="'g' has a handler already"):
        app.workers("S", group="g", partitions="s.{x}")(handles)


async def test_batches_come_as_lists() -> None:
    async def many(events: list[dict[str, Any]], messages: list[Message], state: SimpleNamespace) -> Any:
        return events, [one.sequence for one in messages], state.db

    async def bare(messages):  # type: ignore[no-untyped-def]
        return [one.sequence for one in messages]

    assert await called(bare, [message(), message()], in_batches=True) == [7, 7]
    assert await called(many, [message(), message(b"{}")], in_batches=True) == ([{"id": 1}, {}], [7, 7], "there")


async def test_a_payload_that_does_not_parse_is_rejected() -> None:
    async def one(event: dict[str, Any]) -> None: ...

    with pytest.raises(Reject, match="no JSON"):
        await called(one, message(b"{"))


def test_what_cannot_be_given_is_told_when_the_handler_is_declared() -> None:
    async def unknown(event, message: Message): ...  # type: ignore[no-untyped-def]

    async def strange(event: complex) -> None: ...

    async def twice(event: bytes, other: str) -> None: ...

    async def star(*events: bytes) -> None: ...

    async def no_list(event: bytes) -> None: ...

    cases: list[tuple[Any, str, bool]] = [
        (unknown, "annotate it with its type", False),
        (strange, "a message cannot become 'event'", False),
        (twice, "several parameters for the payload", False),
        (star, "not passed by a name", False),
        (no_list, "must be a list", True),
    ]
    for handler, reason, in_batches in cases:
        with pytest.raises(ConfigError, match=reason):
            bind(handler, STATE, in_batches)
