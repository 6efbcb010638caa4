"""Random lives of a streaming query, without a Spark job: what it reads, what it misses, and what it tells."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.support.streams import Streams

from penstock.errors import DataLoss, MessageNotFound
from penstock.server.embedded import EmbeddedServer
from penstock.spark.datasource import COLUMNS, JetStreamDataSource
from penstock.wire.blocking import connect, run

FEW, MANY = 25, 2000
REMOVES_INSIDE = ("allow_msg_ttl", "allow_rollup_hdrs")
"""Streams whose publishers may remove messages: single ones that are missing there are no loss."""


@pytest.fixture
def shared_streams(shared_server: EmbeddedServer) -> Iterator[Streams]:
    with connect(shared_server.settings) as connection:
        yield Streams(connection)


class Life:
    """A query over one stream, and a book of what the stream holds and what was removed before it was read."""

    def __init__(self, streams: Streams, url: str, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.streams = streams
        self.name = f"LIFE{seed}"
        self.retention = rng.choice(["limits", "limits", "workqueue", "interest"])
        self.filtered = rng.random() < 0.35
        self.flag = rng.choice([None, None, *REMOVES_INSIDE])
        self.options = {
            "servers": url,
            "stream": self.name,
            "consumer": "c",
            "startingOffsets": rng.choice(["earliest", "consumer"]),
            "partitions": str(rng.choice([1, 2, 3])),
        } | ({"subjects": f"{self.name}.a"} if self.filtered else {})
        self.held: dict[int, str] = {}
        """What the stream holds: sequence and last token of the subject."""
        self.last = 0
        self.lost: set[int] = set()
        self.told: list[str] = [f"{self.retention} {self.flag} filtered={self.filtered} {self.options}"]
        self.reader: Any = None
        self.offset: dict[str, Any] = {}

    def begin(self) -> None:
        flags = {self.flag: True} if self.flag else {}
        self.streams.make(self.name, subjects=[f"{self.name}.>"], retention=self.retention, **flags)
        self.restart()
        if self.retention == "interest":
            self.reader.initialOffset()  # without a consumer the stream would keep nothing
            self.restart()
        if self.rng.random() < 0.8:
            self.publish()
        if self.rng.random() < 0.3:
            self.delete()
        self.offset = _logged(self.reader.initialOffset())
        self.lost.clear()  # what was gone before it began is no loss

    def live(self) -> DataLoss | None:
        """Everything that happens to the query; the loss that ended it, if one did."""
        self.begin()
        try:
            for _ in range(self.rng.randrange(4, 14)):
                self.rng.choice([self.publish, self.step, self.step, self.restart, self.delete, self.purge])()
        except DataLoss as loss:
            return loss
        return None

    def publish(self) -> None:
        for _ in range(self.rng.randrange(1, 12)):
            kind = self.rng.choice("ab")
            self.streams.publish(f"{self.name}.{kind}", [b"x"])
            self.last += 1
            self.held[self.last] = kind
        self.told.append(f"publish up to {self.last}")

    def restart(self) -> None:
        self.stop()
        self.reader = JetStreamDataSource(self.options).streamReader(COLUMNS)
        self.told.append("restart")

    def delete(self) -> None:
        if self.held:
            chosen = self.rng.choice(list(self.held))
            self._removed([chosen])
            with suppress(MessageNotFound):  # of an Interest stream and a subject that nobody wants
                run(self.streams.api.delete_message(self.name, chosen))

    def purge(self) -> None:
        if self.held and self.rng.random() < 0.3:
            before = self.rng.choice(list(self.held))
            self._removed([n for n in self.held if n < before])
            run(self.streams.api.purge_stream(self.name, before_seq=before))

    def _removed(self, sequences: list[int]) -> None:
        self.told.append(f"remove {sequences}")
        for sequence in sequences:
            del self.held[sequence]
            if sequence > self.offset.get("sequence", 0):
                self.lost.add(sequence)

    def step(self) -> None:
        """One micro-batch. Raises `DataLoss` when the reader says so."""
        limit = self.rng.choice([ReadAllAvailable(), ReadMaxRows(self.rng.randrange(1, 9))])
        end = _logged(self.reader.latestOffset(self.offset, limit))
        if end == self.offset:
            return
        found = self._read(end)
        if self.rng.random() < 0.3:
            self.restart()
            assert self._read(end) == found, f"a batch that is run again has other rows: {self.told}"
        low, high = self.offset["sequence"], end["sequence"]
        self.told.append(f"read {low + 1} to {high}: {found}")
        wanted = [n for n, kind in self.held.items() if low < n <= high and self._wants(kind)]
        assert found == wanted, self.told
        if not self.filtered and not self.flag and not self.offset["openStart"]:
            assert not [n for n in self.lost if low < n <= high], f"a loss went unnoticed: {self.told}"
        self.reader.commit(end)
        self.offset = end
        if self.retention != "limits":
            self.held = {n: kind for n, kind in self.held.items() if n > high or not self._wants(kind)}

    def _wants(self, kind: str) -> bool:
        return not self.filtered or kind == "a"

    def _read(self, end: dict[str, Any]) -> list[int]:
        parts = self.reader.partitions(self.offset, end)
        return sorted(n for part in parts for batch in self.reader.read(part) for n in batch["sequence"].to_pylist())

    def stop(self) -> None:
        if self.reader:
            self.reader.stop()


def _logged(offset: dict[str, Any]) -> dict[str, Any]:
    again: dict[str, Any] = json.loads(json.dumps(offset))
    return again


@pytest.mark.parametrize(
    "seeds",
    [range(FEW), pytest.param(range(FEW, FEW + MANY), marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
    ids=[f"{FEW} seeds", f"{MANY} seeds"],
)
def test_a_query_reads_every_message_once_and_tells_of_a_loss_if_and_only_if_there_is_one(
    shared_server: EmbeddedServer, shared_streams: Streams, seeds: range
) -> None:
    noticed = 0
    for seed in seeds:
        life = Life(shared_streams, shared_server.url, seed)
        try:
            loss = life.live()
        finally:
            life.stop()
            run(shared_streams.api.delete_stream(life.name))
        if loss:
            noticed += 1
            assert life.lost, f"seed {seed}: a false alarm, {loss}: {life.told}"
    assert noticed, "losses were among the lives"
