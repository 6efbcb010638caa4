"""Arrow columns from bytes and NumPy arrays, without converting Python values.

To convert one (`pa.array`, `pa.scalar`, an argument of `pyarrow.compute`), Arrow imports pandas where it is installed.
That takes a third of a second of processor time in every Python process of Spark, more than many a micro-batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def repeated(text: str, count: int) -> pa.Array:
    """The same text in every row."""
    data = text.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data * count)])


def constant(text: str) -> pa.Scalar[Any]:
    """A text as an argument of `pyarrow.compute`."""
    return repeated(text, 1)[0]


def numbers(values: np.ndarray[Any, Any]) -> pa.Array:
    """A column of numbers; it shares the memory of the array."""
    held = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(held.dtype), len(held), [None, pa.py_buffer(held)])


def values(column: pa.Array) -> np.ndarray[Any, Any]:
    """The numbers of a column without nulls; shares its memory."""
    data = np.frombuffer(column.buffers()[1], dtype=column.type.to_pandas_dtype())
    return data[column.offset : column.offset + len(column)]


def is_valid(column: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each row whether it is there, and no null."""
    bits = column.buffers()[0]
    if bits is None:
        return np.ones(len(column), dtype=np.bool_)
    found = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    return found[column.offset : column.offset + len(column)].astype(np.bool_)
