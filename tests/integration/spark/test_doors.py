"""Format `jetstream` is there without `register`, in every kind of session: what runs here shares the session's JVM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark.pipelines.cli
import pytest
from pyspark.sql import SparkSession
from tests.support import doors
from tests.support.streams import Streams

from penstock.errors import ConfigError
from penstock.server.embedded import EmbeddedServer
from penstock.server.ports import free_ports
from penstock.spark import register

LOOPBACK = "127.0.0.1"


@pytest.fixture
def streams(streams: Streams) -> Streams:
    doors.fill(streams)
    return streams


@pytest.fixture(scope="module")
def connect_url(spark: SparkSession) -> Iterator[str]:
    """A Spark Connect service in the JVM of the session."""
    (port,) = free_ports(1, LOOPBACK)
    jvm: Any = spark._jvm
    context: Any = spark.sparkContext._jsc
    own = {"spark.connect.grpc.binding.port": str(port), "spark.connect.grpc.binding.address": LOOPBACK}
    for key, value in own.items():
        context.sc().conf().set(key, value)
    service = jvm.org.apache.spark.sql.connect.service.SparkConnectService
    service.start(context.sc())
    yield f"sc://{LOOPBACK}:{port}"
    service.stop(jvm.scala.Option.apply(None), jvm.scala.Option.apply(None))


def test_spark_finds_the_format_by_itself(spark: SparkSession, streams: Streams, nats_server: EmbeddedServer) -> None:
    """A session that nobody has registered anything with."""
    frame = spark.newSession().read.format("jetstream").options(servers=nats_server.url, stream="ORDERS").load()
    assert frame.count() == doors.COUNT


def test_a_session_on_another_python_is_told_with_the_fix(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(other))
    with pytest.raises(ConfigError, match=r"cannot import penstock .*spark\.stop"):
        register(spark)


def test_a_registered_source_knows_of_packages_that_were_sent_to_executors(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's own find does not, and tasks on executors without this package would fail."""
    monkeypatch.setattr(spark.sparkContext, "_python_includes", ["sent.zip"])
    session = spark.newSession()
    try:
        register(session)
    finally:
        jvm: Any = spark._jvm  # the new session is the active one now
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)
    found: Any = session._jsparkSession.sessionState().dataSourceManager().lookupDataSource("jetstream")
    assert list(found.dataSourceCls().pythonIncludes()) == ["sent.zip"]


def test_a_client_of_spark_connect_reads_and_writes(
    connect_url: str, streams: Streams, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    doors.python(doors.program(doors.CONNECT, nats_server, tmp_path), tmp_path, SPARK_REMOTE=connect_url)
    assert streams.info("COPY").state.messages == doors.COUNT


def test_a_declarative_pipeline_reads_and_writes(
    connect_url: str, streams: Streams, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    folder = doors.project(tmp_path / "project", nats_server)
    doors.run([sys.executable, pyspark.pipelines.cli.__file__, "run"], folder, SPARK_REMOTE=connect_url)
    assert streams.info("COPY").state.messages == doors.COUNT
