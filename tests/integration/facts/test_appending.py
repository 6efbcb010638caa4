"""Appending facts to a real server: one id, one fact, whoever retries and however late."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.support.streams import make_stream

from penstock.errors import ConfigError
from penstock.facts import Appended, BlockingFacts, FactConflict, Facts, NewFact
from penstock.facts.fact import ID_HEADER
from penstock.server.embedded import EmbeddedServer
from penstock.testing import LossyProxy, eventually, stream_messages

SEED = 20_261_116
WINDOW = 2_000_000_000  # nanoseconds: the stream's duplicate window
WRITER = Path(__file__).with_name("facts_writer.py")


@pytest.fixture
async def facts(nats_server: EmbeddedServer) -> AsyncIterator[Facts]:
    async with Facts(nats_server.settings) as made:
        await make_stream(made.link.jetstream, "FACTS", duplicate_window=WINDOW)
        yield made


async def prepare(server: EmbeddedServer) -> None:
    async with Facts(server.settings) as facts:
        await make_stream(facts.link.jetstream, "FACTS", duplicate_window=WINDOW)


def stored_ids(server: EmbeddedServer) -> Counter[str]:
    return Counter(message.header_values()[ID_HEADER][0] for message in stream_messages(server.settings, "FACTS"))


async def test_the_same_fact_again_gives_back_the_original_sequence(facts: Facts) -> None:
    first = await facts.append_fact("facts.orders", "o-1", b"{}", headers={"Zone": "east"})
    await facts.append_fact("facts.orders", "o-2", b"{}")
    again = await facts.append_fact("facts.orders", "o-1", b"{}", headers={"Zone": "east"})
    assert first == Appended("FACTS", 1, existed=False)
    assert again == Appended("FACTS", 1, existed=True)


@pytest.mark.parametrize(("data", "headers"), [(b"{ }", {"Zone": "east"}), (b"{}", {"Zone": "west"}), (b"{}", None)])
async def test_the_same_id_with_other_content_is_a_conflict(
    facts: Facts, data: bytes, headers: dict[str, str] | None
) -> None:
    await facts.append_fact("facts.orders", "o-1", b"{}", headers={"Zone": "east"})
    with pytest.raises(FactConflict, match=r"'o-1'.*message 1 of stream 'FACTS'"):
        await facts.append_fact("facts.orders", "o-1", data, headers=headers)
    assert (await facts.link.jetstream.stream_info("FACTS")).state.messages == 1


async def test_an_id_names_a_fact_of_its_subject(facts: Facts) -> None:
    one = await facts.append_fact("facts.orders", "1", b"")
    other = await facts.append_fact("facts.refunds", "1", b"")
    assert (one.existed, other.existed) == (False, False)


@pytest.mark.parametrize(
    ("subject", "fact_id", "reason"),
    [
        ("facts.*", "1", "wildcards"),
        ("facts..x", "1", "empty token"),
        ("$JS.API", "1", "no `\\$`"),
        ("facts.x", "", "1 to 512 bytes"),
        ("facts.x", "x" * 513, "1 to 512 bytes"),
        ("facts.x", " 1", "space at its ends"),
        ("facts.x", "1\u2003", "space at its ends"),
        ("facts.x", "\ud800", "no text that UTF-8 can say"),
        ("dlq.orders.placed", "1", "belongs to dead letters"),
        ("dlq_audit.letters", "1", "belongs to dead letters"),
        ("nowhere", "1", "no stream takes"),
    ],
)
async def test_what_cannot_be_a_fact_is_refused_with_the_reason(
    facts: Facts, subject: str, fact_id: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await facts.append_fact(subject, fact_id, b"")


async def test_a_stream_that_does_not_take_the_subject_is_a_mistake_of_the_caller(facts: Facts) -> None:
    with pytest.raises(ConfigError, match="stream 'ORDERS' does not take"):
        await facts.append_fact("facts.x", "1", b"", stream="ORDERS")


@pytest.mark.parametrize("header", ["Nats-Msg-Id", "nats-rollup", "Penstock-Fact-Id"])
async def test_headers_that_steer_the_server_are_refused(facts: Facts, header: str) -> None:
    with pytest.raises(ConfigError, match=header):
        await facts.append_fact("facts.x", "1", b"", headers={header: "x"})


async def test_answers_that_get_lost_store_nothing_twice(nats_server: EmbeddedServer, facts: Facts) -> None:
    with LossyProxy(nats_server.port) as proxy:
        settings = nats_server.settings.with_servers(proxy.url)
        async with Facts(settings) as shaky:
            lost = iter([True, False])
            proxy.drop_down = lambda line: line.startswith(b"MSG _INBOX") and next(lost, False)
            appended = asyncio.create_task(shaky.append_fact("facts.x", "1", b"same"))
            await asyncio.to_thread(lambda: eventually(lambda: stored_ids(nats_server) == {"1": 1}))
            proxy.cut()
            assert await appended == Appended("FACTS", 1, existed=True)
    assert stored_ids(nats_server) == {"1": 1}


# -- many at once ------------------------------------------------------------------------------------------------------


def numbered(first: int, last: int, body: bytes = b"") -> list[NewFact]:
    return [NewFact("facts.n", str(n), body or b"%d" % n) for n in range(first, last + 1)]


async def test_many_facts_are_stored_once_and_in_order_and_each_says_what_became_of_it(
    nats_server: EmbeddedServer, facts: Facts
) -> None:
    await facts.append_facts(numbered(1, 3))
    await facts.append_fact("facts.n", "4", b"else")
    done = await facts.append_facts([*numbered(1, 2_500), NewFact("facts.n", "9", b"9"), NewFact("facts.n", "9", b"8")])
    assert [one.outcome for one in done[:5]] == ["existed", "existed", "existed", "conflict", "stored"]
    assert [one.sequence for one in done[:2_500]] == [*range(1, 2_501)]
    assert done[2_500:] == (Appended("FACTS", 9, existed=True), Appended("FACTS", 9, existed=False, conflict=True))
    assert stored_ids(nats_server) == {str(n): 1 for n in range(1, 2_501)}
    assert await facts.append_facts([]) == ()


async def test_when_one_of_many_cannot_be_a_fact_none_is_stored(facts: Facts) -> None:
    with pytest.raises(ConfigError, match="wildcards"):
        await facts.append_facts([*numbered(1, 3), NewFact("facts.*", "4", b"")])
    assert (await facts.link.jetstream.stream_info("FACTS")).state.messages == 0
    with pytest.raises(ConfigError, match="captures"):
        await facts.append_facts([NewFact("elsewhere", "4", b"")])
    with pytest.raises(ConfigError, match="another one does"):
        await facts.append_facts(numbered(1, 3), stream="OTHER")


async def test_answers_to_many_that_get_lost_store_nothing_twice(nats_server: EmbeddedServer, facts: Facts) -> None:
    with LossyProxy(nats_server.port) as proxy:
        settings = nats_server.settings.with_servers(proxy.url)
        async with Facts(settings) as shaky:
            lost = iter([False] * 20 + [True] * 5)
            proxy.drop_down = lambda line: line.startswith(b"MSG _INBOX") and next(lost, False)
            appended = asyncio.create_task(shaky.append_facts(numbered(1, 50)))
            await asyncio.to_thread(lambda: eventually(lambda: len(stored_ids(nats_server)) == 50))
            proxy.cut()
            done = await appended
    assert [one.sequence for one in done] == [*range(1, 51)]
    assert not any(one.conflict for one in done)
    assert stored_ids(nats_server) == {str(n): 1 for n in range(1, 51)}


async def test_threads_append_many_too(nats_server: EmbeddedServer, facts: Facts) -> None:
    def append() -> tuple[Appended, ...]:
        with BlockingFacts(nats_server.settings) as blocking:
            return blocking.append_facts(numbered(1, 10), stream="FACTS")

    assert [one.outcome for one in await asyncio.to_thread(append)] == ["stored"] * 10


# -- concurrent writers ------------------------------------------------------------------------------------------------


async def storm(server: EmbeddedServer, ids: range, writers: int, rng: random.Random) -> Counter[str]:
    """Every writer appends every id, in an order of its own, each time with one of two contents."""
    outcomes: Counter[str] = Counter()
    sequences: dict[int, set[int]] = {number: set() for number in ids}

    async def write() -> None:
        order = rng.sample(ids, len(ids))
        async with Facts(server.settings) as facts:
            for at in range(0, len(order), 50):
                chunk = order[at : at + 50]
                bodies = [b"%d" % number if rng.random() < 0.6 else b"other %d" % number for number in chunk]
                calls = (facts.append_fact("facts.n", str(n), body) for n, body in zip(chunk, bodies, strict=True))
                for number, result in zip(chunk, await asyncio.gather(*calls, return_exceptions=True), strict=True):
                    if isinstance(result, Appended):
                        sequences[number].add(result.sequence)
                        outcomes["existed" if result.existed else "stored"] += 1
                    else:
                        assert isinstance(result, FactConflict), result
                        sequences[number].add(result.sequence)
                        outcomes["conflict"] += 1

    await asyncio.gather(*(write() for _ in range(writers)))
    assert all(len(found) == 1 for found in sequences.values()), f"seed {SEED}: an id was seen at two sequences"
    return outcomes


async def retried_by_concurrent_writers(server: EmbeddedServer, facts: Facts, count: int) -> None:
    rng = random.Random(SEED)
    first = await storm(server, range(count), 4, rng)
    assert first["stored"] == count
    assert first["conflict"] > 0
    newest = (await facts.link.jetstream.stream_info("FACTS")).state.last_time
    assert newest
    await asyncio.to_thread(lambda: eventually(lambda: _age(newest) > 2.5, what="the duplicate window to be over"))
    second = await storm(server, range(count), 2, rng)
    assert second["stored"] == 0
    assert second["conflict"] > 0
    assert stored_ids(server) == {str(number): 1 for number in range(count)}


def _age(newest: datetime) -> float:
    return (datetime.now(UTC) - newest).total_seconds()


async def test_concurrent_writers_store_one_fact_an_id_inside_and_outside_the_window(
    nats_server: EmbeddedServer, facts: Facts
) -> None:
    await retried_by_concurrent_writers(nats_server, facts, 500)


@pytest.mark.soak
async def test_ten_thousand_ids_retried_by_concurrent_writers(nats_server: EmbeddedServer, facts: Facts) -> None:
    await retried_by_concurrent_writers(nats_server, facts, 10_000)


@pytest.mark.kills
@pytest.mark.short
def test_a_writer_and_a_broker_that_are_killed_at_any_time_leave_one_fact_an_id(nats_server: EmbeddedServer) -> None:
    asyncio.run(prepare(nats_server))
    rng, count = random.Random(SEED), 900
    command = [sys.executable, str(WRITER), nats_server.url, str(count)]
    for round_ in range(4):
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout
        for _ in range(rng.randrange(1, count // 6)):
            writer.stdout.readline()
        writer.kill()
        writer.wait()
        writer.stdout.close()
        if round_ % 2:
            nats_server.kill()
            nats_server.start()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert stored_ids(nats_server) == {str(number): 1 for number in range(count)}, f"seed {SEED}"
