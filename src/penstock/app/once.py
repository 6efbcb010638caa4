"""Results that are stored once, however often the message they come from is delivered.

The batch of results carries a *marker*: an empty message on a subject made of the input's stream, its creation time,
the consumer and the input's sequence, which must not exist yet. A batch that comes a second time is refused whole.

    1. the handler's results are collected
    2. results and marker are stored, all or nothing     crash before: the message comes again, and 2 stores it
    3. the message is acknowledged                       crash before: it comes again, 2 is refused: that is as good
    4. the marker goes, a while after the consumer's ack floor has passed the message

The stream must store the marker's subject (`penstock.done.<STREAM>.>`) and allow atomic batches, and must keep markers
until then: not an Interest stream, and no limit that removes them sooner. A process that has not reached the server for
`ack_wait` stores nothing for its messages any more, since they may have been redelivered to others: that is checked
right before 2 is sent. Only a process that is suspended exactly there, and for longer than markers are kept, could
store results twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Self

from penstock.app import payloads
from penstock.app.commits import Commits, PendingCommit
from penstock.consume.durable import GoneToOthers
from penstock.errors import AccessDenied, ConfigError, PenstockError, StreamNotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json
from penstock.publish.atomic import Publisher
from penstock.wire.headers import Headers

log = logging.getLogger(__name__)

MARKERS = "penstock.done"
PLACES = 1_000
"""Sequences whose markers share a token, so that they are deleted in one request."""
KEPT = 60.0
"""Seconds that markers stay after the ack floor has passed them."""
KEPT_OF_GROUPS = 24 * 3600.0
"""The same for groups, from when they were written: longer than any message waits for its next try."""
TIDY_EVERY = 5.0


@dataclass(frozen=True, slots=True)
class ResultOrigin:
    """The origin of a result."""

    stream: str
    created: str
    """Creation time of the stream, which distinguishes it from a later one of its name."""
    consumer: str
    sequence: int = 0
    batch: int = 1
    """Of several batches of one message, the number."""
    group: bool = False
    """Whether `consumer` is a group, which has no one ack floor: markers of groups stay for `KEPT_OF_GROUPS`."""

    @classmethod
    def named(cls, stream: str, created: datetime | None, consumer: str, group: bool = False) -> ResultOrigin:
        return cls(stream, f"{int(created.timestamp() * 1e6):x}" if created else "0", consumer, group=group)

    def of(self, sequence: int, batch: int) -> ResultOrigin:
        return replace(self, sequence=sequence, batch=batch)

    def markers(self, target: str) -> str:
        """What the subjects of all its markers begin with."""
        return f"{MARKERS}.{target}.{self.stream}.{self.created}.{self.consumer}"

    def marker(self, target: str) -> str:
        return f"{self.markers(target)}.{self.sequence // PLACES}.{self.sequence}.{self.batch}"


def check_target(target: str, config: Json | None) -> None:
    """Raise `ConfigError` for a stream that cannot keep results and their markers; None: there is none."""
    if config is None:
        raise ConfigError(
            f"there is no stream {target!r} to store results in: declare it in penstock.yaml and run `penstock apply`"
        )
    wanted = f"{MARKERS}.{target}.>"
    if not config.get("allow_atomic"):
        raise ConfigError(f"stream {target!r} takes no atomic batches; set `allow_atomic: true` in penstock.yaml")
    if config.get("retention") == "interest":
        raise ConfigError(f"stream {target!r} has retention interest, which keeps no markers: use another")
    if wanted not in (config.get("subjects") or ()):
        raise ConfigError(f"stream {target!r} has no place for markers: add {wanted!r} to its subjects")


class OnceBatch:
    """Results of one message for one stream: stored when the `async with` block ends, unless they are already."""

    def __init__(self, store: Callable[[OnceBatch], Awaitable[bool]]) -> None:
        self._store = store
        self.members: list[tuple[str, bytes, Headers | None]] = []
        self.repeated = False
        """Whether an earlier delivery of the message had stored its results: these ones are not stored."""

    def add(self, subject: str, value: Any, *, headers: Headers | None = None) -> None:
        """Add a result: bytes, text, or something that becomes JSON."""
        self.members.append((subject, payloads.encode(value), headers))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.members:
            self.repeated = not await self._store(self)


class Once:
    """Creates batches of results, and deletes their markers when they are no longer needed."""

    def __init__(self, publisher: Publisher, stood_still: Callable[[str], float]) -> None:
        """`stood_still`: time since the server last certainly received in-progress acknowledgements for the messages of
        a consumer, as a fraction of its ack wait."""
        self._publisher = publisher
        self._jetstream: JetStream = publisher.jetstream
        self._stood_still = stood_still
        self._learning: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._commits: dict[str, Commits] = {}
        self._written: dict[tuple[str, ResultOrigin], dict[int, float | None]] = {}
        """Markers that may be there, by target and by place; when the ack floor was seen to have passed them."""
        self._unlisted: set[tuple[str, ResultOrigin]] = set()
        """Where an earlier process may have left markers that were not listed yet."""

    def batch(self, target: str, origin: ResultOrigin) -> OnceBatch:
        def check() -> None:
            if self._stood_still(origin.consumer) > 1.0:
                raise GoneToOthers(
                    f"nothing was heard of the server for ack_wait: #{origin.sequence} is left to others"
                )

        async def store(batch: OnceBatch) -> bool:
            await self._require(target, origin)
            return await self._commits[target].store(PendingCommit(origin.marker(target), batch.members, check))

        return OnceBatch(store)

    async def _require(self, target: str, origin: ResultOrigin) -> None:
        """Check that the stream can store results, and remember where the marker will be stored."""
        if target not in self._commits:
            async with self._learning[target]:
                if target not in self._commits:
                    await self._check_target(target)
                    self._commits[target] = Commits(self._publisher, target)
        whole = (target, origin.of(0, 0))
        if whole not in self._written:
            self._written[whole] = {}
            self._unlisted.add(whole)
        self._written[whole][origin.sequence // PLACES] = None

    async def _check_target(self, target: str) -> None:
        try:
            config = (await self._jetstream.stream_info(target)).config
        except StreamNotFound:
            check_target(target, None)
            raise
        check_target(target, config)

    async def _left(self, target: str, origin: ResultOrigin) -> dict[int, float | None]:
        """Places of markers that an earlier process has left."""
        prefix = origin.markers(target)
        found = (await self._jetstream.stream_info(target, subjects_filter=f"{prefix}.>")).state.subjects
        return {int(subject.removeprefix(prefix).split(".")[1]): None for subject in found}

    async def tidy(self, now: float | None = None) -> None:
        """Remove the markers of messages that the ack floor has passed a while ago."""
        now = time.monotonic() if now is None else now
        for whole in list(self._unlisted):
            left = await self._left(*whole)
            self._written[whole] = {**left, **self._written[whole]}
            self._unlisted.discard(whole)
        for (target, origin), places in list(self._written.items()):
            floor = None if origin.group else await self._floor(origin)
            for place, passed in list(places.items()):
                if floor is not None and (place + 1) * PLACES > floor + 1:
                    continue
                if passed is None:
                    places[place] = now
                elif now - passed >= (KEPT_OF_GROUPS if origin.group else KEPT):
                    await self._jetstream.purge_stream(target, subject=f"{origin.markers(target)}.{place}.>")
                    del places[place]

    async def _floor(self, origin: ResultOrigin) -> int:
        return (await self._jetstream.consumer_info(origin.stream, origin.consumer)).ack_floor_stream_seq

    async def keep_tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_EVERY)
            try:
                await self.tidy()
            except AccessDenied as exc:
                log.info("markers of results stay until their stream's limits remove them: %s", exc)
                return
            except PenstockError:  # retried at the next call
                continue
