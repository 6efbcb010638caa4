"""Handlers on declared consumers: a real server, the platform's own durables."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.support.commands import here

import penstock
from penstock.app import Message
from penstock.app.once import KEPT, Once, ResultOrigin
from penstock.errors import ConfigError
from penstock.jetstream import JetStream
from penstock.publish import Publisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async, stream_messages

PLATFORM = """
environments: {dev: {servers: ["%s"]}}
streams:
  IN: {subjects: [in.>], retention: %s, allow_atomic: true, max_age: 1d}
  OUT: {subjects: [out.>, penstock.done.OUT.>], allow_atomic: true, duplicate_window: 100ms, max_age: 1d}
  DLQ: {subjects: [dlq.>], max_age: 1d}
consumers:
  charge: {stream: IN, filter: in.use, service: billing, ack_wait: 2s, max_deliver: 3, deliver: all, dlq: dlq.in.use,
           backoff: [2s, 2s], purpose: charges}
  other: {stream: IN, filter: in.other, service: audit, ack_wait: 30s, max_deliver: 5, deliver: all, dlq: dlq.in.other,
          purpose: audits}
"""


class Usage(BaseModel):
    id: int


class Service:
    """A platform on a server, and an app on it."""

    def __init__(self, server: EmbeddedServer, file: Path) -> None:
        self.server = server
        self.app = penstock.App(file)

    @asynccontextmanager
    async def running(self, app: penstock.App | None = None, services: tuple[str, ...] = ()) -> AsyncIterator[None]:
        stop = asyncio.Event()
        serving = asyncio.create_task((app or self.app).serve(stop, services))
        try:
            yield
            if serving.done():
                serving.result()
        finally:
            stop.set()
            await serving

    async def publish(self, first: int, last: int, subject: str = "in.use") -> None:
        await self.send([b'{"id": %d}' % number for number in range(first, last + 1)], subject)

    async def send(self, bodies: list[bytes], subject: str = "in.use") -> None:
        async with await Publisher.connect(self.server.settings) as publisher:
            for start in range(0, len(bodies), 1000):
                await publisher.publish_batch("IN", subject, bodies[start : start + 1000])

    async def ask(self, call: Callable[[JetStream], Awaitable[Any]]) -> Any:
        async with await Publisher.connect(self.server.settings) as publisher:
            return await call(publisher.jetstream)

    async def until_done(self, name: str = "charge", within: float = 30.0) -> None:
        async def done() -> bool:
            return bool((await self.ask(lambda js: js.consumer_info("IN", name))).unprocessed == 0)

        await eventually_async(done, within, f"{name} to have handled everything")

    def stored(self, stream: str, subject: str = "") -> list[bytes]:
        return [one.data for one in stream_messages(self.server.settings, stream) if one.subject.startswith(subject)]


@pytest.fixture(params=["limits"])
def service(nats_server: EmbeddedServer, tmp_path: Path, request: pytest.FixtureRequest) -> Service:
    file = tmp_path / "penstock.yaml"
    file.write_text(PLATFORM % (nats_server.url, request.param))
    applied = here("apply", file)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    return Service(nats_server, file)


async def test_a_handler_works_on_a_declared_consumer_until_its_floor_is_at_the_end(service: Service) -> None:
    seen: list[int] = []

    @service.app.consumer("charge")
    async def charge(usage: Usage, message: Message) -> None:
        seen.append(usage.id)
        assert (message.stream, message.consumer, message.subject) == ("IN", "charge", "in.use")

    await service.publish(1, 5_000)
    async with service.running():
        await service.until_done()
    assert sorted(seen) == list(range(1, 5_001))
    info = await service.ask(lambda js: js.consumer_info("IN", "charge"))
    assert (info.ack_floor_stream_seq, info.unprocessed) == (5_000, 0)


async def test_an_app_that_starts_before_its_server_waits_for_it(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    @service.app.consumer("charge")
    async def charge(usage: Usage) -> None: ...

    await service.publish(1, 5)
    service.server.kill()
    async with service.running():
        await eventually_async(lambda: "trying for" in caplog.text, 10, "the app to say that it waits")
        await asyncio.to_thread(service.server.start)
        await service.until_done()


async def test_instances_share_the_messages_of_a_consumer(service: Service) -> None:
    seen: list[Counter[int]] = []

    def instance() -> penstock.App:
        app, mine = penstock.App(service.app.file), Counter[int]()
        seen.append(mine)

        @app.consumer("charge", concurrency=4)
        async def charge(usage: Usage) -> None:
            mine[usage.id] += 1
            await asyncio.sleep(0.002)

        return app

    await service.publish(1, 400)
    async with service.running(instance()), service.running(instance()):
        await service.until_done()
    assert seen[0] + seen[1] == Counter(range(1, 401))
    assert all(len(mine) > 50 for mine in seen)


async def test_failures_are_tried_again_as_the_consumer_says_and_then_become_letters(service: Service) -> None:
    tries: Counter[int] = Counter()

    @service.app.consumer("charge")
    async def charge(usage: Usage, message: Message) -> None:
        tries[usage.id] += 1
        assert message.delivery_count == tries[usage.id]
        if usage.id == 2 or (usage.id == 3 and tries[3] < 3):
            raise RuntimeError("no")
        if usage.id == 4:
            raise penstock.Reject("never")

    await service.publish(1, 5)
    await service.send([b"no json"])
    async with service.running():
        await service.until_done()
    assert tries == {1: 1, 2: 3, 3: 3, 4: 1, 5: 1}
    letters = {one.data: one for one in stream_messages(service.server.settings, "DLQ")}
    assert set(letters) == {b'{"id": 2}', b'{"id": 4}', b"no json"}
    shown = await asyncio.to_thread(here, "--servers", service.server.url, "dlq", "ls")
    assert "charge" in shown.stdout


async def test_a_further_try_comes_when_the_handler_says_whatever_backoff_the_consumer_has(service: Service) -> None:
    """The server adds to the delay of a nak what its own backoff grows by: an hour here."""
    await service.ask(
        lambda js: js.create_consumer(
            "IN", {"durable_name": "slow", "name": "slow", "ack_policy": "explicit", "filter_subject": "in.slow",
                   "max_deliver": 9, "backoff": [1_000_000_000, 3_600_000_000_000]}
        )
    )  # fmt: skip
    counts: list[int] = []

    @service.app.consumer("slow", stream="IN")
    async def fails(message: Message) -> None:
        counts.append(message.delivery_count)
        if message.delivery_count < 5:
            raise penstock.RetryLater("soon", 0.02)

    await service.publish(1, 1, "in.slow")
    async with service.running():
        await service.until_done("slow")
    assert counts == [1, 2, 3, 4, 5]


async def test_a_handler_may_take_longer_than_ack_wait_and_a_stop_lets_it_finish(service: Service) -> None:
    began, ended = asyncio.Event(), []

    @service.app.consumer("charge")
    async def charge(usage: Usage) -> None:
        began.set()
        await asyncio.sleep(4.5)
        ended.append(usage.id)

    await service.publish(1, 1)
    async with service.running():
        await began.wait()
    assert ended == [1]
    assert (await service.ask(lambda js: js.consumer_info("IN", "charge"))).unprocessed == 0


async def test_order_by_subject_holds_while_a_message_is_tried_again(service: Service) -> None:
    seen: list[int] = []

    @service.app.consumer("charge", ordered_by="subject")
    async def charge(usage: Usage) -> None:
        seen.append(usage.id)
        if usage.id == 10 and seen.count(10) < 3:
            raise RuntimeError("not yet")

    await service.publish(1, 50)
    async with service.running():
        await service.until_done()
    assert seen == [*range(1, 11), 10, 10, *range(11, 51)]


async def test_batches_are_filled_or_come_in_time(service: Service) -> None:
    sizes: list[int] = []

    @service.app.consumer("charge", batch=100, within="200ms", concurrency=1)
    async def charge(usages: list[Usage]) -> None:
        sizes.append(len(usages))

    await service.publish(1, 250)
    async with service.running():
        await service.until_done()
    assert sum(sizes) == 250
    assert max(sizes) == 100


async def test_one_bad_message_of_a_batch_gives_no_other_up(service: Service) -> None:
    handled: Counter[int] = Counter()

    @service.app.consumer("charge", batch=50, within="50ms")
    async def charge(usages: list[Usage]) -> None:
        if any(usage.id == 7 for usage in usages):
            raise penstock.Reject("never 7")
        handled.update(usage.id for usage in usages)

    await service.send([b'{"id": %d}' % number if number != 3 else b"no json" for number in range(1, 21)])
    async with service.running():
        await service.until_done()
    assert handled == Counter(set(range(1, 21)) - {3, 7})
    assert sorted(service.stored("DLQ")) == [b"no json", b'{"id": 7}']


async def test_tries_are_counted_for_the_handler_where_the_server_does_not_count_them(service: Service) -> None:
    seen: dict[str, list[int]] = {"consumer": [], "group": []}

    @service.app.consumer("charge", ordered_by="subject")
    async def charge(message: Message) -> None:
        seen["consumer"].append(message.delivery_count)
        if message.delivery_count < 3:
            raise penstock.RetryLater("again", 0.01)

    @service.app.workers("IN", group="g", partitions=["in.use"], dlq="dlq.g")
    async def handle(message: Message) -> None:
        seen["group"].append(message.delivery_count)
        if message.delivery_count < 3:
            raise penstock.RetryLater("again", 0.01)

    await service.publish(1, 1)
    async with service.running():

        async def all_seen() -> bool:
            return all(counts == [1, 2, 3] for counts in seen.values())

        await eventually_async(all_seen, 30, "three tries of each", lambda: seen)


async def test_whatever_a_handler_raises_concerns_its_message_only(service: Service) -> None:
    tries: Counter[int] = Counter()

    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError("not even this")

    @service.app.consumer("charge")
    async def charge(usage: Usage, message: Message) -> None:
        tries[usage.id] += 1
        if message.delivery_count == 1 and usage.id == 1:
            sleeping = asyncio.create_task(asyncio.sleep(60))
            sleeping.cancel()
            await sleeping
        if message.delivery_count == 1 and usage.id == 2:
            sys.exit(3)
        if usage.id == 3:
            raise penstock.RetryLater("never", float("inf"))
        if usage.id == 4:
            raise Silent
        if usage.id == 6:
            raise BaseException("what libraries of tests raise")

    for consumer in service.app.consumers:
        object.__setattr__(consumer.options, "backoff", (0.01,))
    await service.publish(1, 6)
    async with service.running():
        await service.until_done()
    assert tries == {1: 2, 2: 2, 3: 3, 4: 3, 5: 1, 6: 3}
    assert sorted(service.stored("DLQ")) == [b'{"id": 3}', b'{"id": 4}', b'{"id": 6}']


async def test_a_message_whose_key_cannot_be_found_is_a_dead_letter_and_the_others_go_on(service: Service) -> None:
    seen: list[int] = []

    @service.app.consumer("charge", ordered_by=lambda message: message.json()["id"])
    async def charge(usage: Usage) -> None:
        seen.append(usage.id)

    await service.send([b'{"id": 1}', b"no json", b'{"id": []}', b'{"id": 2}'])
    async with service.running():
        await service.until_done()
    assert seen == [1, 2]
    reasons = [one.header_values()["Penstock-Dlq-Reason"][0] for one in stream_messages(service.server.settings, "DLQ")]
    assert sorted(reason.partition(": ")[2][:27] for reason in reasons) == [
        "ordered_by raised JSONDecod",
        "ordered_by raised TypeError",
    ]


async def test_nothing_is_handled_any_more_once_an_app_has_stopped(service: Service) -> None:
    tried, calls = asyncio.Event(), []

    @service.app.consumer("other", ordered_by="subject")
    async def fails(message: Message) -> None:
        calls.append(message.sequence)
        tried.set()
        raise penstock.RetryLater("soon", 0.2)

    await service.publish(1, 1, "in.other")
    async with service.running():
        await tried.wait()
    before = len(calls)
    await asyncio.sleep(0.5)  # nothing tells of what does not happen
    assert len(calls) == before


@pytest.mark.kills  # on a busy machine the server was seen to deliver to the removed inbox for longer
async def test_an_instance_that_stops_handles_what_had_been_sent_to_it(service: Service) -> None:
    """With a single delivery there is no other chance: the server would give up what the instance passed over."""

    await service.ask(lambda js: js.update_consumer("IN", "other", {"max_deliver": 1}))
    seen: Counter[int] = Counter()
    rounds: list[tuple[int, asyncio.Event]] = []

    @service.app.consumer("other")
    async def count(usage: Usage) -> None:
        seen[usage.id] += 1
        enough, stop = rounds[-1]
        if len(seen) >= enough:
            stop.set()

    await service.publish(1, 8_000, "in.other")
    while len(seen) < 4_000:
        rounds.append((len(seen) + 200, asyncio.Event()))
        await asyncio.wait_for(service.app.serve(rounds[-1][1]), 30)
    rounds.append((9_000, asyncio.Event()))
    async with service.running():
        await service.until_done("other")
    assert len(rounds) > 2
    assert len(seen) == seen.total() == 8_000


async def test_what_waits_for_its_next_try_goes_to_others_when_an_instance_stops(service: Service) -> None:
    """Without waiting for its ack_wait, which is 30 s."""
    tried, handled = asyncio.Event(), asyncio.Event()

    @service.app.consumer("other", ordered_by="subject")
    async def fails(message: Message) -> None:
        tried.set()
        raise penstock.RetryLater("much later", 3600)

    again = penstock.App(service.app.file)

    @again.consumer("other")
    async def works(message: Message) -> None:
        handled.set()

    await service.publish(1, 1, "in.other")
    async with service.running():
        await tried.wait()
    async with service.running(again), asyncio.timeout(15):
        await handled.wait()


async def test_hooks_and_middleware_are_around_the_handlers(service: Service) -> None:
    told: list[object] = []

    @service.app.on_startup
    async def up() -> None:
        service.app.state.name = "up"

    @service.app.on_shutdown
    def down() -> None:
        told.append("down")

    @service.app.middleware
    async def outer(message: Message, call_next: Callable[[Message], Awaitable[Any]]) -> Any:
        told.append(("outer", message.sequence))
        return await call_next(message)

    @service.app.middleware
    async def inner(message: Message, call_next: Callable[[Message], Awaitable[Any]]) -> Any:
        told.append("inner")
        return await call_next(message)

    @service.app.consumer("charge")
    async def charge(message: Message, state: Any) -> None:
        told.append(state.name)

    await service.publish(1, 1)
    async with service.running():
        await service.until_done()
    assert told == [("outer", 1), "inner", "up", "down"]


async def test_only_the_handlers_of_a_service_run(service: Service) -> None:
    seen: list[str] = []

    @service.app.consumer("charge")
    async def charge(message: Message) -> None:
        seen.append("charge")

    @service.app.consumer("other")
    async def other(message: Message) -> None:
        seen.append("other")

    await service.publish(1, 1)
    await service.publish(1, 1, "in.other")
    async with service.running(services=("audit",)):
        await service.until_done("other")
    assert seen == ["other"]


async def test_a_group_handles_partitions_in_order_and_stores_results_once(service: Service) -> None:
    """Two members; each message fails once after its results are stored."""
    seen: dict[str, list[int]] = {}
    tries: Counter[int] = Counter()

    @service.app.workers("IN", group="g", partitions="in.{part}", dlq="dlq.g")
    async def handle(usage: Usage, message: Message) -> None:
        tries[message.sequence] += 1
        assert message.token > 0
        async with message.atomic("OUT") as batch:
            batch.add(f"out.{message.partition}", usage)
        if tries[message.sequence] == 1 and usage.id % 10 == 0:
            raise penstock.RetryLater("once more", 0.01)
        seen.setdefault(message.partition, []).append(usage.id)

    for part in ("a", "b", "c"):
        await service.publish(1, 50, f"in.{part}")
    async with service.running(), service.running():

        async def all_seen() -> bool:
            return sum(map(len, seen.values())) >= 150

        await eventually_async(all_seen, 60, "everything to be handled", lambda: seen)
    assert seen == {part: list(range(1, 51)) for part in ("a", "b", "c")}
    for part in ("a", "b", "c"):
        assert sorted(service.stored("OUT", f"out.{part}")) == sorted(b'{"id":%d}' % n for n in range(1, 51))


async def test_mistakes_are_told_before_anything_runs(service: Service) -> None:
    stop = asyncio.Event()
    with pytest.raises(ConfigError, match="no handlers"):
        await service.app.serve(stop)
    app = penstock.App(service.app.file)

    @app.consumer("nosuch")
    async def handle(message: Message) -> None: ...

    with pytest.raises(ConfigError, match="declares no consumer 'nosuch'"):
        await app.serve(stop)
    for options, said in (
        ({"batch": 2, "ordered_by": "subject"}, "do not go together"),
        ({"ordered_by": 3}, "a function of the message, not 3"),
        ({"timeout": 0}, "timeout must be more than 0"),
        ({"within": "1s"}, "say with batch="),
        ({"keep": "1h"}, "give once=True"),
        ({"once": True, "keep": 0}, "keep must be more than 0"),
        ({"dlq": "dlq.a b"}, "no subject to store dead letters on"),
        ({"dlq": "dlq.*"}, "no subject to store dead letters on"),
        ({"dlq": ""}, "no subject to store dead letters on"),
    ):
        with pytest.raises(ConfigError, match=said):
            app.consumer("charge", **options)


@pytest.mark.parametrize("service", ["limits", "workqueue", "interest"], indirect=True)
async def test_results_are_stored_once_although_messages_come_again(service: Service) -> None:
    """Each message fails once after its results are stored, and its results do not depend on the try."""
    tries: Counter[int] = Counter()
    repeated: list[int] = []

    @service.app.consumer("charge")
    async def charge(usage: Usage, message: Message) -> None:
        tries[usage.id] += 1
        async with message.atomic("OUT") as batch:
            batch.add("out.charged", usage)
            batch.add("out.booked", {"booked": usage.id})
        if batch.repeated:
            repeated.append(usage.id)
        if tries[usage.id] == 1:
            raise RuntimeError("after the results are stored")

    await service.publish(1, 30)
    async with service.running():
        await service.until_done()
    assert sorted(repeated) == list(range(1, 31))
    assert sorted(service.stored("OUT", "out.charged")) == sorted(b'{"id":%d}' % n for n in range(1, 31))
    assert sorted(service.stored("OUT", "out.booked")) == sorted(b'{"booked":%d}' % n for n in range(1, 31))


async def test_batches_that_are_stored_together_do_not_spoil_each_other(service: Service) -> None:
    """Some were stored before, one has a subject that the stream does not take, one comes twice at the same time."""
    async with await Publisher.connect(service.server.settings) as publisher:
        once, origin = Once(publisher, lambda _: 0.0), ResultOrigin("IN", "0", "charge")

        async def store(sequence: int, subject: str = "out.x") -> bool:
            async with once.batch("OUT", origin.of(sequence, 1)) as batch:
                batch.add(subject, sequence)
            return batch.repeated

        assert await asyncio.gather(*(store(n) for n in range(1, 6))) == [False] * 5
        wrong = [store(30, "nobody.takes"), store(31, "not a subject")]
        calls = [*(store(n) for n in range(1, 21)), *wrong, store(20)]
        *found, twin, refused, malformed, twice = await asyncio.gather(*calls, return_exceptions=True)
        assert found == [True] * 5 + [False] * 14
        assert isinstance(refused, penstock.PenstockError)
        assert "nobody.takes" in str(refused)
        assert isinstance(malformed, penstock.PenstockError)
        assert {twin, twice} == {True, False}
    assert sorted(map(int, service.stored("OUT", "out.x"))) == list(range(1, 21))


async def test_markers_go_when_the_floor_has_passed_them_a_while_ago(service: Service) -> None:
    @service.app.consumer("charge")
    async def charge(usage: Usage, message: Message) -> None:
        async with message.atomic("OUT") as batch:
            batch.add("out.charged", usage)

    await service.publish(1, 1_200)
    async with service.running():
        await service.until_done()
    markers = "penstock.done.OUT"
    assert len(service.stored("OUT", markers)) == 1_200
    async with await Publisher.connect(service.server.settings) as publisher:
        once = Once(publisher, lambda _: 0.0)
        created = (await publisher.jetstream.stream_info("IN")).created
        async with once.batch("OUT", ResultOrigin.named("IN", created, "charge").of(5, 1)) as batch:
            batch.add("out.charged", b"again")
        assert batch.repeated
        await once.tidy(now=1.0)
        await once.tidy(now=KEPT)
        assert len(service.stored("OUT", markers)) == 1_200
        await once.tidy(now=KEPT + 1.0)
    assert (
        len(service.stored("OUT", markers)) == 201
    )  # of 1,000 to 1,200: not all that are possible there are acknowledged
    assert b"again" not in service.stored("OUT", "out.charged")


async def test_what_a_stream_of_results_lacks_is_told(service: Service) -> None:
    async with await Publisher.connect(service.server.settings) as publisher:
        once = Once(publisher, lambda _: 0.0)
        for target, reason in [("NOSUCH", "no stream"), ("DLQ", "takes no atomic"), ("IN", "no place for markers")]:
            with pytest.raises(ConfigError, match=reason):
                async with once.batch(target, ResultOrigin("IN", "0", "charge", 1)) as batch:
                    batch.add("out.x", b"")


async def test_an_event_that_was_finished_is_not_started_again(service: Service) -> None:
    started: Counter[str] = Counter()

    @service.app.consumer("charge", once=True)
    async def charge(event: dict[str, Any]) -> None:
        started[event["event_id"]] += 1

    await service.send([b'{"event_id": "%d"}' % (number % 10) for number in range(40)])
    async with service.running():
        await service.until_done()
        await service.send([b'{"event_id": "%d"}' % (number % 10) for number in range(20)])
        await service.until_done()
    again = [count for count in started.values() if count > 1]
    assert set(started) == {str(number) for number in range(10)}
    assert not again or max(again) <= 4  # equal ids that are handled at the same moment have none of them finished
