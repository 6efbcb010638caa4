"""Columns that are built from bytes hold what a conversion of Python values would give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.wire.columns import constant, is_valid, numbers, repeated, values


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_text_is_repeated(count: int) -> None:
    assert repeated("Straße", count).equals(pa.array(["Straße"] * count, pa.string()))


def test_a_constant_is_a_scalar_of_text() -> None:
    assert constant("x").equals(pa.scalar("x"))
    assert constant("").equals(pa.scalar(""))


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float64])
def test_numbers_go_there_and_back(kind: type) -> None:
    given: np.ndarray[Any, Any] = np.arange(10, dtype=kind)[::2]
    assert numbers(given).equals(pa.array(given))
    assert values(numbers(given).slice(1, 3)).tolist() == [2, 4, 6]


@pytest.mark.parametrize("given", [[None, "a", None, "b"] * 5, ["a"] * 4, []])
def test_what_is_null_is_not_valid_also_in_a_slice(given: list[str | None]) -> None:
    column = pa.array(given, pa.string())
    assert is_valid(column).tolist() == [one is not None for one in given]
    assert is_valid(column.slice(1, 3)).tolist() == [one is not None for one in given[1:4]]
