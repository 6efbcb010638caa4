"""Avro events: one datum a message, with or without a header of single-object encoding. Needs `penstock-nats[avro]`."""

from __future__ import annotations

import io
import json
import uuid
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.errors import ConfigError
from penstock.spark.binary_events import BinaryFormat

MARKER = b"\xc3\x01"
"""How a body in single-object encoding begins; 8 bytes of the schema's fingerprint follow."""
HEADER_BYTES = 10

PRIMITIVES: dict[str, DataType] = {
    "string": StringType(),
    "bytes": BinaryType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
}
LOGICAL: dict[str, DataType] = {
    "timestamp-millis": TimestampType(),
    "timestamp-micros": TimestampType(),
    "date": DateType(),
    "uuid": StringType(),
}


class AvroFormat(BinaryFormat):
    """Events of one Avro record schema."""

    what = "Avro of this schema"

    def __init__(self, schema_text: str) -> None:
        try:
            from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form
        except ImportError as exc:
            raise ConfigError("Avro events need the fastavro package: pip install 'penstock-nats[avro]'") from exc
        try:
            declared = json.loads(schema_text)
            self._parsed = parse_schema(declared)
        except Exception as exc:  # fastavro raises many kinds; all of them mean that the schema is wrong
            raise ConfigError(f"the Avro schema cannot be read: {exc}") from exc
        self._header = MARKER + bytes.fromhex(fingerprint(to_parsing_canonical_form(self._parsed), "CRC-64-AVRO"))
        found = _Types().of(declared)
        if not isinstance(found, StructType):
            raise ConfigError("an event's Avro schema must be a record")
        self.schema = found

    def read(self, body: bytes) -> dict[str, Any]:
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


class _Types:
    """Avro's types as Spark's; remembers named types, which later ones may refer to."""

    def __init__(self) -> None:
        self._named: dict[str, DataType | None] = {}

    def of(self, schema: Any) -> DataType:
        if isinstance(schema, list):
            return self._union(schema)
        if isinstance(schema, str):
            return self._reference(schema)
        if logical := schema.get("logicalType"):
            if logical == "decimal":
                return DecimalType(schema["precision"], schema.get("scale", 0))
            if logical in LOGICAL:
                return LOGICAL[logical]
        match schema["type"]:
            case "record":
                return self._record(schema)
            case "enum" | "fixed" as kind:
                return self._remember(schema, PRIMITIVES["string" if kind == "enum" else "bytes"])
            case "array":
                return ArrayType(self.of(schema["items"]))
            case "map":
                return MapType(StringType(), self.of(schema["values"]))
            case inner:
                return self.of(inner)

    def _record(self, schema: dict[str, Any]) -> DataType:
        self._named[schema["name"]] = None  # known, and not usable before it is complete
        fields = [StructField(field["name"], self.of(field["type"])) for field in schema["fields"]]
        return self._remember(schema, StructType(fields))

    def _remember(self, schema: dict[str, Any], kind: DataType) -> DataType:
        name = schema["name"]
        self._named[name] = self._named[name.rsplit(".", 1)[-1]] = kind
        if namespace := schema.get("namespace"):
            self._named[f"{namespace}.{name}"] = kind
        return kind

    def _union(self, branches: list[Any]) -> DataType:
        kinds = [branch for branch in branches if branch != "null"]
        if len(kinds) != 1:
            raise ConfigError(f"a union of {len(kinds)} types has no Spark type; only [null, type] has: {branches}")
        return self.of(kinds[0])

    def _reference(self, name: str) -> DataType:
        if name in PRIMITIVES:
            return PRIMITIVES[name]
        if (known := self._named.get(name)) is None:
            raise ConfigError(f"Avro type {name!r} is recursive or not declared; Spark has no such type")
        return known
