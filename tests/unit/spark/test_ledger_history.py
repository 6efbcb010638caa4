"""What the log of a task says about what is written."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from penstock.spark.history import (
    History,
    Intent,
    LedgerPlace,
    Refused,
    Series,
    Written,
    history_of,
    key_token,
    packed,
    unpacked,
)


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


def test_logs_of_version_1_stay_readable() -> None:
    logged = [
        '{"version":1,"kind":"open","owner":"0f","n":0}',
        '{"version":1,"kind":"chunk","owner":"0f","n":1,"previous":0,"chunk":{"number":0,"digest":"ab","rows":2,'
        '"after":0,"batch_id":"b0","subject":"o.x"}}',
        '{"version":1,"kind":"end","owner":"0f","n":2,"previous":2}',
    ]
    history = history_of(json.loads(line) for line in logged)
    assert history == History((Written(Intent(0, "ab", 2, 0, "b0", "o.x"), 2, run=0),))
    assert history.written[0].intent.row_digests == ""


def test_logs_of_version_2_stay_readable() -> None:
    own = '"version":2,"run":7,"owner":"0f"'
    logged = [
        f'{{{own},"kind":"open","n":0}}',
        f'{{{own},"kind":"chunk","n":1,"previous":0,"chunk":{{"number":0,"digest":"ab","rows":1,"after":0,'
        '"batch_id":"b0","subject":"o.x","row_digests":"YWFhYWFhYWFhYWFh"}}',
        f'{{{own},"kind":"refused","n":2,"rows":"YmJiYmJiYmJiYmJi"}}',
        f'{{{own},"kind":"end","n":3,"previous":2}}',
    ]
    written = Written(Intent(0, "ab", 1, 0, "b0", "o.x", packed([b"a" * 12])), 2, run=7)
    assert history_of(map(json.loads, logged)) == History(
        (written,), refused=(Refused((b"b" * 12,), run=7),), doubtful_run=7
    )


def test_opening_alone_settles_nothing() -> None:
    assert history_of([opened(), chunk(0), opened(), opened()]) == History((), intent(0))


def test_chunks_and_refused_rows_belong_to_the_run_that_wrote_them() -> None:
    refused = {"kind": "refused", "rows": packed([b"a" * 12, b"b" * 12]), "run": 7}
    history = history_of([opened(), {**chunk(0), "run": 7}, {"kind": "end", "previous": 10, "run": 7}, refused])
    assert history.written == (Written(intent(0), 10, run=7),)
    assert history.refused == (Refused((b"a" * 12, b"b" * 12), run=7),)
    assert unpacked("") == []


def test_a_stream_created_again_has_other_keys() -> None:
    old = Series("OUT", "query")
    one, other = (Series("OUT", "query", f"2026-11-16T17:40:43.{n}Z") for n in (1, 2))
    assert (old.key, one.key) == ("OUT.query", "OUT.202611161740431.query")
    assert len({old.key, one.key, other.key}) == 3
    assert one.version_1() == old


def test_keys_are_valid_and_different_for_different_names() -> None:
    assert LedgerPlace("OUT", "7f-a_b", 3, 1).key == "OUT.7f-a_b.3.1"
    tokens = {key_token(text) for text in ("a b", "a.b", "a_b", "a>b")}
    assert len(tokens) == 4
    assert all(token.replace("-", "").replace("_", "").isalnum() for token in tokens)
