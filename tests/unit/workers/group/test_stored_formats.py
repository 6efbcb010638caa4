"""What a group has in KV is read as it was written by earlier versions: samples of their values."""

from __future__ import annotations

from typing import Any

from penstock.jetstream.kv import Entry
from penstock.workers.group.assignment import ASSIGNMENT, Published
from penstock.workers.group.claims import Claim, ProgressRecord, Reached, claims_in, progress_key, records_in
from penstock.workers.group.identity import WorkerRecord, workers_in
from penstock.workers.partitions import Partition

STREAM = "2026-11-16T10:00:00+00:00"
CLAIM = {
    "v": 1, "handoff": 70, "owner": "worker-1", "incarnation": "a1b2", "settled": True, "holders": ["worker-0"],
    "acquired": 55, "tries": [71, 2], "suspect": True, "stream": STREAM, "mark": 7,
}  # fmt: skip
RECORD = {"v": 1, "stream": STREAM, "partitions": {"p.1": [55, 70, 71, 2]}, "trial": ["p.1", 71], "ended": False}
WORKER = {
    "v": 1, "instance": "pod-1", "incarnation": "a1b2", "state": "active", "labels": ["gpu"], "capacity": 2,
    "host": "host", "pid": 42, "beat": 7, "applied": 3, "mode": "working", "failures": 1, "troubles": ["late"],
}  # fmt: skip
SHARE = {
    "v": 1, "version": 1,
    "partitions": [{"id": "p.1", "subjects": ["s.p.1"], "weight": 2, "labels": ["gpu"]}],
}  # fmt: skip
HEAD = {
    "v": 1, "version": 1, "members": ["worker-1"], "parked": ["q"], "stream": "S", "leader": "worker-1",
    "paused": False, "pins": {},
}  # fmt: skip


def entry(value: Any) -> Entry:
    return Entry(value, 60)


def test_a_claim() -> None:
    found = claims_in({"claims.p.1": entry(CLAIM)})["p.1"]
    assert found == Claim("p.1", 70, "worker-1", "a1b2", True, ("worker-0",), 55, (71, 2), True, STREAM, 60, 7)
    assert found.token == 55
    assert {**found.to_json(), "holders": ["worker-0"], "tries": [71, 2]} == CLAIM


def test_a_claim_of_a_version_that_knew_neither_tries_nor_streams() -> None:
    old = {key: value for key, value in CLAIM.items() if key not in ("tries", "suspect", "stream", "mark")}
    assert claims_in({"claims.p.1": entry(old)})["p.1"].about(STREAM, 7).handoff == 70


def test_a_record() -> None:
    found = records_in({progress_key("worker-1", "a1b2"): entry(RECORD)})["progress.worker-1.a1b2"]
    assert found == ProgressRecord(STREAM, {"p.1": Reached(70, (71, 2), 55)}, ("p.1", 71))
    assert {**found.to_json(), "trial": ["p.1", 71]} == RECORD


def test_a_worker() -> None:
    found = workers_in({"workers.worker-1": entry(WORKER)})["worker-1"]
    expected = WorkerRecord("pod-1", "a1b2", "active", frozenset({"gpu"}), 2, "host", 42, 7, 3, "working", 1, ("late",))
    assert found == expected
    assert found.to_json() == WORKER


def test_an_assignment() -> None:
    found = Published.parse({f"{ASSIGNMENT}.head": entry(HEAD), f"{ASSIGNMENT}.of.worker-1": entry(SHARE)})
    assert found.owners == {"p.1": "worker-1"}
    assert found.by_id == {"p.1": Partition("p.1", ("s.p.1",), 2, frozenset({"gpu"}))}
    assert (found.version, found.members, found.parked, found.stream) == (1, ("worker-1",), ("q",), "S")
