"""Declared pipelines on a real Spark and a real server."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession

from penstock import packs
from penstock.deadletter import headers
from penstock.errors import ConfigError
from penstock.observe.pipelines import Declared, collect_pipelines
from penstock.server.embedded import EmbeddedServer
from penstock.spark.outputs import as_messages
from penstock.spark.pipelines import Pipeline, pipeline
from penstock.spark.progress import FINISHED
from penstock.spark.runs import PipelineRun, run
from penstock.testing.contents import stream_data, stream_messages
from penstock.topology.load import load
from penstock.topology.model import PipelineSink
from penstock.wire.blocking import run as blocking

STREAMS = """
streams:
  IN: {subjects: [in.>], allow_atomic: true, allow_direct: true}
  MORE: {subjects: [more.>], allow_direct: true}
  OUT: {subjects: [out.>], allow_atomic: true}
  DLQ: {subjects: [dlq.>], allow_atomic: true, packing: rows}
  PACKED: {subjects: [packed.>], allow_atomic: true, packing: {kind: typed, rows: 40, codec: lz4}}
"""
SCHEMA = "id string NOT NULL, n bigint NOT NULL"


def declared(server: EmbeddedServer, folder: Path, text: str) -> Pipeline:
    """The pipeline `p` of a platform with these streams."""
    (folder / "penstock.yaml").write_text(f"{STREAMS}pipelines:\n  p:\n{text}")
    return pipeline(load(folder / "penstock.yaml"), "p", server.settings)


@pytest.fixture
def flow(nats_server: EmbeddedServer, tmp_path: Path, streams: Any) -> Any:
    for name in ("IN", "MORE", "OUT", "DLQ", "PACKED"):
        streams.make(name, allow_atomic=True)
    return lambda text: declared(nats_server, tmp_path, text)


def events(*pairs: tuple[str, int]) -> list[bytes]:
    return [json.dumps({"id": key, "n": n}).encode() for key, n in pairs]


def table(folder: Path) -> list[dict[str, Any]]:
    """What a reader that knows nothing of Spark sees."""
    found = pyarrow.dataset.dataset(folder, format="parquet", partitioning="hive")
    return sorted(found.to_table().to_pylist(), key=str)


def test_events_flow_to_all_sinks_once_and_bad_records_to_theirs_also_in_a_second_run(
    jetstream: SparkSession, nats_server: EmbeddedServer, tmp_path: Path, streams: Any, flow: Any
) -> None:
    folder = tmp_path / "my files ü"  # tables and checkpoint lie there, and nowhere else
    folder.mkdir()
    text = f"""
    from: {{streams: [IN, MORE], subjects: [in.a, more.>], max_rows: 4}}
    event: {{format: json, schema: "{SCHEMA}"}}
    dedupe: {{key: id, within: 1h}}
    sql: "SELECT id, n * 2 AS twice, jetstream.stream AS origin FROM events"
    to:
      - {{format: parquet, path: lake/t, partition_by: [origin]}}
      - {{stream: OUT, subject: out.t}}
    bad_records: dlq.p
    """
    made = declared(nats_server, folder, text)
    streams.publish("in.a", events(("a", 1), ("b", 2), ("a", 1)), Own="kept")
    streams.publish("in.a", [b"no json", b'{"id":"x"}'], Own="kept")
    streams.publish("in.other", [b"not asked for"])
    streams.publish("more.a", events(("c", 3), ("b", 2)))
    [first] = run(jetstream, [made])
    assert (first.state, first.error) == (FINISHED, None)
    assert (first.rows_read, first.rows_written, first.progress.bad_records) == (7, 3, 2)
    assert [(row["id"], row["twice"]) for row in table(folder / "lake/t")] == [("a", 2), ("b", 4), ("c", 6)]
    assert sorted(json.loads(body)["id"] for body in stream_data(nats_server.settings, "OUT")) == ["a", "b", "c"]

    streams.publish("in.a", events(("b", 2), ("d", 4)))
    [second] = run(jetstream, [made])
    assert (second.rows_read, second.rows_written) == (2, 1)
    assert [row["id"] for row in table(folder / "lake/t")] == ["a", "b", "c", "d"]
    assert len(stream_data(nats_server.settings, "OUT")) == 4

    assert (folder / ".penstock/checkpoints/p/commits").is_dir()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("my")] == [folder.name]
    assert len(second.sample()) == 4

    letters = [blocking(streams.api.get_message("DLQ", seq)) for seq in (1, 2)]
    assert [letter.data for letter in letters] == [b"no json", b'{"id":"x"}']
    assert letters[1].subject == "dlq.p"
    about = {name: values[0] for name, values in letters[1].headers.items()}
    assert about["Own"] == "kept"
    assert about[headers.REASON] == "field n is missing"
    assert (about[headers.STREAM], about[headers.SUBJECT], about[headers.SEQUENCE]) == ("IN", "in.a", "5")
    assert about[headers.PIPELINE] == "p"

    [seen] = blocking(collect_pipelines(streams.api, [Declared("p", made.streams, made.consumer)]))
    assert (seen.state, seen.behind_rows) == (FINISHED, 0)
    assert seen.progress is not None
    assert (seen.progress.rows_written, seen.progress.consumer) == (1, "pipeline_p")


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (
            "sql: 'SELECT upper(id) AS id FROM events WHERE n > 1 UNION ALL SELECT id FROM events'",
            "ABBCaabbc",
        ),
        ("dedupe: {key: id, within: 1h}", "abc"),
        (
            "dedupe: {key: id, within: 1h}\n    sql: 'SELECT id, sum(n) AS n FROM (SELECT * FROM events UNION ALL"
            " SELECT * FROM events) GROUP BY id'",
            "abc",
        ),
    ],
    ids=["stateless", "dedupe", "dedupe and aggregation of events used twice"],
)
def test_a_pipeline_with_bad_records_reads_each_message_once(
    jetstream: SparkSession,
    nats_server: EmbeddedServer,
    tmp_path: Path,
    streams: Any,
    flow: Any,
    more: str,
    found: str,
) -> None:
    made = flow(f"""
    from: {{stream: IN, max_rows: 6}}
    event: {{format: json, schema: "{SCHEMA}"}}
    {more}
    to: [{{format: parquet, path: t}}]
    bad_records: dlq.p
    """)
    streams.publish("in.a", [*events(("a", 1), ("b", 2), ("a", 3)), b"bad", b"bad", *events(("c", 4), ("b", 5))])
    one = PipelineRun(jetstream, made)
    one.start()
    assert one._query
    one._query.awaitTermination(400)
    assert one.ended().error is None
    assert sum(progress.numInputRows for progress in one._query.recentProgress) == 7
    assert one.ended().rows_read == 7
    assert stream_data(nats_server.settings, "DLQ") == [b"bad", b"bad"]
    assert Counter(row["id"] for row in table(tmp_path / "t")) == Counter(found)


def test_rows_with_subjects_of_their_own_are_written_by_several_tasks_in_order_by_subject(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Any, flow: Any
) -> None:
    made = flow(f"""
    from: {{stream: IN}}
    event: {{format: json, schema: "{SCHEMA}"}}
    sql: "SELECT concat('out.', id) AS subject, n, jetstream FROM events"
    to: [{{stream: OUT}}]
    """)
    numbers = [(f"s{n % 7}", n) for n in range(200)]
    streams.publish("in.a", events(*numbers))
    [result] = run(jetstream, [made])
    assert result.error is None
    found: dict[str, list[int]] = {}
    for sequence in range(1, 201):
        message = blocking(streams.api.get_message("OUT", sequence))
        found.setdefault(message.subject, []).append(json.loads(message.data)["n"])
    assert found == {f"out.s{one}": [n for _, n in numbers if n % 7 == one] for one in range(7)}
    rows = jetstream.createDataFrame([("out.a", 1), ("out.b", 2)], "subject string, n bigint")
    assert as_messages(rows, made.spec.sinks[0]).rdd.getNumPartitions() == 2
    assert as_messages(rows, PipelineSink(stream="OUT", subject="out.x")).rdd.getNumPartitions() == 1


def found(server: EmbeddedServer, stream: str, subject: str) -> list[tuple[str, str, list[bytes]]]:
    """Kind, codec and rows of every pack on a subject; a message is one of kind `message`."""
    there = [message for message in stream_messages(server.settings, stream) if message.subject == subject]
    return [as_rows(message.header_values(), message.data) for message in there]


def as_rows(about: dict[str, list[str]], body: bytes) -> tuple[str, str, list[bytes]]:
    if not packs.is_pack(about):
        return "message", "", [body]
    pack = packs.decode(about, body)
    return pack.kind, pack.mark.codec, [row.data for row in pack.rows()]


def test_rows_are_packed_as_the_stream_or_the_sink_says_and_bad_records_are_not(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Any, flow: Any
) -> None:
    made = flow(f"""
    from: {{stream: IN}}
    event: {{format: json, schema: "{SCHEMA}"}}
    sql: "SELECT n, map(id, n) AS by_id, jetstream FROM events"
    to:
      - {{stream: PACKED, subject: packed.typed}}
      - {{stream: OUT, subject: out.rows, packing: {{rows: 30}}}}
      - {{stream: PACKED, subject: packed.plain, packing: none}}
    bad_records: dlq.p
    """)
    numbers = range(100, 0, -1)
    streams.publish("in.a", [*events(*(("a", n) for n in numbers)), b"bad", b"bad"])
    [result] = run(jetstream, [made])
    assert result.error is None
    typed = found(nats_server, "PACKED", "packed.typed")
    assert [(kind, codec, len(rows)) for kind, codec, rows in typed] == [
        ("typed", "lz4", size) for size in (40, 40, 20)
    ]
    rows = found(nats_server, "OUT", "out.rows")
    assert [(kind, codec, len(rows)) for kind, codec, rows in rows] == [("rows", "none", n) for n in (30, 30, 30, 10)]
    plain = found(nats_server, "PACKED", "packed.plain")
    assert {kind for kind, _, _ in plain} == {"message"}
    for written in (typed, rows, plain):  # in the order of the stream
        assert [json.loads(row) for *_, some in written for row in some] == [
            {"n": n, "by_id": {"a": n}} for n in numbers
        ]
    assert found(nats_server, "DLQ", "dlq.p") == [("message", "", [b"bad"])] * 2


def test_messages_as_they_are_do_not_go_into_typed_packs(jetstream: SparkSession, streams: Any, flow: Any) -> None:
    made = flow("    {from: {stream: IN}, to: {stream: PACKED, subject: packed.x}}")
    streams.publish("in.a", [b"x"])
    [result] = run(jetstream, [made])
    assert "have the column `data`, which typed packs have no place for" in str(result.error)
    assert streams.info("PACKED").state.messages == 0


def test_an_aggregation_keeps_one_row_a_group_and_publishes_what_changed(
    jetstream: SparkSession, nats_server: EmbeddedServer, tmp_path: Path, streams: Any, flow: Any
) -> None:
    made = flow(f"""
    from: {{stream: IN}}
    event: {{format: json, schema: "{SCHEMA}"}}
    sql: "SELECT id, sum(n) AS total FROM events GROUP BY ALL"
    to: [{{format: parquet, path: t}}, {{stream: OUT, subject: out.t}}]
    """)
    streams.publish("in.a", events(("a", 1), ("b", 2), ("a", 3)))
    run(jetstream, [made])
    streams.publish("in.a", events(("b", 5)))
    [result] = run(jetstream, [made])
    assert result.error is None
    assert [(row["id"], row["total"]) for row in table(tmp_path / "t")] == [("a", 4), ("b", 7)]
    changes = [json.loads(body) for body in stream_data(nats_server.settings, "OUT")]
    assert changes == [{"id": "a", "total": 4}, {"id": "b", "total": 2}, {"id": "b", "total": 7}]


def test_files_of_every_format_and_the_console_get_the_rows(
    jetstream: SparkSession, tmp_path: Path, streams: Any, flow: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made = flow(f"""
    from: {{stream: IN}}
    event: {{format: json, schema: "{SCHEMA}"}}
    sql: "SELECT id, n FROM events"
    to:
      - {{format: orc, path: t/orc}}
      - {{format: json, path: t/json}}
      - {{format: csv, path: t/csv, options: {{header: "true"}}}}
      - {{format: console}}
    """)
    streams.publish("in.a", events(("a", 1), ("b", 2)))
    [result] = run(jetstream, [made])
    assert result.error is None
    for form in ("orc", "json", "csv"):
        reader = jetstream.read.format(form).schema("id string, n bigint").option("header", "true")
        assert sorted(map(tuple, reader.load(str(tmp_path / "t" / form)).collect())) == [("a", 1), ("b", 2)], form
    assert "|b  |2  |" in capsys.readouterr().out


def test_python_functions_beside_the_file_compute_the_result(
    jetstream: SparkSession, nats_server: EmbeddedServer, tmp_path: Path, streams: Any, flow: Any
) -> None:
    (tmp_path / "own_functions.py").write_text(
        "from pyspark.sql import functions as F\n"
        "def shout(text):\n    return text.upper()\n"
        "def loud(events):\n    return events.select(F.udf(shout, useArrow=False)('id').alias('id'))\n"
        "def last(batch):\n    return batch.selectExpr('max(id) AS data', '\"out.max\" AS subject')\n"
    )
    made = flow(f"""
    from: {{stream: IN}}
    event: {{format: json, schema: "{SCHEMA}"}}
    function: own_functions:loud
    each_batch: own_functions:last
    to: [{{stream: OUT}}]
    """)
    streams.publish("in.a", events(("a", 1), ("c", 2), ("b", 3)))
    [result] = run(jetstream, [made])
    assert result.error is None
    assert stream_data(nats_server.settings, "OUT") == [b"C"]
    assert blocking(streams.api.get_message("OUT", 1)).subject == "out.max"


def test_a_bad_record_without_a_place_to_go_stops_the_pipeline_and_says_which(
    jetstream: SparkSession, tmp_path: Path, streams: Any, flow: Any
) -> None:
    made = flow(f"""
    from: {{stream: IN}}
    event: {{format: json, schema: "{SCHEMA}"}}
    to: [{{format: parquet, path: t}}]
    """)
    streams.publish("in.a", [*events(("a", 1)), b"no json"])
    [result] = run(jetstream, [made])
    assert result.error is not None
    assert str(result.error).startswith("pipeline 'p' failed: message 2 of stream IN on in.a cannot be read")
    assert "\tat " not in str(result.error)
    assert not (tmp_path / "t").exists()


PLAIN = "from: {stream: IN}, event: {schema: 'id string, n bigint'}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{%s, sql: 'SELECT nope FROM events', to: {format: console}}", "`nope` cannot be resolved"),
        ("{%s, sql: 'SELECT 1', to: {format: console}}", "does not read from `events`"),
        ("{%s, sql: 'SELEC', to: {format: console}}", "Syntax error"),
        ("{%s, function: 'nowhere:f', to: {format: console}}", "no module 'nowhere'"),
        ("{%s, to: {format: excel, path: x}}", "cannot write format 'excel'"),
        ("{%s, bad_records: elsewhere.x, to: {format: console}}", "no declared stream takes subject 'elsewhere.x'"),
        (
            "{%s, sql: 'SELECT upper(id) u, sum(n) FROM events GROUP BY id', to: {format: parquet, path: x}}",
            "name them with `key:",
        ),
        ("{from: {stream: IN, subjects: [more.x]}, to: {format: console}}", "no message of stream 'IN' passes more.x"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    jetstream: SparkSession, flow: Any, text: str, says: str
) -> None:
    made = flow("    " + text.replace("%s", PLAIN))
    with pytest.raises(ConfigError, match=says) as raised:
        PipelineRun(jetstream, made)
    assert "\n" not in str(raised.value)


def test_what_a_pipeline_writes_must_not_come_back_to_it(jetstream: SparkSession, streams: Any, flow: Any) -> None:
    made = flow("    {from: {stream: IN}, sql: \"SELECT 'in.again' AS subject, data FROM events\", to: {stream: IN}}")
    streams.publish("in.a", [b"x"])
    [result] = run(jetstream, [made])
    assert "reads it back through '>'" in str(result.error)
    assert streams.info("IN").state.messages == 1


def test_the_order_of_a_stream_is_kept_and_batches_limit_rows(
    jetstream: SparkSession, nats_server: EmbeddedServer, streams: Any, flow: Any
) -> None:
    made = flow("    {from: {stream: IN, max_rows: 40}, to: {stream: OUT, subject: out.copy}}")
    streams.number("in.a", 1, 100)
    [result] = run(jetstream, [made])
    assert result.progress.batches == 3
    assert [int(body) for body in stream_data(nats_server.settings, "OUT")] == list(range(1, 101))
    assert Counter(int(body) for body in stream_data(nats_server.settings, "OUT")).most_common(1)[0][1] == 1
