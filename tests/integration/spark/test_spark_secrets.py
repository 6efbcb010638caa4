"""The password of a login stays out of Spark's plans, environment, progress, errors and checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.spark.pipelines import pipeline
from penstock.topology.load import load
from penstock.wire import blocking

PASSWORD = "hunter2s3cret"
PLATFORM = """
name: p
environments: {dev: {servers: ["URL"]}}
streams: {S: {subjects: ["s.>"]}}
pipelines: {copy: {from: {stream: S}, to: {stream: S, subject: s.b}}}
"""


def test_the_password_of_a_url_shows_up_nowhere_in_spark(jetstream: SparkSession, tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path / "nats", user="ann", password=PASSWORD) as server:
        url = f"nats://ann:{PASSWORD}@127.0.0.1:{server.config.port}"
        with blocking.connect(server.settings) as connection:
            streams = Streams(connection)
            streams.make("S", allow_atomic=True)
            streams.publish("s.a", [b"1", b"2"])
        options = connection_options(tmp_path, url)
        assert url not in options.values()
        assert [name for name, value in options.items() if PASSWORD in value] == ["password"]  # which Spark redacts
        shown = written_and_read(jetstream, {**options, "stream": "S"}, tmp_path / "checkpoint")
        wrong = {**options, "user": "bob", "stream": "S"}
        with pytest.raises(Exception, match="refused the login") as refused:
            jetstream.read.format("jetstream").options(**wrong).load().collect()
        shown += [str(refused.value), repr(refused.value)]
    assert not [one for one in shown if PASSWORD in one]
    assert list((tmp_path / "checkpoint").rglob("*"))
    assert not [file for file in (tmp_path / "checkpoint").rglob("*") if file.is_file() and holds(file)]


def connection_options(tmp_path: Path, url: str) -> dict[str, str]:
    """The options with which a pipeline reads, when its file has the login in the URL."""
    file = tmp_path / "penstock.yaml"
    file.write_text(PLATFORM.replace("URL", url))
    platform = load(file)
    flow = pipeline(platform, "copy", Settings.load(env={}, **platform.environment.settings_overrides()))
    assert PASSWORD not in repr(flow)
    return flow.connection()


def written_and_read(spark: SparkSession, options: dict[str, str], checkpoint: Path) -> list[str]:
    """Read and write, batch and streaming; all that Spark says about it."""
    batch: Any = spark.read.format("jetstream").options(**options).load()
    assert batch.count() == 2
    rows = batch.selectExpr("'s.c' AS subject", "data")
    rows.write.format("jetstream").options(**options).mode("append").save()
    frame: Any = spark.readStream.format("jetstream").options(**options).load()
    writer = frame.selectExpr("'s.d' AS subject", "data").writeStream.format("jetstream").options(**options)
    query: Any = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    java: Any = spark.sparkContext._jsc.sc()
    executions = spark._jsparkSession.sharedState().statusStore().executionsList().mkString()
    return [
        batch._jdf.queryExecution().toString(),
        rows._jdf.queryExecution().toString(),
        frame._jdf.queryExecution().toString(),
        query._jsq.explainInternal(True),
        str(query.lastProgress),
        str(executions),
        str(java.statusStore().environmentInfo().sparkProperties().mkString()),
        str(java.statusStore().environmentInfo().systemProperties().mkString()),
    ]


def holds(file: Path) -> bool:
    return PASSWORD.encode() in file.read_bytes()
