"""Nodes of a cluster that come back: consumers of a work queue are written again for them.

A server that was away while subjects went from one consumer of a work queue to another makes the consumers in an order
of its own when it comes back, finds the old one in the way of the new one, and refuses it (10100): its replica of that
consumer is missing from then on, while everybody is told that it is current. Any change of the consumer makes it try
again.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.errors import PenstockError
from penstock.workers.pull.consumer import WORK_QUEUE, WorkerConsumer

log = logging.getLogger(__name__)

LOOK_EVERY = 10.0  # seconds
TIMES = 3
"""So often a consumer is written again, one look after the other: what is in its way may be written later."""


class Absence:
    """Whether a node was away, and how often consumers were written since. Pure."""

    def __init__(self) -> None:
        self._due = TIMES  # who has just come does not know whether somebody was away before

    def over(self, away: bool) -> bool:
        """One look: whether consumers are to be written now."""
        if away:
            self._due = TIMES
            return False
        due, self._due = self._due, max(self._due - 1, 0)
        return due > 0


class NodeWatch:
    """Looks at the replicas of a worker's consumers from time to time."""

    def __init__(self, consumer: WorkerConsumer) -> None:
        self._consumer = consumer
        self._absence = Absence()

    async def run(self) -> None:
        """Look for as long as the worker lives."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                await self._look()
            except PenstockError as exc:
                self._absence.over(away=True)  # somebody does not answer
                log.info("%s: its replicas cannot be looked at now: %s", self._consumer.options.consumer, exc)

    async def _look(self) -> None:
        if self._consumer.retention != WORK_QUEUE:
            return
        replicas = await self._consumer.replicas()
        away = any(replica.offline or replica.silent for replica in replicas)
        if replicas and self._absence.over(away):
            await self._consumer.write_again()
            log.info("%s is written again, for a node that may have been away", self._consumer.options.consumer)
