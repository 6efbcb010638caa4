"""The poll helpers of `penstock.testing`."""

from __future__ import annotations

from typing import assert_type

import pytest

from penstock.testing import eventually, eventually_async


def test_the_first_true_value_is_returned() -> None:
    values = iter([0, None, "", 7, 8])
    assert eventually(lambda: next(values)) == 7


def test_an_assertion_that_fails_means_not_yet() -> None:
    values = iter([1, 2, 3])

    def condition() -> bool:
        assert next(values) == 3
        return True

    assert eventually(condition)


def test_any_other_error_ends_the_wait_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0)


def test_the_timeout_says_what_was_waited_for_and_the_state() -> None:
    with pytest.raises(AssertionError) as caught:
        eventually(list, within=0.05, what="a message", state=lambda: {"depth": 4})
    assert "waited 0.05 s in vain for: a message" in str(caught.value)
    assert "returned []" in str(caught.value)
    assert "{'depth': 4}" in str(caught.value)


async def test_async_conditions_are_awaited_and_plain_ones_called() -> None:
    values = iter([0, 5])

    async def condition() -> int:
        return next(values)

    async def state() -> str:
        return "asleep"

    assert await eventually_async(condition) == 5
    assert await eventually_async(lambda: 6) == 6
    with pytest.raises(AssertionError, match="asleep"):
        await eventually_async(lambda: 0, within=0.05, state=state)


async def test_what_is_returned_is_never_none_for_the_type_checker_either() -> None:
    def plain() -> str | None:
        return "a"

    async def awaited() -> str | None:
        return "b"

    assert assert_type(eventually(plain), str) == "a"
    assert assert_type(await eventually_async(plain), str) == "a"
    assert assert_type(await eventually_async(awaited), str) == "b"
