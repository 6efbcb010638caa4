"""Rows that cannot be messages: the task that writes them detects them, and makes them dead letters."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.deadletter import headers as names
from penstock.deadletter.letters import MESSAGE_LIMIT, one_line
from penstock.spark.output import Columns, RowMaker

LANE, REASON = "penstock_lane", "penstock_reason"
"""Columns that are added to rows internally."""
ROWS, LETTERS = "rows", "letters"
HEADERS = pa.map_(pa.string(), pa.list_(pa.string()))
PLACE = {"stream": names.STREAM, "subject": names.SUBJECT, "sequence": names.SEQUENCE}
"""Columns that say where a row came from, if they are there, and the header of a letter for each."""


class Sorter:
    """Says for each row of a write whether it can be a message."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._maker = RowMaker(columns)

    def marked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows, with `LANE`, and for a letter the `REASON`."""
        reasons = pa.array(self._maker.problems(batch), pa.string())
        lanes = pc.if_else(pc.is_null(reasons), ROWS, LETTERS)
        return batch.append_column(LANE, lanes).append_column(REASON, reasons)

    def letters(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows that were marked as messages: the body as it came, and headers that say from where and why."""
        headers = [self._letter_headers(row) for row in batch.drop_columns(["data"]).to_pylist()]
        return pa.record_batch({"data": batch.column("data"), "headers": pa.array(headers, HEADERS)})

    def _letter_headers(self, row: dict[str, Any]) -> list[tuple[str, list[str]]]:
        own = {
            name: given if self._columns.several_values else [given]
            for name, given in row.get("headers") or ()
            if given is not None and not name.startswith(names.PREFIX)
        }
        told = {header: row[column] for column, header in PLACE.items() if row.get(column) is not None}
        told |= {names.REASON: row[REASON], names.PIPELINE: f"sink of {self._columns.stream}"}
        added = {header: one_line(str(value), MESSAGE_LIMIT) for header, value in told.items()}
        return [*own.items(), *((name, [value]) for name, value in added.items())]
