"""The sink, from DataFrames: columns, options, errors before a job starts, and closing what is written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from penstock.server.embedded import EmbeddedServer
from penstock.spark import register
from penstock.spark.history import Series
from penstock.spark.ledger import Ledger
from penstock.spark.link import Link
from penstock.spark.origin import created
from penstock.testing.contents import stream_data, stream_messages

Json = dict[str, Any]


OUT: Json = {"name": "OUT", "subjects": ["o.>"], "allow_atomic": True, "allow_batched": True}


class Output:
    """A server with an output stream, and Spark's way to write there."""

    def __init__(self, spark: SparkSession, server: EmbeddedServer, stream: Json = OUT) -> None:
        self.spark = spark
        self.server = server
        self.settings = server.settings
        self.create(stream)

    def create(self, config: Json) -> None:
        with Link(self.settings) as link:
            link.call(lambda api: api.create_stream(config))

    def write(self, frame: DataFrame, **options: str) -> None:
        chosen = {"servers": self.server.url, "stream": "OUT", **options}
        frame.write.format("jetstream").options(**chosen).mode("append").save()

    def ids(self) -> list[int]:
        return sorted(int(data) for data in stream_data(self.settings, "OUT"))

    def ledger_keys(self) -> list[str]:
        with Link(self.settings) as link:
            info = link.call(lambda api: api.stream_info("KV_penstock_ledger", subjects_filter=">"))
            token = re.sub(r"\D", "", created(link.stream_info("OUT")))
        keys = (subject.removeprefix("$KV.penstock_ledger.") for subject in info.state.subjects)
        return sorted(key.replace(f".{token}.", ".") for key in keys if key != "runs")


@pytest.fixture
def output(spark: SparkSession, nats_server: EmbeddedServer) -> Output:
    register(spark)
    return Output(spark, nats_server)


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, numPartitions=partitions).select(F.col("id").cast("string").alias("data"))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_rows_of_all_partitions_are_written_once_and_leave_no_logs(output: Output) -> None:
    output.write(numbers(output.spark, 5000, partitions=4), subject="o.x")
    assert output.ids() == list(range(5000))
    assert output.ledger_keys() == []


def by_streams(spark: SparkSession, count: int) -> DataFrame:
    """Numbers that go by turns to the streams OUT and ELSE, from each of three tasks."""
    odd = F.col("id") % 2 == 1
    return spark.range(0, count, numPartitions=3).select(
        F.when(odd, "OUT").otherwise("ELSE").alias("stream"),
        F.when(odd, "o.x").otherwise("e.x").alias("subject"),
        F.col("id").cast("string").alias("data"),
    )


ELSEWHERE: Json = {"name": "ELSE", "subjects": ["e.>"], "allow_atomic": True}


def test_rows_go_to_the_stream_that_their_column_names_once(output: Output) -> None:
    output.create(ELSEWHERE)
    once = {"stream": "", "txnAppId": "a", "txnVersion": "0"}
    for _ in range(2):  # the second time on other partitions: everything is there already
        output.write(by_streams(output.spark, 5000).repartition(2), **once)
    assert output.ids() == list(range(1, 5000, 2))
    assert sorted(int(data) for data in stream_data(output.settings, "ELSE")) == list(range(0, 5000, 2))
    output.write(by_streams(output.spark, 10), stream="")
    assert (len(output.ids()), len(stream_data(output.settings, "ELSE"))) == (2505, 2505)
    assert [key for key in output.ledger_keys() if "job-" in key] == []
    output.write(by_streams(output.spark, 10).drop("subject"), subject="o.y")  # the option is for all rows
    assert len(output.ids()) == 2515


def test_a_streaming_query_writes_to_the_streams_that_rows_name(output: Output, tmp_path: Path) -> None:
    output.create(ELSEWHERE)
    by_streams(output.spark, 2000).write.json(str(tmp_path / "in"))
    frame = output.spark.readStream.schema("stream string, subject string, data string").json(str(tmp_path / "in"))
    given = {"servers": output.server.url, "checkpointLocation": str(tmp_path / "c")}
    for _ in range(2):
        query = frame.writeStream.format("jetstream").options(**given).trigger(availableNow=True).start()
        assert query.awaitTermination(300)
        shutil.rmtree(tmp_path / "c" / "commits")  # as after a crash before Spark's commit
    assert output.ids() == list(range(1, 2000, 2))
    assert sorted(int(data) for data in stream_data(output.settings, "ELSE")) == list(range(0, 2000, 2))


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        ("CAST(NULL AS string)", "a row has no stream"),
        ("'NONE'", "there is no stream 'NONE'"),
        ("'OUT'", "stream 'OUT' does not take subject 'e.x'"),
        ("5", "column 'stream' must be string"),
    ],
)
def test_a_row_whose_stream_cannot_be_written_to_is_told(output: Output, stream: str, says: str) -> None:
    output.create(ELSEWHERE)
    with pytest.raises(PySparkException, match=says):
        output.write(by_streams(output.spark, 10).withColumn("stream", F.expr(stream)), stream="")


def test_subject_data_headers_and_message_id_come_from_columns(output: Output) -> None:
    rows = [
        ("o.1", bytearray(b"\x00\r\n"), {"A": ["1", "2"], "B": []}, "m1"),
        ("o.2", bytearray(b""), None, None),
        ("o.3", None, {"C": ["ü"]}, None),
    ]
    schema = "subject string, data binary, headers map<string,array<string>>, message_id string"
    output.write(output.spark.createDataFrame(rows, schema).coalesce(1))
    found = stream_messages(output.settings, "OUT")
    assert [(message.subject, message.data) for message in found] == [("o.1", b"\x00\r\n"), ("o.2", b""), ("o.3", b"")]
    headers = [message.header_values() for message in found]
    assert (headers[0]["A"], headers[0]["Nats-Msg-Id"], "B" in headers[0]) == (["1", "2"], ["m1"], False)
    assert "Nats-Msg-Id" not in headers[1]
    assert headers[2]["C"] == ["ü"]


def test_headers_may_have_single_values_and_the_option_overrides_the_column(output: Output) -> None:
    frame = output.spark.createDataFrame(
        [("elsewhere", "x", {"A": "1"})], "subject string, data string, headers map<string,string>"
    )
    output.write(frame, subject="o.fixed")
    (message,) = stream_messages(output.settings, "OUT")
    assert (message.subject, message.header_values()["A"]) == ("o.fixed", ["1"])


def test_a_frame_without_rows_writes_nothing(output: Output) -> None:
    output.write(numbers(output.spark, 0), subject="o.x")
    output.write(numbers(output.spark, 3, partitions=8), subject="o.x")  # most partitions are empty
    assert output.ids() == [0, 1, 2]


MISFITS = {
    None: "column `subject` is null",
    "o.\x1bx": "control characters",
    "o.*": "it has a wildcard",
    "p.x": "does not take subject",
    "dlq.x": "belongs to dead letters",
    "o." + 4000 * "x": "a subject has at most",
}


def test_rows_that_cannot_be_messages_become_dead_letters_once(output: Output, tmp_path: Path) -> None:
    output.create({"name": "DLQ", "subjects": ["dlq.>"], "allow_atomic": True})
    rows: list[tuple[Any, ...]] = [(subject, f"bad {n}", {}) for n, subject in enumerate(MISFITS)]
    rows += [("o.x", "bad header", {"My Header": ["1"]}), *(("o.x", str(n), {"A": ["1"]}) for n in range(10))]
    schema = "subject string, data string, headers map<string, array<string>>"
    output.spark.createDataFrame(rows, schema).repartition(2).write.parquet(str(tmp_path / "in"))
    frame = output.spark.readStream.schema(schema).parquet(str(tmp_path / "in"))
    given = {"servers": output.server.url, "stream": "OUT", "checkpointLocation": str(tmp_path / "c")}
    for _ in range(2):
        writer = frame.writeStream.format("jetstream").options(**given, deadLetters="dlq.copy")
        assert writer.trigger(availableNow=True).start().awaitTermination(300)
        shutil.rmtree(tmp_path / "c" / "commits")  # as after a crash before Spark's commit
    assert output.ids() == list(range(10))
    stored = stream_messages(output.settings, "DLQ")
    letters = {one.data.decode(): one.header_values() for one in stored}
    assert [one.subject for one in stored] == ["dlq.copy"] * (len(MISFITS) + 1)
    assert sorted(letters) == [*(f"bad {n}" for n in range(len(MISFITS))), "bad header"]
    reasons = {body: headers["Penstock-Dlq-Reason"][0] for body, headers in letters.items()}
    for n, reason in enumerate(MISFITS.values()):
        assert reason in reasons[f"bad {n}"]
    assert "'My Header' is not usable" in reasons["bad header"]
    assert letters["bad header"]["My_Header"] == ["1"]
    assert letters["bad 3"]["Penstock-Dlq-Subject"] == ["p.x"]


@pytest.mark.parametrize("delivery", ["atomic", "fast"])
def test_rows_do_not_go_among_the_dead_letters(output: Output, delivery: str) -> None:
    output.create({**OUT, "name": "DLQ", "subjects": ["dlq.>"]})
    by_column = numbers(output.spark, 3).withColumn("subject", F.lit("dlq.a"))
    for frame, options in ((numbers(output.spark, 3), {"subject": "dlq.a"}), (by_column, {})):
        with pytest.raises(PySparkException, match=r"'dlq\.a' belongs to dead letters"):
            output.write(frame, stream="DLQ", delivery=delivery, **options)
    assert stream_data(output.settings, "DLQ") == []


def test_bodies_of_eight_megabytes_are_written(spark: SparkSession, tmp_path: Path) -> None:
    register(spark)
    size = 8 * 1024 * 1024
    with EmbeddedServer(data=tmp_path / "large", max_payload=size + 4096) as server:
        output = Output(spark, server)
        frame = spark.range(0, 3, numPartitions=1).select(F.expr(f"repeat('x', {size} - int(id))").alias("data"))
        output.write(frame, subject="o.large")
        assert [len(data) for data in stream_data(server.settings, "OUT")] == [size, size - 1, size - 2]


def test_fast_delivery_writes_everything(output: Output) -> None:
    output.write(numbers(output.spark, 30_000), subject="o.x", delivery="fast")
    assert output.ids() == list(range(30_000))


# -- what is written again ---------------------------------------------------------------------------------------------


def test_a_job_that_runs_again_writes_again_unless_it_is_named(output: Output) -> None:
    for _ in range(2):
        output.write(numbers(output.spark, 10), subject="o.x")
        output.write(numbers(output.spark, 10), subject="o.y", txnAppId="nightly export", txnVersion="7")
    subjects = [message.subject for message in stream_messages(output.settings, "OUT")]
    assert (subjects.count("o.x"), subjects.count("o.y")) == (20, 10)
    output.write(numbers(output.spark, 10), subject="o.y", txnAppId="nightly export", txnVersion="8")
    assert len(stream_messages(output.settings, "OUT")) == 40


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Spark hands tasks 500 rows at a time."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


@pytest.mark.usefixtures("small_batches")
def test_a_failed_job_leaves_no_logs_and_a_named_one_is_continued(output: Output) -> None:
    ids = output.spark.range(0, 3000, numPartitions=1)
    good = ids.select(F.lit("o.x").alias("subject"), F.col("id").cast("string").alias("data"))
    broken = good.withColumn("subject", F.expr("if(data = '2500', null, subject)"))
    with pytest.raises(PySparkException, match="a row has no subject"):
        output.write(broken)
    assert output.ledger_keys() == []
    assert 1000 <= len(output.ids()) <= 2000
    with Link(output.settings) as link:
        link.call(lambda api: api.purge_stream("OUT"))
    with pytest.raises(PySparkException, match="a row has no subject"):
        output.write(broken, txnAppId="app", txnVersion="1")
    assert output.ledger_keys() == ["OUT.app.1.0", "OUT.app.1.run"]
    assert 1000 <= len(output.ids()) <= 2000
    output.write(good, txnAppId="app", txnVersion="1")
    assert output.ids() == list(range(3000))
    assert output.ledger_keys() == ["OUT.app", "OUT.app.1.0", "OUT.app.1.claims", "OUT.app.1.run"]
    output.write(good.limit(5), txnAppId="app", txnVersion="2")
    assert output.ledger_keys() == ["OUT.app", "OUT.app.2.0", "OUT.app.2.run"]


# -- streaming ---------------------------------------------------------------------------------------------------------


def stream_numbers(output: Output, folder: Path, checkpoint: Path, **options: str) -> None:
    """All files of the folder, one a micro-batch, to the output."""
    frame = output.spark.readStream.schema("data string").option("maxFilesPerTrigger", 1).json(str(folder))
    chosen = {"servers": output.server.url, "stream": "OUT", "subject": "o.x", **options}
    writer = frame.writeStream.format("jetstream").options(checkpointLocation=str(checkpoint), **chosen)
    writer.trigger(availableNow=True).start().awaitTermination()


def add_file(folder: Path, ids: Iterator[int] | range) -> None:
    folder.mkdir(exist_ok=True)
    name = f"{len(list(folder.iterdir())):03}.json"
    (folder / name).write_text("".join(json.dumps({"data": str(n)}) + "\n" for n in ids))


def test_micro_batches_are_written_once_and_closed_in_order(output: Output, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    for batch in range(3):
        add_file(folder, range(batch * 1500, batch * 1500 + 1500))
    add_file(folder, range(0))  # a batch without rows
    stream_numbers(output, folder, checkpoint)
    assert output.ids() == list(range(4500))
    query = json.loads((checkpoint / "metadata").read_text())["id"]
    assert output.ledger_keys() == [f"OUT.{query}", f"OUT.{query}.3.0", f"OUT.{query}.3.run"]
    with Link(output.settings) as link:
        assert Ledger(link).closed(Series("OUT", query, created(link.stream_info("OUT")))) == 3


def test_a_batch_that_spark_runs_again_after_it_was_closed_is_not_written_again(output: Output, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    add_file(folder, range(100))
    add_file(folder, range(100, 200))
    stream_numbers(output, folder, checkpoint)
    for file in (checkpoint / "commits").glob("*1*"):  # as if the driver had died before it wrote this
        file.unlink()
    add_file(folder, range(200, 300))
    stream_numbers(output, folder, checkpoint)
    assert output.ids() == list(range(300))


def test_a_checkpoint_exactly_one_batch_back_is_refused_or_completed(output: Output, tmp_path: Path) -> None:
    """Spark plans the batch anew, with other files than those of the batch that was written."""
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    add_file(folder, range(100))
    stream_numbers(output, folder, checkpoint)
    shutil.copytree(checkpoint, tmp_path / "backup")
    add_file(folder, range(100, 200))
    stream_numbers(output, folder, checkpoint)
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "backup", checkpoint)
    (folder / "001.json").unlink()
    add_file(folder, range(100, 300))
    with pytest.raises(PySparkException, match=r"batch 1 of .* is already finished, and now comes with other rows"):
        stream_numbers(output, folder, checkpoint)
    assert output.ids() == list(range(200))
    stream_numbers(output, folder, checkpoint, onFinishedBatch="write")
    assert output.ids() == list(range(300))


def test_a_txn_version_that_is_used_again_with_other_rows_is_refused(output: Output) -> None:
    once = {"subject": "o.x", "txnAppId": "app", "txnVersion": "1"}
    output.write(numbers(output.spark, 10), **once)
    with pytest.raises(PySparkException, match="txnVersion was used before"):
        output.write(numbers(output.spark, 20), **once)
    output.write(numbers(output.spark, 20), onFinishedBatch="skip", **once)
    assert output.ids() == list(range(10))


def test_a_batch_that_runs_again_on_another_number_of_partitions_is_written_once(output: Output) -> None:
    """The driver dies before it closes the batch; the job runs again on other cores."""
    once = {"subject": "o.x", "txnAppId": "app", "txnVersion": "1"}
    output.write(numbers(output.spark, 3000, partitions=2), **once)
    with Link(output.settings) as link:
        record = Series("OUT", "app", created(link.stream_info("OUT"))).key
        link.call(lambda api: api.purge_stream("KV_penstock_ledger", subject=f"$KV.penstock_ledger.{record}"))
        assert Ledger(link).closed(Series("OUT", "app", created(link.stream_info("OUT")))) == -1
    output.write(numbers(output.spark, 5000, partitions=5), **once)
    assert output.ids() == list(range(5000))


def test_a_checkpoint_taken_back_further_is_an_error_and_loses_nothing_silently(output: Output, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    for batch in range(3):
        add_file(folder, range(batch * 10, batch * 10 + 10))
    stream_numbers(output, folder, checkpoint)
    for kind in ("commits", "offsets"):
        for number in (1, 2):
            for file in (checkpoint / kind).glob(f"*{number}*"):
                file.unlink()
    with pytest.raises(PySparkException, match="use a new checkpoint"):
        stream_numbers(output, folder, checkpoint)


# -- errors before a job starts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stream": "OUTT"}, "no stream 'OUTT'; did you mean 'OUT'"),
        ({"stream": "PLAIN", "subject": "plain"}, "allow_atomic: true"),
        ({"stream": "PLAIN", "subject": "plain", "delivery": "fast"}, "allow_batched: true"),
        ({"stream": "MIRROR", "subject": "o.x"}, "is a mirror"),
        ({"subject": "elsewhere"}, "does not take subject 'elsewhere'"),
        ({}, "messages need a subject"),
        ({"subject": "o.x", "delivery": "quick"}, "delivery must be atomic or fast"),
        ({"subject": "o.x", "txnAppId": "a"}, "txnAppId and txnVersion go together"),
        ({"subject": "o.x", "strem": "OUT"}, "did you mean 'stream'"),
        ({"subject": "o.x", "deadLetters": "o.bad"}, "'o.bad' is no subject for dead letters"),
        ({"subject": "o.x", "deadLetters": "dlq.copy"}, "no stream takes 'dlq.copy'"),
        ({"subject": "o.x", "servers": "nats://127.0.0.1:1", "timeout": "1"}, "no NATS server answers"),
    ],
)
def test_what_cannot_work_is_said_on_the_driver(
    output: Output, jobs_started: Callable[[], int], options: dict[str, str], complaint: str
) -> None:
    output.create({"name": "PLAIN", "subjects": ["plain"]})
    output.create({"name": "MIRROR", "mirror": {"name": "OUT"}})
    jobs = jobs_started()
    with pytest.raises(PySparkException, match=complaint):
        output.write(numbers(output.spark, 10), **options)
    assert jobs_started() == jobs
    assert stream_data(output.settings, "OUT") == []


def test_overwriting_a_stream_is_refused(output: Output) -> None:
    writer = numbers(output.spark, 10).write.format("jetstream")
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        writer.options(servers=output.server.url, stream="OUT", subject="o.x").mode("overwrite").save()


def test_a_row_with_an_unusable_subject_fails_the_job(output: Output) -> None:
    frame = output.spark.createDataFrame([("o.1", "a"), (None, "b")], "subject string, data string").coalesce(1)
    with pytest.raises(PySparkException, match="a row has no subject"):
        output.write(frame)


@pytest.mark.parametrize(("delivery", "needed"), [("atomic", r"2\.12\.0"), ("fast", r"2\.14\.0")])
def test_a_server_that_is_too_old_is_told_on_the_driver(
    spark: SparkSession,
    jobs_started: Callable[[], int],
    old_nats_server_binary: Path,
    tmp_path: Path,
    delivery: str,
    needed: str,
) -> None:
    register(spark)
    with EmbeddedServer(data=tmp_path / "old", binary=old_nats_server_binary) as server:
        output = Output(spark, server, {"name": "OUT", "subjects": ["o.>"]})
        jobs = jobs_started()
        complaint = rf"delivery={delivery} needs nats-server {needed} or newer, but this server is 2\.10\.25"
        with pytest.raises(PySparkException, match=complaint):
            output.write(numbers(spark, 10), subject="o.x", delivery=delivery)
        assert jobs_started() == jobs
        assert stream_data(server.settings, "OUT") == []
