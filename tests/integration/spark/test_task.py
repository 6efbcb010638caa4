"""One task of a write against a real server: exactly once, whatever happened to the attempts before it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from penstock.jetstream.reader import read_range
from penstock.jetstream.rows import Range
from penstock.server.embedded import EmbeddedServer
from penstock.spark import steps
from penstock.spark.chunks import ChunkRows
from penstock.spark.delivery import AtomicDelivery, Chunk, Confirm, Stored, delivery
from penstock.spark.history import Intent, LedgerPlace, Series
from penstock.spark.ledger import Ledger, OtherRows, Rewound, Superseded
from penstock.spark.link import Link
from penstock.spark.origin import created
from penstock.spark.output import RowMaker, columns_of
from penstock.spark.task import TaskTally, write_partition
from penstock.testing import EmbeddedCluster, LeafPair
from penstock.testing.contents import stream_data, stream_messages

PLACE = LedgerPlace("OUT", "query", 0, 0)
COUNT = 4500
SEED = 20_240_611


@pytest.fixture
def link(nats_server: EmbeddedServer) -> Iterator[Link]:
    with Link(nats_server.settings) as link:
        config = {"name": "OUT", "subjects": ["o.>"], "allow_atomic": True, "allow_batched": True}
        # The shortest window the server takes: nothing here may depend on it.
        link.call(lambda api: api.create_stream({**config, "duplicate_window": 100_000_000}))
        Ledger(link).create_bucket(1)
        yield link


def batches(ids: list[int], size: int = 700, row_ids: bool = False) -> Iterator[ChunkRows]:
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        lines = [b"Nats-Msg-Id: %d\r\n" % n if row_ids else b"Own: %d\r\n" % n for n in part]
        yield ChunkRows(
            pa.array([f"o.{n % 3}" for n in part]), pa.array([b"%d" % n for n in part]), pa.array(lines, pa.binary())
        )


def ids_stored(link: Link) -> Counter[int]:
    return Counter(int(data) for data in stream_data(link.settings, "OUT"))


def once(count: int) -> Counter[int]:
    return Counter(dict.fromkeys(range(count), 1))


class Crash(Exception):
    """Stands for the end of the process."""


class Crashing(AtomicDelivery):
    """Ends the attempt before or after a chunk is stored."""

    def __init__(self, link: Link, confirm: Confirm, chunk: int, stored: bool) -> None:
        super().__init__(link, "OUT", confirm)
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
    kind: str = "atomic",
    place: LedgerPlace = PLACE,
    run: int = 0,
    finished: str = "fail",
) -> TaskTally:
    return write_partition(link, place, rows, partial(delivery, kind, link, "OUT"), run=run, finished=finished)


def crash(link: Link, rows: Iterator[ChunkRows], chunk: int, stored: bool) -> None:
    with pytest.raises(Crash):
        write_partition(link, PLACE, rows, lambda confirm: Crashing(link, confirm, chunk, stored), None)


def test_a_task_writes_its_rows_once_in_their_order_and_names_its_chunks(link: Link) -> None:
    tally = write(link, batches(list(range(COUNT))))
    assert tally == TaskTally(written=COUNT)
    found = stream_messages(link.settings, "OUT")
    assert [int(message.data) for message in found] == list(range(COUNT))
    assert found[7].subject == "o.1"
    headers = [message.header_values() for message in found]
    assert headers[7]["Own"] == ["7"]
    names = [values["Penstock-Chunk"] for values in headers if "Penstock-Chunk" in values]
    assert [name[0].rsplit(".", 1)[0] for name in names] == [f"query.0.0.{n}" for n in range(5)]
    assert headers[999]["Nats-Msg-Id"] == names[0]


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("stored", [False, True], ids=["before it is stored", "after it is stored"])
@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_an_attempt_after_a_crash_writes_only_what_is_missing(link: Link, chunk: int, stored: bool) -> None:
    ids = list(range(COUNT))
    crash(link, batches(ids), chunk, stored)
    before = link.last_sequence("OUT")
    tally = write(link, batches(ids, size=997))
    assert ids_stored(link) == once(COUNT)
    assert (tally.skipped, tally.written) == (before, COUNT - before)


@pytest.mark.parametrize("stored", [False, True], ids=["before it is stored", "after it is stored"])
def test_rows_that_come_again_in_another_order_are_written_once(link: Link, stored: bool) -> None:
    rng = random.Random(SEED)
    ids = list(range(COUNT))
    for chunk in (1, 3, 4):
        crash(link, batches(ids), chunk, stored)
        rng.shuffle(ids)
    tally = write(link, batches(ids))
    assert ids_stored(link) == once(COUNT), f"seed {SEED}"
    assert tally.strays == 0


def test_a_subject_transform_does_not_hide_what_was_sent(link: Link) -> None:
    change = {"subject_transform": {"src": "o.*", "dest": "changed.{{wildcard(1)}}"}}
    link.call(lambda api: api.update_stream("OUT", change))
    ids = list(range(COUNT))
    crash(link, batches(ids), 2, stored=True)
    random.Random(SEED).shuffle(ids)
    assert write(link, batches(ids)).skipped == 3000
    assert ids_stored(link) == once(COUNT), f"seed {SEED}"


def test_equal_rows_are_written_as_often_as_they_come(link: Link) -> None:
    ids = [n % 10 for n in range(3000)]
    crash(link, batches(ids), 1, stored=True)
    tally = write(link, batches(sorted(ids)))
    assert ids_stored(link) == Counter(ids)
    assert tally.skipped == 2000


def test_rows_that_do_not_come_again_stay_and_are_counted(link: Link) -> None:
    crash(link, batches(list(range(2000))), 0, stored=True)
    tally = write(link, batches(list(range(500, 2500))))
    assert tally.strays == 500
    assert ids_stored(link) == once(2500)
    again = write(link, iter([]))
    assert again == TaskTally()


def test_without_the_log_the_same_crash_writes_rows_twice(link: Link) -> None:
    """Shows that the checks above can fail: the second attempt does not see the log of the first."""
    crash(link, batches(list(range(COUNT))), 2, stored=True)
    write(link, batches(list(range(COUNT))), place=LedgerPlace("OUT", "query", 0, 1))
    assert ids_stored(link) != once(COUNT)


QUERY = Series("OUT", "query")


@pytest.mark.parametrize("kind", ["atomic", "fast"])
def test_a_closed_batch_is_not_written_again_in_whatever_order_it_comes(link: Link, kind: str) -> None:
    ledger, ids = Ledger(link), list(range(COUNT))
    tally = write(link, batches(ids), kind, run=ledger.next_run())
    ledger.close(QUERY, 0, tally.rows)
    for again in (ids, ids[::-1]):
        assert write(link, batches(again), kind, run=ledger.next_run()) == TaskTally(skipped=COUNT)
        ledger.close(QUERY, 0, tally.rows)
    assert ids_stored(link) == once(COUNT)


def test_an_older_batch_than_the_last_closed_one_is_an_error(link: Link) -> None:
    ledger = Ledger(link)
    write(link, batches(list(range(10))), run=ledger.next_run())
    ledger.close(QUERY, 0, 10)
    ledger.close(QUERY, 1, 0)
    with pytest.raises(Rewound, match="use a new checkpoint"):
        write(link, batches(list(range(10))), run=ledger.next_run())
    assert ids_stored(link) == once(10)


def test_a_closed_batch_that_comes_with_other_rows_loses_nothing_silently(link: Link) -> None:
    """A checkpoint that is exactly one batch back: Spark plans the batch anew, with what has arrived meanwhile."""
    ledger, before, anew = Ledger(link), list(range(200)), list(range(300))
    ledger.close(QUERY, 0, write(link, batches(before), run=ledger.next_run()).rows)
    with pytest.raises(OtherRows, match="onFinishedBatch=write"):
        write(link, batches(anew), run=ledger.next_run())
    assert write(link, batches(anew), run=ledger.next_run(), finished="skip") == TaskTally()
    assert ids_stored(link) == once(200)
    tally = write(link, batches(anew), run=ledger.next_run(), finished="write")
    assert tally == TaskTally(written=100, skipped=200)
    ledger.close(QUERY, 0, tally.rows, finished="write")
    assert write(link, batches(anew), run=ledger.next_run()) == TaskTally(skipped=300)
    assert ids_stored(link) == once(300)


def test_a_closed_batch_that_comes_with_fewer_rows_is_noticed_when_it_is_closed_again(link: Link) -> None:
    """Rows that the next batch would bring again."""
    ledger = Ledger(link)
    ledger.close(QUERY, 0, write(link, batches(list(range(200))), run=ledger.next_run()).rows)
    tally = write(link, batches(list(range(150))), run=ledger.next_run())
    assert tally == TaskTally(skipped=150)
    with pytest.raises(OtherRows, match="150 rows, and 200 were written"):
        ledger.close(QUERY, 0, tally.rows)


def test_rows_that_the_server_refused_belong_to_a_closed_batch(link: Link) -> None:
    link.call(lambda api: api.update_stream("OUT", {"duplicate_window": 120_000_000_000}))
    ledger = Ledger(link)
    write(link, batches([5], row_ids=True), place=replace(PLACE, series="other"))
    tally = write(link, batches(list(range(10)), row_ids=True), run=ledger.next_run())
    assert (tally.written, tally.duplicates) == (9, 1)
    ledger.close(QUERY, 0, tally.rows)
    assert write(link, batches(list(range(10)), row_ids=True), run=ledger.next_run()) == TaskTally(skipped=10)


# -- another number of partitions --------------------------------------------------------------------------------------


def partition(ids: list[int], number: int, count: int) -> list[int]:
    """What one of so many partitions gets."""
    return ids[len(ids) * number // count : len(ids) * (number + 1) // count]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 3), (3, 3)])
def test_a_batch_that_runs_again_on_other_partitions_is_written_once(link: Link, before: int, after: int) -> None:
    rng, ledger, ids = random.Random(SEED), Ledger(link), list(range(COUNT))
    run = ledger.next_run()
    for number in range(before - 1):
        write(link, batches(partition(ids, number, before)), place=replace(PLACE, partition=number), run=run)
    last = replace(PLACE, partition=before - 1)
    rows = batches(partition(ids, before - 1, before))
    with pytest.raises(Crash):
        write_partition(link, last, rows, lambda confirm: Crashing(link, confirm, 0, stored=True), run=run)
    stored = link.last_sequence("OUT")
    rng.shuffle(ids)
    run = ledger.next_run()
    tallies = [
        write(link, batches(partition(ids, number, after)), place=replace(PLACE, partition=number), run=run)
        for number in range(after)
    ]
    assert ids_stored(link) == once(COUNT), f"seed {SEED}"
    assert sum(tally.skipped for tally in tallies) == stored
    ledger.close(QUERY, 0, COUNT)
    again = write(link, batches(ids), run=ledger.next_run())
    assert again == TaskTally(skipped=COUNT)


def test_equal_rows_in_several_partitions_are_written_as_often_as_they_come(link: Link) -> None:
    """Two tasks have the same row, and an earlier run wrote it once: one of them writes it, the other leaves it out."""
    ledger = Ledger(link)
    write(link, batches([7] * 10), place=replace(PLACE, partition=5), run=ledger.next_run())
    run = ledger.next_run()
    first = write(link, batches([7] * 8), place=replace(PLACE, partition=0), run=run)
    second = write(link, batches([7] * 8), place=replace(PLACE, partition=1), run=run)
    assert (first.skipped, second.skipped) == (8, 2)
    assert ids_stored(link) == {7: 16}


def test_tasks_that_claim_at_the_same_time_share_what_is_written(link: Link) -> None:
    rng, ledger, ids = random.Random(SEED), Ledger(link), [n % 700 for n in range(8000)]
    write(link, batches(ids[:5000]), run=ledger.next_run())
    rng.shuffle(ids)
    run = ledger.next_run()

    def task(number: int) -> TaskTally:
        with Link(link.settings) as own:
            return write(own, batches(partition(ids, number, 4)), place=replace(PLACE, partition=number), run=run)

    with ThreadPoolExecutor(4) as pool:
        tallies = list(pool.map(task, range(4)))
    assert ids_stored(link) == Counter(ids), f"seed {SEED}"
    assert sum(tally.skipped for tally in tallies) == 5000


def test_an_attempt_of_a_new_run_finds_what_the_one_before_it_claimed_and_wrote(link: Link) -> None:
    ledger, ids = Ledger(link), list(range(3000))
    write(link, batches(ids[:1500]), place=replace(PLACE, partition=1), run=ledger.next_run())
    run = ledger.next_run()
    with pytest.raises(Crash):
        write_partition(link, PLACE, batches(ids), lambda confirm: Crashing(link, confirm, 0, stored=True), run=run)
    random.Random(SEED).shuffle(ids)
    tally = write(link, batches(ids), run=run)
    assert (tally.written, tally.skipped) == (500, 2500)
    assert ids_stored(link) == once(3000)


def test_a_task_of_an_earlier_run_that_begins_late_writes_nothing(link: Link) -> None:
    ledger = Ledger(link)
    earlier, later = ledger.next_run(), ledger.next_run()
    write(link, batches(list(range(10))), run=later)
    for number in (0, 1):  # the log of the later run, and a log that nobody has opened
        with pytest.raises(Superseded):
            write(link, batches(list(range(10))), place=replace(PLACE, partition=number), run=earlier)
    assert ids_stored(link) == once(10)


def test_a_task_of_an_earlier_run_whose_partition_is_gone_can_append_no_more(link: Link) -> None:
    ledger, ids = Ledger(link), list(range(COUNT))
    run = ledger.next_run()

    def slow() -> Iterator[ChunkRows]:
        for number, rows in enumerate(batches(ids, size=1000)):
            if number == 3:
                write(link, batches(ids), run=ledger.next_run())
            yield rows

    with Link(link.settings) as other, pytest.raises(Superseded):
        write(other, slow(), place=replace(PLACE, partition=9), run=run)
    assert ids_stored(link) == once(COUNT)


# -- streams and ledgers of before -------------------------------------------------------------------------------------


def here(link: Link) -> LedgerPlace:
    """The place of a task, in the stream as it is now."""
    return replace(PLACE, created=created(link.stream_info("OUT")))


def test_a_stream_that_was_deleted_and_created_again_is_written_again(link: Link) -> None:
    ledger, ids = Ledger(link), list(range(100))
    write(link, batches(ids), place=here(link), run=ledger.next_run())
    ledger.close(here(link).of, 0, 100)
    config = link.stream_info("OUT").config
    link.call(lambda api: api.delete_stream("OUT"))
    link.call(lambda api: api.create_stream(config))
    assert write(link, batches(ids), place=here(link), run=ledger.next_run()).written == 100
    assert ids_stored(link) == once(100)


def as_version_1(link: Link, monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Leave a log as version 1 did, at its third chunk: without creation time, run and row digests."""
    put = Ledger.put

    def put_old(self: Ledger, key: str, value: dict[str, Any], *rest: Any) -> int:
        old = {name: field for name, field in value.items() if name != "run"} | {"version": 1}
        if "chunk" in old:
            old["chunk"] = {name: field for name, field in old["chunk"].items() if name != "row_digests"}
        return put(self, key, old, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "put", put_old)
        crash(link, batches(ids), 2, stored=True)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_batch_that_version_1_has_begun_is_continued(
    link: Link, monkeypatch: pytest.MonkeyPatch, shuffled: bool
) -> None:
    ledger, ids = Ledger(link), list(range(COUNT))
    as_version_1(link, monkeypatch, ids)
    if shuffled:
        random.Random(SEED).shuffle(ids)
    run = ledger.next_run()
    tallies = [
        write(link, batches(partition(ids, number, 2)), place=replace(here(link), partition=number), run=run)
        for number in range(2)
    ]
    assert sum(tally.skipped for tally in tallies) == 3000
    assert ids_stored(link) == once(COUNT)
    for batch in (0, 1):
        ledger.close(here(link).of, batch, COUNT)
    assert ledger.values(PLACE.key) == [], "what version 1 left is gone"


def test_what_version_1_has_closed_is_closed_unless_the_stream_is_another_one(link: Link) -> None:
    ledger, ids = Ledger(link), list(range(10))
    ledger.put("OUT.query", {"version": 1, "closed": 0})
    assert write(link, batches(ids), place=here(link), run=ledger.next_run()) == TaskTally()
    ledger.close(here(link).of, 0, 0)
    assert ledger.record(here(link).of).rows is None
    link.call(lambda api: api.delete_stream("OUT"))
    link.call(lambda api: api.create_stream({"name": "OUT", "subjects": ["o.>"], "allow_atomic": True}))
    assert write(link, batches(ids), place=here(link), run=ledger.next_run()).written == 10


# -- attempts that are overtaken ---------------------------------------------------------------------------------------


def test_an_attempt_that_was_overtaken_stops_and_repeats_nothing(link: Link, nats_server: EmbeddedServer) -> None:
    ids = list(range(COUNT))

    def slow() -> Iterator[ChunkRows]:
        for number, rows in enumerate(batches(ids, size=1000)):
            if number == 3:  # two chunks are written; the third waits for these rows
                with Link(nats_server.settings) as other:
                    write(other, batches(ids))
            yield rows

    with pytest.raises(Superseded):
        write(link, slow())
    assert ids_stored(link) == once(COUNT)


def test_an_attempt_that_freezes_before_it_sends_does_not_send_when_it_wakes(
    link: Link, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(range(COUNT))
    frozen = iter([steps.INTENDED] * 2)

    def freeze(step: str) -> None:
        if step == next(frozen, None):
            with Link(nats_server.settings) as other:
                write(other, batches(ids))

    monkeypatch.setattr(steps, "reached", freeze)
    with pytest.raises(Superseded):
        write(link, batches(ids))
    assert ids_stored(link) == once(COUNT)


@pytest.mark.kills
@pytest.mark.short
def test_a_killed_server_in_the_middle_costs_nothing(link: Link, nats_server: EmbeddedServer) -> None:
    def rows() -> Iterator[ChunkRows]:
        for number, part in enumerate(batches(list(range(COUNT)), size=500)):
            if number in (3, 6):
                nats_server.kill()
                nats_server.start()
            yield part

    assert write(link, rows()).written == COUNT
    assert ids_stored(link) == once(COUNT)


def consume_all(link: Link) -> Counter[int]:
    """Take everything out of a WorkQueue stream, as its consumers would."""
    state = link.stream_info("OUT").state
    wanted = Range(stream="OUT", first=state.first_seq, last=state.last_seq, direct=True)
    found = Counter(int(data) for part in read_range(link.settings, wanted) for data in part.column("data").to_pylist())
    link.call(lambda api: api.purge_stream("OUT"))
    return found


SHORT = 100_000_000
"""A duplicate window, in nanoseconds, that is over when one waits for it."""


@pytest.mark.parametrize("window", [SHORT, 120_000_000_000], ids=["passed", "open"])
def test_chunks_that_were_consumed_meanwhile_are_not_written_again(link: Link, window: int) -> None:
    link.call(lambda api: api.delete_stream("OUT"))
    config = {"name": "OUT", "subjects": ["o.>"], "allow_atomic": True, "allow_direct": True}
    link.call(lambda api: api.create_stream({**config, "retention": "workqueue", "duplicate_window": window}))
    crash(link, batches(list(range(COUNT))), 2, stored=True)
    consumed = consume_all(link)
    if window == SHORT:
        time.sleep(2 * SHORT / 1_000_000_000)
    write(link, batches(list(range(COUNT))))
    consumed += consume_all(link)
    # Only for the chunk under way does it take the duplicate window to know.
    in_doubt = Counter(range(2000, 3000)) if window == SHORT else Counter()
    assert consumed == once(COUNT) + in_doubt


@pytest.mark.kills
def test_a_change_of_leaders_in_the_middle_costs_nothing(nats_cluster: EmbeddedCluster) -> None:
    with Link(nats_cluster.settings) as link:
        config = {"name": "OUT", "subjects": ["o.>"], "allow_atomic": True, "num_replicas": 3}
        link.call(lambda api: api.create_stream({**config, "duplicate_window": 100_000_000}))
        Ledger(link).create_bucket(3)

        def rows() -> Iterator[ChunkRows]:
            for number, part in enumerate(batches(list(range(COUNT)), size=500)):
                if number == 3:
                    other.call(lambda api: api.step_down_stream("OUT"))
                if number == 6:
                    other.call(lambda api: api.step_down_stream("KV_penstock_ledger"))
                yield part

        with Link(nats_cluster.settings) as other:
            assert write(link, rows()).written == COUNT
        assert ids_stored(link) == once(COUNT)


def test_a_stream_of_another_domain_is_written_with_its_own_ledger(nats_leaf: LeafPair) -> None:
    with Link(nats_leaf.leaf.settings) as leaf, Link(replace(nats_leaf.hub.settings, domain="leaf")) as link:
        leaf.call(lambda api: api.create_stream({"name": "OUT", "subjects": ["o.>"], "allow_atomic": True}))
        Ledger(link).create_bucket(1)
        crash(link, batches(list(range(COUNT))), 2, stored=True)
        assert write(link, batches(list(range(COUNT)))).skipped == 3000
        assert ids_stored(leaf) == once(COUNT)
        assert leaf.has_stream("KV_penstock_ledger")


def test_rows_with_known_message_ids_are_left_out_and_the_others_written(link: Link) -> None:
    link.call(lambda api: api.update_stream("OUT", {"duplicate_window": 120_000_000_000}))
    write(link, batches([5, 700, 1999], row_ids=True))
    tally = write(link, batches(list(range(2000)), row_ids=True), place=LedgerPlace("OUT", "query", 1, 0))
    assert (tally.written, tally.duplicates) == (1997, 3)
    assert ids_stored(link) == once(2000)


def test_fast_delivery_repeats_at_most_the_chunk_that_was_under_way(link: Link) -> None:
    ids = list(range(25_000))

    def failing() -> Iterator[ChunkRows]:
        yield from batches(ids[:24_000])
        raise Crash

    with pytest.raises(Crash):
        write(link, failing(), kind="fast")
    tally = write(link, batches(ids), kind="fast")
    assert tally.skipped == 10_000
    stored = ids_stored(link)
    assert set(stored) == set(ids)
    assert all(stored[n] == 1 for n in range(10_000))
    assert max(stored.values()) == 2


def test_a_batch_without_rows_leaves_no_trace(link: Link) -> None:
    assert write(link, iter([])) == TaskTally()
    assert link.last_sequence("OUT") == 0
    assert link.last_sequence("KV_penstock_ledger") == 0


@pytest.mark.parametrize("kind", ["atomic", "fast"])
def test_rows_that_carry_orders_of_their_old_stream_are_written_without_them(link: Link, kind: str) -> None:
    """A copy of a stream with roll-ups, schedules and TTLs into a stream that has none of it."""
    types = {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True}
    fields = [("data", "string"), ("headers", types)]
    schema = StructType.fromJson(
        {"fields": [{"name": name, "type": kind_, "nullable": True, "metadata": {}} for name, kind_ in fields]}
    )
    maker = RowMaker(replace(columns_of(schema, "OUT", ["o.>"], "o.x"), ttl=False))
    orders = [("Nats-Rollup", "all"), ("Nats-Schedule", "@every 1s"), ("Nats-TTL", "1h"), ("Own", "1")]
    headers = pa.array([orders] * 3, pa.map_(pa.string(), pa.string()))
    rows = maker.rows(pa.record_batch({"data": pa.array(["0", "1", "2"]), "headers": headers}))
    assert write(link, iter([rows]), kind).written == 3
    assert ids_stored(link) == once(3)


@pytest.mark.parametrize("kind", ["atomic", "fast"])
def test_a_body_as_large_as_the_server_takes_is_written(link: Link, kind: str) -> None:
    link.persistently(lambda: None)
    body = b"x" * (link.connection.info.max_payload - 1000)
    rows = ChunkRows(pa.array(["o.1"] * 3), pa.array([b"a", body, b"b"]))
    write_partition(link, PLACE, iter([rows]), partial(delivery, kind, link, "OUT"), None)
    assert [len(message.data) for message in stream_messages(link.settings, "OUT")] == [1, len(body), 1]
