"""Payloads: from data to what a handler asks for, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel

from penstock.app.payloads import BadPayload, encode, parser
from penstock.errors import ConfigError


class Model(BaseModel):
    id: int
    name: str = "x"


class Struct(msgspec.Struct):
    id: int
    name: str = "x"


@dataclass
class Inner:
    price: float


@dataclass
class Data:
    id: int
    inner: Inner | None = None
    many: list[Inner] = field(default_factory=list)
    open: dict[str, Any] = field(default_factory=dict)


class Colour(Enum):
    RED = "red"


@dataclass
class Rich:
    id: UUID
    at: datetime
    day: date = date(2026, 1, 1)
    hour: time = time(1)
    cost: Decimal = Decimal(0)
    colour: Colour = Colour.RED
    size: Literal["s", "l"] = "s"
    pair: tuple[int, str] = (0, "")
    row: tuple[int, ...] = ()
    tags: set[str] = field(default_factory=set)
    note: Annotated[str, "free text"] = ""


ID = UUID("12345678-1234-5678-1234-567812345678")
RICH = Rich(ID, datetime(2026, 1, 2, tzinfo=UTC), cost=Decimal("1.50"), pair=(1, "a"), row=(1, 2), tags={"x"})
RICH_DATA = (
    b'{"id":"12345678-1234-5678-1234-567812345678","at":"2026-01-02T00:00:00+00:00","day":"2026-01-01",'
    b'"hour":"01:00:00","cost":"1.50","colour":"red","size":"s","pair":[1,"a"],"row":[1,2],"tags":["x"],"note":""}'
)


def test_a_dataclass_may_have_fields_that_json_has_no_types_for() -> None:
    assert parsed(Rich, RICH_DATA) == RICH
    assert encode(RICH) == RICH_DATA
    start = b'{"id":"12345678-1234-5678-1234-567812345678","at":"2026-01-02T00:00:00Z",'
    assert parsed(Rich, start + b'"cost":1.5}').cost == Decimal("1.5")
    for wrong, reason in {
        b'"day":"tomorrow"}': 'Rich.day is "tomorrow", not a date',
        b'"day":3}': "Rich.day is 3, not date",
        b'"cost":"x"}': 'Rich.cost is "x", not a Decimal',
        b'"colour":"blue"}': "Rich.colour is \"blue\", not one of 'red'",
        b'"size":"m"}': "Rich.size is \"m\", not one of 's', 'l'",
        b'"pair":[1]}': "Rich.pair has 1 items, not 2",
        b'"pair":[1,2]}': "Rich.pair[1] is 2, not str",
    }.items():
        with pytest.raises(BadPayload) as told:
            parsed(Rich, start + wrong)
        assert reason in str(told.value)


def test_lists_and_dicts_of_models_hold_models() -> None:
    for one in (Model, Struct, Data):
        assert parsed(list[one], b'[{"id": 1}, {"id": 2}]') == [one(id=1), one(id=2)]  # type: ignore[valid-type]
        assert parsed(dict[str, one], b'{"a": {"id": 3}}') == {"a": one(id=3)}  # type: ignore[valid-type]
        with pytest.raises(BadPayload, match=rf"no list\[{one.__name__}\]"):
            parsed(list[one], b'[{"id": "x"}, 5]')  # type: ignore[valid-type]
    assert parsed(list[int], b"[1]") == [1]


def parsed(kind: Any, data: bytes) -> Any:
    parse = parser(kind)
    assert parse is not None
    return parse(data)


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        (bytes, b"\xff", b"\xff"),
        (str, "ä".encode(), "ä"),
        (dict, b'{"a":1}', {"a": 1}),
        (dict[str, int], b'{"a":1}', {"a": 1}),
        (list, b"[1]", [1]),
        (Any, b"null", None),
        (Model, b'{"id":1}', Model(id=1)),
        (Struct, b'{"id":1}', Struct(1)),
        (Data, b'{"id":1,"inner":{"price":2},"many":[{"price":2.5}],"more":1}', Data(1, Inner(2.0), [Inner(2.5)])),
        (Data, b'{"id":1,"inner":null}', Data(1)),
        (Data, b'{"id":1,"open":{"a":[null]}}', Data(1, open={"a": [None]})),
    ],
)
def test_data_becomes_what_is_asked_for(kind: Any, data: bytes, expected: Any) -> None:
    assert parsed(kind, data) == expected


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        (str, b"\xff", "no UTF-8"),
        (dict, b"{", "no JSON"),
        (dict, b"[" * 100_000, "no JSON"),
        (dict, b"[1]", "another kind than dict"),
        (Model, b'{"id":"x"}', "no Model"),
        (Struct, b'{"id":"x"}', "no Struct"),
        (Data, b'{"name":"x"}', "Data has no id"),
        (Data, b'{"id":true}', "Data.id is true, not int"),
        (Data, b'{"id":1,"many":[{"price":"x"}]}', 'Data.many[0].price is "x", not float'),
        (Data, b"[]", "not an object"),
    ],
)
def test_what_data_cannot_become_is_told_with_the_reason(kind: Any, data: bytes, reason: str) -> None:
    with pytest.raises(BadPayload) as told:
        parsed(kind, data)
    assert reason in str(told.value)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (b"x", b"x"),
        ("ä", "ä".encode()),
        ({"a": [1]}, b'{"a":[1]}'),
        (Model(id=1), b'{"id":1,"name":"x"}'),
        (Struct(1), b'{"id":1,"name":"x"}'),
        (Inner(2.0), b'{"price":2.0}'),
        (bytearray(b"x"), b"x"),
        (memoryview(b"x"), b"x"),
        ([Model(id=1), Struct(1), Inner(2.0)], b'[{"id":1,"name":"x"},{"id":1,"name":"x"},{"price":2.0}]'),
        ({"at": datetime(2026, 1, 2, tzinfo=UTC)}, b'{"at":"2026-01-02T00:00:00+00:00"}'),
    ],
)
def test_values_become_data(value: Any, data: bytes) -> None:
    assert encode(value) == data


@pytest.mark.parametrize("value", [float("nan"), {"a": float("inf")}, object(), {1: object()}, {b"a": 1}])
def test_what_json_has_no_place_for_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be the data of a message"):
        encode(value)
