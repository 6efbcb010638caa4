"""Avro and Protobuf events, on real Spark and with the real libraries."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import fastavro
import pytest
from google.protobuf import descriptor_pb2, message_factory, timestamp_pb2, wrappers_pb2
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import ConfigError
from penstock.spark.avro_events import AvroFormat
from penstock.spark.decode import decode
from penstock.topology.model import PipelineEvent

MESSAGES = (
    "stream string, subject string, sequence bigint, timestamp timestamp,"
    " headers map<string,array<string>>, data binary"
)
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


def messages(spark: SparkSession, bodies: list[bytes]) -> DataFrame:
    no_headers: dict[str, list[str]] = {}
    rows = [("S", "s.x", n, WHEN, no_headers, bytearray(body)) for n, body in enumerate(bodies, 1)]
    return spark.createDataFrame(rows, MESSAGES)


def avro_datum() -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(AVRO), USAGE)
    return out.getvalue()


def test_avro_datums_become_rows_and_the_rest_bad_records(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "usage.avsc").write_text(json.dumps(AVRO))
    canonical = fastavro.schema.to_parsing_canonical_form(fastavro.parse_schema(AVRO))
    fingerprint = bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))
    datum = avro_datum()
    bodies = [datum, b"\xc3\x01" + fingerprint + datum, datum + b"!", datum[:5], b""]
    read = decode(messages(spark, bodies), PipelineEvent("avro", "usage.avsc"), tmp_path, key="id")
    assert read.bad is not None
    rows = read.events.collect()
    assert len(rows) == 2
    for row in rows:
        assert (row.id, row.price, row.note, row.kind, row.second) == ("a", Decimal("12.34"), None, "GPU", "CPU")
        assert (row.tags, bytes(row.who.raw)) == ({"x": [1, 2]}, b"\x00\xff")
        assert row["at"].astimezone(UTC) == WHEN
    reasons = {row.sequence: row.reason for row in read.bad.collect()}
    assert sorted(reasons) == [3, 4, 5]
    assert "1 bytes are left over" in reasons[3]
    assert all("not Avro of this schema" in reason for reason in reasons.values())


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "cannot be read"),
        ('{"type": "recrd", "name": "x"}', "cannot be read"),
        ('"string"', "must be a record"),
        ('{"type":"record","name":"x","fields":[{"name":"u","type":["int","string"]}]}', "union of 2"),
        ('{"type":"record","name":"x","fields":[{"name":"u","type":["null","x"]}]}', "recursive"),
    ],
)
def test_an_avro_schema_that_spark_cannot_have_is_refused(schema: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AvroFormat(schema)


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


def test_protobuf_messages_become_rows_and_the_rest_bad_records(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "billing.desc").write_bytes(descriptor_set())
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set())
    usage = message_factory.GetMessages(list(files.file))["billing.Usage"]
    full = usage(id="a", big=2**64 - 1, note={"value": "n"}, who={"raw": b"\xff"}, parts=[{"raw": b"1"}, {}])
    full.at.FromDatetime(WHEN)
    event = PipelineEvent("protobuf", "billing.desc", "billing.Usage")
    bodies = [full.SerializeToString(), b"", b"\xff\xff\xff", full.SerializeToString()[:-1]]
    read = decode(messages(spark, bodies), event, tmp_path)
    assert read.bad is not None
    first, empty = sorted(read.events.collect(), key=lambda row: row.jetstream.sequence)
    assert (first.id, first.big, first.note, bytes(first.who.raw)) == ("a", Decimal(2**64 - 1), "n", b"\xff")
    assert [bytes(part.raw) for part in first.parts] == [b"1", b""]
    assert first["at"].astimezone(UTC) == WHEN
    assert (empty.id, empty.note, empty.who, empty.parts) == ("", None, None, [])
    bad = sorted(read.bad.collect(), key=lambda row: row.sequence)
    assert [row.sequence for row in bad] == [3, 4]
    assert all("not a billing.Usage" in row.reason for row in bad)


@pytest.mark.parametrize(
    ("body", "message", "says"),
    [
        (descriptor_set(), None, "`message` is needed; the descriptor set has billing.Usage, billing.Who"),
        (descriptor_set(), "billing.Usag", "no message 'billing.Usag'"),
        (b"not a descriptor set", "x", "not a descriptor set"),
    ],
)
def test_a_descriptor_set_without_the_message_is_refused(
    spark: SparkSession, tmp_path: Path, body: bytes, message: str | None, says: str
) -> None:
    (tmp_path / "x.desc").write_bytes(body)
    with pytest.raises(ConfigError, match=says):
        decode(messages(spark, []), PipelineEvent("protobuf", "x.desc", message), tmp_path)
