"""Avro events: one datum a message, with or without a header of single-object encoding. Needs `penstock-nats[avro]`."""

from __future__ import annotations

import io
import json
import uuid
from typing import Any

from penstock.errors import ConfigError

MARKER = b"\xc3\x01"
"""How a body in single-object encoding begins; 8 bytes of the schema's fingerprint follow."""
HEADER_BYTES = 10


class AvroReader:
    """Reads events of one Avro record schema."""

    def __init__(self, schema_text: str) -> None:
        """Raises `ConfigError` for a schema that is none, or without fastavro."""
        try:
            from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form
        except ImportError as exc:
            raise ConfigError("Avro events need the fastavro package: pip install 'penstock-nats[avro]'") from exc
        try:
            self.declared: Any = json.loads(schema_text)
            self._parsed = parse_schema(self.declared)
        except Exception as exc:  # fastavro raises many kinds; all of them mean that the schema is wrong
            raise ConfigError(f"the Avro schema cannot be read: {exc}") from exc
        self._header = MARKER + bytes.fromhex(fingerprint(to_parsing_canonical_form(self._parsed), "CRC-64-AVRO"))

    def read(self, body: bytes) -> dict[str, Any]:
        """The event. Raises whatever fastavro raises for a body that is none."""
        from fastavro import schemaless_reader

        source = io.BytesIO(body)
        if body.startswith(self._header):
            source.seek(HEADER_BYTES)
        event = schemaless_reader(source, self._parsed, None)
        if left := len(body) - source.tell():
            raise ValueError(f"{left} bytes are left over after the event")
        assert isinstance(event, dict)
        return {name: _plain(value) for name, value in event.items()}


def _plain(value: Any) -> Any:
    """A value as PySpark takes it."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return bytearray(value)
    return str(value) if isinstance(value, uuid.UUID) else value
