"""Runs pipelines: starts them together in one Spark, watches them, reports to the server, and stops them cleanly."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import PenstockError, Unavailable
from penstock.settings import Settings
from penstock.spark import register
from penstock.spark.failures import readable
from penstock.spark.files import local_path
from penstock.spark.json_events import ALL_OR_NOTHING
from penstock.spark.link import Link
from penstock.spark.outputs import Outputs, StopRequested, check
from penstock.spark.pipelines import Pipeline, pipeline, planned
from penstock.spark.progress import (
    FAILED,
    FINISHED,
    MAX_RECENT,
    RUNNING,
    STOPPED,
    Board,
    PipelineProgress,
    new_batches,
    now,
)
from penstock.spark.session import running
from penstock.topology.model import Platform

TICK = 0.2  # seconds between looks at the queries
REPORT_PATIENCE = 2.0
"""Seconds a report may take while the server is unavailable: the pipelines themselves continue."""

OnProgress = Callable[[PipelineProgress], None]


class PipelineFailed(PenstockError):
    """A pipeline ended with an error; what it had written stays, and the next run continues from there."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"pipeline {self.name!r} failed: {self.reason}"


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """How a run of a pipeline ended."""

    name: str
    state: str
    progress: PipelineProgress
    outputs: tuple[str, ...]
    """Where it wrote: URIs of files, names of streams."""
    error: PenstockError | None = None

    @property
    def rows_read(self) -> int:
        return self.progress.rows_read

    @property
    def rows_written(self) -> int:
        return self.progress.rows_written

    def sample(self, limit: int = 5) -> list[dict[str, Any]]:
        """Some rows of its first table on this machine; none when it writes to no such table."""
        import pyarrow.dataset

        for place in self.outputs:
            path = local_path(place)
            if path and any(path.rglob("*.parquet")):
                table = pyarrow.dataset.dataset(path, format="parquet", partitioning="hive")
                rows: list[dict[str, Any]] = table.head(limit).to_pylist()
                return rows
        return []


class PipelineRun:
    """One pipeline's query, from its plan to its end."""

    def __init__(self, spark: SparkSession, flow: Pipeline, once: bool = False) -> None:
        self.flow = flow
        self._once = once
        self._session = spark.newSession()  # views and settings of its own
        self._session.conf.set(*ALL_OR_NOTHING)
        register(self._session)
        self._plan = planned(self._session, flow)
        self._outputs = Outputs(flow, self._plan)
        check(flow, self._plan)
        self._query: StreamingQuery | None = None
        self._given_up = False
        started = now()
        self.progress = PipelineProgress(
            pipeline=flow.name,
            state=RUNNING,
            streams=flow.streams,
            consumer=flow.consumer,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=started,
            heard=started,
            ui=spark_pages(self._plan.frame.sparkSession),
        )

    @property
    def ends_by_itself(self) -> bool:
        return self._once or self.flow.spec.trigger.every is None

    def start(self) -> None:
        """Start the query; when this returns it has connected to its streams, or failed to."""
        writer = self._plan.frame.writeStream.queryName(self.flow.name).outputMode(self._plan.output_mode)
        every = self.flow.spec.trigger.every
        if every is None or self.ends_by_itself:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{round(every.total_seconds() * 1000)} milliseconds")
        writer = writer.option("checkpointLocation", self.flow.checkpoint).foreachBatch(self._outputs)
        self._query = writer.start()
        self._outputs.query.set_result(str(self._query.id))
        # Every stream gets its own Python process on the driver; started all at once, on a small machine, they would
        # take longer than Spark waits for them.
        while self.active and self._query.status["message"] == "Initializing sources":
            time.sleep(TICK)

    @property
    def active(self) -> bool:
        return self._query is not None and self._query.isActive

    def stop(self, at_once: bool = False) -> None:
        """Let the running micro-batch finish, and start no other; call again until it is not active.

        With `at_once` the micro-batch is cancelled; the next run starts with it.
        """
        self._outputs.stopping = True
        self._given_up = at_once
        if self._query and self._query.isActive and (at_once or not self._query.status["isTriggerActive"]):
            self._query.stop()

    def look(self) -> PipelineProgress:
        """The progress as of now."""
        if self._query is None:
            return self.progress
        reports = [json.loads(report.json) for report in self._query.recentProgress]
        for batch in new_batches(reports, self._last_batch, self._plan.reads):
            self.progress = replace(
                self.progress,
                batch=batch.number,
                batch_ended=batch.ended,
                batch_seconds=batch.seconds,
                batch_rows=batch.rows,
                rows_per_second=batch.rows_per_second,
                state_rows=batch.state_rows,
                state_bytes=batch.state_bytes,
                late_rows=self.progress.late_rows + batch.late_rows,
                rows_read=self.progress.rows_read + batch.rows,
                batches=self.progress.batches + 1,
                recent=(*self.progress.recent, batch)[-MAX_RECENT:],
            )
        counts = self._outputs.counts
        self.progress = replace(
            self.progress,
            query=str(self._query.id),
            heard=now(),
            rows_written=counts.rows,
            bad_records=counts.bad_records,
        )
        return self.progress

    @property
    def _last_batch(self) -> int:
        return -1 if self.progress.batch is None else self.progress.batch

    def ended(self) -> PipelineResult:
        """Return the result; call it when the run is no longer active, or was never started."""
        error = self._failure()
        unfinished = self._outputs.stopping or self._query is None
        state = FAILED if error else STOPPED if unfinished else FINISHED
        self.progress = replace(self.look(), state=state, error=str(error) if error else None)
        places = (sink.stream or self.flow.located(sink.path or "") for sink in self.flow.spec.sinks)
        return PipelineResult(self.flow.name, state, self.progress, tuple(places), error)

    def _failure(self) -> PenstockError | None:
        cause = self._query.exception() if self._query else None
        if cause is None or self._given_up:
            return None
        raised = self._outputs.error
        if isinstance(raised, StopRequested):
            return None
        if isinstance(raised, PenstockError):
            return PipelineFailed(self.flow.name, str(raised))
        return PipelineFailed(self.flow.name, readable(_told(cause)))


def _told(cause: StreamingQueryException | PySparkException) -> str:
    """Return Spark's full text about a failure, with its causes."""
    return "\n".join(str(part) for part in (cause, getattr(cause, "_cause", None)) if part)


def run(
    spark: SparkSession,
    flows: Sequence[Pipeline],
    once: bool = False,
    stop: threading.Event | None = None,
    on_progress: OnProgress | None = None,
    stop_at_once: bool = False,
) -> list[PipelineResult]:
    """Run pipelines until all have ended, or until `stop` is set and their micro-batches are done, or given up.

    Those that end by themselves run one after the other, each with what the ones before it have written; others run
    side by side. A pipeline that fails does not take the others with it. Raises `ConfigError`, before anything is
    started, for a pipeline that cannot run at all.
    """
    _send_modules(spark, flows)
    runs = [PipelineRun(spark, flow, once) for flow in flows]
    groups = [[one] for one in runs] if all(one.ends_by_itself for one in runs) else [runs]
    stop = stop or threading.Event()
    with _reporting(flows, runs):
        for group in groups:
            for one in group:
                if not stop.is_set():
                    one.start()
            _watch(group, stop, stop_at_once, on_progress or (lambda _: None))
        return [one.ended() for one in runs]


def _watch(runs: Sequence[PipelineRun], stop: threading.Event, at_once: bool, on_progress: OnProgress) -> None:
    """Watch the runs until the last of them has ended."""
    seen: dict[str, int] = {}
    while any(one.active for one in runs):
        if stop.is_set():
            for one in runs:
                one.stop(at_once)
        _tell_news(runs, seen, on_progress)
        time.sleep(TICK)
    _tell_news(runs, seen, on_progress)


def _tell_news(runs: Sequence[PipelineRun], seen: dict[str, int], on_progress: OnProgress) -> None:
    for progress in (one.look() for one in runs):
        if progress.batches != seen.get(progress.pipeline, 0):
            seen[progress.pipeline] = progress.batches
            on_progress(progress)


def _send_modules(spark: SparkSession, flows: Sequence[Pipeline]) -> None:
    """Send the modules of Python functions to the workers, which do not see the driver's search path."""
    found = {path for flow in flows for path in flow.modules()}
    for path in sorted(found):
        spark.sparkContext.addPyFile(str(path))


@contextmanager
def _reporting(flows: Sequence[Pipeline], runs: Sequence[PipelineRun]) -> Iterator[None]:
    """Write progress to the server while the block runs, and the final state after it."""
    if not flows:
        yield
        return
    reporter = Reporter(flows[0], runs)
    thread = threading.Thread(target=reporter.report_until_done, name="penstock-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        reporter.done.set()
        thread.join()


class Reporter:
    """Writes the progress of the runs to the bucket. The thread that runs the pipelines changes `Run.progress`; this
    only reads it."""

    def __init__(self, flow: Pipeline, runs: Sequence[PipelineRun]) -> None:
        stream = flow.platform.streams.get(flow.streams[0])
        self._link = Link(flow.settings, REPORT_PATIENCE)
        self._board = Board(self._link, stream.replicas if stream else 1)
        self._runs = runs
        self._told: dict[str, PipelineProgress] = {}
        self._made = False
        self.done = threading.Event()

    def report_until_done(self) -> None:
        while not self.done.wait(1.0):
            self._report()
        self._report()
        self._link.close()

    def _report(self) -> None:
        """Write the progress. An unavailable server must not stop the pipelines."""
        try:
            if not self._made:
                self._board.create()
                self._made = True
            for one in self._runs:
                self._tell(one.progress)
        except Unavailable:
            self._link.close()

    def _tell(self, progress: PipelineProgress) -> None:
        last = self._told.get(progress.pipeline)
        if last is None or last.tells_less_than(progress):
            self._board.put(progress)
            self._told[progress.pipeline] = progress


def run_all(
    platform: Platform,
    settings: Settings,
    base_dir: Path,
    on_progress: OnProgress | None = None,
    master: str = "local[*]",
    stop: threading.Event | None = None,
) -> list[PipelineResult]:
    """Run every pipeline of a platform once over what is there, in one Spark that ends with it; at once on `stop`."""
    flows = [pipeline(platform, name, settings, base_dir) for name in platform.pipelines]
    if not flows:
        return []
    with running("penstock", master, short_lived=True) as spark:
        return run(spark, flows, once=True, stop=stop, on_progress=on_progress, stop_at_once=True)


def spark_pages(session: SparkSession) -> str | None:
    """Return the URL of Spark's own UI; None when it is off. A client of Spark Connect does not know it."""
    context = getattr(session, "sparkContext", None)
    return str(context.uiWebUrl) if context is not None and context.uiWebUrl else None
