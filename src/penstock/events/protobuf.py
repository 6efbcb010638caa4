"""Protobuf events, by a descriptor set. Needs `penstock-nats[protobuf]`.

A descriptor set is what `protoc --include_imports --descriptor_set_out=events.desc events.proto` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any

from penstock.errors import ConfigError

WELL_KNOWN = "google.protobuf."
WRAPPERS = {f"{WELL_KNOWN}{kind}Value" for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32")}
WRAPPERS |= {f"{WELL_KNOWN}{kind}Value" for kind in ("Bool", "String", "Bytes")}
TIMESTAMP = f"{WELL_KNOWN}Timestamp"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNSIGNED = frozenset({"UINT64", "FIXED64"})
"""Kinds whose upper half a signed number of 64 bits has no room for: their values are decimals."""


class ProtobufReader:
    """Reads events of one message of a descriptor set; without a name, the only one it has.

    It holds bytes and a name alone, so that it can be sent to executors.
    """

    def __init__(self, descriptor_set: bytes, message: str | None) -> None:
        """Raises `ConfigError` for a set that is none or lacks the message, or without protobuf."""
        try:
            import google.protobuf.message  # noqa: F401 # only to see that it is there
        except ImportError as exc:
            raise ConfigError(
                "Protobuf events need the protobuf package: pip install 'penstock-nats[protobuf]'"
            ) from exc
        self._set = descriptor_set
        self.name = _chosen(descriptor_set, message)

    @property
    def descriptor(self) -> Any:
        return _messages(self._set)[self.name].DESCRIPTOR

    def read(self, body: bytes) -> dict[str, Any]:
        """The event. Raises whatever protobuf raises for a body that is none."""
        message = _messages(self._set)[self.name]()
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


def kind_of(field: Any) -> str:
    """The kind of a field, such as `INT64`."""
    return _kinds()[field.type]


@lru_cache(maxsize=1)
def _kinds() -> dict[int, str]:
    from google.protobuf.descriptor import FieldDescriptor

    prefix = "TYPE_"
    return {
        getattr(FieldDescriptor, name): name.removeprefix(prefix)
        for name in dir(FieldDescriptor)
        if name.startswith(prefix)
    }


def is_repeated(field: Any) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _values(message: Any) -> dict[str, Any]:
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if is_map(field):
        convert = _converter(field.message_type.fields_by_name["value"])
        key = _converter(field.message_type.fields_by_name["key"])
        return {key(name): convert(value[name]) for name in value}
    if is_repeated(field):
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
    if kind_of(field) in UNSIGNED:
        return Decimal
    return bytearray if kind_of(field) == "BYTES" else lambda value: value


def _message_value(message: Any) -> Any:
    name = message.DESCRIPTOR.full_name
    if name == TIMESTAMP:
        return EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1000)
    if name in WRAPPERS:
        return _converter(message.DESCRIPTOR.fields_by_name["value"])(message.value)
    return _values(message)
