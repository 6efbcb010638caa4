"""Messages of pull consumers, many at a time: one match a message, for readers that answer each of them. Pure.

For reading without answers there is `scan`, which makes columns and no objects. Here every message becomes a tuple, and
nothing but the standard library is needed: a worker process stays small.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_DELIVERY = re.compile(
    rb"H?MSG ([^\x00-\x20]{1,4096}) ([0-9]{1,18}) "
    rb"(\$JS\.ACK\.[^\x00-\x20.]{1,255}\.[^\x00-\x20.]{1,255}"
    rb"\.([0-9]{1,9})\.([0-9]{1,18})\.([0-9]{1,18})\.[0-9]{1,20}\.[0-9]{1,20}) "
    rb"(?:([0-9]{1,18}) )?([0-9]{1,9})\r\n"
)
"""The control line of a message that a consumer delivers. Every other, and every longer one, is the parser's."""


Delivery = tuple[bytes, str, str, int, int, int, bytes, bytes]
"""Subscription, subject, reply, delivery count, stream sequence, consumer sequence, header block, data.

A plain tuple: a named one takes four times as long to make, and its reader makes something else of it at once.
"""


def take(buffer: bytearray, at: int, sids: Collection[bytes]) -> tuple[list[Delivery], int]:
    """The complete deliveries to these subscriptions that lie at the front, and where they end.

    Stops at whatever is not a usual delivery, or not complete: the parser sees to that.
    """
    if not _DELIVERY.match(buffer, at):
        return [], at
    raw = bytes(buffer)  # slices of bytes are cheaper than two copies of each piece
    match, size, found = _DELIVERY.match, len(raw), list[Delivery]()
    while line := match(raw, at):
        subject, sid, reply, count, sequence, number, header_size, total = line.groups()
        body = line.end()
        end = body + int(total)
        if end + 2 > size or sid not in sids or raw[end : end + 2] != b"\r\n":
            break
        split = body + int(header_size) if header_size else body
        found.append(
            (
                sid,
                subject.decode("utf-8", "surrogateescape"),
                reply.decode("utf-8", "surrogateescape"),
                int(count),
                int(sequence),
                int(number),
                raw[body:split],
                raw[split:end],
            )
        )
        at = end + 2
    return found, at
