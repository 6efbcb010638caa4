"""Random pipelines over random streams: once through format `jetstream`, once over the same rows in memory.

Everything follows from a seed. A case says what differs between the two; nothing, when all is well.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.readwriter import DataStreamWriter
from tests.support.streams import Streams

from penstock.settings import Settings
from penstock.spark.datasource import COLUMNS
from penstock.subjects import matches
from penstock.wire.blocking import run

RETENTIONS = ("limits", "workqueue", "interest")
TOKENS = ("a", "b", "c.x", "c.y")
SHUFFLE = "spark.sql.shuffle.partitions"
ANCHOR = "ANCHOR"
"""A stream that stays. The server removes the folder of an account with its last stream, and fails to create another
one meanwhile ("error creating store for stream", seen with 2.15.1)."""
STREAMING = 7
"""Every so many seeds a streaming query, which takes five times as long."""
STATEFUL = "grouped"
WITHIN = 300
"""Seconds for a streaming query, on a busy machine."""

Row = tuple[Any, ...]
Step = Callable[[DataFrame], DataFrame]


class Stopped(Exception):
    """Stands for a crash of the driver inside a micro-batch."""


@dataclass
class Origin:
    """A stream, and what must be read from it by what was published, deleted and kept."""

    streams: Streams
    name: str
    rng: random.Random
    retention: str
    per_subject: int | None
    filters: tuple[str, ...]
    rows: dict[int, Row] = field(default_factory=dict)
    """What the stream holds, by sequence: subject, headers, body."""

    @classmethod
    def make(cls, streams: Streams, name: str, rng: random.Random) -> Origin:
        retention = rng.choice(RETENTIONS)
        per_subject = rng.randint(2, 8) if retention == "limits" and rng.random() < 0.2 else None
        lower = name.lower()
        chosen = [(), (), (f"{lower}.a",), (f"{lower}.c.*",), (f"{lower}.a", f"{lower}.c.>")]
        made = cls(streams, name, rng, retention, per_subject, rng.choice(chosen))
        limit = {"max_msgs_per_subject": per_subject} if per_subject else {}
        streams.make(name, retention=retention, **limit)
        if retention != "limits":
            wanted = {"filter_subjects": list(made.filters)} if made.filters else {}
            run(streams.api.create_consumer(name, {"durable_name": "d", "ack_policy": "explicit", **wanted}))
        return made

    def publish(self, count: int) -> None:
        """Publish numbers on random subjects, some with headers; Interest keeps what its consumer wants."""
        for _ in range(count):
            subject = f"{self.name.lower()}.{self.rng.choice(TOKENS)}"
            body = b"%d" % self.rng.randint(0, 30)
            named = {"Key": self.rng.choice("xyz")} if self.rng.random() < 0.5 else {}
            answer = json.loads(self.streams.connection.request(subject, body, named or None).data)
            if self.retention != "interest" or self._wants(subject):
                self.rows[answer["seq"]] = (subject, {name: [value] for name, value in named.items()}, body)
        if self.per_subject:
            self._keep_newest(self.per_subject)

    def _keep_newest(self, count: int) -> None:
        for subject in {row[0] for row in self.rows.values()}:
            for sequence in [n for n, row in sorted(self.rows.items()) if row[0] == subject][:-count]:
                del self.rows[sequence]

    def damage(self) -> None:
        """Delete single messages, or the oldest ones, before anybody has read."""
        kind = self.rng.choice(("", "", "delete", "purge")) if self.retention == "limits" and self.rows else ""
        if kind == "delete":
            for sequence in self.rng.sample(sorted(self.rows), min(3, len(self.rows))):
                run(self.streams.api.delete_message(self.name, sequence))
                del self.rows[sequence]
        elif kind == "purge":
            before = self.rng.choice(sorted(self.rows))
            run(self.streams.api.purge_stream(self.name, before_seq=before))
            self.rows = {sequence: row for sequence, row in self.rows.items() if sequence >= before}

    def _wants(self, subject: str) -> bool:
        return not self.filters or any(matches(filter_, subject) for filter_ in self.filters)

    def options(self, settings: Settings) -> dict[str, str]:
        """The options of a read of all that is wanted."""
        found = {"servers": ",".join(settings.servers), "stream": self.name, "subjects": ",".join(self.filters)}
        if self.retention != "limits":
            found["consumer"] = "d"
        return found

    def wanted(self, low: int = 0, high: int = 2**60) -> list[Row]:
        """The rows of a read, as Spark takes them."""
        return [
            (self.name, row[0], sequence, None, row[1], row[2])
            for sequence, row in sorted(self.rows.items())
            if low <= sequence <= high and self._wants(row[0])
        ]

    def left(self) -> list[int]:
        """What a WorkQueue or Interest stream still holds of what was wanted, and should not after a query."""
        if self.retention == "limits":
            return []
        kept = self.streams.info(self.name).state.messages
        unwanted = sum(not self._wants(row[0]) for row in self.rows.values())
        return [kept - unwanted] if kept != unwanted else []


@dataclass(frozen=True, slots=True)
class Pair:
    """The same pipeline over the stream and over memory."""

    live: DataFrame
    memory: DataFrame
    words: str

    def then(self, words: str, step: Step) -> Pair:
        return Pair(step(self.live), step(self.memory), f"{self.words} → {words}")

    def with_(self, other: Pair, words: str, step: Callable[[DataFrame, DataFrame], DataFrame]) -> Pair:
        joined = f"{words}({self.words}; {other.words})"
        return Pair(step(self.live, other.live), step(self.memory, other.memory), joined)


@dataclass
class Case:
    """One seed: a stream, a pipeline over it, and the comparison."""

    spark: SparkSession
    settings: Settings
    streams: Streams
    folder: Path
    seed: int
    lose: bool = False
    """Leave a row out of what is read, to see that it is noticed."""
    description: str = ""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.origin = Origin.make(self.streams, f"S{self.seed}", self.rng)

    def differences(self) -> list[str]:
        """What came out of one side and not of the other."""
        try:
            with self._shuffled():
                found = self._batch() if self.seed % STREAMING else self._streaming()
        finally:
            for name in run(self.streams.api.stream_names()):
                if name != ANCHOR and not name.startswith("KV_"):
                    run(self.streams.api.delete_stream(name))
        return found

    @contextmanager
    def _shuffled(self) -> Iterator[None]:
        """Any number of shuffle partitions; AQE on, which follows the data and the cores, or off."""
        settings = (SHUFFLE, "spark.sql.adaptive.enabled")
        before = {name: self.spark.conf.get(name) for name in settings}
        self._shuffle_anew()
        self.spark.conf.set(settings[1], str(self.rng.random() < 0.7).lower())
        try:
            yield
        finally:
            for name, value in before.items():
                assert value is not None
                self.spark.conf.set(name, value)

    def _shuffle_anew(self) -> None:
        self.spark.conf.set(SHUFFLE, str(self.rng.randint(1, 4)))

    def _in_memory(self, rows: list[Row]) -> DataFrame:
        return self.spark.createDataFrame(rows, COLUMNS)

    def _told(self, kind: str, more: str) -> None:
        origin = self.origin
        about = [origin.retention, f"{len(origin.rows)} messages", f"filters {','.join(origin.filters) or 'none'}"]
        if origin.per_subject:
            about.append(f"max_msgs_per_subject {origin.per_subject}")
        self.description = f"seed {self.seed}, {kind}: {', '.join(about)}; {more}"

    # -- batch ---------------------------------------------------------------------------------------------------------

    def _batch(self) -> list[str]:
        self.origin.publish(self.rng.randint(0, 60))
        self.origin.damage()
        pool = [self._loaded()]
        if self.rng.random() < 0.3:
            pool.append(self._loaded())
        cached: list[DataFrame] = []
        for _ in range(self.rng.randint(2, 6)):
            pool.append(self._derived(pool, cached))
        other = self.rng.choice(pool)
        chosen = [pool[-1]] if other is pool[-1] else [pool[-1], other]
        self._told("batch", " | ".join(pair.words for pair in chosen))
        try:
            return [text for pair in chosen for text in self._compared(pair)]
        finally:
            for frame in cached:
                frame.unpersist()

    def _loaded(self) -> Pair:
        """One `load()`, of the whole stream or a range of it."""
        rng, origin, low, high = self.rng, self.origin, 0, 2**60
        options = {**origin.options(self.settings), "partitions": str(rng.randint(1, 5))}
        if origin.rows and rng.random() < 0.4:
            low, high = sorted(rng.choices(sorted(origin.rows), k=2))
            options |= {"startingOffsets": str(low), "endingOffsets": str(high)}
        rows = origin.wanted(low, high)
        live = self.spark.read.format("jetstream").options(**options).load()
        if self.lose and rows:
            live = live.where(f"sequence <> {rows[0][2]}")
        bounds = f"[{low}..{high}]" if high < 2**60 else ""
        return Pair(live, self._in_memory(rows), f"load{bounds}").then("columns", narrow)

    def _derived(self, pool: list[Pair], cached: list[DataFrame]) -> Pair:
        """One more step, on any of what there is; all of them keep the columns."""
        rng, pair = self.rng, self.rng.choice(pool)
        kind = rng.choice(
            ("where", "where", "union", "join", "group", "repartition", "limit", "distinct", "cache", "view")
        )
        match kind:
            case "where":
                return self._where(pair)
            case "union":
                return pair.with_(rng.choice(pool), "union", DataFrame.unionByName)
            case "join":
                if "join" in pair.words:  # one over another would be too many rows
                    return pair
                return pair.with_(rng.choice(pool[:1]), "join", joined)
            case "group":
                return pair.then("groupBy", grouped)
            case "repartition":
                count = rng.randint(1, 4)
                return pair.then(f"repartition {count}", lambda frame: frame.repartition(count, "n"))
            case "limit":
                count = rng.randint(0, 20)
                order = ("sequence", "n", "subject")
                return pair.then(f"limit {count}", lambda frame: frame.orderBy(*order).limit(count))
            case "distinct":
                return pair.then("distinct", lambda frame: frame.select("subject", "n", "sequence").distinct())
            case "cache":
                cached.append(pair.live.cache())
                return pair.then("cache", lambda frame: frame)
            case _:
                return pair.then("view", lambda frame: self._viewed(frame))

    def _viewed(self, frame: DataFrame) -> DataFrame:
        frame.createOrReplaceTempView("differential")
        return self.spark.sql("SELECT subject, sequence, n + 1 AS n FROM differential WHERE n % 2 = 0")

    def _where(self, pair: Pair) -> Pair:
        name, rng = self.origin.name.lower(), self.rng
        conditions = (
            f"subject = '{name}.a'",
            f"subject IN ('{name}.a', '{name}.b')",
            f"subject LIKE '{name}.c.%'",
            f"sequence > {rng.randint(0, 60)}",
            f"sequence BETWEEN {rng.randint(0, 30)} AND {rng.randint(20, 60)}",
            f"n % {rng.randint(2, 4)} = 0",
            "subject IS NULL",
        )
        condition = rng.choice(conditions)
        return pair.then(f"where {condition}", lambda frame: frame.where(condition))

    def _compared(self, pair: Pair) -> list[str]:
        live, memory = counted(pair.live.collect()), counted(pair.memory.collect())
        return [f"{pair.words}: {difference(live, memory)}"] if live != memory else []

    # -- streaming -----------------------------------------------------------------------------------------------------

    def _streaming(self) -> list[str]:
        """A query that ends, is stopped inside a batch, or both, and goes on with more messages."""
        rng, origin = self.rng, self.origin
        self.streams.make("OUT", subjects=["out.>"], allow_atomic=True, duplicate_window=100_000_000)
        origin.publish(rng.randint(1, 40))
        origin.damage()
        steps = [rng.choice(STREAM_STEPS) for _ in range(rng.randint(0, 3))]
        if sum(name == "union" for name, _ in steps) > 1:
            steps = steps[:1]
        sink = rng.choice(SINKS)
        if sink == STATEFUL:
            steps.append((STATEFUL, grouped))
        stop_at = rng.choice((None, "before", "between", "after")) if sink in ("foreachBatch", STATEFUL) else None
        words = " → ".join(["load", *(name for name, _ in steps), sink])
        self._told("streaming", f"{words}, stopped {stop_at or 'never'}")
        expected = origin.wanted()
        output = Output(self, sink, stop_at)
        output.run(steps)
        origin.rows = {} if origin.retention != "limits" and not origin.filters else origin.rows
        before = set(origin.rows)
        origin.publish(rng.randint(0, 20))
        expected += [row for row in origin.wanted() if row[2] not in before]
        output.stop_at = None
        if sink != STATEFUL:
            self._shuffle_anew()
        output.run(steps)
        memory = narrow(self._in_memory(expected[1:] if self.lose else expected))
        for _, step in steps:
            memory = step(memory)
        wanted, found = counted(memory.collect()), output.found()
        wrong = [f"{name}: {difference(rows, wanted)}" for name, rows in found.items() if rows != wanted]
        return [*wrong, *(f"{count} messages left in the stream" for count in origin.left())]


def narrow(frame: DataFrame) -> DataFrame:
    """The columns that every step keeps."""
    body = F.col("data").cast("string").cast("bigint") + 100 * F.size("headers")
    return frame.select("subject", "sequence", body.alias("n"))


def joined(left: DataFrame, right: DataFrame) -> DataFrame:
    low, high = left.alias("l"), right.alias("r")
    return low.join(high, F.expr("l.n % 5 = r.n % 5 AND l.sequence <= r.sequence")).select(
        "l.subject", "r.sequence", "l.n"
    )


def grouped(frame: DataFrame) -> DataFrame:
    return frame.groupBy("subject").agg(F.max("sequence").alias("sequence"), F.sum("n").alias("n"))


def _with_static(frame: DataFrame) -> DataFrame:
    few = frame.sparkSession.range(0, 6).withColumn("factor", F.col("id") * 10)
    return frame.join(few, F.expr("n % 6 = id AND id <> 3")).select(
        "subject", "sequence", (F.col("n") + F.col("factor")).alias("n")
    )


STREAM_STEPS: tuple[tuple[str, Step], ...] = (
    ("where", lambda frame: frame.where("n % 3 <> 0")),
    ("where subject", lambda frame: frame.where("subject LIKE '%.a' OR subject LIKE '%.x'")),
    ("union", lambda frame: frame.where("n < 15").unionByName(frame.where("n > 10"))),
    ("repartition", lambda frame: frame.repartition(3)),
    ("repartition by n", lambda frame: frame.repartition(2, "n")),
    ("join", _with_static),
)
SINKS = ("foreachBatch", "foreachBatch", "jetstream", "parquet", STATEFUL)


class Output:
    """Where a query writes, and what is there in the end."""

    def __init__(self, case: Case, sink: str, stop_at: str | None) -> None:
        self._case = case
        self._sink = sink
        self.stop_at = stop_at
        self._stop_in = case.rng.randint(0, 2)
        self._batches: dict[int, list[Row]] = {}
        self._folder = case.folder / f"seed-{case.seed}"

    def run(self, steps: list[tuple[str, Step]]) -> None:
        """Run the query to its end; once more when it was stopped."""
        case = self._case
        options = {**case.origin.options(case.settings), "partitions": str(case.rng.randint(1, 4))}
        if case.rng.random() < 0.7:
            options["maxRowsPerTrigger"] = str(case.rng.randint(10, 40))
        for _ in range(2):
            frame = narrow(case.spark.readStream.format("jetstream").options(**options).load())
            for _, step in steps:
                frame = step(frame)
            if self._ended(self._writer(frame)):
                return
            self.stop_at = None
        raise AssertionError("it was stopped twice")

    def _ended(self, writer: DataStreamWriter) -> bool:
        writer = writer.option("checkpointLocation", str(self._folder / "checkpoint")).trigger(availableNow=True)
        query = writer.start()
        try:
            assert query.awaitTermination(WITHIN), query.status
        except StreamingQueryException as exc:
            if Stopped.__name__ not in str(exc):
                raise
            return False
        finally:
            query.stop()
        return True

    def _writer(self, frame: DataFrame) -> DataStreamWriter:
        if self._sink == "jetstream":
            return as_message(frame).writeStream.format("jetstream").options(**self._out())
        if self._sink == "parquet":
            return frame.writeStream.format("parquet").option("path", str(self._folder / "lake"))
        mode = "update" if self._sink == STATEFUL else "append"
        return frame.writeStream.foreachBatch(self._write).outputMode(mode)

    def _out(self) -> dict[str, str]:
        return {"servers": ",".join(self._case.settings.servers), "stream": "OUT", "subject": "out.row"}

    def _write(self, frame: DataFrame, number: int) -> None:
        """Two sinks, each of which may see a batch twice; `stop_at` says where it ends."""
        stopping = self.stop_at if number == self._stop_in else None
        if stopping == "before":
            raise Stopped
        self._batches[number] = [tuple(row) for row in frame.collect()]
        if stopping == "between":
            raise Stopped
        if self._sink != STATEFUL:
            once = {"txnAppId": f"q{self._case.seed}", "txnVersion": str(number)}
            as_message(frame).write.format("jetstream").mode("append").options(**self._out(), **once).save()
        if stopping == "after":
            raise Stopped

    def found(self) -> dict[str, Counter[Row]]:
        """The rows in each of the sinks."""
        case = self._case
        if self._sink == "parquet":
            lake = case.spark.read.schema("subject string, sequence bigint, n bigint").parquet(
                str(self._folder / "lake")
            )
            return {"parquet": counted(lake.collect())}
        if self._sink == STATEFUL:
            newest = {row[0]: row for _, rows in sorted(self._batches.items()) for row in rows}
            return {"groups": Counter(newest.values())}
        found = {
            "stream": Counter(_row(case.streams, seq) for seq in range(1, case.streams.info("OUT").state.last_seq + 1))
        }
        if self._sink == "foreachBatch":
            found["batches"] = Counter(row for rows in self._batches.values() for row in rows)
        return found


def as_message(frame: DataFrame) -> DataFrame:
    return frame.select(F.to_json(F.struct("subject", "sequence", "n")).alias("data"))


def _row(streams: Streams, sequence: int) -> Row:
    found = json.loads(run(streams.api.get_message("OUT", sequence)).data)
    return found["subject"], found["sequence"], found["n"]


def counted(rows: list[Any]) -> Counter[Row]:
    """Rows as a multiset."""
    return Counter(tuple(row[name] for name in ("subject", "sequence", "n")) for row in rows)


def difference(found: Counter[Row], wanted: Counter[Row]) -> str:
    missing, extra = wanted - found, found - wanted
    return f"{missing.total()} missing {list(missing)[:3]}, {extra.total()} too many {list(extra)[:3]}"
