"""Payloads: from data to what a handler asks for, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from penstock.app.payloads import BadPayload, encode, parser


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
    ],
)
def test_values_become_data(value: Any, data: bytes) -> None:
    assert encode(value) == data
