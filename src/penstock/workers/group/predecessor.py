"""What the process that had our id before us has left: claims that are still its, and a consumer that is ours now.

Before the filters of that consumer are changed, all of it is taken over. Its ack floor counts for the claims; and on an
Interest stream its filters may be all that keeps messages which nobody has handled.
"""

from __future__ import annotations

from penstock.jetstream.kv import Bucket
from penstock.publish.control import Control
from penstock.workers.group import handoff
from penstock.workers.group.assignment import Assignments
from penstock.workers.group.claims import CLAIMS, Claim, claims_in
from penstock.workers.group.handoff import Retention, View
from penstock.workers.options import GroupOptions
from penstock.workers.partitions import Partition


class Predecessor:
    """Asked until nothing of it is left."""

    def __init__(self, control: Control, bucket: Bucket, options: GroupOptions, worker_id: str) -> None:
        self.done = False
        """Whether there is none, or nothing left of it."""
        self._control = control
        self._bucket = bucket
        self._options = options
        self._id = worker_id

    async def left_something(self) -> bool:
        """Whether there was one: without a consumer there is nothing to take over."""
        name = f"{self._options.group}-{self._id}"
        names = await self._control.jetstream.consumer_names(self._options.stream)
        self.done = not any(one == name or one.startswith(f"{name}-") for one in names)
        return not self.done

    async def claims(self, known: dict[str, Partition]) -> dict[str, Claim]:
        """The claims of all partitions of the assignment; these become known."""
        everybody = (await Assignments(self._bucket).current()).partitions.values()
        known |= {partition.id: partition for some in everybody for partition in some}
        found = claims_in(await self._bucket.entries(CLAIMS))
        return {partition: claim for partition, claim in found.items() if partition in known}

    def still_covered(self, view: View, mine: frozenset[str], retention: Retention) -> set[str]:
        """What the consumer has to go on covering, though it is not ours: what could not be taken, or was held.

        `view` is what was seen before anything was taken, `mine` is what we have now.
        """
        if view.wanted is None:
            return set()
        left = handoff.inherited(view) - mine
        self.done = not left
        if retention is not Retention.INTEREST:
            return set()
        held = {partition for partition, claim in view.claims.items() if self._id in claim.holders}
        return (left | held) - mine
