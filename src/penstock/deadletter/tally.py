"""What a replay or a discard did, in numbers that stay small however many letters there were."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Self

REFUSALS_KEPT: Final = 1_000


@dataclass(slots=True)
class Tally:
    """What a run did."""

    done: int = 0
    """Letters replayed, or discarded."""
    found_done: int = 0
    """Letters that an earlier, interrupted run had replayed; they were only removed."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Letters left where they are, by the reason."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Letters that the server would not store again, with its words; the first `REFUSALS_KEPT` of them."""
    refused_total: int = 0

    @property
    def left(self) -> int:
        """Letters that are still where they were."""
        return sum(self.skipped.values()) + self.refused_total

    def refuse(self, letter: str, why: str) -> None:
        self.refused_total += 1
        if len(self.refused) < REFUSALS_KEPT:
            self.refused.append((letter, why))

    def encoded(self) -> str:
        """Encode the tally for a Spark task's report to its driver."""
        told = {"done": self.done, "found_done": self.found_done, "skipped": self.skipped}
        return json.dumps({**told, "refused": self.refused, "refused_total": self.refused_total})

    @classmethod
    def parse(cls, text: str) -> Self:
        told = json.loads(text)
        skipped, refused = Counter(told.pop("skipped")), [(id_, why) for id_, why in told.pop("refused")]
        return cls(**told, skipped=skipped, refused=refused)

    def plus(self, other: Tally) -> Tally:
        """Return the sum of both."""
        return Tally(
            done=self.done + other.done,
            found_done=self.found_done + other.found_done,
            skipped=self.skipped + other.skipped,
            refused=[*self.refused, *other.refused][:REFUSALS_KEPT],
            refused_total=self.refused_total + other.refused_total,
        )
