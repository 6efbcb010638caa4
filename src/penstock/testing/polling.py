"""Waiting for something to become true, without a sleep that hopes."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast, overload

T = TypeVar("T")

PAUSE = 0.02  # seconds between two looks
WITHIN = 30.0
"""Seconds: much longer than anything takes, except on a machine that has too much to do."""


def eventually(
    condition: Callable[[], T | None], within: float = WITHIN, what: str = "", state: Callable[[], Any] | None = None
) -> T:
    """Call `condition` until it returns something true, and return that.

    A condition that raises `AssertionError` is not true yet. After `within` seconds an `AssertionError` says `what`
    was waited for, what the condition returned or raised last, and what `state` returns at that moment.
    """
    deadline = time.monotonic() + within
    while True:
        value, complaint = _looked(condition)
        if value:
            return cast(T, value)
        if time.monotonic() >= deadline:
            shown = state() if state else None
            raise AssertionError(_report(condition, within, what, value, complaint, shown)) from complaint
        time.sleep(PAUSE)


@overload
async def eventually_async(
    condition: Callable[[], Awaitable[T | None]],
    within: float = WITHIN,
    what: str = "",
    state: Callable[[], Any] | None = None,
) -> T: ...


@overload
async def eventually_async(
    condition: Callable[[], T | None], within: float = WITHIN, what: str = "", state: Callable[[], Any] | None = None
) -> T: ...


async def eventually_async(
    condition: Callable[[], Any], within: float = WITHIN, what: str = "", state: Callable[[], Any] | None = None
) -> Any:
    """`eventually` for asyncio: `condition` and `state` may be plain or async functions."""
    deadline = time.monotonic() + within
    while True:
        value, complaint = await _looked_async(condition)
        if value:
            return value
        if time.monotonic() >= deadline:
            shown = await _awaited(state()) if state else None
            raise AssertionError(_report(condition, within, what, value, complaint, shown)) from complaint
        await asyncio.sleep(PAUSE)


def _looked(condition: Callable[[], Any]) -> tuple[Any, AssertionError | None]:
    try:
        return condition(), None
    except AssertionError as exc:
        return None, exc


async def _looked_async(condition: Callable[[], Any]) -> tuple[Any, AssertionError | None]:
    try:
        return await _awaited(condition()), None
    except AssertionError as exc:
        return None, exc


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _report(
    condition: Callable[..., Any], within: float, what: str, value: Any, complaint: AssertionError | None, shown: Any
) -> str:
    named = what or getattr(condition, "__qualname__", repr(condition))
    last = f"raised {complaint}" if complaint else f"returned {value!r}"
    text = f"waited {within:g} s in vain for: {named}; the condition last {last}"
    return text if shown is None else f"{text}; state: {shown!r}"
