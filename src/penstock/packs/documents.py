"""The events of a typed pack as JSON documents: for readers who expect messages, or want to look. Pure."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from penstock.packs.schemas import portable


def documents(batch: pa.RecordBatch) -> list[bytes]:
    """Each row as a JSON object. Times are ISO 8601, in UTC where they have a zone; binaries are base64."""
    rows = portable(batch).to_pylist(maps_as_pydicts="lossy")
    return [json.dumps(_plain(row), separators=(",", ":"), ensure_ascii=False).encode() for row in rows]


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(_plain(name)): _plain(one) for name, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case bytes():
            return base64.b64encode(value).decode()
        case datetime():
            return (value.astimezone(UTC) if value.tzinfo else value).isoformat().replace("+00:00", "Z")
        case date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return str(value)
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case _:
            return value
