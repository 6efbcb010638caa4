"""Protobuf events, by a descriptor set. Needs `penstock-nats[protobuf]`.

A descriptor set is what `protoc --include_imports --descriptor_set_out=events.desc events.proto` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
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
from penstock.spark.binary_events import BinaryFormat

WELL_KNOWN = "google.protobuf."
WRAPPERS = {f"{WELL_KNOWN}{kind}Value" for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32")}
WRAPPERS |= {f"{WELL_KNOWN}{kind}Value" for kind in ("Bool", "String", "Bytes")}
TIMESTAMP = f"{WELL_KNOWN}Timestamp"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

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
        try:
            import google.protobuf.message  # noqa: F401 # only to see that it is there
        except ImportError as exc:
            raise ConfigError(
                "Protobuf events need the protobuf package: pip install 'penstock-nats[protobuf]'"
            ) from exc
        self._set = descriptor_set
        self._name = _chosen(descriptor_set, message)
        self.schema = _struct(_message_class(descriptor_set, self._name).DESCRIPTOR, ())

    @property
    def what(self) -> str:
        return f"a {self._name}"

    def read(self, body: bytes) -> dict[str, Any]:
        message = _message_class(self._set, self._name)()
        message.ParseFromString(body)
        if not message.IsInitialized():
            raise ValueError(f"required fields are missing: {', '.join(message.FindInitializationErrors())}")
        return _values(message)


def _chosen(descriptor_set: bytes, message: str | None) -> str:
    names = sorted(_messages(descriptor_set))
    own = [name for name in names if not name.startswith(WELL_KNOWN)]
    if message is None and len(own) == 1:
        return own[0]
    if message not in names:
        said = "`message` is needed" if message is None else f"there is no message {message!r}"
        raise ConfigError(f"event schema: {said}; the descriptor set has {', '.join(own) or 'none'}")
    return message


@lru_cache(maxsize=8)
def _messages(descriptor_set: bytes) -> dict[str, type[Any]]:
    """Every message class of the set by full name."""
    from google.protobuf import descriptor_pb2, message_factory
    from google.protobuf.message import DecodeError

    files = descriptor_pb2.FileDescriptorSet()
    try:
        files.ParseFromString(descriptor_set)
        classes: dict[str, type[Any]] = message_factory.GetMessages(list(files.file))
    except (DecodeError, TypeError, KeyError) as exc:
        raise ConfigError(
            "event schema: not a descriptor set with all its imports; write it with "
            "`protoc --include_imports --descriptor_set_out=FILE …`"
        ) from exc
    return classes


def _message_class(descriptor_set: bytes, name: str) -> type[Any]:
    return _messages(descriptor_set)[name]


def _kind(field: Any) -> str:
    names: dict[int, str] = {value: name for name, value in _field_types().items()}
    return names[field.type]


@lru_cache(maxsize=1)
def _field_types() -> dict[str, int]:
    from google.protobuf.descriptor import FieldDescriptor

    return {name: getattr(FieldDescriptor, f"TYPE_{name}") for name in (*SCALARS, "MESSAGE", "GROUP")}


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


# -- types ---------------------------------------------------------------------------------------------------------


def _struct(message: Any, above: tuple[str, ...]) -> StructType:
    if message.full_name in above:
        raise ConfigError(f"message {message.full_name!r} contains itself; Spark has no such type")
    inside = (*above, message.full_name)
    return StructType([StructField(field.name, _type(field, inside)) for field in message.fields])


def _type(field: Any, above: tuple[str, ...]) -> DataType:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return MapType(_single(key, above), _single(value, above))
    return ArrayType(_single(field, above)) if _repeated(field) else _single(field, above)


def _single(field: Any, above: tuple[str, ...]) -> DataType:
    if (inner := field.message_type) is None:
        return SCALARS[_kind(field)]
    if inner.full_name == TIMESTAMP:
        return TimestampType()
    return _single(inner.fields_by_name["value"], above) if inner.full_name in WRAPPERS else _struct(inner, above)


# -- values --------------------------------------------------------------------------------------------------------


def _values(message: Any) -> dict[str, Any]:
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if _is_map(field):
        convert = _converter(field.message_type.fields_by_name["value"])
        key = _converter(field.message_type.fields_by_name["key"])
        return {key(name): convert(value[name]) for name in value}
    if _repeated(field):
        return [_converter(field)(item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _converter(field)(value)


def _converter(field: Any) -> Callable[[Any], Any]:
    if field.message_type is not None:
        return _message_value
    if field.enum_type is not None:
        names = field.enum_type.values_by_number
        return lambda number: names[number].name if number in names else str(number)
    if isinstance(SCALARS[_kind(field)], DecimalType):
        return Decimal
    return bytearray if _kind(field) == "BYTES" else lambda value: value


def _message_value(message: Any) -> Any:
    name = message.DESCRIPTOR.full_name
    if name == TIMESTAMP:
        return EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1000)
    if name in WRAPPERS:
        return _converter(message.DESCRIPTOR.fields_by_name["value"])(message.value)
    return _values(message)
