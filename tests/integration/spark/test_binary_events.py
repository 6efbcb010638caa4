"""Avro and Protobuf events, on real Spark and with the real libraries."""

from __future__ import annotations

import json
from datetime import UTC
from decimal import Decimal
from pathlib import Path

import fastavro
import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.support.binary_events import AVRO, WHEN, avro_datum, descriptor_set, protobuf_usage

from penstock.errors import ConfigError
from penstock.spark.avro_events import AvroFormat
from penstock.spark.decode import decode
from penstock.topology.model import PipelineEvent

MESSAGES = (
    "stream string, subject string, sequence bigint, timestamp timestamp,"
    " headers map<string,array<string>>, data binary"
)


def messages(spark: SparkSession, bodies: list[bytes]) -> DataFrame:
    no_headers: dict[str, list[str]] = {}
    rows = [("S", "s.x", n, WHEN, no_headers, bytearray(body)) for n, body in enumerate(bodies, 1)]
    return spark.createDataFrame(rows, MESSAGES)


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


def test_protobuf_messages_become_rows_and_the_rest_bad_records(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "billing.desc").write_bytes(descriptor_set())
    event = PipelineEvent("protobuf", "billing.desc", "billing.Usage")
    bodies = [protobuf_usage(), b"", b"\xff\xff\xff", protobuf_usage()[:-1]]
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
