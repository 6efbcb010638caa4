"""Named readers while readers, gateways and the broker are killed: all is fetched, nothing confirmed comes again."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.gateways import TOKENS, RunningGateway, write_platform
from tests.support.streams import make_stream

from penstock.facts import Facts
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually

SEED = 20_261_116
READER = Path(__file__).with_name("facts_reader.py")
CONSUMER = "reader"
ACK_WAIT = 2_000_000_000
"""Nanoseconds: a reader that takes longer to write down what it fetched writes it after another one."""


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


def verdict(found: list[tuple[str, list[int]]], facts: int, dedicated: bool = False) -> list[str]:
    """What is wrong with a log of readers that were to read facts 1 to `facts`; a dedicated one also in order."""
    fetched: set[int] = set()
    confirmed: set[int] = set()
    wrong = []
    for kind, sequences in found:
        page = set(sequences)
        if sequences != sorted(page):
            wrong.append(f"a page out of order: {sequences[:5]}")
        if (
            dedicated
            and kind == "F"
            and (sequences[0] > len(fetched) + 1 or page != {*range(sequences[0], sequences[-1] + 1)})
        ):
            wrong.append(f"a page that leaves something out: {sequences[0]} to {sequences[-1]} after {len(fetched)}")
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


def test_the_check_of_a_dedicated_reader_can_fail() -> None:
    log = [("F", [1]), ("F", [3]), ("F", [2])]
    assert verdict(log, 3) == []
    assert verdict(log, 3, dedicated=True)


def test_the_check_of_these_tests_accepts_repeats_of_what_was_not_confirmed() -> None:
    assert verdict([("F", [1, 2]), ("F", [1, 2]), ("C", [1, 2]), ("F", [3])], 3) == []


async def prepare(server: EmbeddedServer, count: int, reader: str) -> None:
    async with Facts(server.settings) as facts:
        js = facts.link.jetstream
        await make_stream(js, "FACTS")
        for start in range(0, count, 1_000):
            numbers = range(start, min(start + 1_000, count))
            await asyncio.gather(*(facts.append_fact("facts.n", str(n), b"%d" % n) for n in numbers))
        config = {"durable_name": CONSUMER, "ack_policy": "explicit", "ack_wait": ACK_WAIT}
        await js.create_consumer("FACTS", {**config, "metadata": {"penstock.reader": reader}})


async def all_confirmed(server: EmbeddedServer, count: int) -> bool:
    async with Facts(server.settings) as facts:
        info = await facts.link.jetstream.consumer_info("FACTS", CONSUMER)
        return (info.ack_floor_stream_seq, info.ack_pending) == (count, 0)


class Progress:
    """How many facts were fetched, repeats included; reads only what was added to the log since the last look."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = self._fetched = 0

    def __call__(self) -> int:
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._at)
                whole = file.read().rpartition(b"\n")[0]
            for line in whole.splitlines():
                self._fetched += line.count(b",") + 1 if line.startswith(b"F") else 0
            self._at += len(whole) + 1 if whole else 0
        return self._fetched

    def reaches(self, count: int) -> bool:
        return self() >= count


@dataclass(frozen=True)
class Ordeal:
    """How much is read, by how many, and how often something is killed."""

    facts: int
    limit: int
    readers: int
    kills: int

    @property
    def dedicated(self) -> bool:
        return self.readers == 1

    def run(self, server: EmbeddedServer, log: Path, target: list[str], *others: Callable[[], None]) -> None:
        """Kill a reader, the broker or one of `others`, drawn at random, each at a random point of the progress."""
        rng = random.Random(SEED)
        points = sorted(rng.randrange(self.facts) for _ in range(self.kills))
        progress = Progress(log)
        with reading([*target, CONSUMER, str(log), str(self.limit)], self.readers) as running:
            for point in points:
                eventually(partial(progress.reaches, point), 120, f"{point} facts fetched", progress)
                time.sleep(rng.uniform(0, 0.05))  # anywhere within a page
                self._kill(rng, server, running, others)
            eventually(lambda: asyncio.run(all_confirmed(server, self.facts)), 300, "all confirmed", progress)
        wrong = verdict(events(log), self.facts, self.dedicated)
        assert not wrong, f"seed {SEED}: {wrong[:5]}"

    def _kill(
        self, rng: random.Random, server: EmbeddedServer, running: Readers, others: tuple[Callable[[], None], ...]
    ) -> None:
        choice = rng.randrange(2 + len(others))
        if choice == 0:
            running.kill_one(rng)
        elif choice == 1:
            server.kill()
            server.start()
        else:
            others[choice - 2]()


def ordeals(facts: int, kills: int, short_with: tuple[int, ...] = (1, 4)) -> list[Any]:
    """The short form, and the long one with a dedicated reader and with four that share an identity."""
    short = [Ordeal(facts=facts, limit=10, readers=readers, kills=kills) for readers in short_with]
    long = [Ordeal(facts=100_000, limit=50, readers=readers, kills=100) for readers in (1, 4)]
    named = [pytest.param(one, id=f"{one.readers} of {one.facts}") for one in short]
    return [*named, *(pytest.param(one, marks=pytest.mark.soak, id=f"{one.readers} of 100000") for one in long)]


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("ordeal", ordeals(facts=1_000, kills=8))
def test_readers_and_broker_killed_at_random_lose_nothing_and_repeat_only_the_unconfirmed(
    nats_server: EmbeddedServer, tmp_path: Path, ordeal: Ordeal
) -> None:
    asyncio.run(prepare(nats_server, ordeal.facts, "dedicated" if ordeal.dedicated else "shared"))
    ordeal.run(nats_server, tmp_path / "log", [nats_server.url])


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("ordeal", ordeals(facts=300, kills=5, short_with=(4,)))
def test_the_same_holds_through_a_gateway_that_is_killed_too(
    nats_server: EmbeddedServer, tmp_path: Path, ordeal: Ordeal, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(prepare(nats_server, ordeal.facts, "dedicated" if ordeal.dedicated else "shared"))
    monkeypatch.setenv("GATEWAY_TOKEN", TOKENS["edge"])
    file = write_platform(tmp_path, nats_server.url, consumer=CONSUMER)
    with RunningGateway(file, "--insecure") as gateway:
        ordeal.run(nats_server, tmp_path / "log", ["--gateway", gateway.url], gateway.restart)
