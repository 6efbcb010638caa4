"""Protobuf events as rows of Spark."""

from __future__ import annotations

from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
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
from penstock.events.protobuf import TIMESTAMP, WRAPPERS, ProtobufReader, is_map, is_repeated, kind_of
from penstock.spark.binary_events import BinaryFormat

SCALARS: dict[str, DataType] = {
    "DOUBLE": DoubleType(),
    "FLOAT": FloatType(),
    "INT64": LongType(),
    "UINT64": DecimalType(20, 0),  # a bigint has no room for its upper half
    "INT32": IntegerType(),
    "FIXED64": DecimalType(20, 0),
    "FIXED32": LongType(),
    "BOOL": BooleanType(),
    "STRING": StringType(),
    "BYTES": BinaryType(),
    "UINT32": LongType(),
    "ENUM": StringType(),
    "SFIXED32": IntegerType(),
    "SFIXED64": LongType(),
    "SINT32": IntegerType(),
    "SINT64": LongType(),
}


class ProtobufFormat(BinaryFormat):
    """Events of one message of a descriptor set; without a name, the only one it has."""

    def __init__(self, descriptor_set: bytes, message: str | None) -> None:
        self._reader = ProtobufReader(descriptor_set, message)
        self.schema = _struct(self._reader.descriptor, ())

    @property
    def what(self) -> str:
        return f"a {self._reader.name}"

    def read(self, body: bytes) -> dict[str, Any]:
        return self._reader.read(body)


def _struct(message: Any, above: tuple[str, ...]) -> StructType:
    if message.full_name in above:
        raise ConfigError(f"message {message.full_name!r} contains itself; Spark has no such type")
    inside = (*above, message.full_name)
    return StructType([StructField(field.name, _type(field, inside)) for field in message.fields])


def _type(field: Any, above: tuple[str, ...]) -> DataType:
    if is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return MapType(_single(key, above), _single(value, above))
    return ArrayType(_single(field, above)) if is_repeated(field) else _single(field, above)


def _single(field: Any, above: tuple[str, ...]) -> DataType:
    if (inner := field.message_type) is None:
        return SCALARS[kind_of(field)]
    if inner.full_name == TIMESTAMP:
        return TimestampType()
    return _single(inner.fields_by_name["value"], above) if inner.full_name in WRAPPERS else _struct(inner, above)
