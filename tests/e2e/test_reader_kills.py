"""Named readers while readers and the broker are killed: all is fetched, and nothing confirmed comes again."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedServer
from penstock.facts import Facts
from penstock.testing import eventually

SEED = 20_261_116
READER = Path(__file__).with_name("facts_reader.py")
CONSUMER = "reader"
ACK_WAIT = 1_000_000_000  # nanoseconds


class Readers:
    """Reader processes that are started again when they are killed."""

    def __init__(self, arguments: list[str], count: int) -> None:
        self._command = [sys.executable, str(READER), *arguments]
        self._processes = [self._spawn() for _ in range(count)]

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command)

    def kill_one(self, rng: random.Random) -> None:
        at = rng.randrange(len(self._processes))
        self._processes[at].kill()
        self._processes[at].wait()
        self._processes[at] = self._spawn()

    def end(self) -> None:
        ended = [process.poll() for process in self._processes]
        for process in self._processes:
            process.kill()
            process.wait()
        assert ended == [None] * len(ended), "a reader ended by itself"


@contextmanager
def reading(arguments: list[str], count: int) -> Iterator[Readers]:
    readers = Readers(arguments, count)
    try:
        yield readers
    finally:
        readers.end()


def events(log: Path) -> list[tuple[str, list[int]]]:
    """The lines of the log; a last one that was cut by a kill is left out."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [(line[0], [int(part) for part in line[2:].split(",")]) for line in lines]


def verdict(found: list[tuple[str, list[int]]], facts: int) -> list[str]:
    """What is wrong with a log of readers that were to read facts 1 to `facts`."""
    fetched: set[int] = set()
    confirmed: set[int] = set()
    wrong = []
    for kind, sequences in found:
        page = set(sequences)
        if sequences != sorted(page):
            wrong.append(f"a page out of order: {sequences[:5]}")
        if kind == "F":
            if again := page & confirmed:
                wrong.append(f"fetched again though confirmed: {sorted(again)[:5]}")
            fetched |= page
            continue
        if unseen := page - fetched:
            wrong.append(f"confirmed and never fetched: {sorted(unseen)[:5]}")
        if twice := page & confirmed:
            wrong.append(f"confirmed by two pages: {sorted(twice)[:5]}")
        confirmed |= page
    if missing := set(range(1, facts + 1)) - fetched:
        wrong.append(f"never fetched: {len(missing)}, first {sorted(missing)[:5]}")
    return wrong


@pytest.mark.parametrize(
    "log",
    [
        [("F", [1, 2]), ("C", [1, 2])],  # 3 is missing
        [("F", [1, 2, 3]), ("C", [1, 2, 3]), ("F", [3])],  # again, though confirmed
        [("F", [1, 2]), ("C", [1, 2, 3]), ("F", [3])],  # confirmed before it was fetched
        [("F", [1, 2, 3]), ("F", [1, 2, 3]), ("C", [1, 2, 3]), ("C", [1, 2, 3])],  # by two pages
        [("F", [2, 1, 3])],  # order
    ],
)
def test_the_check_of_these_tests_can_fail(log: list[tuple[str, list[int]]]) -> None:
    assert verdict(log, 3)


def test_the_check_of_these_tests_accepts_repeats_of_what_was_not_confirmed() -> None:
    assert verdict([("F", [1, 2]), ("F", [1, 2]), ("C", [1, 2]), ("F", [3])], 3) == []


async def prepare(server: EmbeddedServer, count: int) -> None:
    async with Facts(server.settings) as facts:
        js = facts.link.jetstream
        await js.create_stream({"name": "FACTS", "subjects": ["facts.>"]})
        for start in range(0, count, 1_000):
            numbers = range(start, min(start + 1_000, count))
            await asyncio.gather(*(facts.append_fact("facts.n", str(n), b"%d" % n) for n in numbers))
        await js.create_consumer("FACTS", {"durable_name": CONSUMER, "ack_policy": "explicit", "ack_wait": ACK_WAIT})


async def all_confirmed(server: EmbeddedServer, count: int) -> bool:
    async with Facts(server.settings) as facts:
        info = await facts.link.jetstream.consumer_info("FACTS", CONSUMER)
        return (info.ack_floor_stream_seq, info.ack_pending) == (count, 0)


def kill_while_reading(
    server: EmbeddedServer,
    log: Path,
    arguments: list[str],
    *,
    facts: int,
    readers: int,
    kills: int,
    others: tuple[Callable[[], None], ...] = (),
) -> None:
    """Kill a reader, the broker or one of `others`, drawn at random, each at a random point of the progress."""
    rng = random.Random(SEED)
    points = sorted(rng.randrange(facts) for _ in range(kills))
    with reading(arguments, readers) as running:
        for point in points:
            eventually(lambda p=point: _progress(log) >= p, 120, f"{point} facts fetched", lambda: _progress(log))
            time.sleep(rng.uniform(0, 0.05))  # anywhere within a page
            choice = rng.randrange(2 + len(others))
            if choice == 0:
                running.kill_one(rng)
            elif choice == 1:
                server.kill()
                server.start()
            else:
                others[choice - 2]()
        eventually(lambda: asyncio.run(all_confirmed(server, facts)), 300, "all confirmed", lambda: _progress(log))
    wrong = verdict(events(log), facts)
    assert not wrong, f"seed {SEED}: {wrong[:5]}"


def _progress(log: Path) -> int:
    return sum(len(sequences) for kind, sequences in events(log) if kind == "F")


@pytest.mark.parametrize("readers", [1, 4])
def test_readers_and_broker_killed_at_random_lose_nothing_and_repeat_only_the_unconfirmed(
    nats_server: EmbeddedServer, tmp_path: Path, readers: int
) -> None:
    log = tmp_path / "log"
    asyncio.run(prepare(nats_server, 3_000))
    arguments = [nats_server.url, CONSUMER, str(log), "10"]
    kill_while_reading(nats_server, log, arguments, facts=3_000, readers=readers, kills=10)


@pytest.mark.soak
@pytest.mark.parametrize("readers", [1, 4])
def test_a_hundred_thousand_facts_with_readers_and_broker_killed_at_random(
    nats_server: EmbeddedServer, tmp_path: Path, readers: int
) -> None:
    log = tmp_path / "log"
    asyncio.run(prepare(nats_server, 100_000))
    arguments = [nats_server.url, CONSUMER, str(log), "50"]
    kill_while_reading(nats_server, log, arguments, facts=100_000, readers=readers, kills=100)
