"""Parses received bytes into Arrow record batches, without a Python object for each message. No I/O.

A `Scanner` owns the receive buffer: fill `space`, say how much with `received`, and ask `next` what came. Messages of
the data subscription collect as rows until `take` makes a record batch of them; every other frame is handed out as it
is. The buffer is the bound of memory: it holds the bytes of the rows not yet taken, and grows only for a single message
that is larger.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from penstock import subjects
from penstock.errors import ProtocolError
from penstock.wire import compiled, frames, plain
from penstock.wire import layout as at
from penstock.wire.columns import repeated
from penstock.wire.scanning import ANY_SEQUENCE, BATCH_ROWS, BUFFER_BYTES, REPLACE, Rows, Stop

FIRST_NO_ASCII = 0x80
MAX_GROUPED_LINES = 64
"""Header lines of one message up to which the kernel compares names with each other; beyond it, a table does."""

RecordBatch: TypeAlias = pa.RecordBatch
HEADERS = pa.map_(pa.string(), pa.list_(pa.field("element", pa.string())))
SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("subject", pa.string()),
        ("sequence", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("headers", HEADERS),
        ("data", pa.binary()),
    ]
)
"""The columns of every batch; Spark gets exactly these."""

Array = np.ndarray[Any, Any]


class Scanner:
    """Collects the messages of one subscription. `direct`: they come from direct get, not from a consumer."""

    def __init__(
        self,
        stream: str,
        sid: int,
        *,
        direct: bool = False,
        last_wanted: int = ANY_SEQUENCE,
        invalid_text: str = REPLACE,
        kernels: compiled.Kernels | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        batch_rows: int = BATCH_ROWS,
        max_message: int = frames.MAX_MESSAGE,
    ) -> None:
        self._stream = stream
        self._invalid_text = invalid_text
        self._kernels = kernels or compiled.current()
        self._limits = (sid, int(direct), frames.MAX_LINE, frames.MAX_INFO, max_message)
        self._buffer: Array = np.empty(buffer_bytes, dtype=np.uint8)
        self._table: Array = np.zeros((at.COLUMNS, batch_rows), dtype=np.int64)
        self._state: Array = np.zeros(at.STATE_SIZE, dtype=np.int64)
        self._state[at.LAST_WANTED] = last_wanted
        self._state[at.NEXT_DELIVERY] = 0 if direct else 1
        self.total_rows = 0
        """Rows found so far, taken or not."""
        self.last_sequence = 0
        """Stream sequence of the last row found."""
        self.last_pending = 0
        """Messages that the server said come after that row."""

    # -- bytes in --------------------------------------------------------------------------------------------------

    def space(self) -> memoryview:
        """Where to receive next. Empty when the rows must be taken first."""
        self._make_room()
        return self._buffer.data[int(self._state[at.END]) :]

    def received(self, count: int) -> None:
        """That many bytes were written to `space`."""
        self._state[at.END] += count

    def feed(self, data: bytes | memoryview) -> None:
        """Take in bytes that were received elsewhere; as many as `space` has room for."""
        self.space()[: len(data)] = data
        self.received(len(data))

    def _make_room(self) -> None:
        """Move what is unread to the front, once no row points into the buffer, and fit the next frame."""
        start, end = int(self._state[at.AT]), int(self._state[at.END])
        if self._state[at.ROWS] or (end < len(self._buffer) and start == 0):
            return
        needed = int(self._state[at.FRAME_END]) - start
        unread = self._buffer[start:end].copy()
        if needed > len(self._buffer) or len(unread) == len(self._buffer):
            self._buffer = np.empty(max(needed, 2 * len(self._buffer)), dtype=np.uint8)
        self._buffer[: len(unread)] = unread
        self._state[at.AT], self._state[at.END], self._state[at.FRAME_END] = 0, len(unread), 0

    # -- received frames -------------------------------------------------------------------------------------------

    def next(self) -> frames.Frame | Stop:
        """Parse what was received: returns a frame that is no row, or why there is nothing more to parse."""
        before = int(self._state[at.ROWS])
        why = self._kernels.scan(self._buffer, self._state, self._table, *self._limits)
        rows = int(self._state[at.ROWS])
        if rows > before:
            self.total_rows += rows - before
            self.last_sequence = int(self._table[at.SEQUENCE, rows - 1])
            self.last_pending = int(self._table[at.PENDING, rows - 1])
        if why == at.OTHER:
            return self._other()
        if why == at.BAD:
            start = int(self._state[at.AT])
            raise ProtocolError(f"this is not the NATS protocol: {bytes(self._buffer[start : start + 60])!r}")
        if why == at.MORE and rows and self._state[at.END] == len(self._buffer):
            return Stop.FULL
        return Stop(why)

    def _other(self) -> frames.Frame:
        start, end = int(self._state[at.AT]), int(self._state[at.FRAME_END])
        parser = frames.Parser()
        parser.feed(self._buffer[start:end].tobytes())
        frame = parser.next()
        if frame is None:
            raise ProtocolError(f"half a frame: {bytes(self._buffer[start : start + 60])!r}")
        self._state[at.AT] = end
        return frame

    def rest(self) -> bytes:
        """Return the bytes received and not parsed."""
        return self._buffer[int(self._state[at.AT]) : int(self._state[at.END])].tobytes()

    # -- rows out --------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows waiting to be taken."""
        return int(self._state[at.ROWS])

    def replies(self) -> list[bytes]:
        """The subjects on which the waiting rows can be acknowledged."""
        view = self._buffer.data
        starts, sizes = self._column(at.REPLY_AT).tolist(), self._column(at.REPLY_LEN).tolist()
        return [bytes(view[start : start + size]) for start, size in zip(starts, sizes, strict=True)]

    def sequences(self) -> list[int]:
        """The stream sequences of the waiting rows."""
        found: list[int] = self._column(at.SEQUENCE).tolist()
        return found

    def take(self, filters: tuple[str, ...] = ()) -> pa.RecordBatch:
        """The rows as a record batch of `SCHEMA`; their bytes are copied out of the buffer.

        With several filters only those that match one of them: direct get knows one filter.
        """
        batch = self._taken()
        return batch.filter(matching(batch.column("subject"), filters)) if len(filters) > 1 else batch

    def _taken(self) -> pa.RecordBatch:
        count = self.rows
        sequence, time = self._column(at.SEQUENCE).copy(), self._column(at.TIME).copy()
        columns = [
            repeated(self._stream, count),
            self._texts(self._column(at.SUBJECT_AT), self._column(at.SUBJECT_AT + 1)),
            pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(sequence)]),
            pa.Array.from_buffers(SCHEMA.field("timestamp").type, count, [None, pa.py_buffer(time)]),
            self._headers(),
            self._pieces(pa.binary(), self._column(at.BODY_AT), self._column(at.BODY_AT + 1)),
        ]
        self._state[at.ROWS] = 0
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def pieces(self, first: int, stop: int) -> Rows:
        """Return some of the waiting rows as lists of bytes, without taking them."""
        return Rows(
            self._slices(at.SUBJECT_AT, first, stop),
            self._slices(at.HEADERS_AT, first, stop),
            self._slices(at.BODY_AT, first, stop),
            self._table[at.SEQUENCE, first:stop].tolist(),
        )

    def _slices(self, column: int, first: int, stop: int) -> list[bytes]:
        starts, sizes = self._table[column, first:stop], self._table[column + 1, first:stop]
        if not sizes.any():
            return [b""] * (stop - first)
        # One copy of the bytes, then slices of that: cheaper than slices of a buffer that is no bytes object.
        low = int(starts[0])
        raw = self._buffer[low : int(starts[-1] + sizes[-1])].tobytes()
        begins = (starts - low).tolist()
        return [raw[begin:end] for begin, end in zip(begins, (starts + sizes - low).tolist(), strict=True)]

    def expect(self, delivery: int | None) -> None:
        """Require this delivery number of the next row; None: any, in any order, until the caller checks."""
        self._state[at.NEXT_DELIVERY] = delivery or 0

    def next_delivery(self) -> int:
        """The delivery number of the row at which the scan stopped with `GAP`."""
        row = self.rows
        start, size = int(self._table[at.REPLY_AT, row]), int(self._table[at.REPLY_LEN, row])
        return int(self._buffer[start : start + size].tobytes().rsplit(b".", 3)[1])

    def forget_order(self) -> None:
        """Accept rows of any sequence, in any order, from here on: they will be dropped."""
        self._state[at.NEXT_DELIVERY], self._state[at.LAST_WANTED] = 0, ANY_SEQUENCE

    def drop(self) -> None:
        """Drop the waiting rows."""
        self._state[at.ROWS] = 0

    def _column(self, column: int) -> Array:
        values: Array = self._table[column, : self.rows]
        return values

    def _texts(self, start: Array, size: Array) -> pa.Array:
        """Return pieces of the buffer as strings. Publishers may write anything: invalid UTF-8 is made readable."""
        found = self._pieces(pa.binary(), start, size)
        data = found.buffers()[2]
        if data is None or not len(data) or int(np.frombuffer(data, dtype=np.uint8).max()) < FIRST_NO_ASCII:
            return found.view(pa.string())
        try:
            return found.cast(pa.string())
        except pa.ArrowInvalid:
            return pa.array([piece.decode("utf-8", self._invalid_text) for piece in found.to_pylist()], pa.string())

    def _pieces(self, kind: pa.DataType, start: Array, size: Array) -> pa.Array:
        """Pieces of the buffer as strings or binaries."""
        offsets = _offsets(size)
        values = np.empty(int(offsets[-1]), dtype=np.uint8)
        if self._kernels.gather(self._buffer, start, size, values) < 0:
            raise ProtocolError("a message whose parts lie outside of what was received")
        return pa.Array.from_buffers(kind, len(size), [None, pa.py_buffer(offsets), pa.py_buffer(values)])

    def _headers(self) -> pa.Array:
        """A map of lists for each row: names in the order they came, each with all of its values."""
        rows, parts = self._header_lines()
        order = np.empty(len(rows), dtype=np.int64)
        few = len(rows) <= MAX_GROUPED_LINES or np.bincount(rows).max() <= MAX_GROUPED_LINES
        group_names = self._kernels.group_names if few else plain.group_names
        entries = group_names(self._buffer, rows, parts, order)
        by_name = np.argsort(order, kind="stable")
        lists = _offsets(np.bincount(order, minlength=entries))
        names = by_name[lists[:-1]]
        values = self._texts(*np.ascontiguousarray(parts[2:4, by_name]))
        value_lists = pa.Array.from_buffers(HEADERS.item_type, entries, [None, pa.py_buffer(lists)], children=[values])
        keys = self._texts(*np.ascontiguousarray(parts[0:2, names]))
        maps = np.searchsorted(rows[names], np.arange(self.rows + 1)).astype(np.int32)
        struct = pa.StructArray.from_arrays([keys, value_lists], fields=[HEADERS.key_field, HEADERS.item_field])
        return pa.Array.from_buffers(HEADERS, self.rows, [None, pa.py_buffer(maps)], children=[struct])

    def _header_lines(self) -> tuple[Array, Array]:
        """The row of each header line, and where its name and value are."""
        start, size = self._column(at.HEADERS_AT), self._column(at.HEADERS_LEN)
        room = 8 * self.rows if size.any() else 0
        while True:
            rows, parts = np.empty(room, dtype=np.int64), np.empty((4, room), dtype=np.int64)
            found = self._kernels.header_lines(self._buffer, start, size, rows, parts) if room else 0
            if found <= room:
                return rows[:found], np.ascontiguousarray(parts[:, :found])
            room = found


def _offsets(sizes: Array) -> Array:
    offsets: Array = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def matching(column: pa.Array, filters: tuple[str, ...]) -> pa.Array:
    """Which subjects of the column pass one of the filters; each distinct subject is looked at once."""
    import pyarrow.compute as pc  # slow to import, and few reads have several filters

    distinct = pc.unique(column)
    passed = [text for text in distinct.to_pylist() if any(subjects.matches(one, text) for one in filters)]
    return pc.is_in(column, value_set=pa.array(passed, pa.string()))
