"""Replaying dead letters in bulk: every Spark task takes a range of the letters and replays it as `penstock dlq replay`
does, chunk by chunk, with the same audit and the same promises.

A task that Spark runs again finds its earlier attempt in the audit, by the run's name and its partition, and goes on
behind it. What earlier runs had left unfinished is finished by the driver before the first task starts. Tasks replay
their ranges side by side: the order of letters holds within a task only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce

from pyspark import RDD, TaskContext
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from penstock.deadletter import inventory, streams
from penstock.deadletter.audit import Deed, FiledPlace
from penstock.deadletter.letters import EPOCH, FiledLetter, read
from penstock.deadletter.replay import ReplayOptions, opened
from penstock.deadletter.selection import Selection
from penstock.deadletter.tally import Tally
from penstock.errors import ConfigError
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import StoredMessage, StreamInfo
from penstock.settings import Settings
from penstock.spark.datasource import register
from penstock.spark.options import CONNECTION
from penstock.wire import aio

FILED = "filed struct<stream:string,sequence:bigint,time:string>"


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """The parameters of every task; pickled and sent to the executors."""

    settings: Settings
    stream: str
    wanted: Selection
    options: ReplayOptions
    deed: Deed
    settled: frozenset[FiledPlace]
    """Existing letters that the audit records as replayed: they are only deleted."""

    def __call__(self, rows: Iterable[Row]) -> Iterator[str]:
        """Replay the letters of one partition; yields the result as JSON."""
        tally = asyncio.run(self._replay(_letters(self.stream, rows)))
        yield tally.encoded()

    async def _replay(self, letters: Iterator[FiledLetter]) -> Tally:
        context = TaskContext.get()
        assert context is not None, "a replay runs in a task"
        deed = replace(self.deed, run=f"{self.deed.run}-{self.stream}-{context.partitionId()}")
        async with opened(self.settings) as room:
            room.settled |= self.settled
            await room.finish_interrupted(deed.run)
            return await room.replay_all(room.chosen(letters, self.wanted), deed, self.options, lambda _: None)


def _letters(stream: str, rows: Iterable[Row]) -> Iterator[FiledLetter]:
    for row in rows:
        time = EPOCH + timedelta(microseconds=row["micros"])
        headers = {name: list(values) for name, values in (row["headers"] or {}).items()}
        yield read(StoredMessage(stream, row["subject"], row["sequence"], time, bytes(row["data"]), headers))


def replay_letters(
    spark: SparkSession,
    settings: Settings,
    wanted: Selection,
    options: ReplayOptions,
    *,
    actor: str,
    reason: str = "",
    partitions: int | None = None,
) -> Tally:
    """Replay the existing letters that match, with the tasks of a Spark job. Blocks until all are done."""
    if options.limit:
        raise ConfigError("a replay in bulk takes all letters that match: leave out the limit, or replay without Spark")
    register(spark)
    deed = Deed(run=secrets.token_hex(6), actor=actor, reason=reason)
    found = asyncio.run(_prepared(settings))
    tallies = []
    for info in found:
        rows = _rows(_messages(spark, settings, info, partitions))
        task = ReplayTask(settings, info.name, wanted, _shared(options, rows), deed, _leftovers(spark, settings, info))
        tallies += rows.mapPartitions(task).collect()
    return reduce(Tally.plus, map(Tally.parse, tallies), Tally())


async def _prepared(settings: Settings) -> list[StreamInfo]:
    """Finish the unfinished work of earlier runs, and return the streams that hold letters now."""
    async with opened(settings) as room:
        await room.finish_interrupted()
    async with await aio.connect(settings) as connection:
        found = await inventory.letter_streams(JetStream(connection.requester(), settings.domain, settings.timeout))
    return [info for info in found if info.state.messages]


def _messages(spark: SparkSession, settings: Settings, info: StreamInfo, partitions: int | None) -> DataFrame:
    """The letters of a stream as they lie there now."""
    values = {option: getattr(settings, field) for option, field in CONNECTION.items()}
    given = {option: str(value) for option, value in values.items() if value is not None}
    given |= {"servers": ",".join(settings.servers), "stream": info.name, "endingOffsets": str(info.state.last_seq)}
    given["failOnDataLoss"] = "false"  # letters that were replayed or discarded leave holes
    if partitions:
        given["partitions"] = str(partitions)
    return spark.read.format("jetstream").options(**given).load()


def _rows(frame: DataFrame) -> RDD[Row]:
    """Rows as Python objects: by Arrow, PySpark would give them to a function only where pandas is installed.

    The time is a number, since a timestamp would come without its zone.
    """
    return frame.select("subject", "sequence", F.unix_micros("timestamp").alias("micros"), "headers", "data").rdd


def _leftovers(spark: SparkSession, settings: Settings, letters: StreamInfo) -> frozenset[FiledPlace]:
    """Letters that are still there although the audit has their record: a run was killed between the two."""
    info = asyncio.run(_audit(settings))
    if not info.state.messages:
        return frozenset()
    told = _messages(spark, settings, info, None).where(F.col("subject").startswith(streams.settled_subject("")))
    filed = told.select(F.from_json(F.col("data").cast("string"), FILED)["filed"].alias("filed")).select("filed.*")
    here = filed.where((F.col("stream") == letters.name) & (F.col("sequence") >= letters.state.first_seq))
    there = _messages(spark, settings, letters, None).select("sequence", "timestamp")
    rows = here.join(there, "sequence").select("stream", "sequence", "time").collect()
    return frozenset((row["stream"], row["sequence"], row["time"]) for row in rows)


async def _audit(settings: Settings) -> StreamInfo:
    async with await aio.connect(settings) as connection:
        jetstream = JetStream(connection.requester(), settings.domain, settings.timeout)
        return await jetstream.stream_info(streams.AUDIT)


def _shared(options: ReplayOptions, rows: RDD[Row]) -> ReplayOptions:
    """Divide the rate among the tasks."""
    if not options.rate:
        return options
    return replace(options, rate=options.rate / max(1, rows.getNumPartitions()))
