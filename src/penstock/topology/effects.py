"""What a change of one field costs on a living stream or consumer. Pure; one place for the server's rules.

The rules are those of nats-server 2.15: what it updates in place, what it refuses, and what it accepts although
something is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from penstock import subjects


class Effect(StrEnum):
    """What happens when a field gets another value, mildest first."""

    SAFE = "safe"
    """The server changes it in place; nothing is lost."""
    LOSES_POSITION = "loses position"
    """The consumer starts over, or skips what it should have seen."""
    LOSES_DATA = "loses data"
    """Stored messages are deleted."""
    IMPOSSIBLE = "impossible"
    """The server refuses; only a new resource can have the value."""


EDITABLE = "editable"
RECREATE = "recreate"
IMMUTABLE = "immutable"
SHRINKS = "shrinks"
ONE_WAY = "one way"
RETENTION = "retention"
MIRROR = "mirror"
FILTERS = "filters"
DELIVERY = "delivery"

CHANGE_WORDS = {
    EDITABLE: "can be changed at any time",
    RECREATE: "the server refuses a change: the consumer is made anew and loses its position",
    IMMUTABLE: "can never be changed",
    SHRINKS: "raising it is safe, lowering it deletes messages",
    ONE_WAY: "can be switched on, never off again",
    RETENTION: "limits to interest deletes messages nobody waits for; to or from workqueue is impossible",
    MIRROR: "can only be removed, which makes the stream a normal one",
    FILTERS: "narrowing is safe; an added subject's backlog is skipped without a word",
    DELIVERY: "another subject can be set; between pull and push the consumer is made anew",
}
"""The words a field's `change` may be, with their meaning for the reference."""


def effect(change: str, old: Any, new: Any) -> Effect:
    """What it costs to go from `old` to `new`, both as the server shows them (None: absent)."""
    match change:
        case "recreate":
            return Effect.LOSES_POSITION
        case "immutable":
            return Effect.IMPOSSIBLE
        case "shrinks":
            return Effect.LOSES_DATA if _limit(new) < _limit(old) else Effect.SAFE
        case "one way":
            return Effect.IMPOSSIBLE if old and not new else Effect.SAFE
        case "retention":
            return _retention(old or "limits", new or "limits")
        case "mirror":
            return Effect.SAFE if not new else Effect.IMPOSSIBLE
        case "filters":
            return Effect.SAFE if narrowed(old, new) else Effect.LOSES_POSITION
        case "delivery":
            return Effect.SAFE if bool(old) == bool(new) else Effect.LOSES_POSITION
    return Effect.SAFE


def _limit(value: Any) -> float:
    """A limit that can be compared: 0, -1 and absent all mean none."""
    return float("inf") if value is None or value <= 0 else float(value)


def _retention(old: str, new: str) -> Effect:
    if old == new:
        return Effect.SAFE
    if "workqueue" in (old, new):
        return Effect.IMPOSSIBLE
    return Effect.LOSES_DATA if new == "interest" else Effect.SAFE


def narrowed(old: str | Sequence[str] | None, new: str | Sequence[str] | None) -> bool:
    """Whether the new filters ask for nothing that the old ones did not; no filter asks for everything."""
    before, after = _filters(old), _filters(new)
    if not before:
        return True
    return bool(after) and all(subjects.covered(filter_, before) for filter_ in after)


def _filters(value: str | Sequence[str] | None) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else list(value)
