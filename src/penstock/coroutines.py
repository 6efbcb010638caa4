"""One text for asyncio and for blocking code: `async def` over a connection that waits in the event loop, or blocks.

Over `wire.aio` such a coroutine suspends while it waits. Over `wire.blocking` every wait blocks the thread, so that it
never suspends, and `finished` has its result after one step. The blocking classes are facades of the asyncio ones:
their methods are `blocked`, their attributes `passed`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

_thread = threading.local()
"""`blocks`: whether the coroutine that runs in this thread must not suspend."""


async def sleep(seconds: float) -> None:
    """Wait: in the event loop, or by blocking the thread when the coroutine is run by `finished`."""
    if getattr(_thread, "blocks", False):
        time.sleep(seconds)  # noqa: ASYNC251, no event loop runs it
    else:
        await asyncio.sleep(seconds)


def finished(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine over a blocking connection. It needs no event loop, and disturbs none that runs."""
    before = getattr(_thread, "blocks", False)
    _thread.blocks = True
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        _thread.blocks = before
    call.close()
    raise RuntimeError(f"{call} waits for an event loop, and was called by blocking code")


class blocked(Generic[P, T]):  # noqa: N801, it is used as a decorator is
    """A method of a facade: calls the async method of what `inner` is, and returns its result.

    The coroutine is run by the facade's own `run`, where it has one: with a lock, or in an event loop of its own.
    """

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self._name = method.__name__
        self.__doc__ = method.__doc__

    def __get__(self, facade: Any, owner: type | None = None) -> Callable[P, T]:
        if facade is None:
            return cast("Callable[P, T]", self)  # the class is looked at, as `help` does
        run, method = getattr(facade, "run", finished), getattr(facade.inner, self._name)

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = run(method(*args, **kwargs))
            return result

        return call


class passed(Generic[T]):  # noqa: N801
    """An attribute of a facade that is the attribute of the same name of what `inner` is."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, facade: Any, owner: type | None = None) -> T:
        if facade is None:
            return cast(T, self)
        value: T = getattr(facade.inner, self._name)
        return value

    def __set__(self, facade: Any, value: T) -> None:
        setattr(facade.inner, self._name, value)
