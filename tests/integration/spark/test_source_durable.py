"""The durable of a query: whose it is, what fits, and what a commit acknowledges; without a Spark job."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.support.spark_readers import logged, rows
from tests.support.streams import Streams

from penstock.errors import ConfigError
from penstock.jetstream.direct import DirectGetRefused
from penstock.server.cluster import EmbeddedCluster
from penstock.spark import commit as committing
from penstock.spark import durable, steps
from penstock.spark.commit import Acknowledging
from penstock.spark.durable import ConsumerTaken, UnfitConsumer
from penstock.spark.link import Link
from penstock.testing import eventually
from penstock.wire.blocking import run

# -- the durable -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_of_two_queries_on_one_durable_one_is_refused_with_both_names(
    streams: Streams, stream_reader: Any, retention: str
) -> None:
    streams.make("S", retention=retention)
    first = stream_reader(consumer="d")
    start = logged(first.initialOffset())
    streams.number("s.a", 1, 10)
    end = logged(first.latestOffset(start, ReadAllAvailable()))
    first.commit(end)
    second = stream_reader(consumer="d")
    begun = logged(second.initialOffset())
    assert begun["sequence"] == 10, "it continues where the durable is"
    streams.number("s.a", 11, 20)
    both = f"{begun['owner']}.*{end['owner']}"
    further = logged(first.latestOffset(end, ReadAllAvailable()))
    for again, commit in ((first, further), (stream_reader(consumer="d"), further)):
        with pytest.raises(ConsumerTaken, match=both):
            again.commit(commit)
    with pytest.raises(ConsumerTaken, match=both):
        stream_reader(consumer="d").latestOffset(further, ReadAllAvailable())
    assert durable.floor(streams.consumer("S", "d")) == 10, "nothing was committed for the one that is refused"
    second.commit(logged(second.latestOffset(begun, ReadAllAvailable())))
    assert durable.floor(streams.consumer("S", "d")) == 20


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_batches_that_spark_does_not_commit_in_time_are_refused_where_acknowledging_deletes(
    streams: Streams, stream_reader: Any, retention: str
) -> None:
    """With asynchronous progress tracking Spark runs batches whose predecessors are not on disk."""
    streams.make("S", retention=retention)
    first, second = (stream_reader(consumer=name, maxRowsPerTrigger="5", subjects=f"s.{name}") for name in "ab")
    starts = [logged(reader.initialOffset()) for reader in (first, second)]
    for _ in range(3):
        for name in "ab":
            streams.number(f"s.{name}", 1, 5)
    for synchronous, reader, end in zip((True, False), (first, second), starts, strict=True):
        ends = [end]
        for _ in range(2):
            ends.append(logged(reader.latestOffset(ends[-1], ReadMaxRows(5))))
            if synchronous:
                reader.commit(ends[-2])
        if synchronous or retention == "limits":
            assert reader.latestOffset(ends[-1], ReadMaxRows(5))["sequence"] > ends[-1]["sequence"]
        else:
            with pytest.raises(ConfigError, match="asyncProgressTrackingEnabled"):
                reader.latestOffset(ends[-1], ReadMaxRows(5))


def test_a_query_stays_the_owner_however_often_spark_asks_where_to_begin(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    reader = stream_reader(consumer="d")
    start = logged(reader.initialOffset())
    end = logged(reader.latestOffset(start, ReadAllAvailable()))
    assert logged(reader.initialOffset())["owner"] == start["owner"] == end["owner"]
    # The driver dies before the batch is committed: Spark asks again, and goes on with the offsets that it has logged.
    second = stream_reader(consumer="d")
    assert rows(second, second.partitions(logged(second.initialOffset()), end)) == list(range(1, 11))
    assert second.latestOffset(end, ReadAllAvailable()) == end
    third = stream_reader(consumer="d")
    assert third.latestOffset(end, ReadAllAvailable()) == end
    assert durable.floor(streams.consumer("S", "d")) == 10


def test_a_checkpoint_of_before_there_were_owners_takes_a_durable_that_nobody_has(
    streams: Streams, stream_reader: Any
) -> None:
    created = streams.make("S").raw["created"]
    streams.number("s.a", 1, 10)
    run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit", "metadata": {"my": "own"}}))
    old = {"version": 1, "stream": "S", "created": created, "sequence": 4, "tasks": 1, "openStart": False}
    for _ in range(2):  # also after a crash before the next offset was logged
        end = logged(stream_reader(consumer="d").latestOffset(old, ReadAllAvailable()))
    assert end["owner"] == streams.consumer("S", "d").config["metadata"]["penstock.query"] != ""
    assert streams.consumer("S", "d").config["metadata"]["my"] == "own"
    stream_reader(consumer="d").commit(end)
    stream_reader(consumer="d").initialOffset()
    with pytest.raises(ConsumerTaken):
        stream_reader(consumer="d").latestOffset(old, ReadAllAvailable())


def test_the_durable_is_made_with_the_filters_of_the_query(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    stream_reader(consumer="d", subjects="s.a,s.b").initialOffset()
    found = streams.consumer("S", "d")
    assert set(found.config["filter_subjects"]) == {"s.a", "s.b"}
    assert found.config["ack_policy"] == "explicit"


@pytest.mark.parametrize(
    ("retention", "config", "complaint"),
    [
        ("limits", {"ack_policy": "none"}, "ack policy 'none'"),
        ("limits", {"ack_policy": "explicit", "filter_subject": "s.b"}, "it filters s.b, and the query reads s.a"),
        ("limits", {"ack_policy": "explicit"}, "it filters every subject"),
        ("interest", {"ack_policy": "none", "filter_subject": "s.a"}, "ack policy 'none'"),
        ("limits", {"ack_policy": "explicit", "filter_subject": "s.a", "deliver_policy": "new"}, "it delivers 'new'"),
        ("workqueue", {"ack_policy": "explicit", "filter_subject": "s.b"}, "it filters s.b"),
        (
            "limits",
            {"ack_policy": "explicit", "filter_subject": "s.a", "deliver_subject": "x"},
            "a pull consumer is needed",
        ),
    ],
)
def test_an_unfit_durable_is_refused(
    streams: Streams, stream_reader: Any, retention: str, config: dict[str, Any], complaint: str
) -> None:
    streams.make("S", retention=retention)
    run(streams.api.create_consumer("S", {"durable_name": "d", **config}))
    with pytest.raises(UnfitConsumer, match=complaint):
        stream_reader(consumer="d", subjects="s.a").initialOffset()


@pytest.mark.parametrize("subjects", ["", "s.a"])
def test_who_else_consumes_a_work_queue_is_named(streams: Streams, stream_reader: Any, subjects: str) -> None:
    streams.make("S", retention="workqueue")
    for name in "ab":
        config = {"durable_name": f"worker_{name}", "ack_policy": "explicit", "filter_subject": f"s.{name}"}
        run(streams.api.create_consumer("S", config))
    rivals = "'worker_a'" if subjects else "'worker_a', 'worker_b'"
    with pytest.raises(UnfitConsumer, match=f"consumer 'd' cannot be made: .* and {rivals} has what the query reads"):
        stream_reader(consumer="d", subjects=subjects).initialOffset()


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_streams_that_consuming_deletes_need_a_durable(
    streams: Streams, stream_reader: Any, batch_reader: Any, retention: str
) -> None:
    streams.make("S", retention=retention)
    for failing in (stream_reader().initialOffset, batch_reader().partitions):
        with pytest.raises(ConfigError, match="name a durable consumer"):
            failing()
    with pytest.raises(ConfigError, match="never acknowledged"):
        stream_reader(consumer="d", startingOffsets="latest").initialOffset()


def test_streams_that_consuming_deletes_need_direct_get(streams: Streams, stream_reader: Any) -> None:
    streams.make("S", retention="workqueue", allow_direct=False)
    with pytest.raises(DirectGetRefused, match="allow_direct: true"):
        stream_reader(consumer="d").initialOffset()


def test_a_commit_on_a_limits_stream_moves_the_durable(streams: Streams, stream_reader: Any) -> None:
    streams.make("S")
    streams.number("s.a", 1, 10)
    reader = stream_reader(consumer="d", maxRowsPerTrigger="6")
    start = logged(reader.initialOffset())
    end = logged(reader.latestOffset(start, reader.getDefaultReadLimit()))
    assert streams.consumer("S", "d").ack_floor_stream_seq == 0
    reader.commit(end)
    reader.commit(end)
    found = streams.consumer("S", "d")
    assert (found.ack_floor_stream_seq, found.pending) == (6, 4)
    assert stream_reader(consumer="d").initialOffset()["sequence"] == 6


@pytest.mark.kills
@pytest.mark.short
def test_a_commit_on_replicas_takes_a_status_that_overtakes_its_messages(nats_cluster: EmbeddedCluster) -> None:
    """A consumer with replicas says that a pull is complete before its messages arrive."""
    with Link(nats_cluster.settings) as link:
        streams = Streams(link.connection)
        link.call(lambda api: api.stream_names())  # connects
        streams.make("S", retention="workqueue", num_replicas=3, deny_purge=True)
        run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit"}))
        streams.number("s.a", 1, 5000)
        for end in (2500, 5000):
            committing.commit(link, streams.info("S"), streams.consumer("S", "d"), end)
            assert streams.consumer("S", "d").ack_floor_stream_seq == end
        eventually(lambda: streams.info("S").state.messages == 0, 30, "nothing left", lambda: streams.info("S").state)


@pytest.mark.parametrize(("retention", "deny_purge"), [("workqueue", False), ("workqueue", True), ("interest", False)])
@pytest.mark.parametrize("subjects", ["", "s.a", "s.a,s.c"])
def test_a_commit_deletes_exactly_the_range(
    streams: Streams, stream_reader: Any, retention: str, deny_purge: bool, subjects: str
) -> None:
    streams.make("S", retention=retention, deny_purge=deny_purge)
    first = stream_reader(consumer="d", subjects=subjects)
    start = logged(first.initialOffset())
    if subjects and retention == "interest":  # without interest in s.b its messages would not be kept
        run(
            streams.api.create_consumer(
                "S", {"durable_name": "other", "filter_subject": "s.b", "ack_policy": "explicit"}
            )
        )
    for n in range(1, 41):
        streams.number("s.b" if n % 4 == 0 else "s.a", n, n)
    end = logged(first.latestOffset(start, ReadMaxRows(22)))
    assert len(left(streams)) == 40
    first.commit(end)
    done = [n for n in range(1, end["sequence"] + 1) if not subjects or n % 4]
    assert left(streams) == [n for n in range(1, 41) if n not in done]
    again = stream_reader(consumer="d", subjects=subjects)  # another process, after a crash
    again.commit(end)
    assert left(streams) == [n for n in range(1, 41) if n not in done]
    last = logged(again.latestOffset(end, ReadAllAvailable()))
    again.commit(last)
    assert left(streams) == ([n for n in range(1, 41) if n % 4 == 0] if subjects else [])


def left(streams: Streams) -> list[int]:
    """The sequences that the stream still holds."""
    state = run(streams.api.stream_info("S", deleted_details=True)).raw["state"]
    gone = set(state.get("deleted") or [])
    if not state["messages"]:
        return []
    return [n for n in range(state["first_seq"], state["last_seq"] + 1) if n not in gone]


def test_a_commit_goes_on_when_the_server_is_too_slow_for_one_try(
    streams: Streams, stream_reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Acknowledging._pulled
    monkeypatch.setattr(Acknowledging, "_pulled", lambda self, count: whole(self, min(count, 3)) and False)
    streams.make("S", retention="workqueue", deny_purge=True)
    reader = stream_reader(consumer="d")
    start = logged(reader.initialOffset())
    streams.number("s.a", 1, 30)
    reader.commit(logged(reader.latestOffset(start, ReadMaxRows(25))))
    assert left(streams) == list(range(26, 31))


@pytest.mark.parametrize("deny_purge", [False, True])
def test_a_commit_that_was_cut_short_is_taken_up(streams: Streams, stream_reader: Any, deny_purge: bool) -> None:
    streams.make("S", retention="workqueue", deny_purge=deny_purge)
    reader = stream_reader(consumer="d")
    start = logged(reader.initialOffset())
    streams.number("s.a", 1, 30)
    end = logged(reader.latestOffset(start, ReadMaxRows(20)))
    # As a crash leaves it: some messages delivered and not answered.
    streams.connection.subscribe("inbox")
    streams.connection.publish("$JS.API.CONSUMER.MSG.NEXT.S.d", b"10", reply="inbox")
    for _ in range(10):
        streams.connection.receive(5)
    assert streams.consumer("S", "d").ack_pending == 10
    stream_reader(consumer="d").commit(end)
    assert left(streams) == list(range(21, 31))


# -- work queues, by purge ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_acknowledging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acknowledging, "run", lambda _: pytest.fail("acknowledged one by one"))


@pytest.mark.usefixtures("no_acknowledging")
@pytest.mark.parametrize("subjects", ["", "s.a"])
def test_a_work_queue_is_purged_up_to_the_batch_and_others_keep_theirs(
    streams: Streams, stream_reader: Any, subjects: str
) -> None:
    streams.make("S", retention="workqueue")
    reader = stream_reader(consumer="d", subjects=subjects)
    start = logged(reader.initialOffset())
    if subjects:
        other = {"durable_name": "other", "filter_subject": "s.b", "ack_policy": "explicit"}
        run(streams.api.create_consumer("S", other))
    for n in range(1, 41):
        streams.number("s.b" if n % 4 == 0 else "s.a", n, n)
    end = logged(reader.latestOffset(start, ReadMaxRows(22)))
    reader.commit(end)
    found = streams.consumer("S", "d")
    assert (durable.floor(found), found.ack_pending) == (end["sequence"], 0)
    assert found.pending == len([n for n in left(streams) if not subjects or n % 4])
    if subjects:
        assert streams.consumer("S", "other").pending == 10
    more = logged(reader.latestOffset(end, ReadAllAvailable()))
    assert rows(reader, reader.partitions(end, more)) == [
        n for n in range(end["sequence"] + 1, 41) if not subjects or n % 4
    ]


def test_what_was_skipped_by_an_operator_is_not_purged(streams: Streams, stream_reader: Any) -> None:
    streams.make("S", retention="workqueue")
    stream_reader(consumer="d").initialOffset()
    streams.number("s.a", 1, 30)
    run(streams.api.reset_consumer("S", "d", 11))
    reader = stream_reader(consumer="d", startingOffsets="consumer")
    start = logged(reader.initialOffset())
    assert start["sequence"] == 10
    reader.commit(logged(reader.latestOffset(start, ReadMaxRows(10))))
    assert left(streams) == [*range(1, 11), *range(21, 31)]


class Crash(Exception):
    """Stands for the end of the process."""


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("step", [steps.PURGING, steps.PURGED])
def test_a_crash_at_either_side_of_a_purge_loses_and_repeats_nothing(
    streams: Streams, stream_reader: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def reached(name: str) -> None:
        if name == step:
            raise Crash

    streams.make("S", retention="workqueue")
    reader = stream_reader(consumer="d")
    start = logged(reader.initialOffset())
    streams.number("s.a", 1, 30)
    end = logged(reader.latestOffset(start, ReadMaxRows(20)))
    with monkeypatch.context() as patched:
        patched.setattr(steps, "reached", reached)
        with pytest.raises(Crash):
            reader.commit(end)
    assert len(left(streams)) == (30 if step == steps.PURGING else 10)
    again = stream_reader(consumer="d")  # Spark has the batch in its commit log, and goes on behind it
    further = logged(again.latestOffset(end, ReadAllAvailable()))
    assert left(streams) == list(range(21, 31))
    assert rows(again, again.partitions(end, further)) == list(range(21, 31))
    again.commit(further)
    assert left(streams) == []


@pytest.mark.kills
def test_a_purge_holds_on_three_replicas_whichever_server_dies(nats_cluster: EmbeddedCluster) -> None:
    with Link(nats_cluster.settings) as link:
        streams = Streams(link.connection)
        link.call(lambda api: api.stream_names())  # connects
        streams.make("S", retention="workqueue", num_replicas=3)
        run(streams.api.create_consumer("S", {"durable_name": "d", "ack_policy": "explicit"}))
        streams.number("s.a", 1, 3000)
    for turn, node in enumerate(nats_cluster.nodes, start=1):
        with Link(nats_cluster.settings) as link:
            end = turn * 900
            found = link.call(lambda api: api.consumer_info("S", "d"))
            committing.commit(link, link.stream_info("S"), found, end)
            node.kill()

            def there(link: Link = link) -> tuple[int, int, int]:
                state, consumer = link.stream_info("S").state, link.call(lambda api: api.consumer_info("S", "d"))
                # Its position may be an older one, of before the change of leaders: nothing is left there.
                return state.messages, max(state.first_seq - 1, durable.floor(consumer)), consumer.pending

            wanted = (3000 - end, end, 3000 - end)
            eventually(partial(lambda look, right: look() == right, there, wanted), 60, f"{wanted}", there)
            node.start()
            eventually(lambda: nats_cluster.leader is not None, 60, "a leader")
