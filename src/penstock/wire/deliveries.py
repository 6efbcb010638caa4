"""Messages of pull consumers, many at a time: one match a message, for readers that answer each of them. Pure.

For reading without answers there is `scan`, which makes columns and no objects. Here every message becomes a tuple, and
nothing but the standard library is needed: a worker process stays small.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TypeVar

_DELIVERY = re.compile(
    rb"H?MSG ([^\x00-\x20]{1,4096}) ([0-9]{1,18}) "
    rb"(\$JS\.ACK\.[^\x00-\x20.]{1,255}\.[^\x00-\x20.]{1,255}"
    rb"\.([0-9]{1,9})\.([0-9]{1,18})\.([0-9]{1,18})\.[0-9]{1,20}\.[0-9]{1,20}) "
    rb"(?:([0-9]{1,18}) )?([0-9]{1,9})\r\n"
)
"""The control line of a message that a consumer delivers. Every other, and every longer one, is the parser's."""


T = TypeVar("T", bound=tuple[object, ...])


def take(buffer: bytearray, at: int, sid: bytes, made: type[T], received_at: datetime) -> tuple[list[T], int]:
    """The complete deliveries to this subscription that lie at the front, and where they end.

    Each becomes a `made`, a named tuple of subject, data, stream sequence, delivery count, reply, `received_at`, header
    block, consumer sequence, and a 0. Stops at whatever is not a usual delivery to it, or not complete: the parser sees
    to that.
    """
    if not _DELIVERY.match(buffer, at):
        return [], at
    raw = bytes(buffer)  # slices of bytes are cheaper than two copies of each piece
    match, size, found, new = _DELIVERY.match, len(raw), list[T](), tuple.__new__  # `made(…)` in a third of the time
    while line := match(raw, at):
        subject, to, reply, count, sequence, number, header_size, total = line.groups()
        body = line.end()
        end = body + int(total)
        if end + 2 > size or to != sid or raw[end : end + 2] != b"\r\n":
            break
        split = body + int(header_size) if header_size else body
        fields = (
            subject.decode("utf-8", "surrogateescape"),
            raw[split:end],
            int(sequence),
            int(count),
            reply.decode("utf-8", "surrogateescape"),
            received_at,
            raw[body:split],
            int(number),
            0,
        )
        found.append(new(made, fields))
        at = end + 2
    return found, at
