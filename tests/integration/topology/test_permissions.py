"""Every component runs under exactly the permissions that `penstock permissions` prints, and under no less."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.support.commands import ended, here
from tests.support.gateways import Papers, RunningGateway, platform
from tests.support.guarded import Guarded, login, refused, started
from tests.support.pages_served import served
from tests.support.pulls import Pull

import penstock
from penstock.app.app import Running
from penstock.deadletter.capture import capture
from penstock.deadletter.letters import FailedDelivery, Failure
from penstock.examples import example_dir
from penstock.facts import Facts
from penstock.gateway import BlockingGatewayClient
from penstock.jetstream import connect
from penstock.jetstream.reader import read_range
from penstock.jetstream.rows import Range
from penstock.publish.plain import PlainPublisher
from penstock.settings import Settings
from penstock.testing import eventually, eventually_async, letter_subject, stream_messages
from penstock.topology.load import load
from penstock.topology.model import ConsumerSpec
from penstock.topology.permissions import permissions, user_of
from penstock.wire import aio

EXAMPLE = example_dir() / "penstock.yaml"
CONSUMERS = load(EXAMPLE, "dev").consumers
SERVICES = sorted({consumer.service for consumer in CONSUMERS.values() if consumer.service})


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    more = ("--group", "billing=BILLING:dlq.billing.grouped")
    yield from started(tmp_path_factory.mktemp("permissions"), EXAMPLE, *more, trace=True)


def of_service(service: str) -> list[ConsumerSpec]:
    return [consumer for consumer in CONSUMERS.values() if consumer.service == service]


def written_to(consumer: ConsumerSpec) -> str:
    """A subject that it reads."""
    subject = consumer.filters[0].replace(">", "x")
    return letter_subject(subject) if subject.startswith("dlq.") else subject


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_reads_acknowledges_and_buries_under_its_permissions(guarded: Guarded, service: str) -> None:
    settings = guarded.settings(user_of(service))
    async with PlainPublisher(guarded.operator) as publisher:
        for consumer in of_service(service):
            subject = written_to(consumer)
            await publisher.add(subject, b"by page")
            await publisher.add(subject, b"by pull")
        await publisher.finish()
    async with Facts(settings) as facts, await aio.connect(settings) as connection:
        for consumer in of_service(service):
            page = await facts.fetch_facts(consumer.name, 1, stream=consumer.stream, wait=5)
            await facts.confirm_receipt(consumer.name, page.receipt or "", stream=consumer.stream)
            pull = Pull(connection, consumer.stream, consumer.name, None, 1)
            (message,) = await pull.fetch(10)
            if consumer.dlq:
                delivery, failure = FailedDelivery.parse(message.reply), Failure("ValueError", "no")
                letter = delivery.letter(subject=message.subject, body=message.data, headers=message.header_values(),
                                         failure=failure, failed_at=datetime.now(UTC))  # fmt: skip
                assert (await capture(connection, letter, consumer.dlq)).new
            await connection.request(message.reply, b"+ACK")
            await pull.close()


async def test_an_app_handles_and_buries_under_the_permissions_of_its_service(guarded: Guarded) -> None:
    app, before = penstock.App(EXAMPLE, "dev", guarded.settings("provisioning-worker")), guarded.violations()
    handled: list[bytes] = []
    wanted = of_service("provisioning-worker")

    async def handle(message: penstock.Message) -> None:
        if message.data == b"bad":
            raise penstock.Reject("never")
        handled.append(message.data)

    for consumer in wanted:
        app.consumer(consumer.name)(handle)
    async with PlainPublisher(guarded.operator) as publisher:
        for body in (b"good", b"bad"):
            for consumer in wanted:
                await publisher.add(written_to(consumer), body)
        await publisher.finish()
    stop, running = asyncio.Event(), list[Running]()
    serving = asyncio.create_task(app.serve(stop, (), running.extend))

    async def done() -> bool:
        return serving.done() or (bool(running) and all([await one.done() for one in running]))

    await eventually_async(done, 30, "the app to handle everything", guarded.violations)
    stop.set()
    await serving
    assert handled.count(b"good") == len(wanted)
    assert sum(one.counts.dead for one in running) == len(wanted)
    assert guarded.violations() == before


def test_an_app_stores_results_once_under_the_permissions_of_its_service(tmp_path: Path) -> None:
    streams = {"IN": {"subjects": ["in.>"]},
               "OUT": {"subjects": ["out.>", "penstock.done.OUT.>"], "allow_atomic": True}}  # fmt: skip
    declared = {"environments": {"dev": {"servers": ["nats://127.0.0.1:4222"]}}, "streams": streams,
                "consumers": {"copy": {"stream": "IN", "filter": "in.a", "service": "copier"}},
                "services": {"copier": {"publishes": ["out.copy"]}}}  # fmt: skip
    file = tmp_path / "penstock.json"
    file.write_text(json.dumps(declared))
    for made in started(tmp_path, file):
        assert asyncio.run(copied(made, file)) == [False, True]
        assert [one.data for one in stream_messages(made.operator, "OUT") if one.subject == "out.copy"] == [b"x"]
        assert made.violations() == []


async def copied(made: Guarded, file: Path) -> list[bool]:
    """Handle a message twice, and store its result; whether that was a repetition, each time."""
    app, repeated = penstock.App(file, "dev", made.settings("copier")), list[bool]()

    @app.consumer("copy")
    async def copy(message: penstock.Message) -> None:
        async with message.atomic("OUT") as batch:
            batch.add("out.copy", message.data)
        repeated.append(batch.repeated)
        if message.delivery_count == 1:
            raise penstock.RetryLater("once more", 0.01)

    async with PlainPublisher(made.operator) as publisher:
        await publisher.add("in.a", b"x")
        await publisher.finish()
    stop, running = asyncio.Event(), list[Running]()
    serving = asyncio.create_task(app.serve(stop, (), running.extend))

    async def done() -> bool:
        return serving.done() or (bool(running) and all([await one.done() for one in running]))

    await eventually_async(done, 30, "the result to be stored", made.violations)
    stop.set()
    await serving
    return repeated


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_is_refused_everything_else(guarded: Guarded, service: str) -> None:
    settings = guarded.settings(user_of(service))
    mine = of_service(service)
    others = [one for one in CONSUMERS.values() if one.service != service]
    stream = mine[0].stream
    tried = [
        mine[0].filters[0].replace(">", "x"),
        f"$JS.API.STREAM.DELETE.{stream}",
        f"$JS.API.STREAM.PURGE.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.CONSUMER.DELETE.{stream}.{mine[0].name}",
        f"$JS.API.CONSUMER.CREATE.{stream}.spy",
        "$KV.penstock_facts.signing-key",
        *(f"$JS.API.CONSUMER.MSG.NEXT.{one.stream}.{one.name}" for one in others[:3]),
        *(f"$JS.ACK.{one.stream}.{one.name}.1.1.1.1.1" for one in others[:3]),
        *(f"$KV.penstock_facts.book.{one.stream}.{one.name}" for one in others[:3]),
    ]
    assert [one for one in tried if not await refused(settings, one)] == []
    async with await aio.connect(settings) as connection:
        denied: list[str] = []
        connection.on_denied(lambda one: denied.append(one.subject))
        for subject in (">", "_INBOX.>", "_INBOX_operator.>"):
            await connection.subscribe(subject, handler=lambda _: None)
        await connection.flush()
        assert denied == [">", "_INBOX.>", "_INBOX_operator.>"]


def test_every_service_and_pipeline_of_the_example_has_its_user() -> None:
    found = permissions(load(EXAMPLE, "dev"))
    writers = load(EXAMPLE, "dev").services
    assert {one.user for one in found if one.kind == "service"} == {user_of(name) for name in (*SERVICES, *writers)}
    assert {one.user for one in found if one.kind == "dead letters"} == {"dlq", "dlq-capture"}
    assert [one.user for one in found if one.kind == "pipeline"] == [
        f"pipeline-{name}" for name in load(EXAMPLE, "dev").pipelines
    ]
    assert not [subject for one in found for subject in one.publish if subject in (">", "$JS.API.>", "$JS.>")]


def test_the_command_prints_all_forms() -> None:
    (user,) = json.loads(ended("permissions", EXAMPLE, "--service", "billing-worker", "--json").stdout)["users"]
    assert user["inbox_prefix"] == "_INBOX_billing-worker"
    (listed,) = json.loads(ended("permissions", EXAMPLE, "--service", "billing-worker", "--form", "server").stdout)[
        "authorization"
    ]["users"]
    assert listed == {"user": "billing-worker", "permissions": user["permissions"]}
    (claims,) = json.loads(ended("permissions", EXAMPLE, "--service", "billing-worker", "--form", "jwt").stdout)
    assert claims["nats"]["pub"]["allow"] == user["permissions"]["publish"]["allow"]
    assert (claims["nats"]["type"], claims["nats"]["version"]) == ("user", 2)
    assert "$JS.ACK.BILLING" in ended("permissions", EXAMPLE, "--service", "billing-worker").stdout
    assert "there is no user 'x'" in ended("permissions", EXAMPLE, "--service", "x", code=1).stderr


def test_the_server_command_takes_the_users_and_refuses_half_ones(tmp_path: Path) -> None:
    half = tmp_path / "half.json"
    half.write_text(ended("permissions", EXAMPLE, "--form", "server").stdout)
    assert "needs a password or an nkey" in ended("server", "--users", half, "--port", "0", code=1).stderr
    half.write_text("[]")
    assert "holds no users" in ended("server", "--users", half, "--port", "0", code=1).stderr


def test_the_gateway_serves_under_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "penstock.json"
    file.write_text(json.dumps(platform("nats://127.0.0.1:4222")))
    for made in started(tmp_path, file, trace=True):
        papers, mine = Papers(tmp_path), made.settings("gateway")
        declared = platform(made.server.url)
        declared["environments"]["dev"] |= {"user": "gateway", "password": mine.password,
                                            "inbox_prefix": mine.inbox_prefix}  # fmt: skip
        file.write_text(json.dumps(declared))
        with (
            RunningGateway(file, *papers.flags()) as gateway,
            BlockingGatewayClient(gateway.url, papers.login("edge"), timeout=30) as edge,
        ):
            assert gateway.look("/readyz")[0] == 200
            assert not edge.append_fact("facts.edge.a", "1", b"x").existed
            assert edge.append_fact("facts.edge.a", "1", b"x").existed
            page = edge.fetch_facts("edge_reader", 5, wait=10)
            assert [fact.data for fact in page.facts] == [b"x"]
            edge.confirm_receipt("edge_reader", page.receipt or "")
        unused = [one for one in made.unused("gateway") if not re.search(r"(busy|other)_reader", one)]
        assert unused == ["$JS.API.STREAM.NAMES"]  # asked when nobody answers to an append: is there a stream?
        for subject in ("other.x", "$JS.API.STREAM.DELETE.FACTS", "$JS.API.CONSUMER.CREATE.FACTS.spy"):
            assert asyncio.run(refused(mine, subject)), subject


HANDLERS = """
from pathlib import Path
from penstock.consume.verdicts import Reject

def handle(message, context):
    if message.data == b"bad":
        raise Reject("never")
    with Path("handled").open("ab") as file:
        file.write(message.data + b"\\n")
"""


def test_a_worker_group_works_and_buries_under_its_permissions(guarded: Guarded, tmp_path: Path) -> None:
    settings, before = guarded.settings("group-billing"), guarded.violations()
    (tmp_path / "handlers.py").write_text(HANDLERS)
    (tmp_path / "handled").touch()

    async def publish() -> None:
        async with PlainPublisher(guarded.operator) as publisher:
            for n in range(20):
                await publisher.add(f"platform.billing.grouped.{'ab'[n % 2]}", b"%d" % n)
            await publisher.add("platform.billing.grouped.a", b"bad")
            await publisher.finish()

    async def letters() -> int:
        async with connect(guarded.operator) as broker:
            info = await broker.jetstream.stream_info("DLQ", subjects_filter="dlq.billing.grouped.>")
            return len(info.state.subjects)

    asyncio.run(publish())
    command = [sys.executable, "-m", "penstock", *login(settings), "work", "handlers:handle", "--group", "billing",
               "--stream", "BILLING", "--partition", "a=platform.billing.grouped.a", "--partition",
               "b=platform.billing.grouped.b", "--dlq", "dlq.billing.grouped"]  # fmt: skip
    variables = {**os.environ, "PENSTOCK_PASSWORD": settings.password or "", "PYTHONPATH": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        workers = [subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=log, stderr=log) for _ in range(2)]
    try:

        def is_done() -> bool:
            return len(set((tmp_path / "handled").read_text().split())) == 20 and asyncio.run(letters()) == 1

        eventually(
            is_done, what="20 messages and a letter", state=lambda: (guarded.violations(), _text(tmp_path / "log"))
        )
    finally:
        for worker in workers:
            worker.terminate()
        codes = [worker.wait(30) for worker in workers]
    assert set(codes) <= {0, 2}, _text(tmp_path / "log")  # 2: there are dead letters
    assert guarded.violations() == before
    # Handoffs between workers that read at different speeds get what lies between them.
    assert guarded.unused("group-billing") == ["$JS.API.STREAM.MSG.GET.BILLING"]
    for subject in ("platform.billing.usage.metered", "$JS.API.STREAM.DELETE.BILLING", "$JS.API.STREAM.PURGE.BILLING",
                    "$KV.penstock_facts.signing-key", "$JS.API.CONSUMER.INFO.APPS.x"):  # fmt: skip
        assert asyncio.run(refused(settings, subject)), subject


def _text(path: Path) -> str:
    return path.read_text()


def test_a_bridge_carries_under_its_permissions(tmp_path: Path) -> None:
    streams = {"SRC": {"subjects": ["src.>"]}, "DST": {"subjects": ["dst.>"], "allow_atomic": True}}
    file = tmp_path / "penstock.yaml"
    file.write_text(json.dumps({"environments": {"dev": {"servers": ["nats://127.0.0.1:4222"]}}, "streams": streams}))
    for made in started(tmp_path, file, "--bridge", "copy=SRC:DST", trace=True):
        settings = made.settings("bridge-copy")

        async def publish(operator: Settings) -> None:
            async with PlainPublisher(operator) as publisher:
                for n in range(50):
                    await publisher.add(f"src.{n % 3}", b"%d" % n)
                await publisher.finish()

        for round_ in (1, 2):  # the second finds its consumer
            asyncio.run(publish(made.operator))
            done = here(*login(settings), "bridge", "copy", "SRC", "DST", "--map", "src.>=dst.>", "--until-caught-up",
                        variables={"PENSTOCK_PASSWORD": settings.password or ""})  # fmt: skip
            assert (done.returncode, made.violations()) == (0, []), done
            assert len(stream_messages(made.operator, "DST")) == 50 * round_
        assert made.unused("bridge-copy") == ["$JS.API.CONSUMER.CREATE.SRC.copy.>"]  # with one filter
        for subject in ("src.1", "$JS.API.STREAM.DELETE.SRC", "$JS.API.CONSUMER.CREATE.SRC.spy", "other.x",
                        "$JS.API.STREAM.MSG.GET.SRC"):  # fmt: skip
            assert asyncio.run(refused(settings, subject)), subject


def test_a_pipeline_reads_back_what_it_has_written(guarded: Guarded) -> None:
    """As it does after a crash, to find out how far it came."""
    settings = guarded.settings("pipeline-usage_hourly")

    async def publish() -> None:
        async with PlainPublisher(guarded.operator) as publisher:
            await publisher.add(letter_subject("dlq.billing.usage_metered"), b"bad")
            await publisher.finish()

    asyncio.run(publish())
    (rows,) = read_range(settings, Range(stream="DLQ", first=1, last=1))
    assert rows.num_rows == 1


def test_components_that_name_a_domain_are_granted_its_api(tmp_path: Path) -> None:
    """As those do that come over a leaf node."""
    file, lines = tmp_path / "penstock.yaml", tmp_path / "lines"
    lines.write_text('{"n": 1}\n{"n": 2}\n')
    file.write_text(json.dumps({
        "environments": {"dev": {"servers": ["nats://127.0.0.1:4222"]}},
        "streams": {"SRC": {"subjects": ["src.>"], "allow_atomic": True}, "DLQ": {"subjects": ["dlq.>"]},
                    "DST": {"subjects": ["dst.>"], "allow_atomic": True}},
        "consumers": {"reader": {"stream": "SRC", "filter": "src.>", "service": "reading", "dlq": "dlq.src",
                                 "ack_wait": "1s", "reader": "dedicated"}},
        "services": {"writing": {"publishes": ["src.>"], "appends": ["src.facts"]}},
    }))  # fmt: skip
    for made in started(tmp_path, file, "--bridge", "copy=SRC:DST", domain="core"):

        def run(user: str, *words: str, made: Guarded = made) -> str:
            settings = made.settings(user)
            done = here(*login(settings), "--domain", "core", *words, cwd=tmp_path,
                        variables={"PENSTOCK_PASSWORD": settings.password or ""})  # fmt: skip
            assert done.returncode == 0, (user, words, done.stderr, made.violations())
            return done.stdout

        run("writing", "publish", "src.a", "--file", str(lines), "--atomic")
        run("writing", "append", "src.facts", "1", "--data", "x")
        run("reading", "fetch", "reader", "--stream", "SRC", "--wait", "10s", "--limit", "2")
        page = json.loads(run("reading", "fetch", "reader", "--stream", "SRC", "--wait", "10s", "--json"))
        assert [fact["attempt"] for fact in page["facts"]] == [2, 2, 1]
        run("reading", "confirm", "reader", page["receipt"], "--stream", "SRC")
        run("bridge-copy", "bridge", "copy", "SRC", "DST", "--map", "src.>=dst.>", "--until-caught-up")
        run("dlq-capture", "dlq", "capture", "--until-caught-up")
        run("dlq", "dlq", "ls")
        assert made.violations() == []
        mine = replace(made.settings("reading"), domain="core")
        for subject in ("$JS.API.STREAM.DELETE.SRC", "$JS.core.API.STREAM.DELETE.SRC"):
            assert asyncio.run(refused(mine, subject))
        done = here(*login(mine), "--domain", "core", "status", variables={"PENSTOCK_PASSWORD": mine.password or ""})
        assert "Permissions Violation" in done.stderr


def test_the_pages_are_served_under_their_permissions(guarded: Guarded) -> None:
    before = guarded.violations()
    platform = load(EXAMPLE, "dev")
    with served(guarded.settings("ui"), platform) as pages:
        for path in (
            "/",
            "/streams/BILLING",
            "/streams/DLQ/messages",
            "/consumers",
            "/groups",
            "/pipelines",
            "/letters",
        ):
            assert (answer := pages.get(path)).status == 200, (path, answer.text)
    refused_now = [line for line in guarded.violations()[len(before) :] if "user:ui" in line]
    assert not [line for line in refused_now if "KV_penstock_billing" not in line], (
        "only the undeclared group is denied"
    )
