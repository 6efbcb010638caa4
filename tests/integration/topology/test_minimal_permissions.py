"""No component has a grant that it can do without: each is taken away alone, and the component fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.support.commands import here
from tests.support.guarded import Guarded, login, started
from tests.support.pulls import Pull

import penstock
from penstock.deadletter.capture import capture
from penstock.deadletter.letters import FailedDelivery, Failure
from penstock.errors import ConsumerNotFound, PenstockError
from penstock.examples import example_dir
from penstock.facts import Facts
from penstock.jetstream import connect
from penstock.publish.plain import PlainPublisher
from penstock.settings import Settings
from penstock.testing import eventually_async, letter_subject
from penstock.topology.load import load
from penstock.topology.model import ConsumerSpec
from penstock.topology.permissions import user_of
from penstock.wire import aio

EXAMPLE = example_dir() / "penstock.yaml"
PLATFORM = load(EXAMPLE, "dev")
SERVICES = sorted({one.service for one in PLATFORM.consumers.values() if one.service})
SMALL = "provisioning-worker / storage-worker"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    yield from started(tmp_path_factory.mktemp("minimal"), EXAMPLE, lacking=True)


class Failed(Exception):
    """The component could not do its work."""


def command(settings: Settings, *words: str, codes: tuple[int, ...] = (0,), cwd: Path | None = None) -> str:
    done = here(
        *login(settings), "--timeout", "5", *words, variables={"PENSTOCK_PASSWORD": settings.password or ""}, cwd=cwd
    )
    if done.returncode not in codes:
        raise Failed(done.stderr)
    return done.stdout


def needless(guarded: Guarded, user: str, scenario: Callable[[Settings], None]) -> list[str]:
    """The grants without which everything goes on as before."""
    scenario(guarded.settings(user))
    found = []
    for poorer, grant in guarded.without_one(user).items():
        try:
            scenario(guarded.settings(poorer))
        except (Failed, PenstockError, ExceptionGroup):
            continue
        found.append(grant)
    return found


# -- services ----------------------------------------------------------------------------------------------------------


def subject_of(consumer: ConsumerSpec) -> str:
    subject = consumer.filters[0].replace(">", "x")
    return letter_subject(subject) if subject.startswith("dlq.") else subject


async def start_app(settings: Settings, consumers: list[ConsumerSpec]) -> None:
    """An app with a handler on each, which is stopped before it pulls."""
    app, stop = penstock.App(settings=settings), asyncio.Event()

    async def handle(message: penstock.Message) -> None: ...

    for consumer in consumers:
        app.consumer(consumer.name, stream=consumer.stream)(handle)
    await app.serve(stop, (), lambda _: stop.set())


async def read_and_bury(operator: Settings, settings: Settings, consumers: list[ConsumerSpec]) -> None:
    """A page with its receipt and a plain pull of every consumer; what was pulled becomes a dead letter."""
    async with PlainPublisher(operator) as publisher:
        for consumer in consumers:
            for body in (b"by page", b"by pull"):
                await publisher.add(subject_of(consumer), body)
        await publisher.finish()
    async with Facts(settings) as facts, await aio.connect(settings) as connection:
        for consumer in consumers:
            page = await facts.fetch_facts(consumer.name, 1, stream=consumer.stream, wait=2)
            await facts.confirm_receipt(consumer.name, page.receipt or "", stream=consumer.stream)
            pull = Pull(connection, consumer.stream, consumer.name, None, 1)
            found = await pull.fetch(2)
            if not found:
                raise Failed(f"{consumer.name} got nothing")
            if consumer.dlq:
                delivery, failure = FailedDelivery.parse(found[0].reply), Failure("ValueError", "no")
                letter = delivery.letter(subject=found[0].subject, body=found[0].data, headers={}, failure=failure,
                                         failed_at=datetime.now(UTC))  # fmt: skip
                await capture(connection, letter, consumer.dlq, patience=0.2)
            await connection.request(found[0].reply, b"+ACK")
            await pull.close()


@pytest.mark.parametrize(
    "service", [one if one == SMALL else pytest.param(one, marks=pytest.mark.kills) for one in SERVICES]
)
def test_a_service_needs_every_grant(guarded: Guarded, service: str) -> None:
    consumers = [one for one in PLATFORM.consumers.values() if one.service == service]

    def scenario(settings: Settings) -> None:
        asyncio.run(read_and_bury(guarded.operator, settings, consumers))
        asyncio.run(start_app(settings, consumers))

    assert needless(guarded, user_of(service), scenario) == []


# -- who publishes -----------------------------------------------------------------------------------------------------


def test_a_publisher_needs_every_grant(guarded: Guarded, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n{"a": 2}\n')

    def scenario(settings: Settings) -> None:
        for filter_ in PLATFORM.services["gpu-cloud"].publishes:
            subject = filter_.replace(">", "minimal")
            command(settings, "publish", subject, "--file", "lines", "--atomic", cwd=tmp_path)
            command(settings, "publish", subject, "--file", "lines", cwd=tmp_path)

    assert needless(guarded, "gpu-cloud", scenario) == []


# -- dead letters ------------------------------------------------------------------------------------------------------

GIVE_UP = ("billing_worker_usage_metered", "billing_worker_balance_credited", "provisioning_worker_provision_requested",
           "app_runtime_worker_instance_requested", "storage_worker_attachment_requested")  # fmt: skip
"""A consumer of every stream."""


async def give_up(operator: Settings) -> None:
    """Services that have never heard of Penstock give up on a message of every stream; one message is then removed."""
    consumers = [PLATFORM.consumers[name] for name in GIVE_UP]
    async with PlainPublisher(operator) as publisher:
        for consumer in consumers:
            await publisher.add(consumer.filters[0], b'{"a": 1}')
        await publisher.finish()
    async with connect(operator) as broker, await aio.connect(operator) as connection:
        before = (await broker.jetstream.stream_info("DLQ_ADVISORIES")).state.last_seq
        for consumer in consumers:
            await broker.jetstream.update_consumer(consumer.stream, consumer.name, {"max_deliver": 2})
        pulls = [Pull(connection, one.stream, one.name, None, 100) for one in consumers]

        async def are_kept() -> bool:
            for pull in pulls:  # the advisory comes when the consumer is asked for more
                for message in await pull.fetch(0.02):
                    await connection.publish(message.reply, b"-NAK")
            return (await broker.jetstream.stream_info("DLQ_ADVISORIES")).state.last_seq >= before + len(consumers)

        await eventually_async(are_kept, what="the advisories")
        for pull in pulls:
            await pull.close()


async def remove_last(operator: Settings, stream: str) -> None:
    async with connect(operator) as broker:
        await broker.jetstream.delete_message(stream, (await broker.jetstream.stream_info(stream)).state.last_seq)


async def forget_advisories(operator: Settings) -> None:
    """Also those that a capturer has, and has not answered."""
    async with connect(operator) as broker:
        await broker.jetstream.purge_stream("DLQ_ADVISORIES")
        with suppress(ConsumerNotFound):
            await broker.jetstream.delete_consumer("DLQ_ADVISORIES", "dlq_capture")


def captured(guarded: Guarded, settings: Settings) -> None:
    asyncio.run(give_up(guarded.operator))
    asyncio.run(remove_last(guarded.operator, "STORAGE"))  # whether its letter is there is looked up
    try:
        command(settings, "dlq", "capture", "--until-caught-up")
    finally:
        asyncio.run(forget_advisories(guarded.operator))


def settled(guarded: Guarded, settings: Settings) -> None:
    """All that a person does: what nobody has captured is found, listed, shown, taken away, replayed, and told."""
    asyncio.run(give_up(guarded.operator))
    asyncio.run(forget_advisories(guarded.operator))
    try:
        command(settings, "dlq", "reconcile", codes=(0, 2))
        asyncio.run(give_up(guarded.operator))
        asyncio.run(remove_last(guarded.operator, "STORAGE"))
        listed = json.loads(command(settings, "dlq", "ls", "--letters", "--json", codes=(2,)))
        if not listed["given_up"]:
            raise Failed("nobody says that messages were given up")
        command(settings, "dlq", "reconcile", codes=(0, 2))
        letter = listed["letters"][0]["id"]
        command(settings, "dlq", "show", letter)
        command(settings, "dlq", "discard", letter, "--reason", "test", "--yes")
        command(settings, "dlq", "replay", "--all", "--dry-run", codes=(0, 2))
        command(settings, "dlq", "replay", "--all", codes=(0, 2))
        if not json.loads(command(settings, "dlq", "audit", "--json"))["records"]:
            raise Failed("no audit")
    finally:
        asyncio.run(forget_advisories(guarded.operator))


@pytest.mark.kills
def test_capturing_needs_every_grant(guarded: Guarded) -> None:
    assert needless(guarded, "dlq-capture", lambda settings: captured(guarded, settings)) == []


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Guarded]:
    """Nobody has left anything pending."""
    yield from started(tmp_path, EXAMPLE, trace=True)


@pytest.mark.parametrize(("user", "scenario"), [("dlq-capture", captured), ("dlq", settled)])
def test_dead_letters_are_dealt_with_under_the_permissions_and_all_of_them_are_used(
    fresh: Guarded, user: str, scenario: Callable[[Guarded, Settings], None]
) -> None:
    """Taking away each one of a person takes minutes: that all are used says as much."""
    scenario(fresh, fresh.settings(user))
    assert fresh.violations() == []
    of_nobody = {"platform.artifact.>"}  # no consumer of the example reads it, so that there are no letters of it
    assert set(fresh.unused(user)) <= of_nobody
