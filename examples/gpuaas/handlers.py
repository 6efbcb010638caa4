"""Handlers of the GPU cloud's services."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Credits:
    """The billing worker's view of top-ups: who has paid how much. An event that it has seen changes nothing."""

    limit: float
    """No top-up may be larger; somebody has to set it right."""
    seen: set[str] = field(default_factory=set)
    paid: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def handle(self, event: dict[str, Any]) -> None:
        """Book a top-up. Raises `ValueError` for one that is above the limit."""
        project, amount = event["payload"]["project_id"], event["payload"]["amount"]
        if amount > self.limit:
            raise ValueError(f"a top-up of {amount:g} for {project} is above the limit of {self.limit:g}")
        if event["event_id"] not in self.seen:
            self.seen.add(event["event_id"])
            self.paid[project] += amount

    @property
    def total(self) -> float:
        return sum(self.paid.values())
