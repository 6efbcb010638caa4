"""What the scan of the receive buffer leaves behind: a table of positions and numbers, one row a message."""

from __future__ import annotations

from typing import Final

# What a scan stopped for.
NEXT: Final = -1  # nothing: a row was added, go on
MORE: Final = 0  # the next frame is not complete yet
FULL: Final = 1  # the table has no room for another row
OTHER: Final = 2  # a frame that is no row lies between AT and FRAME_END
GAP: Final = 3  # the next row does not follow the one before it: something was lost on the way
DONE: Final = 4  # the last sequence wanted was read, or is passed by the next row
BAD: Final = 5  # bytes that no server sends

# Fields of the state that one scan hands to the next.
AT: Final = 0  # first byte not consumed
END: Final = 1  # first byte not received
ROWS: Final = 2  # rows in the table
FRAME_END: Final = 3  # end of the frame at AT when it is known, else 0
NEXT_DELIVERY: Final = 4  # consumer sequence that the next row must have; 0 when that does not matter
LAST_WANTED: Final = 5  # stream sequence beyond which nothing is wanted
FIELDS: Final = 6  # scratch for the fields of a control line: start and stop of up to five, then their number
STATE_SIZE: Final = FIELDS + 11

# Columns of the table. `…_AT` are positions in the receive buffer.
SUBJECT_AT: Final = 0
SUBJECT_LEN: Final = 1
REPLY_AT: Final = 2
REPLY_LEN: Final = 3
HEADERS_AT: Final = 4  # header lines only: no version line, no closing empty line, nothing that direct get added
HEADERS_LEN: Final = 5
BODY_AT: Final = 6
BODY_LEN: Final = 7
SEQUENCE: Final = 8
TIME: Final = 9  # microseconds since 1970
PENDING: Final = 10
COLUMNS: Final = 11

ACK_PREFIX: Final = b"$JS.ACK."
DIRECT_LINES: Final = (
    b"Nats-Last-Sequence: ",
    b"Nats-Num-Pending: ",
    b"Nats-Time-Stamp: ",
    b"Nats-Sequence: ",
    b"Nats-Subject: ",
)
"""The lines that a batched direct get appends to a message's own headers and a line with the stream, last one first.

A message that was republished carries some of these names as its own headers, and a publisher may write any of them, so
only the last lines are taken.
"""
DIGITS: Final = 18
"""A longer number is no size and no sequence. (Times since 1970 in nanoseconds have 19 until the year 2286.)"""
