"""The kernels without machine code: regular expressions for usual messages, `kernels` as Python for everything else.

Two to three times slower than machine code, and the same in every result.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from penstock.wire import kernels
from penstock.wire.layout import AT, END, LAST_WANTED, NEXT, NEXT_DELIVERY, ROWS

Array = np.ndarray[Any, Any]
Row = tuple[int, ...]

_LINE = re.compile(
    rb"(H?)MSG ([^\x00-\x20]+) ([0-9]{1,18}) (?:(\$JS\.ACK(?:\.[^\x00-\x20.]+){3}"
    rb"\.([0-9]{1,18})\.([0-9]{1,18})\.([0-8]?[0-9]{1,18})\.([0-9]{1,18})) )?(?:([0-9]{1,18}) )?([0-9]{1,18})\r\n"
)
"""The control line of a message; with its reply subject when that is a consumer's."""
_DIRECT = re.compile(
    rb"\r\n(Nats-Stream: [^\r\n]*\r\nNats-Subject: )([^\r\n]*)\r\nNats-Sequence: ([0-9]{1,18})\r\n"
    rb"Nats-Time-Stamp: ([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]+))?Z\r\n"
    rb"Nats-Num-Pending: ([0-9]{1,18})\r\nNats-Last-Sequence: [^\r\n]*\r\n\r\n\Z"
)
"""What direct get appends to the headers of a message."""


def scan(
    buf: Array, state: Array, table: Array, sid: int, direct: int, max_line: int, max_info: int, max_message: int
) -> int:
    """As `kernels.scan`."""
    view = buf.data
    while True:
        _scan_usual(view, state, table, sid, direct, max_line, max_message)
        why = kernels.step(view, state, table, sid, direct, max_line, max_info, max_message)
        if why != NEXT:
            return why


def _scan_usual(
    view: memoryview, state: Array, table: Array, sid: int, direct: int, max_line: int, max_message: int
) -> None:
    """Add rows as long as they are of a usual kind; the next step looks at whatever stopped this."""
    at, end, delivery, wanted = (int(state[field]) for field in (AT, END, NEXT_DELIVERY, LAST_WANTED))
    first = int(state[ROWS])
    rows: list[Row] = []
    wanted_sid = str(sid).encode()
    while len(rows) < table.shape[1] - first and (found := _LINE.match(view, at, min(end, at + max_line + 2))):
        body, size = found.end(), int(found[10])
        frame_end = body + size + 2
        if (
            found[3] != wanted_sid
            or size > max_message
            or frame_end > end
            or bytes(view[frame_end - 2 : frame_end]) != b"\r\n"
        ):
            break
        row = _direct_row(view, found) if direct else _consumer_row(view, found, delivery)
        if row is None or row[8] >= wanted:
            break
        rows.append(row)
        at = frame_end
        delivery += 1 if delivery else 0
    if rows:
        table[:, first : first + len(rows)] = np.array(rows, dtype=np.int64).T
        state[AT], state[NEXT_DELIVERY], state[ROWS] = at, delivery, first + len(rows)


def _consumer_row(view: memoryview, found: re.Match[bytes], delivery: int) -> Row | None:
    """The row of a consumer's message, or None when it is not of the usual kind."""
    if found[4] is None or (delivery and int(found[6]) != delivery):
        return None
    headers = _headers(view, found)
    if headers is None:
        return None
    (subject, subject_end), (reply, reply_end) = found.span(2), found.span(4)
    lines, split, stop = headers
    numbers = int(found[5]), int(found[7]) // 1000, int(found[8])
    size = max(split - 2 - lines, 0)
    return subject, subject_end - subject, reply, reply_end - reply, lines, size, split, stop - split, *numbers


def _headers(view: memoryview, found: re.Match[bytes]) -> tuple[int, int, int] | None:
    """Where the header lines, the body, and the end of a message are; None when its headers are not as usual."""
    body, stop = found.end(), found.end() + int(found[10])
    if (found[1] == b"H") != (found[9] is not None):
        return None
    if not found[1]:
        return body, body, stop
    split = body + int(found[9])
    usual = split <= stop and split - body >= 12 and bytes(view[body : body + 10]) == b"NATS/1.0\r\n"
    return (body + 10, split, stop) if usual and bytes(view[split - 4 : split]) == b"\r\n\r\n" else None


def _direct_row(view: memoryview, found: re.Match[bytes]) -> Row | None:
    """The row of a message that direct get sent, or None when it is not of the usual kind."""
    headers = _headers(view, found)
    if headers is None or not found[1] or found[4] is not None:
        return None
    lines, split, stop = headers
    start = lines - 2
    added = _DIRECT.search(view[start:split])
    if added is None:
        return None
    date = kernels.days(int(added[4]), int(added[5]), int(added[6]))
    seconds = ((date * 24 + int(added[7])) * 60 + int(added[8])) * 60 + int(added[9])
    time = seconds * 1_000_000 + int((added[10] or b"")[:6].ljust(6, b"0"))
    subject, subject_end = added.span(2)
    size = start + added.start(1) - lines
    numbers = int(added[3]), time, int(added[11])
    return start + subject, subject_end - subject, 0, 0, lines, size, split, stop - split, *numbers


def gather(buf: Array, at: Array, size: Array, out: Array) -> int:
    """As `kernels.gather`."""
    if (size < 0).any() or (at < 0).any() or (at + size > len(buf)).any() or size.sum() > len(out):
        return -1
    view = buf.data
    pieces = b"".join([view[a : a + n] for a, n in zip(at.tolist(), size.tolist(), strict=True)])
    out[: len(pieces)] = np.frombuffer(pieces, dtype=np.uint8)
    return 0


def header_lines(buf: Array, at: Array, size: Array, rows: Array, parts: Array) -> int:
    """As `kernels.header_lines`."""
    view = buf.data
    found: list[tuple[int, ...]] = []
    for row, (start, length) in enumerate(zip(at.tolist(), size.tolist(), strict=True)):
        line = start
        for text in bytes(view[start : start + length]).split(b"\r\n"):
            name, colon, value = text.partition(b":")
            if colon:
                blank = len(value) - len(value.lstrip())
                found.append((row, line, len(name), line + len(name) + 1 + blank, len(value.strip())))
            line += len(text) + 2
    if found and len(found) <= len(rows):
        columns = np.array(found, dtype=np.int64).T
        rows[: len(found)] = columns[0]
        parts[:, : len(found)] = columns[1:]
    return len(found)


def group_names(buf: Array, rows: Array, parts: Array, order: Array) -> int:
    """As `kernels.group_names`."""
    view = buf.data
    names: dict[tuple[int, bytes], int] = {}
    for i, (row, start, length) in enumerate(zip(rows.tolist(), parts[0].tolist(), parts[1].tolist(), strict=True)):
        order[i] = names.setdefault((row, bytes(view[start : start + length])), len(names))
    return len(names)
