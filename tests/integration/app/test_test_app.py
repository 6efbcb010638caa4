"""`TestApp`: each of these tests runs without a broker and with a real one, and sees the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.server.embedded import EmbeddedServer
from penstock.testing import TestApp

PLATFORM = """
streams:
  IN: {subjects: [in.>], max_age: 1d}
  OUT: {subjects: [out.>, penstock.done.OUT.>], allow_atomic: true, max_age: 1d}
  PLAIN: {subjects: [plain.>], max_age: 1d}
  DLQ: {subjects: [dlq.>], max_age: 1d}
consumers:
  charge: {stream: IN, filter: in.use, max_deliver: 3, backoff: [1m, 1h], dlq: dlq.in.use}
  audit: {stream: OUT, filter: out.charged}
groups:
  tele: {stream: IN, partitions: "in.tele.{device}", dlq: dlq.in.tele, backoff: [1h]}
"""


@dataclass
class Usage:
    id: int


Run = Callable[[penstock.App], TestApp]


@pytest.fixture(params=["memory", "server"])
def run(request: pytest.FixtureRequest) -> Run:
    server: EmbeddedServer | None = request.getfixturevalue("nats_server") if request.param == "server" else None
    return lambda app: TestApp(app, server)


@pytest.fixture
def app(tmp_path: Path) -> penstock.App:
    file = tmp_path / "penstock.yaml"
    file.write_text(PLATFORM)
    return penstock.App(file)


async def test_messages_in_and_results_out_through_two_handlers(app: penstock.App, run: Run) -> None:
    seen: list[Any] = []

    @app.consumer("charge")
    async def charge(usage: Usage, message: penstock.Message) -> None:
        assert (message.stream, message.consumer, message.subject) == ("IN", "charge", "in.use")
        assert message.headers == {"Trace": [f"t{usage.id}"]}
        async with message.atomic("OUT") as batch:
            batch.add("out.charged", {"cents": usage.id * 2})

    @app.consumer("audit")
    def audit(event: dict[str, Any]) -> None:
        seen.append(event)

    async with run(app) as test:
        for number in (1, 2, 3):
            await test.send("in.use", Usage(number), headers={"Trace": f"t{number}"})
        await test.send("in.other", b"nobody reads this")
        await test.done()
        assert sorted(one.data for one in await test.stored("OUT")) == [b'{"cents":%d}' % n for n in (2, 4, 6)]
        assert Counter(one.consumer for one in test.handled) == {"charge": 3, "audit": 3}
        assert sorted(seen, key=str) == [{"cents": 2}, {"cents": 4}, {"cents": 6}]
        assert await test.letters() == []
    assert app.settings is None  # as it was


async def test_verdicts_tries_and_letters(app: penstock.App, run: Run) -> None:
    tries: Counter[int] = Counter()

    @app.consumer("charge")
    async def charge(usage: Usage, message: penstock.Message) -> None:
        tries[usage.id] += 1
        assert message.delivery_count == tries[usage.id]
        if usage.id == 1:
            raise penstock.Reject("never")
        if usage.id == 2 or tries[usage.id] == 1:
            raise RuntimeError(f"no {usage.id}")

    async with run(app) as test:
        for number in (1, 2, 3):
            await test.send("in.use", {"id": number})
        await test.send("in.use", b"no json")
        await test.done()
        found = {one.body: one for one in await test.letters()}
        assert set(found) == {b'{"id":1}', b'{"id":2}', b"no json"}
        assert found[b'{"id":1}'].failure.message == "rejected by the handler: never"
        assert found[b'{"id":2}'].failure.message == "gave up after 3 tries: RuntimeError: no 2"
        assert (found[b'{"id":2}'].failure.type, found[b'{"id":2}'].deliveries) == ("RuntimeError", 3)
        assert "Usage" in found[b"no json"].failure.message
        assert {(one.consumer, one.stream, one.subject) for one in found.values()} == {("charge", "IN", "in.use")}
        assert [one.json() for one in test.handled] == [{"id": 3}]
        assert Counter(str(error) for _, error in test.failed)["no 2"] == 3
    assert tries == {1: 1, 2: 3, 3: 2}


async def test_results_are_stored_once_although_the_handler_fails_after_it(app: penstock.App, run: Run) -> None:
    repeated: list[bool] = []

    @app.consumer("charge")
    async def charge(usage: Usage, message: penstock.Message) -> None:
        async with message.atomic("OUT") as batch:
            batch.add("out.x", usage)
        repeated.append(batch.repeated)
        if message.delivery_count == 1:
            raise RuntimeError("after it was stored")

    async with run(app) as test:
        await test.send("in.use", {"id": 1})
        await test.done()
        assert [one.data for one in await test.stored("OUT")] == [b'{"id":1}']
    assert repeated == [False, True]


async def test_what_a_stream_of_results_lacks_is_told(app: penstock.App, run: Run) -> None:
    @app.consumer("charge")
    async def charge(usage: Usage, message: penstock.Message) -> None:
        async with message.atomic({1: "PLAIN", 2: "NOSUCH"}[usage.id]) as batch:
            batch.add("plain.x", usage)

    async with run(app) as test:
        for number in (1, 2):
            await test.send("in.use", {"id": number})
        await test.done()
        reasons = {one.body: one.failure.message for one in await test.letters()}
        assert "takes no atomic batches" in reasons[b'{"id":1}']
        assert "no stream 'NOSUCH'" in reasons[b'{"id":2}']
        assert {type(error) for _, error in test.failed} == {ConfigError}


def failing_once(app: penstock.App, **options: Any) -> list[int]:
    """A handler that fails the first time; what it is called with."""
    calls: list[int] = []

    @app.consumer("charge", **options)
    async def charge(event: dict[str, Any], message: penstock.Message) -> None:
        calls.append(event["id"])
        if message.delivery_count == 1:
            raise penstock.RetryLater("again")

    return calls


async def test_nothing_overtakes_a_message_where_order_is_asked_for(app: penstock.App, run: Run) -> None:
    calls = failing_once(app, ordered_by="subject")
    async with run(app) as test:
        for number in (1, 2, 3):
            await test.send("in.use", {"id": number})
        await test.done()
    assert calls == [1, 1, 2, 2, 3, 3]


async def test_an_event_that_was_handled_is_passed_over(app: penstock.App, run: Run) -> None:
    calls = failing_once(app, once=True)
    async with run(app) as test:
        for _ in range(3):
            await test.send("in.use", {"id": 5, "event_id": "same"})
            await test.done()
    assert calls == [5, 5]


async def test_a_batch_handler_gets_lists_and_one_bad_message_gives_no_other_up(app: penstock.App, run: Run) -> None:
    @app.consumer("charge", batch=10, within="1h")
    async def charge(usages: list[Usage]) -> None:
        if any(usage.id == 2 for usage in usages):
            raise penstock.Reject("no twos")

    async with run(app) as test:
        for number in range(1, 5):
            await test.send("in.use", {"id": number})
        await test.done()
        assert sorted(one.json()["id"] for one in test.handled) == [1, 3, 4]
        assert [one.body for one in await test.letters()] == [b'{"id":2}']


async def test_a_group_handles_each_partition_in_order(app: penstock.App, run: Run) -> None:
    seen: dict[str, list[int]] = {}

    @app.workers("IN", group="tele")
    async def read(usage: Usage, message: penstock.Message) -> None:
        assert message.token > 0
        if usage.id == 2 and message.delivery_count < 3:
            raise RuntimeError("again")
        if usage.id == 4:
            raise penstock.Reject("never")
        seen.setdefault(message.partition, []).append(usage.id)

    async with run(app) as test:
        for number in range(1, 6):
            for device in ("a", "b"):
                await test.send(f"in.tele.{device}", {"id": number})
        await test.send("in.use", {"id": 9})
        await test.done()
        assert sorted(one.subject for one in await test.letters()) == ["in.tele.a", "in.tele.b"]
    assert seen == {"a": [1, 2, 3, 5], "b": [1, 2, 3, 5]}


async def test_hooks_middleware_and_mistakes(app: penstock.App, run: Run) -> None:
    told: list[str] = []
    app.on_startup(lambda: told.append("up"))
    app.on_shutdown(lambda: told.append("down"))

    @app.middleware
    async def named(message: penstock.Message, call_next: Callable[[penstock.Message], Awaitable[Any]]) -> Any:
        told.append("around")
        return await call_next(message)

    @app.consumer("charge")
    async def charge(message: penstock.Message) -> None:
        told.append("handled")

    async with run(app) as test:
        await test.send("in.use", "x")
        await test.done()
        with pytest.raises(PenstockError):
            await test.send("nobody.takes", "x")
    assert told == ["up", "around", "handled", "down"]

    app.consumer("nosuch")(charge)
    with pytest.raises(PenstockError, match="declares no consumer 'nosuch'"):
        async with run(app):
            pass


def test_a_test_without_asyncio_waits(app: penstock.App, run: Run) -> None:
    @app.consumer("charge")
    def charge(usage: Usage) -> None:
        if usage.id == 2:
            raise penstock.Reject("no twos")

    with run(app) as test:
        test.send("in.use", {"id": 1})
        test.send("in.use", {"id": 2})
        test.done()
        assert [one.json() for one in test.handled] == [{"id": 1}]
        assert [one.body for one in test.letters()] == [b'{"id":2}']


async def test_without_a_platform_file_a_consumer_reads_everything() -> None:
    app = penstock.App()

    @app.consumer("anything")
    async def handle(event: dict[str, int], message: penstock.Message) -> None:
        async with message.atomic("RESULTS") as batch:
            batch.add("results.doubled", event["n"] * 2)

    async with TestApp(app) as test:
        await test.send("whatever", {"n": 4})
        await test.done()
        assert [one.data for one in await test.stored("RESULTS")] == [b"8"]
