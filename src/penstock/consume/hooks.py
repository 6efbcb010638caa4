"""Callbacks of a program for start and stop of its worker, and for added and removed partitions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError

log = logging.getLogger(__name__)

Moment = Callable[[], Awaitable[Any] | Any]
PartitionHook = Callable[[tuple[str, ...]], Awaitable[Any] | Any]
"""Takes the ids of partitions."""


class HookFailed(PenstockError):
    """A hook of the program raised: the start or the partitions that it prepares are held back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """Functions of a program, plain or async; each is optional.

    An exception of `on_start` ends the start. One of `on_assigned` is logged, and the hook is called again until it
    returns; no message of those partitions is handled before. Exceptions of the other two are logged, and nothing waits
    for them.
    """

    on_start: Moment | None = None
    """Called before the worker pulls anything. Called again when it rejoins, as after the loss of its id."""
    on_stop: Moment | None = None
    """Called when no message is handled any more, after `on_revoked` of all partitions."""
    on_assigned: PartitionHook | None = None
    """Called before the first message of these partitions is handled here."""
    on_revoked: PartitionHook | None = None
    """Called when no message of these partitions is handled here any more; before another worker may own them, unless
    it already does because this one was declared dead."""


class Announced:
    """Calls the hooks of one worker, and tracks which partitions they were called for."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._partitions: set[str] = set()

    async def started(self) -> None:
        if self._hooks.on_start:
            await _called("on_start", self._hooks.on_start)

    async def stopped(self) -> None:
        await self.revoked(self._partitions)
        if self._hooks.on_stop:
            await _tolerated("on_stop", self._hooks.on_stop)

    async def assigned(self, partitions: Collection[str]) -> None:
        new = tuple(sorted(set(partitions) - self._partitions))
        if new and self._hooks.on_assigned:
            await _called("on_assigned", self._hooks.on_assigned, new)
        self._partitions.update(new)

    async def revoked(self, partitions: Collection[str]) -> None:
        gone = tuple(sorted(self._partitions.intersection(partitions)))
        self._partitions.difference_update(gone)
        if gone and self._hooks.on_revoked:
            await _tolerated("on_revoked", self._hooks.on_revoked, gone)


async def _called(name: str, hook: Callable[..., Any], *arguments: object) -> None:
    try:
        answer = hook(*arguments)
        if inspect.isawaitable(answer):
            await answer
    except Exception as exc:
        raise HookFailed(f"{name} raised {type(exc).__name__}: {exc}") from exc


async def _tolerated(name: str, hook: Callable[..., Any], *arguments: object) -> None:
    try:
        await _called(name, hook, *arguments)
    except HookFailed as exc:
        log.error("%s", exc, exc_info=exc.__cause__)
