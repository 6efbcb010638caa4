"""What somebody should look at: said by a worker with its heartbeat, shown by `group show`, counted in the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable

from penstock.jetstream.kv import Bucket, Entry
from penstock.workers.dispatch.lanes import Lane

log = logging.getLogger(__name__)

LONG = 30.0
"""Seconds after which a handler that runs is told of."""
SHOWN = 5
"""Partitions that are named; of the others, the number."""
PROBLEMS = "assignment.problems"
"""The key with what the leader finds wrong with the partitions."""


def left_out(count: int) -> list[str]:
    """Partitions that are not served for lack of room."""
    if not count:
        return []
    return [
        f"{count} partitions are not served: their subjects do not fit. Add workers, give partitions wildcard "
        "subjects, raise max_subjects, or allow another consumer with max_consumers"
    ]


def running(lanes: Iterable[Lane]) -> list[tuple[str, float]]:
    """The partitions whose handlers run now, and for how many seconds."""
    now = time.perf_counter()
    return [(lane.id, now - started) for lane in list(lanes) if (started := lane.started) is not None]


class LongRunning:
    """Handlers that run for long. Each is logged once."""

    def __init__(self, long: float = LONG) -> None:
        self.now: dict[str, float] = {}
        """Seconds by partition."""
        self._long = long

    def look(self, lanes: Collection[Lane]) -> None:
        """See who runs for long now."""
        found = {id_: seconds for id_, seconds in running(lanes) if seconds >= self._long}
        for id_ in found.keys() - self.now.keys():
            log.warning("the handler of %s has been running for %.0f s; nothing else of it is handled", id_, found[id_])
        for id_ in self.now.keys() - found.keys():
            log.info("the handler of %s has ended", id_)
        self.now = found

    def told(self) -> list[str]:
        """A line about them, if there are any."""
        if not self.now:
            return []
        longest = sorted(self.now.items(), key=lambda item: -item[1])
        named = ", ".join(f"{id_} for {seconds:.0f} s" for id_, seconds in longest[:SHOWN])
        more = f" and {len(longest) - SHOWN} more" if len(longest) > SHOWN else ""
        return [f"handlers that have not ended: {named}{more}"]


class Problems:
    """What the leader finds wrong with the partitions, kept where `group show` sees it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._written: list[str] | None = None

    async def write(self, found: list[str]) -> None:
        """Write them down, unless they are there."""
        if found == self._written:
            return
        if found or await self._bucket.get(PROBLEMS):
            await self._bucket.put(PROBLEMS, {"v": 1, "problems": found})
        self._written = list(found)


def problems_in(entry: Entry | None) -> tuple[str, ...]:
    """What was written down."""
    found = entry.value.get("problems") if entry else None
    return tuple(map(str, found)) if isinstance(found, list) else ()
