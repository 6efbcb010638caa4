"""One task that writes packs: each row once, whatever happened to the attempts and runs before it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pytest

from penstock import packs
from penstock.server.embedded import EmbeddedServer
from penstock.spark.chunks import ChunkRows
from penstock.spark.delivery import AtomicDelivery, Chunk, Confirm, Stored, delivery
from penstock.spark.history import Intent, LedgerPlace, Series
from penstock.spark.ledger import Ledger
from penstock.spark.link import Link
from penstock.spark.packing import Packing, typed_rows
from penstock.spark.task import TaskTally, write_partition
from penstock.testing import EmbeddedCluster
from penstock.testing.contents import stream_messages
from penstock.wire.frames import Message

PLACE = LedgerPlace("OUT", "query", 0, 0)
COUNT = 2000
SEED = 20_261_118
PACKING = Packing(packs.ROWS, rows=2, codec=packs.LZ4)
"""Two rows a pack, so that a chunk has 800 rows: 400 packs."""
TYPED = replace(PACKING, kind=packs.TYPED)
Rows = Callable[[list[int]], Iterator[ChunkRows]]


def make_streams(link: Link, replicas: int = 1) -> None:
    config = {"name": "OUT", "subjects": ["o.>"], "allow_atomic": True, "allow_batched": True}
    # The shortest window the server takes: nothing here may depend on it.
    config |= {"duplicate_window": 100_000_000, "num_replicas": replicas}
    link.call(lambda api: api.create_stream(config))
    Ledger(link).create_bucket(replicas)


@pytest.fixture
def link(nats_server: EmbeddedServer) -> Iterator[Link]:
    with Link(nats_server.settings) as link:
        make_streams(link)
        yield link


def rows_of(ids: list[int]) -> Iterator[ChunkRows]:
    for start in range(0, len(ids), 700):
        part = ids[start : start + 700]
        yield ChunkRows(
            pa.array([f"o.{n % 3}" for n in part]),
            pa.array([b"%d" % n for n in part]),
            pa.array([b"Own: %d\r\n" % n for n in part], pa.binary()),
        )


def events_of(ids: list[int]) -> Iterator[ChunkRows]:
    for start in range(0, len(ids), 700):
        part = ids[start : start + 700]
        events = pa.array([{"n": n, "tags": ["a"] * (n % 3)} for n in part])
        yield typed_rows(pa.array([f"o.{n % 3}" for n in part]), events)


KINDS = [pytest.param(rows_of, PACKING, id="rows"), pytest.param(events_of, TYPED, id="typed")]


def ids_stored(link: Link) -> Counter[int]:
    found: Counter[int] = Counter()
    for message in stream_messages(link.settings, "OUT"):
        assert packs.is_pack(message.header_values())
        found.update(_ids(message))
    return found


def _ids(message: Message) -> list[int]:
    pack = packs.decode(message.header_values(), message.data)
    if pack.kind == packs.TYPED:
        return [int(n) for n in pack.batch.column("n").to_pylist()]
    rows = list(pack.rows(message.subject))
    assert all(row.headers == {"Own": [row.data.decode()]} and row.subject == message.subject for row in rows)
    return [int(row.data) for row in rows]


def once(count: int) -> Counter[int]:
    return Counter(dict.fromkeys(range(count), 1))


class Crash(Exception):
    """Stands for the end of the process."""


class Crashing(AtomicDelivery):
    """Ends the attempt before or after a chunk is stored."""

    def __init__(self, link: Link, packing: Packing, confirm: Confirm, chunk: int, stored: bool) -> None:
        super().__init__(link, "OUT", confirm, packing)
        self._crash_at, self._crash_stored = chunk, stored

    def begin(self, chunk: Chunk, intent: Intent, name: str) -> None:
        if intent.number == self._crash_at and not self._crash_stored:
            raise Crash
        super().begin(chunk, intent, name)

    def finish(self) -> Stored:
        stored = super().finish()
        assert self._intent
        if self._intent.number == self._crash_at:
            raise Crash
        return stored


def write(
    link: Link,
    rows: Iterator[ChunkRows],
    packing: Packing | None = PACKING,
    kind: str = "atomic",
    place: LedgerPlace = PLACE,
    run: int = 0,
) -> TaskTally:
    return write_partition(link, place, rows, partial(delivery, kind, link, "OUT", packing=packing), run=run)


def crash(link: Link, rows: Iterator[ChunkRows], packing: Packing, chunk: int, stored: bool, run: int = 0) -> None:
    with pytest.raises(Crash):
        write_partition(
            link, PLACE, rows, lambda confirm: Crashing(link, packing, confirm, chunk, stored), None, run=run
        )


@pytest.mark.parametrize(("make", "packing"), KINDS)
@pytest.mark.parametrize("kind", ["atomic", "fast"])
def test_a_task_writes_its_rows_once_in_packs_of_one_subject(
    link: Link, make: Rows, packing: Packing, kind: str
) -> None:
    assert write(link, make(list(range(COUNT))), packing, kind) == TaskTally(written=COUNT)
    assert ids_stored(link) == once(COUNT)
    found = stream_messages(link.settings, "OUT")
    assert len(found) < COUNT * 0.51
    for subject in ("o.0", "o.1", "o.2"):
        ids = [n for message in found if message.subject == subject for n in _ids(message)]
        assert ids == sorted(ids), "rows of a subject keep their order"


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize(("make", "packing"), KINDS)
@pytest.mark.parametrize("stored", [False, True], ids=["before it is stored", "after it is stored"])
def test_an_attempt_after_a_crash_writes_only_what_is_missing(
    link: Link, make: Rows, packing: Packing, stored: bool
) -> None:
    ids = list(range(COUNT))
    crash(link, make(ids), packing, 1, stored)
    before = ids_stored(link).total()
    tally = write(link, make(ids), packing)
    assert ids_stored(link) == once(COUNT)
    assert (tally.skipped, tally.written) == (before, COUNT - before)


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize(("make", "packing"), KINDS)
def test_rows_that_come_again_in_another_order_are_written_once(link: Link, make: Rows, packing: Packing) -> None:
    rng = random.Random(SEED)
    ids = list(range(COUNT))
    for chunk, stored in ((0, True), (1, False), (2, True)):
        crash(link, make(ids), packing, chunk, stored)
        rng.shuffle(ids)
    tally = write(link, make(ids), packing)
    assert ids_stored(link) == once(COUNT), f"seed {SEED}"
    assert tally.strays == 0


def test_another_size_of_packs_or_none_at_all_repeats_nothing(link: Link) -> None:
    """Rows are compared, not packs: the options may change between two attempts."""
    ids = list(range(COUNT))
    crash(link, rows_of(ids), PACKING, 0, stored=True)
    larger = replace(PACKING, rows=3, bytes=3000, codec=packs.ZSTD)
    crash(link, rows_of(ids), replace(larger, rows=1), 1, stored=True)
    crash(link, rows_of(ids), larger, 2, stored=False)
    assert write(link, rows_of(ids), None).strays == 0
    messages = stream_messages(link.settings, "OUT")
    plain = [int(message.data) for message in messages if not packs.is_pack(message.header_values())]
    packed = [n for message in messages if packs.is_pack(message.header_values()) for n in _ids(message)]
    assert plain
    assert packed
    assert Counter(plain + packed) == once(COUNT)


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize(("make", "packing"), KINDS)
def test_a_new_run_with_another_number_of_tasks_writes_each_row_once(link: Link, make: Rows, packing: Packing) -> None:
    ids = list(range(COUNT))
    random.Random(SEED).shuffle(ids)
    crash(link, make(ids), packing, 1, stored=True, run=1)
    written = ids_stored(link).total()
    random.Random(SEED + 1).shuffle(ids)
    tallies = [
        write(link, make(ids[part::3]), packing, place=replace(PLACE, partition=part), run=2) for part in range(3)
    ]
    assert ids_stored(link) == once(COUNT), f"seed {SEED}"
    assert sum(tally.skipped for tally in tallies) == written


def test_a_closed_batch_that_comes_again_writes_nothing(link: Link) -> None:
    ids = list(range(COUNT))
    write(link, rows_of(ids), run=1)
    Ledger(link).close(Series("OUT", "query"), 0, COUNT)
    assert write(link, rows_of(ids[::-1]), replace(PACKING, rows=3), run=2) == TaskTally(skipped=COUNT)
    assert ids_stored(link) == once(COUNT)


@pytest.mark.kills
def test_packs_are_written_once_while_a_server_of_three_dies(nats_cluster: EmbeddedCluster) -> None:
    with Link(nats_cluster.settings) as link:
        make_streams(link, replicas=3)

        def rows() -> Iterator[ChunkRows]:
            for index, some in enumerate(rows_of(list(range(COUNT)))):
                if index == 1:
                    nats_cluster.nodes[0].kill()
                yield some

        assert write(link, rows()).written == COUNT
        assert ids_stored(link) == once(COUNT)
