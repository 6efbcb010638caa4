"""What the log of a task says about what is written."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.spark.ledger import History, Intent, Place, Written, history_of, key_token


def opened() -> dict[str, Any]:
    return {"kind": "open"}


def chunk(number: int, previous: int = 0) -> dict[str, Any]:
    return {"kind": "chunk", "chunk": asdict(intent(number)), "previous": previous}


def intent(number: int) -> Intent:
    return Intent(number, f"d{number}", 10, number * 10, f"b{number}", "o.x")


def test_the_last_chunk_of_an_unfinished_log_is_doubtful() -> None:
    history = history_of([opened(), chunk(0), chunk(1, previous=17)])
    assert history == History((Written(intent(0), 17),), intent(1))


def test_an_ended_log_has_no_doubts() -> None:
    history = history_of([opened(), chunk(0), {"kind": "end", "previous": 10}])
    assert history == History((Written(intent(0), 10),))


def test_a_chunk_found_in_the_stream_is_written_and_one_not_found_is_free_again() -> None:
    found = history_of([opened(), chunk(0), opened(), {"kind": "done", "previous": 12}])
    assert found == History((Written(intent(0), 12),))
    lost = history_of([opened(), chunk(0), opened(), {"kind": "void"}])
    assert lost == History()
    again = history_of([opened(), chunk(0), opened(), {"kind": "void"}, chunk(0), chunk(1, previous=10)])
    assert [written.intent.number for written in again.written] == [0]


def test_opening_alone_settles_nothing() -> None:
    assert history_of([opened(), chunk(0), opened(), opened()]) == History((), intent(0))


def test_keys_are_valid_and_different_for_different_names() -> None:
    assert Place("OUT", "7f-a_b", 3, 1).key == "OUT.7f-a_b.3.1"
    tokens = {key_token(text) for text in ("a b", "a.b", "a_b", "a>b")}
    assert len(tokens) == 4
    assert all(token.replace("-", "").replace("_", "").isalnum() for token in tokens)
