"""Pulls the next page of a shared reader while its last one is being confirmed.

Only for a reader that goes from page to page without a pause, and only for a moment: what no fetch takes within
`KEPT_FOR` seconds is given back to the server. What a crash leaves behind is what a crash after a pull leaves: messages
that are delivered again after the ack wait. Nothing is in the book before a fetch takes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from penstock.errors import PenstockError
from penstock.facts.pull import Delivered, PagePuller, Want
from penstock.jetstream.model import ConsumerInfo

KEPT_FOR = 0.1  # seconds
NO_PAUSE = 0.02
"""Seconds between a confirmation and the next fetch, up to which a reader counts as one that makes no pause."""
SHARE_OF_ACK_WAIT = 0.1
"""Nothing is pulled ahead when `KEPT_FOR` is more than this share of the consumer's ack wait."""

GiveBack = Callable[[list[Delivered]], Awaitable[None]]
Consumer = tuple[str, str]


@dataclass(slots=True)
class ReaderPace:
    """How one reader goes from page to page."""

    want: Want | None = None
    """The limits of its last fetch, if that filled a page with more behind it."""
    confirmed_at: float = 0.0
    steady: bool = False
    """Whether its last fetch came right after a confirmation."""


@dataclass(slots=True)
class PulledAhead:
    """A pull that no fetch has asked for yet."""

    want: Want
    info: ConsumerInfo
    """The consumer just before."""
    connection: int
    """Which connection it was, since a server that was restarted may have forgotten the deliveries."""
    before: tuple[str, ...]
    """Pages that were open when it was requested."""
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[list[Delivered]] | None = None

    def fits(self, now: ConsumerInfo) -> bool:
        """Whether the consumer is the same as it was: neither created anew nor reset since."""
        then = self.info
        return now.created == then.created and now.delivered_consumer_seq >= then.delivered_consumer_seq


class Ahead:
    """What one process has pulled ahead, by consumer."""

    def __init__(self, puller: PagePuller, give_back: GiveBack) -> None:
        self._puller = puller
        self._give_back = give_back
        self._paces: dict[Consumer, ReaderPace] = {}
        self._pulls: dict[Consumer, PulledAhead] = {}
        self._returns: set[asyncio.Task[None]] = set()

    # -- how a reader goes on --------------------------------------------------------------------------------------

    def fetching(self, at: Consumer) -> None:
        pace = self._paces.setdefault(at, ReaderPace())
        pace.steady = time.monotonic() - pace.confirmed_at < NO_PAUSE

    def fetched(self, at: Consumer, want: Want, count: int, behind: int) -> None:
        self._paces.setdefault(at, ReaderPace()).want = want if behind and count == want.limit else None

    def confirmed(self, at: Consumer) -> None:
        self._paces.setdefault(at, ReaderPace()).confirmed_at = time.monotonic()

    # -- pulls -----------------------------------------------------------------------------------------------------

    def begin(
        self, at: Consumer, info: ConsumerInfo, connection: int, before: tuple[str, ...], ack_wait: float
    ) -> None:
        """Pull the next page of a reader that has been going from page to page; does nothing for another one."""
        pace = self._paces.get(at)
        if pace is None or not pace.steady or pace.want is None or at in self._pulls:
            return
        if ack_wait * SHARE_OF_ACK_WAIT < KEPT_FOR or int(info.config.get("max_deliver") or -1) > 0:
            return  # what is given back counts as delivered: a message that may come only so often would be lost
        pull = self._pulls[at] = PulledAhead(replace(pace.want, wait=0.0), info, connection, before)
        pull.task = asyncio.create_task(self._pull(at, pull))

    async def _pull(self, at: Consumer, pull: PulledAhead) -> list[Delivered]:
        try:
            found = await self._puller.pull(*at, pull.want)
        except PenstockError:
            found = []  # the next fetch finds out why
        asyncio.get_running_loop().call_later(KEPT_FOR, self._expire, at, pull)
        return found

    def _expire(self, at: Consumer, pull: PulledAhead) -> None:
        if self._pulls.get(at) is pull:
            del self._pulls[at]
            self._return(pull)

    def _return(self, pull: PulledAhead) -> None:
        task = asyncio.create_task(self.give_back(pull))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def give_back(self, pull: PulledAhead) -> None:
        """Let the server deliver again what was pulled ahead and is not used."""
        assert pull.task
        if found := await pull.task:
            await self._give_back(found)

    async def taken(
        self, info: ConsumerInfo, want: Want, connection: int
    ) -> tuple[PulledAhead, list[Delivered]] | None:
        """What was pulled ahead for a fetch of the consumer as it is now; None when nothing was, or it does not fit."""
        pull = self._pulls.pop((info.stream, info.name), None)
        if pull is None:
            return None
        assert pull.task
        same = (pull.want.limit, pull.want.max_bytes, pull.connection) == (want.limit, want.max_bytes, connection)
        if not (same and pull.fits(info)):
            self._return(pull)
            return None
        found = await pull.task
        return (pull, found) if found else None

    async def close(self) -> None:
        """Give back everything."""
        pulls, self._pulls = list(self._pulls.values()), {}
        for pull in pulls:
            with suppress(PenstockError):
                await self.give_back(pull)
