"""Limits of one caller: calls per second, and concurrent calls. Pure, with the clock passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import Unavailable


class TooMany(Unavailable):
    """The caller exceeds a limit; `seconds` says when to retry."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what = what
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.what}; come again in {self.seconds:.2g} s"


@dataclass(slots=True)
class Allowance:
    """Token bucket of one identity: fills with its rate, up to one second of it."""

    rate: int
    concurrent: int
    left: float = field(init=False)
    at: float = 0.0
    running: int = 0

    def __post_init__(self) -> None:
        self.left = float(self.rate)

    def enter(self, now: float) -> None:
        """Start a call, or raise `TooMany`. Each started call must `leave`."""
        self.left = min(self.rate, self.left + (now - self.at) * self.rate) if self.at else self.left
        self.at = now
        if self.running >= self.concurrent:
            raise TooMany(f"{self.running} calls of this identity are under way, and no more are allowed", 0.1)
        if self.left < 1:
            raise TooMany(f"this identity may make {self.rate} calls a second", (1 - self.left) / self.rate)
        self.left -= 1
        self.running += 1

    def leave(self) -> None:
        self.running -= 1
