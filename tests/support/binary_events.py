"""One event in Avro and one in Protobuf, with their schemas."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from decimal import Decimal

import fastavro
from google.protobuf import descriptor_pb2, message_factory, timestamp_pb2, wrappers_pb2

WHEN = datetime(2026, 1, 2, 3, 4, 5, 600000, tzinfo=UTC)
AVRO = {
    "type": "record",
    "name": "Usage",
    "namespace": "billing",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["GPU", "CPU"]}},
        {"name": "second", "type": "Kind"},
        {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": "int"}}},
        {"name": "who", "type": {"type": "record", "name": "Who", "fields": [{"name": "raw", "type": "bytes"}]}},
    ],
}
USAGE = {
    "id": "a", "at": WHEN, "price": Decimal("12.34"), "note": None, "kind": "GPU", "second": "CPU",
    "tags": {"x": [1, 2]}, "who": {"raw": b"\x00\xff"},
}  # fmt: skip


def avro_datum() -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(AVRO), USAGE)
    return out.getvalue()


def descriptor_set() -> bytes:
    """What protoc would write for a file with two messages, one of which refers to well-known types."""
    field = descriptor_pb2.FieldDescriptorProto
    usage = descriptor_pb2.DescriptorProto(name="Usage")
    for number, (name, kind, type_name, label) in enumerate(
        [
            ("id", field.TYPE_STRING, None, field.LABEL_OPTIONAL),
            ("big", field.TYPE_UINT64, None, field.LABEL_OPTIONAL),
            ("at", field.TYPE_MESSAGE, ".google.protobuf.Timestamp", field.LABEL_OPTIONAL),
            ("note", field.TYPE_MESSAGE, ".google.protobuf.StringValue", field.LABEL_OPTIONAL),
            ("who", field.TYPE_MESSAGE, ".billing.Who", field.LABEL_OPTIONAL),
            ("parts", field.TYPE_MESSAGE, ".billing.Who", field.LABEL_REPEATED),
        ],
        1,
    ):
        usage.field.add(name=name, number=number, type=kind, type_name=type_name, label=label)
    who = descriptor_pb2.DescriptorProto(name="Who")
    who.field.add(name="raw", number=1, type=field.TYPE_BYTES, label=field.LABEL_OPTIONAL)
    own = descriptor_pb2.FileDescriptorProto(name="billing.proto", package="billing", syntax="proto3")
    own.message_type.extend([usage, who])
    files = descriptor_pb2.FileDescriptorSet()
    for module in (timestamp_pb2, wrappers_pb2):
        own.dependency.append(module.DESCRIPTOR.name)
        module.DESCRIPTOR.CopyToProto(files.file.add())
    files.file.append(own)
    encoded: bytes = files.SerializeToString()
    return encoded


def protobuf_usage() -> bytes:
    """A `billing.Usage` with every field set."""
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set())
    usage = message_factory.GetMessages(list(files.file))["billing.Usage"]
    full = usage(id="a", big=2**64 - 1, note={"value": "n"}, who={"raw": b"\xff"}, parts=[{"raw": b"1"}, {}])
    full.at.FromDatetime(WHEN)
    encoded: bytes = full.SerializeToString()
    return encoded
