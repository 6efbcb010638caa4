"""Checks the columns of a DataFrame to be written to a stream, and turns its rows into messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructType

from penstock import subjects
from penstock.errors import ConfigError
from penstock.publish.reserved import check_unreserved
from penstock.spark.chunks import ChunkRows
from penstock.spark.options import INVALID_HEADERS
from penstock.spark.packing import typed_rows
from penstock.spark.stored import MESSAGE_ID, is_own_header
from penstock.wire import frames
from penstock.wire import headers as header_block
from penstock.wire.columns import constant, repeated

WRITTEN = ("subject", "data", "headers", "message_id")
TYPED = ("subject", "event")
"""Columns of typed packs."""
PASSED_OVER = ("stream", "sequence", "timestamp", "row")
"""Columns of the source with a row's origin: they may be present, and are not written."""

ORDERS = frozenset({"nats-rollup", "nats-incr", "nats-counter-sources", "nats-stream-source", "nats-marker-reason"})
"""Headers that the server acts on, or adds itself. Rows that come from a stream carry old ones."""
ORDER_PREFIX = "nats-schedule"
TTL = "nats-ttl"
FAIL_AT_HEADER = INVALID_HEADERS[0]
NO_BYTES = constant("").cast(pa.binary())
_UNUSABLE_IN_NAME = re.compile(r"[^!-9;-~]")
_UNUSABLE_IN_VALUE = re.compile(r"[\r\n\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Columns:
    """How rows become messages: decided on the driver, used in tasks."""

    stream: str
    """Empty when a column has it."""
    accepted: tuple[str, ...]
    """The stream's subjects; others would end up in another stream, or nowhere."""
    subject: str | None = None
    """The subject of all rows; None when a column has it."""
    headers: bool = False
    several_values: bool = True
    """Whether a header has an array of values or a single one."""
    message_id: bool = False
    invalid_headers: str = INVALID_HEADERS[0]
    """What to do with a header that a message cannot have: one of `INVALID_HEADERS`."""
    orders: bool = False
    """Whether headers that the server acts on are written."""
    ttl: bool = True
    """Whether the stream takes messages with a time to live of their own."""
    dead_letters: bool = False
    """Whether rows may go to dead-letter subjects: the bad records of a pipeline do."""
    typed: bool = False
    """Whether column `event` has what is written, instead of `data`."""

    def takes_header(self, name: str) -> bool:
        """Whether a header of a row goes into the message."""
        if is_own_header(name):
            return False
        lower = name.lower()
        if lower == TTL:
            return self.ttl or self.orders
        return self.orders or not (lower in ORDERS or lower.startswith(ORDER_PREFIX))

    def header_line(self, name: str, value: str) -> bytes:
        """One header of a row; empty when it is dropped."""
        try:
            return header_block.line(name, value.strip())
        except ConfigError as exc:
            if self.invalid_headers == "drop":
                return b""
            if self.invalid_headers == "replace":
                name = _UNUSABLE_IN_NAME.sub("_", name) or "_"
                return header_block.line(name, _UNUSABLE_IN_VALUE.sub(" ", value).strip())
            raise ConfigError(f"{exc}; set invalidHeaders=replace or invalidHeaders=drop to go on") from None

    def check_subject(self, subject: str | None) -> None:
        """Raise unless messages can be published to it and the stream stores them."""
        if subject is None:
            raise ConfigError("a row has no subject: column `subject` is null there; filter such rows, or fill it")
        if reason := subjects.problem(subject):
            raise ConfigError(f"{subject!r} cannot be published to: {reason}")
        if not subjects.is_literal(subject):
            raise ConfigError(f"{subject!r} cannot be published to: it has a wildcard")
        frames.checked_subject(subject)  # the server closes the connection at one that is too long
        if not self.dead_letters:
            check_unreserved(subject)
        if not any(subjects.matches(one, subject) for one in self.accepted):
            raise ConfigError(
                f"stream {self.stream!r} does not take subject {subject!r}; it takes {', '.join(self.accepted)}"
            )


def columns_of(
    schema: StructType,
    stream: str,
    accepted: Sequence[str],
    subject: str | None,
    dead_letters: bool = False,
    typed: bool = False,
) -> Columns:
    """The columns of a DataFrame to be written, or what is wrong with them. `typed`: into typed packs."""
    types: dict[str, DataType] = {field.name: field.dataType for field in schema.fields}
    _check_names(types, typed)
    if "subject" not in types and subject is None:
        raise ConfigError("messages need a subject: add a column `subject`, or give the option `subject`")
    if not stream and "stream" not in types:
        raise ConfigError(
            "rows need a stream: name it with the option stream, such as .option('stream', 'ORDERS'), or add a column "
            "`stream`"
        )
    if not stream:
        _check_type(types, "stream", (StringType,), "string")
    _check_type(types, "subject", (StringType,), "string")
    _check_type(types, "data", (StringType, BinaryType), "binary or string")
    _check_type(types, "message_id", (StringType,), "string")
    columns = Columns(
        stream=stream,
        accepted=tuple(accepted),
        subject=subject,
        headers="headers" in types,
        several_values=_has_several_values(types.get("headers")),
        message_id="message_id" in types,
        dead_letters=dead_letters,
        typed=typed,
    )
    if subject is not None and stream:
        columns.check_subject(subject)
    return columns


def _check_names(types: dict[str, DataType], typed: bool) -> None:
    names, written = list(types), TYPED if typed else WRITTEN
    if typed and not isinstance(types.get("event"), StructType):
        raise ConfigError(
            "typed packs need a column `event` of type struct, such as F.struct('id', 'amount').alias('event')"
        )
    if not typed and "data" not in names:
        raise ConfigError(f"messages need a body: there is no column `data` among {', '.join(names) or 'no columns'}")
    for name in names:
        if name not in written and name not in PASSED_OVER:
            near = difflib.get_close_matches(name, written, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"select {', '.join(written)} before writing"
            raise ConfigError(f"column {name!r} has no place in a {'typed pack' if typed else 'message'}; {hint}")


def _check_type(types: dict[str, DataType], name: str, allowed: tuple[type[DataType], ...], words: str) -> None:
    found = types.get(name)
    if found is not None and not isinstance(found, allowed):
        raise ConfigError(f"column {name!r} must be {words}, not {found.simpleString()}; cast it, or use to_json(…)")


def _has_several_values(headers: DataType | None) -> bool:
    if headers is None:
        return True
    if isinstance(headers, MapType) and isinstance(headers.keyType, StringType):
        if isinstance(headers.valueType, StringType):
            return False
        if isinstance(headers.valueType, ArrayType) and isinstance(headers.valueType.elementType, StringType):
            return True
    raise ConfigError(
        "column 'headers' must be map<string,array<string>> or map<string,string>, not " + headers.simpleString()
    )


class RowMaker:
    """Turns record batches of one DataFrame into rows, checking every subject once."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._known: set[str] = set()
        self._taken: dict[str, bool] = {}

    def rows(self, batch: pa.RecordBatch) -> ChunkRows:
        columns = self._columns
        if columns.typed:
            return typed_rows(self._subjects(batch), batch.column("event"))
        bodies = pc.fill_null(batch.column("data").cast(pa.binary()), NO_BYTES)
        headers = self._header_lines(batch) if columns.headers or columns.message_id else None
        return ChunkRows(self._subjects(batch), bodies, headers)

    def problems(self, batch: pa.RecordBatch) -> list[str | None]:
        """Why each row cannot be a message; None for those that can."""
        found = [self._subject_problem(subject) for subject in self._given(batch, "subject")]
        if self._columns.invalid_headers == FAIL_AT_HEADER:
            for index, (pairs, one) in enumerate(self._named(batch)):
                found[index] = found[index] or self._problem(partial(self._lines, pairs, one))
        return found

    def _subject_problem(self, subject: str | None) -> str | None:
        if self._columns.subject is not None or subject in self._known:
            return None
        problem = self._problem(partial(self._columns.check_subject, subject))
        if subject is not None and problem is None:
            self._known.add(subject)
        return problem

    @staticmethod
    def _problem(check: Callable[[], object]) -> str | None:
        try:
            check()
        except ConfigError as exc:
            return str(exc)
        return None

    def _subjects(self, batch: pa.RecordBatch) -> pa.Array:
        if self._columns.subject is not None:
            return repeated(self._columns.subject, batch.num_rows)
        column = batch.column("subject")
        for subject in pc.unique(column).to_pylist():
            if subject not in self._known:
                self._columns.check_subject(subject)
                self._known.add(subject)
        return column

    def _header_lines(self, batch: pa.RecordBatch) -> pa.Array:
        return pa.array((self._lines(pairs, one) for pairs, one in self._named(batch)), pa.binary())

    def _named(self, batch: pa.RecordBatch) -> Iterable[tuple[list[tuple[str, Any]] | None, str | None]]:
        """The headers and the message id of each row."""
        return zip(self._given(batch, "headers"), self._given(batch, "message_id"), strict=True)

    def _given(self, batch: pa.RecordBatch, name: str) -> list[Any]:
        has = {"headers": self._columns.headers, "message_id": self._columns.message_id}
        return batch.column(name).to_pylist() if has.get(name, name in batch.schema.names) else [None] * batch.num_rows

    def _lines(self, pairs: list[tuple[str, Any]] | None, message_id: str | None) -> bytes:
        lines = b"".join(
            self._columns.header_line(name, value)
            for name, given in pairs or ()
            if given is not None and self._takes(name)
            for value in (given if self._columns.several_values else [given])
            if value is not None
        )
        # The server ignores an empty id, and so do we: it would replace the chunk's own id.
        return lines + self._columns.header_line(MESSAGE_ID, message_id) if message_id and message_id.strip() else lines

    def _takes(self, name: str) -> bool:
        if name not in self._taken:
            self._taken[name] = self._columns.takes_header(name)
        return self._taken[name]
