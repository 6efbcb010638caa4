"""Avro events as rows of Spark."""

from __future__ import annotations

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
from penstock.events.avro import AvroReader
from penstock.spark.binary_events import BinaryFormat

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
        self._reader = AvroReader(schema_text)
        found = _Types().of(self._reader.declared)
        if not isinstance(found, StructType):
            raise ConfigError("an event's Avro schema must be a record")
        self.schema = found

    def read(self, body: bytes) -> dict[str, Any]:
        return self._reader.read(body)


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
