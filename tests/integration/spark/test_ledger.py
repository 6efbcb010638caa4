"""The ledger on a real server: who may append, what survives, what is forgotten."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.support.freezing import freeze

from penstock.jetstream.connection import WrongRevision
from penstock.server.embedded import EmbeddedServer
from penstock.spark.history import Intent, LedgerPlace, Series, Written
from penstock.spark.ledger import STREAM, Ledger, OtherRows, Superseded
from penstock.spark.link import Link
from penstock.testing import EmbeddedCluster, eventually
from penstock.wire import frames, headers

PLACE = LedgerPlace("OUT", "query", 3, 0)
QUERY = PLACE.of


@pytest.fixture
def ledger(nats_server: EmbeddedServer) -> Iterator[Ledger]:
    with Link(nats_server.settings) as link:
        ledger = Ledger(link)
        ledger.create_bucket(replicas=1)
        yield ledger


def intent(number: int) -> Intent:
    return Intent(number, f"d{number}", 10, 0, f"b{number}", "o.x")


def test_a_second_attempt_sees_what_the_first_wrote_and_stops_it(ledger: Ledger) -> None:
    first = ledger.open_log(PLACE)
    first.chunk(intent(0), previous=0)
    first.chunk(intent(1), previous=10)
    second = ledger.open_log(PLACE)
    assert second.history.written == (Written(intent(0), 10),)
    assert second.history.doubtful == intent(1)
    with pytest.raises(Superseded, match=r"OUT\.query\.3\.0"):
        first.chunk(intent(2), previous=20)
    second.done(20)
    second.end(20)
    assert len(ledger.open_log(PLACE).history.written) == 2


def test_an_append_whose_answer_was_lost_is_recognised_as_our_own(ledger: Ledger) -> None:
    log = ledger.open_log(PLACE)
    revision = log._revision
    log.chunk(intent(0), previous=0)
    log._revision, log._appended = revision, log._appended - 1  # as if the answer never came, and the call is repeated
    log.chunk(intent(0), previous=0)
    log.end(10)
    assert len(ledger.open_log(PLACE).history.written) == 1


def test_closing_is_repeatable_and_never_goes_back(ledger: Ledger) -> None:
    assert ledger.closed(QUERY) == -1
    for batch in (0, 1, 1, 0):
        ledger.close(QUERY, batch)
    assert ledger.closed(QUERY) == 1
    assert ledger.closed(Series("OUT", "another")) == -1


def test_closing_keeps_the_logs_of_its_batch_until_the_next_one_closes(ledger: Ledger) -> None:
    other, next_ = LedgerPlace("OUT", "other", 3, 0), LedgerPlace("OUT", "query", 4, 0)
    for place in (PLACE, LedgerPlace("OUT", "query", 3, 1), other):
        ledger.open_log(place).chunk(intent(0), previous=0)
    ledger.close(QUERY, 2)
    ledger.close(QUERY, 3)
    assert len(ledger.values("OUT.query")) == 1
    assert len(ledger.values(PLACE.key)) == 3, "open, chunk, sealed"
    ledger.open_log(next_).chunk(intent(0), previous=0)
    ledger.close(QUERY, 4)
    assert ledger.values(PLACE.key) == ledger.values("OUT.query.3.1") == []
    assert [len(ledger.values(place.key)) for place in (next_, other)] == [3, 2]


def test_a_closed_batch_cannot_be_closed_with_another_number_of_rows(ledger: Ledger) -> None:
    ledger.close(QUERY, 3, rows=100)
    ledger.close(QUERY, 3, rows=100)
    with pytest.raises(OtherRows, match="50 rows, and 100 were written"):
        ledger.close(QUERY, 3, rows=50)
    ledger.close(QUERY, 3, rows=0, finished="skip")
    assert ledger.record(QUERY).rows == 100
    ledger.close(QUERY, 3, rows=150, finished="write")
    assert ledger.record(QUERY).rows == 150


def test_an_attempt_of_a_closed_batch_that_wakes_up_late_can_no_longer_append(ledger: Ledger) -> None:
    late = ledger.open_log(PLACE)
    ledger.close(QUERY, 3)
    with pytest.raises(Superseded):
        late.chunk(intent(0), previous=0)


def test_the_ledger_survives_a_killed_server_and_the_link_comes_back(nats_server: EmbeddedServer) -> None:
    with Link(nats_server.settings) as link:
        ledger = Ledger(link)
        ledger.create_bucket(replicas=1)
        log = ledger.open_log(PLACE)
        log.chunk(intent(0), previous=0)
        nats_server.kill()
        nats_server.start()
        log.chunk(intent(1), previous=10)
        ledger.create_bucket(replicas=1)
        assert ledger.open_log(PLACE).history.doubtful == intent(1)


@pytest.mark.kills
def test_a_write_that_the_replicas_do_not_have_yet_is_a_conflict_too(nats_cluster: EmbeddedCluster) -> None:
    """A replicated stream refuses an append with 10164 while another one is on its way to the followers."""
    with Link(nats_cluster.settings) as link:
        Ledger(link).create_bucket(replicas=3)
        eventually(lambda: link.stream_info(STREAM).leader, what="a leader of the ledger")
        name = link.stream_info(STREAM).leader
    leader = next(node for node in nats_cluster.nodes if node.config.name == name)
    followers = [node for node in nats_cluster.nodes if node is not leader]
    with Link(replace(leader.settings, timeout=1.0)) as link:
        ledger = Ledger(link)
        first = ledger.open_log(PLACE)
        expected = headers.encode({"Nats-Expected-Last-Subject-Sequence": str(first._revision)})
        entry = json.dumps({"version": 1, "kind": "open"}).encode()
        freeze(*(node.pid for node in followers))
        try:
            link.connection.send(frames.publish(f"$KV.penstock_ledger.{PLACE.key}", entry, headers=expected))
            with pytest.raises(WrongRevision, match="wrong last sequence") as refused:
                ledger.put(PLACE.key, {"kind": "open"}, first._revision)
            assert refused.value.err_code == 10164
        finally:
            for node in followers:
                os.kill(node.pid, signal.SIGCONT)
        with pytest.raises(Superseded):
            first.chunk(intent(0), previous=0)


@pytest.mark.kills
def test_the_ledger_gets_as_many_replicas_as_the_stream_that_is_written(nats_cluster: EmbeddedCluster) -> None:
    with Link(nats_cluster.settings) as link:
        for replicas, expected in ((1, 1), (3, 3), (1, 3)):
            Ledger(link).create_bucket(replicas)
            assert link.stream_info(STREAM).config["num_replicas"] == expected


def test_replicas_that_a_server_cannot_have_do_not_stop_a_write(ledger: Ledger) -> None:
    ledger.create_bucket(replicas=3)
    assert ledger.link.stream_info(STREAM).config["num_replicas"] == 1
