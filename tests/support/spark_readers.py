"""The source's two readers as Spark makes them, and what they planned, for tests without a Spark job."""

from __future__ import annotations

import json
from typing import Any

from penstock.server.embedded import EmbeddedServer
from penstock.spark.datasource import JetStreamDataSource
from penstock.spark.source import Part


def source(server: EmbeddedServer, options: dict[str, Any]) -> JetStreamDataSource:
    texts = {name: str(value) for name, value in {"servers": server.url, "stream": "S", **options}.items()}
    return JetStreamDataSource(texts)


def logged(offset: dict[str, Any]) -> dict[str, Any]:
    """An offset as it comes back from Spark's log."""
    again: dict[str, Any] = json.loads(json.dumps(offset))
    return again


def ranges(parts: list[Part]) -> list[tuple[int, int]]:
    return [(part.value.first, part.value.last) for part in parts]


def rows(reader: Any, parts: list[Part]) -> list[int]:
    return [n for part in parts for batch in reader.read(part) for n in batch.column("sequence").to_pylist()]
