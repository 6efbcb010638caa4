"""Replays and discards that run behind their page, which shows how far they are."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from penstock.deadletter.tally import Tally
from penstock.errors import PenstockError

log = logging.getLogger(__name__)

MAX_KEPT = 100
"""Runs whose pages can still be opened."""

Work = Callable[[Callable[[Tally], None]], Awaitable[Tally]]
"""Does something to dead letters, and calls its argument with what is done so far."""


@dataclass(slots=True)
class Run:
    """One replay or discard."""

    action: str
    actor: str
    expected: int
    """Letters that matched when it was started."""
    rate_limit: float | None = None
    """Messages a second, at most."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    ended: datetime | None = None
    tally: Tally = field(default_factory=Tally)
    error: str | None = None

    @property
    def done(self) -> int:
        """Letters replayed or discarded, by this run or by one that was interrupted before."""
        return self.tally.done + self.tally.found_done

    @property
    def looked_at(self) -> int:
        return self.done + self.tally.left

    @property
    def took(self) -> timedelta:
        return (self.ended or datetime.now(UTC)) - self.began

    @property
    def rate(self) -> float:
        """Letters a second since it began."""
        return self.done / max(self.took.total_seconds(), 0.001)

    @property
    def remaining(self) -> timedelta | None:
        """How long it goes on at this rate; None when that is not known."""
        left = self.expected - self.looked_at
        return timedelta(seconds=left / self.rate) if self.ended is None and self.done and left > 0 else None


class Runs:
    """The runs of this process. One that the end of the process interrupts is finished by the next replay."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, id_: str) -> Run | None:
        return self._runs.get(id_)

    def start(self, run: Run, work: Work) -> None:
        """Begin to work; returns at once."""
        self._runs[run.id] = run
        ended = [one.id for one in self._runs.values() if one.ended]
        for id_ in ended[: max(0, len(self._runs) - MAX_KEPT)]:
            del self._runs[id_]
        task = asyncio.create_task(self._work(run, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, run: Run, work: Work) -> None:
        def progressed(tally: Tally) -> None:
            run.tally = tally

        try:
            run.tally = await work(progressed)
        except PenstockError as exc:
            run.error = str(exc)
        except Exception as exc:
            log.exception("the %s of dead letters failed", run.action)
            run.error = f"{type(exc).__name__}: {exc}"
        finally:
            run.ended = datetime.now(UTC)

    async def close(self) -> None:
        """Interrupt what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
