"""Why a body is no event, in words; without Spark."""

from __future__ import annotations

import pytest
from pyspark.sql.types import ArrayType, LongType, StructType

from penstock.spark.json_events import JsonFormat

SCHEMA = StructType().add("n", LongType()).add("list", ArrayType(LongType()))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "empty"),
        (b"\xff", "not UTF-8"),
        (b"[1]", "not an object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"[" * 900 + b"]" * 900 + b"}", "field n is"),
        (b'{"n": 1e999}', "field n is"),
        (b'{"n": ' + b"9" * 5_000 + b"}", "not JSON"),
        (b'{"list": [1, "\\ud800"]}', "field list[1] is"),
        (b'{"n": 1}', None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_body_that_is_no_event_says_why_and_ends_nothing(body: bytes, why: str | None) -> None:
    found = JsonFormat(SCHEMA).explain(body)
    assert (found is None) if why is None else (why in str(found))
