"""The interface of scanners of received bytes, whether they build Arrow columns or Python objects."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, Protocol

from penstock.wire import frames
from penstock.wire import layout as at

REPLACE, ESCAPE = "replace", "backslashreplace"
"""What becomes of bytes in subjects and headers that are no UTF-8: U+FFFD, or `\\xNN` for each byte."""
BUFFER_BYTES = 4 * 1024 * 1024
BATCH_ROWS = 16_384
ANY_SEQUENCE = 2**62


class Stop(Enum):
    """Why a scan went no further, besides a frame that is no row."""

    MORE = at.MORE
    """More bytes are needed."""
    FULL = at.FULL
    """`take` the rows first."""
    GAP = at.GAP
    """Messages were lost on the way: the next one does not follow the last row."""
    DONE = at.DONE
    """The last sequence wanted was read, or is passed."""


class Rows(NamedTuple):
    """Messages as plain lists, one item a message."""

    subjects: list[bytes]
    header_lines: list[bytes]
    """Each with its line ends, without the version line and the closing empty line; empty when there are none."""
    data: list[bytes]
    sequences: list[int]


class Scanning(Protocol):
    """Collects the messages of one subscription as rows, and hands out every other frame as it is.

    Fill `space`, say how much with `received`, and ask `next` what came.
    """

    total_rows: int
    """Rows found so far, taken or not."""
    last_sequence: int
    """Stream sequence of the last row found."""
    last_pending: int
    """Messages that the server said come after that row."""

    def space(self) -> memoryview:
        """Where to receive next. Empty when the rows must be taken first."""
        ...

    def received(self, count: int) -> None:
        """That many bytes were written to `space`."""
        ...

    def feed(self, data: bytes | memoryview) -> None:
        """Take in bytes that were received elsewhere; as many as `space` has room for."""
        ...

    def next(self) -> frames.Frame | Stop:
        """Parse what was received: returns a frame that is no row, or why there is nothing more to parse."""
        ...

    def rest(self) -> bytes:
        """Return the bytes received and not parsed."""
        ...

    @property
    def rows(self) -> int:
        """Rows waiting to be taken."""
        ...

    def replies(self) -> list[bytes]:
        """The subjects on which the waiting rows can be acknowledged."""
        ...

    def sequences(self) -> list[int]:
        """The stream sequences of the waiting rows."""
        ...

    def take(self, filters: tuple[str, ...] = ()) -> Any:
        """The waiting rows; with several filters those that match one of them."""
        ...

    def pieces(self, first: int, stop: int) -> Rows:
        """Return some of the waiting rows as lists of bytes, without taking them."""
        ...

    def expect(self, delivery: int | None) -> None:
        """Require this delivery number of the next row; None: any, in any order, until the caller checks."""
        ...

    def next_delivery(self) -> int:
        """The delivery number of the row at which the scan stopped with `GAP`."""
        ...

    def forget_order(self) -> None:
        """Accept rows of any sequence, in any order, from here on: they will be dropped."""
        ...

    def drop(self) -> None:
        """Drop the waiting rows."""
        ...
