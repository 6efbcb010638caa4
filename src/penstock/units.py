"""Durations, sizes and times as people write them: `1h30m`, `250ms`, `64MiB`, `1GB`, `2026-01-31T12:00:00Z`."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from penstock.errors import ConfigError

INT64 = 2**63 - 1
"""The most that a number of the server can be."""
INT32 = 2**31 - 1
MAX_DIGITS = 40
"""More than any number that makes sense has."""
MICROSECOND = timedelta(microseconds=1)
DURATION_UNITS = {
    "w": timedelta(weeks=1),
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
    "us": MICROSECOND,
}
SIZE_UNITS = {
    "B": 1,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}
"""Decimal units count in 1000s, binary ones in 1024s; a bare `k`, `M` or `G` is refused, for it could mean both."""

DURATION_HELP = "write a number and a unit (w, d, h, m, s, ms, us), such as 30s, 1h30m or 7d"
TIME_HELP = "write RFC 3339, such as 2026-01-31T12:00:00Z"
SIZE_HELP = "write a number and a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB), such as 64MiB"

_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(w|d|h|ms|us|µs|m|s)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern}\s*)+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)?")
_SIZE_FACTORS = {unit.lower(): factor for unit, factor in SIZE_UNITS.items()}


def parse_duration(text: str | int | float) -> timedelta:
    """The duration that `text` says. A number without a unit is refused, except 0, which needs none."""
    written = str(text).strip()
    if written in ("0", "0.0"):
        return timedelta()
    if not _DURATION.fullmatch(written):
        raise ConfigError(f"{_short(written)!r} is not a duration: {DURATION_HELP}")
    total = timedelta()
    try:
        for number, unit in _DURATION_PART.findall(written):
            total += float(number) * DURATION_UNITS[unit.replace("µ", "u")]
    except OverflowError:
        total = timedelta.max
    if nanoseconds(total) > INT64:
        raise ConfigError(
            f"{_short(written)!r} is too long a time: the server counts at most {INT64} ns, about 292 years"
        )
    return total


def parse_moment(text: str) -> datetime:
    """The time that `text` says, in UTC. A time without a zone is refused: it means another moment in each place."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(f"{_short(text)!r} is not a time: {TIME_HELP}") from None
    if moment.tzinfo is None:
        raise ConfigError(f"{_short(text)!r} has no time zone: add Z for UTC, or an offset such as +02:00")
    return moment.astimezone(UTC)


def parse_since(text: str) -> datetime:
    """The time that `text` says, or as long ago as the duration that it says."""
    with suppress(ConfigError):
        return datetime.now(UTC) - parse_duration(text)
    try:
        return parse_moment(text)
    except ConfigError as exc:
        raise ConfigError(f"{exc}; or write a duration, such as 15m") from None


def parse_size(text: str | int | float) -> int:
    """The bytes that `text` says; a whole number without a unit is bytes. Letter case does not matter."""
    written = str(text).strip()
    match = _SIZE.fullmatch(written)
    factor = _SIZE_FACTORS.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None or (factor == 1 and "." in match[1]):
        raise ConfigError(f"{_short(written)!r} is not a size: {SIZE_HELP}")
    if len(match[1].split(".")[0]) > MAX_DIGITS:
        raise ConfigError(f"{_short(written)!r} is too large: the server counts at most {INT64} bytes")
    return round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def _short(written: str) -> str:
    """Enough of a text to find it again."""
    return written if len(written) <= 40 else f"{written[:30]}…"


def format_duration(duration: timedelta) -> str:
    """The duration in its largest whole units; `parse_duration` reads it back."""
    left, parts = duration, []
    for unit, size in DURATION_UNITS.items():
        if unit == "w":
            continue  # 7d and 30d read better than 1w and 4w2d
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def format_size(size: int) -> str:
    """The size in the largest unit that divides it, a binary one where two are as large; `parse_size` reads it back."""
    units = ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB")
    unit = next((one for one in units if size and size % SIZE_UNITS[one] == 0), "B")
    return f"{size // SIZE_UNITS[unit]}{unit}"


def approximate_size(size: int) -> str:
    """The size as a person wants to see it: three digits and a unit."""
    shown = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if shown < 1000:
            return f"{shown:.0f} {unit}" if unit == "B" or shown >= 100 else f"{shown:.1f} {unit}"
        shown /= 1024
    return f"{shown:.1f} TiB"


def approximate_duration(duration: timedelta) -> str:
    """The duration as a person wants to see it: its two largest units, from seconds up."""
    parts: list[str] = []
    left = timedelta(seconds=round(duration.total_seconds()))
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, DURATION_UNITS[unit])
        if count or parts:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"


def counted(count: int, noun: str) -> str:
    """`1 stream`, `2 streams`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def nanoseconds(duration: timedelta) -> int:
    """The duration as JetStream writes it."""
    return duration // MICROSECOND * 1000


def from_nanoseconds(count: int) -> timedelta:
    """A duration as JetStream writes it, cut to microseconds."""
    return timedelta(microseconds=count // 1000)
