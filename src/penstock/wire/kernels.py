"""The inner loops of the reader, written so that numba can compile them: numbers and arrays only.

`compiled` makes machine code of them. As Python they run too, a hundred times slower: `plain` uses them like that for
what its regular expressions do not know, so that both give the same answer to every input.

The grammar is what nats-server writes: names in capitals, one space between fields. Anything else is BAD. A subject may
hold every byte but space, tab, CR and LF: the server takes what publishers choose.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.wire.layout import (
    ACK_PREFIX,
    AT,
    BAD,
    BODY_AT,
    BODY_LEN,
    DIGITS,
    DIRECT_LINES,
    DONE,
    END,
    FIELDS,
    FRAME_END,
    FULL,
    GAP,
    HEADERS_AT,
    HEADERS_LEN,
    LAST_WANTED,
    MORE,
    NEXT,
    NEXT_DELIVERY,
    OTHER,
    PENDING,
    REPLY_AT,
    REPLY_LEN,
    ROWS,
    SEQUENCE,
    SUBJECT_AT,
    SUBJECT_LEN,
    TIME,
)

Array = Any
"""A numpy array, of which numba infers the type; the buffer may also be a memoryview."""

CR, LF, SPACE, COLON, DOT, TAB, MINUS = 13, 10, 32, 58, 46, 9, 45
NO_TIME = -(2**62)
FIELD_COUNT = FIELDS + 10


def _bytes(text: bytes) -> Array:
    return np.frombuffer(text, dtype=np.uint8)


ACK = _bytes(ACK_PREFIX)
MSG, HMSG = _bytes(b"MSG "), _bytes(b"HMSG ")
LAST_SEQUENCE, NUM_PENDING, TIME_STAMP, STREAM_SEQUENCE, SUBJECT = (_bytes(line) for line in DIRECT_LINES)


def smaller(a: int, b: int) -> int:
    """The smaller one. (The builtin brings an exception along, which machine code without Python cannot raise.)"""
    return a if a < b else b


def starts(buf: Array, at: int, stop: int, text: Array) -> bool:
    """Whether buf[at:stop] begins with `text`."""
    if stop - at < len(text):
        return False
    piece = buf[at:stop]
    for i in range(len(text)):  # noqa: SIM110 -- numba compiles no generator expressions
        if piece[i] != text[i]:
            return False
    return True


def number(buf: Array, at: int, stop: int, digits: int) -> int:
    """The decimal number buf[at:stop], or -1."""
    if at >= stop or stop - at > digits or (stop - at == 19 and buf[at] == 57):  # 9·10¹⁸ is too much for 64 bits
        return -1
    value = 0
    piece = buf[at:stop]
    for i in range(len(piece)):
        digit = piece[i] - 48
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
    return value


def line_end(buf: Array, at: int, end: int) -> int:
    """Where the next CR LF begins, or -1."""
    piece = buf[at:end]
    for i in range(len(piece) - 1):
        if piece[i] == CR and piece[i + 1] == LF:
            return at + i
    return -1


def split_line(buf: Array, at: int, end: int, state: Array) -> int:
    """Note where the line's fields are in the state. Returns where its CR LF is; -1: not here yet, -2: malformed."""
    count = 0
    start = 0
    line = buf[at:end]
    for i in range(len(line)):
        byte = line[i]
        if byte > SPACE or (byte != SPACE and byte != CR and byte != LF and byte != TAB):
            continue  # servers take every other byte in a subject
        if i == start or count == 5:
            return -2
        state[FIELDS + 2 * count] = at + start
        state[FIELDS + 2 * count + 1] = at + i
        count += 1
        start = i + 1
        if byte == CR:
            state[FIELD_COUNT] = count
            if start == len(line):
                return -1
            return at + i if line[start] == LF else -2
        if byte != SPACE:
            return -2
    return -1


def count_dots(buf: Array, at: int, stop: int) -> int:
    """How many dots there are."""
    dots = 0
    piece = buf[at:stop]
    for i in range(len(piece)):
        dots += piece[i] == DOT
    return dots


def after_dots(buf: Array, at: int, stop: int, dots: int) -> int:
    """The position behind that many dots; they must be there."""
    piece = buf[at:stop]
    for i in range(len(piece)):
        if piece[i] == DOT:
            dots -= 1
            if dots == 0:
                return at + i + 1
    return stop


def token_end(buf: Array, at: int, stop: int) -> int:
    """Where the subject token at `at` ends."""
    piece = buf[at:stop]
    for i in range(len(piece)):
        if piece[i] == DOT:
            return at + i
    return stop


def read_ack(buf: Array, at: int, stop: int, table: Array, row: int) -> int:
    """Stream sequence, time and pending of `$JS.ACK.…` into the row; returns the consumer sequence, or -1.

    Nine tokens: `$JS.ACK.stream.consumer.deliveries.sequence.consumer sequence.nanoseconds.pending`; eleven or more
    when the server puts domain and account before the stream.
    """
    dots = count_dots(buf, at, stop)
    if dots != 8 and dots < 10:
        return -1
    a = after_dots(buf, at, stop, 5 if dots == 8 else 7)
    b = token_end(buf, a, stop)
    c = token_end(buf, b + 1, stop)
    d = token_end(buf, c + 1, stop)
    e = token_end(buf, d + 1, stop)
    sequence = number(buf, a, b, DIGITS)
    delivery = number(buf, b + 1, c, DIGITS)
    before_1970 = d > c + 1 and buf[c + 1] == MINUS
    nanoseconds = number(buf, c + 2 if before_1970 else c + 1, d, DIGITS + 1)
    pending = number(buf, d + 1, e, DIGITS)
    if sequence < 0 or nanoseconds < 0 or pending < 0:
        return -1
    table[SEQUENCE, row] = sequence
    table[TIME, row] = (-nanoseconds if before_1970 else nanoseconds) // 1000
    table[PENDING, row] = pending
    return delivery


def days(year: int, month: int, day: int) -> int:
    """Days from 1970-01-01 to a date of the Gregorian calendar."""
    year -= 1 if month <= 2 else 0
    era = year // 400
    year_of_era = year - era * 400
    day_of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719468


def microseconds(buf: Array, at: int, stop: int) -> int:
    """The time `2026-01-02T03:04:05.123456789Z`, with any number of decimals or none, or NO_TIME.

    Before 1970 it is negative, and as exact.
    """
    if stop - at < 20 or buf[stop - 1] != 90:
        return NO_TIME
    year, month, day = number(buf, at, at + 4, 4), number(buf, at + 5, at + 7, 2), number(buf, at + 8, at + 10, 2)
    hour, minute = number(buf, at + 11, at + 13, 2), number(buf, at + 14, at + 16, 2)
    second = number(buf, at + 17, at + 19, 2)
    if year < 0 or month < 0 or day < 0 or hour < 0 or minute < 0 or second < 0:
        return NO_TIME
    fraction = 0
    if stop - at > 20:
        decimals = smaller(stop - 1 - (at + 20), 6)
        fraction = number(buf, at + 20, at + 20 + decimals, 6)
        if fraction < 0 or buf[at + 19] != DOT:
            return NO_TIME
        for _ in range(6 - decimals):
            fraction *= 10
    return (((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second) * 1_000_000 + fraction


def line_start(buf: Array, floor: int, stop: int) -> int:
    """Where the line begins whose CR LF ends at `stop`; not before `floor`, which a CR LF precedes.

    Half a line end is part of the line: the length of what is between two line starts is never below 2.
    """
    at = stop - 2
    while at > floor and (buf[at - 1] != LF or buf[at - 2] != CR):
        at -= 1
    return at if at > floor else floor


def read_direct(buf: Array, floor: int, stop: int, table: Array, row: int) -> bool:
    """Fill the row from the six lines that direct get appended before `stop`; False when they are not there.

    The first of them, `Nats-Stream`, has the rest of a block before it that did not end as it should.
    """
    last = line_start(buf, floor, stop)
    pending = line_start(buf, floor, last)
    time = line_start(buf, floor, pending)
    sequence = line_start(buf, floor, time)
    subject = line_start(buf, floor, sequence)
    stream = line_start(buf, floor, subject)
    if not (
        starts(buf, last, stop, LAST_SEQUENCE)
        and starts(buf, pending, last, NUM_PENDING)
        and starts(buf, time, pending, TIME_STAMP)
        and starts(buf, sequence, time, STREAM_SEQUENCE)
        and starts(buf, subject, sequence, SUBJECT)
    ):
        return False
    table[SUBJECT_AT, row] = subject + len(SUBJECT)
    table[SUBJECT_LEN, row] = sequence - 2 - (subject + len(SUBJECT))
    table[HEADERS_LEN, row] = stream - floor
    table[SEQUENCE, row] = number(buf, sequence + len(STREAM_SEQUENCE), time - 2, DIGITS)
    table[TIME, row] = microseconds(buf, time + len(TIME_STAMP), pending - 2)
    table[PENDING, row] = number(buf, pending + len(NUM_PENDING), last - 2, DIGITS)
    if table[SUBJECT_LEN, row] < 0 or table[HEADERS_LEN, row] < 0:
        return False
    return bool(table[SEQUENCE, row] >= 0 and table[TIME, row] != NO_TIME and table[PENDING, row] >= 0)


def first_header(buf: Array, at: int, split: int) -> int:
    """Where the header lines of a block begin: behind its first line, whatever that is."""
    end = line_end(buf, at, split)
    return split if end < 0 else end + 2


def headers_stop(buf: Array, headers: int, split: int) -> int:
    """Where the header lines end: before the closing empty line, or before a line that does not end.

    A server stores whatever a publisher calls a header block.
    """
    at = split
    while at > headers and (buf[at - 1] != LF or buf[at - 2] != CR):
        at -= 1
    if at - 2 >= headers and at == split and buf[at - 4] == CR and buf[at - 3] == LF:
        at -= 2
    return at


def read_row(buf: Array, body: int, split: int, state: Array, table: Array, direct: int) -> int:
    """Fill the next row from a message on the data subscription: its consumer sequence (0: none), or -1 when no row."""
    row = state[ROWS]
    headers = first_header(buf, body, split)
    stop = headers_stop(buf, headers, split)
    table[HEADERS_AT, row] = headers
    table[HEADERS_LEN, row] = stop - headers
    if direct:
        if split == body or not read_direct(buf, headers, stop, table, row):
            return -1
        return 0
    count = state[FIELD_COUNT]
    if count != (5 if split > body else 4):
        return -1
    reply, reply_end = state[FIELDS + 4], state[FIELDS + 5]
    if not starts(buf, reply, reply_end, ACK):
        return -1
    table[SUBJECT_AT, row] = state[FIELDS]
    table[SUBJECT_LEN, row] = state[FIELDS + 1] - state[FIELDS]
    table[REPLY_AT, row] = reply
    table[REPLY_LEN, row] = reply_end - reply
    return read_ack(buf, reply, reply_end, table, row)


def other_frame(buf: Array, state: Array, max_line: int, max_info: int) -> int:
    """The frame at AT is one line (PING, PONG, INFO, +OK, -ERR): find its end."""
    at, end = state[AT], state[END]
    limit = max_info if buf[at] == 73 else max_line
    stop = line_end(buf, at, smaller(end, at + limit + 2))
    if stop < 0:
        return BAD if end - at > limit + 1 else MORE
    state[FRAME_END] = stop + 2
    return OTHER


def message_frame(
    buf: Array, state: Array, table: Array, sid: int, direct: int, max_line: int, max_message: int
) -> int:
    """Read the MSG or HMSG at AT."""
    at, end = state[AT], state[END]
    with_headers = buf[at] == 72
    name = HMSG if with_headers else MSG
    if not starts(buf, at, end, name):
        return BAD if end - at >= len(name) else MORE
    stop = split_line(buf, at + len(name), smaller(end, at + max_line + 2), state)
    if stop == -1:
        return BAD if end - at > max_line + 1 else MORE
    count = state[FIELD_COUNT]
    least = 4 if with_headers else 3
    if stop < 0 or count < least or count > least + 1:
        return BAD
    last = FIELDS + 2 * (count - 1)
    size = number(buf, state[last], state[last + 1], DIGITS)
    header_size = number(buf, state[last - 2], state[last - 1], DIGITS) if with_headers else 0
    subscription = number(buf, state[FIELDS + 2], state[FIELDS + 3], DIGITS)
    if size < 0 or size > max_message or header_size < 0 or header_size > size or subscription < 0:
        return BAD
    body = stop + 2
    state[FRAME_END] = body + size + 2
    if state[FRAME_END] > end:
        return MORE
    if buf[body + size] != CR or buf[body + size + 1] != LF:
        return BAD
    split = body + header_size
    if subscription != sid:
        return OTHER
    delivery = read_row(buf, body, split, state, table, direct)
    if delivery < 0:
        return OTHER
    return accept_row(state, table, delivery, split, body + size)


def accept_row(state: Array, table: Array, delivery: int, split: int, stop: int) -> int:
    """Count the row that was read, unless it is out of order or beyond what is wanted."""
    row = state[ROWS]
    if state[NEXT_DELIVERY] > 0:
        if delivery != state[NEXT_DELIVERY]:
            return GAP
        state[NEXT_DELIVERY] += 1
    if table[SEQUENCE, row] > state[LAST_WANTED]:
        return DONE
    table[BODY_AT, row] = split
    table[BODY_LEN, row] = stop - split
    state[ROWS] = row + 1
    state[AT] = stop + 2
    return DONE if table[SEQUENCE, row] == state[LAST_WANTED] else NEXT


def decimal(line: Array, at: int) -> tuple[int, int]:
    """The digits at `at` as a number, -1 when there are none or too many, and where they end."""
    value = 0
    stop = at
    while stop < len(line) and 48 <= line[stop] <= 57:
        value = value * 10 + (line[stop] - 48)
        stop += 1
    if stop == at or stop - at > DIGITS + 1 or (stop - at == DIGITS + 1 and line[at] == 57):
        return -1, stop
    return value, stop


def text_stop(line: Array, at: int, mark: int) -> int:
    """Where the text at `at` ends: at the mark, or with its field."""
    while at < len(line) and line[at] != mark and line[at] > SPACE:
        at += 1
    return at


def usual_message(buf: Array, state: Array, table: Array, sid: int, max_line: int, max_message: int) -> int:
    """Make a row of the MSG at AT if it is as nearly all are: complete, ours, with an ack of nine tokens; else OTHER.

    It does in one pass over the line what `message_frame` does in several: that halves the time of a scan.
    """
    at, row = state[AT], state[ROWS]
    line = buf[at : state[END]]
    subject_stop = text_stop(line, len(MSG), SPACE)
    subscription, stop = decimal(line, subject_stop + 1)
    reply = stop + 1
    if subscription != sid or not starts(line, reply, len(line), ACK):
        return OTHER
    stream_stop = text_stop(line, reply + len(ACK), DOT)
    consumer_stop = text_stop(line, stream_stop + 1, DOT)
    deliveries, a = decimal(line, consumer_stop + 1)
    sequence, b = decimal(line, a + 1)
    delivery, c = decimal(line, b + 1)
    nanoseconds, d = decimal(line, c + 1)
    pending, reply_stop = decimal(line, d + 1)
    size, line_stop = decimal(line, reply_stop + 1)
    body = line_stop + 2
    stop = body + size
    if size < 0 or size > max_message or stop + 2 > len(line) or line_stop > max_line or subject_stop == len(MSG):
        return OTHER
    if deliveries < 0 or sequence < 0 or delivery < 0 or nanoseconds < 0 or pending < 0:
        return OTHER
    if line[subject_stop] != SPACE or line[reply - 1] != SPACE or line[reply_stop] != SPACE:
        return OTHER
    if line[stream_stop] != DOT or line[consumer_stop] != DOT:
        return OTHER
    if line[a] != DOT or line[b] != DOT or line[c] != DOT or line[d] != DOT:
        return OTHER
    if line[line_stop] != CR or line[body - 1] != LF or line[stop] != CR or line[stop + 1] != LF:
        return OTHER
    table[SUBJECT_AT, row] = at + len(MSG)
    table[SUBJECT_LEN, row] = subject_stop - len(MSG)
    table[REPLY_AT, row] = at + reply
    table[REPLY_LEN, row] = reply_stop - reply
    table[HEADERS_AT, row] = at + body
    table[HEADERS_LEN, row] = 0
    table[SEQUENCE, row] = sequence
    table[TIME, row] = nanoseconds // 1000
    table[PENDING, row] = pending
    return accept_row(state, table, delivery, at + body, at + stop)


def step(
    buf: Array, state: Array, table: Array, sid: int, direct: int, max_line: int, max_info: int, max_message: int
) -> int:
    """Read one frame: NEXT when it became a row, else what to stop for."""
    state[FRAME_END] = 0
    if state[ROWS] >= table.shape[1]:
        return FULL
    if state[AT] >= state[END]:
        return MORE
    first = buf[state[AT]]
    if not direct and starts(buf, state[AT], state[END], MSG):
        why = usual_message(buf, state, table, sid, max_line, max_message)
        if why != OTHER:
            return why
    if first == 77 or first == 72:  # M, H
        return message_frame(buf, state, table, sid, direct, max_line, max_message)
    if first == 80 or first == 73 or first == 43 or first == 45:  # P, I, +, -
        return other_frame(buf, state, max_line, max_info)
    return BAD


def scan(
    buf: Array, state: Array, table: Array, sid: int, direct: int, max_line: int, max_info: int, max_message: int
) -> int:
    """Add the messages at AT to the table until something else comes; returns what."""
    while True:
        why = step(buf, state, table, sid, direct, max_line, max_info, max_message)
        if why != NEXT:
            return why


def gather(buf: Array, at: Array, size: Array, out: Array) -> int:
    """Copy the pieces of the buffer one behind the other: 0, or -1 when one lies outside of the buffer or of `out`."""
    # Slices first, here and above: numba knows that their indexes are not negative, and LLVM copies 16 bytes at a time.
    to = 0
    for row in range(len(at)):
        count = size[row]
        if count < 0 or at[row] < 0 or at[row] + count > len(buf) or to + count > len(out):
            return -1
        piece, place = buf[at[row] : at[row] + count], out[to : to + count]
        for i in range(count):
            place[i] = piece[i]
        to += count
    return 0


def header_lines(buf: Array, at: Array, size: Array, rows: Array, parts: Array) -> int:
    """Find the header lines of all rows: row, name and value go to `rows` and `parts` while there is room.

    Returns how many there are, so a caller with too little room can come again.
    """
    found = 0
    for row in range(len(at)):
        line = at[row]
        stop = at[row] + size[row]
        while line < stop:
            end = line_end(buf, line, stop)
            end = stop if end < 0 else end
            colon = line
            while colon < end and buf[colon] != COLON:
                colon += 1
            if colon < end:
                if found < len(rows):
                    rows[found] = row
                    note_header(buf, line, colon, end, parts, found)
                found += 1
            line = end + 2
    return found


def note_header(buf: Array, line: int, colon: int, end: int, parts: Array, at: int) -> None:
    start = colon + 1
    while start < end and (buf[start] == SPACE or (buf[start] >= TAB and buf[start] <= CR)):
        start += 1
    while end > start and (buf[end - 1] == SPACE or (buf[end - 1] >= TAB and buf[end - 1] <= CR)):
        end -= 1
    parts[0, at] = line
    parts[1, at] = colon - line
    parts[2, at] = start
    parts[3, at] = end - start


def group_names(buf: Array, rows: Array, parts: Array, order: Array) -> int:
    """Number the distinct names of each row in the order they first appear; `order` gets each line's number.

    Returns how many there are in all. Quadratic in the lines of one message: messages with many go to `plain`.
    """
    entries = 0
    first = 0
    for i in range(len(rows)):
        if i > 0 and rows[i] != rows[i - 1]:
            first = i
        order[i] = -1
        for j in range(first, i):
            if same_name(buf, parts, i, j):
                order[i] = order[j]
                break
        if order[i] < 0:
            order[i] = entries
            entries += 1
    return entries


def same_name(buf: Array, parts: Array, i: int, j: int) -> bool:
    if parts[1, i] != parts[1, j]:
        return False
    for k in range(parts[1, i]):  # noqa: SIM110 -- numba compiles no generator expressions
        if buf[parts[0, i] + k] != buf[parts[0, j] + k]:
            return False
    return True
