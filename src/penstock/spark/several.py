"""Several streams in one source: a reader for each of them, and an offset that holds theirs by name."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from typing import Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from penstock.errors import ConfigError
from penstock.spark import admission
from penstock.spark.link import Link
from penstock.spark.offsets import VERSION, CheckpointMismatch
from penstock.spark.options import EARLIEST, SourceOptions
from penstock.spark.origin import NoSuchStream
from penstock.spark.source import JetStreamReader, JetStreamStreamReader, News, Part, TaskReader
from penstock.spark.unpack import Shape

log = logging.getLogger(__name__)

STREAMS = "streams"
Raw = dict[str, Any]


def stream_names(options: SourceOptions) -> list[str]:
    """The streams that the options name, or that match their pattern now."""
    if not options.pattern:
        return list(options.streams)
    pattern = re.compile(options.pattern)
    with Link(options.settings, options.settings.timeout) as link:
        there = link.call(lambda api: api.stream_names())
    return sorted(name for name in there if pattern.fullmatch(name))


def _some(options: SourceOptions) -> list[str]:
    if not (found := stream_names(options)):
        raise NoSuchStream(f"no stream matches streamPattern {options.pattern!r}")
    if unknown := {*options.starting_by, *options.ending_by} - set(found):
        raise ConfigError(f"offsets are given for {min(unknown)!r}, which is not read: it reads {', '.join(found)}")
    return found


class SeveralReader(TaskReader, DataSourceReader):
    """Reads several streams once."""

    def __init__(self, options: SourceOptions, shape: Shape | None = None) -> None:
        super().__init__(shape)
        self._options = options

    def partitions(self) -> list[Part]:
        names = _some(self._options)
        return [part for name in names for part in JetStreamReader(self._options.of(name)).partitions()]


class SeveralStreamReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads several streams micro-batch by micro-batch.

    A stream that a pattern finds later comes into the offset first, at its oldest message, and is read from the next
    micro-batch on: so the checkpoint knows where it began.
    """

    def __init__(self, options: SourceOptions, shape: Shape | None = None) -> None:
        super().__init__(shape)
        self._options = options
        self._readers: dict[str, JetStreamStreamReader] = {}
        self._there: list[str] | None = None
        """With availableNow: the streams that existed when the query started."""
        self._wait = admission.Wait(options.min_rows, options.max_delay)

    def _reader(self, name: str) -> JetStreamStreamReader:
        if name not in self._readers:
            self._readers[name] = JetStreamStreamReader(self._options.of(name))
        return self._readers[name]

    def _newcomer(self, name: str) -> JetStreamStreamReader:
        """Return the reader of a stream that did not exist when the query started: nothing of it was read."""
        self._readers[name] = JetStreamStreamReader(replace(self._options.of(name), starting=EARLIEST))
        if self._there is not None:
            self._readers[name].prepareForTriggerAvailableNow()
        return self._readers[name]

    # -- called by Spark, in this order ----------------------------------------------------------------------------

    def initialOffset(self) -> Raw:
        return _offset({name: self._reader(name).initialOffset() for name in _some(self._options)})

    def prepareForTriggerAvailableNow(self) -> None:
        self._there = _some(self._options)
        for name in self._there:
            self._reader(name).prepareForTriggerAvailableNow()

    def getDefaultReadLimit(self) -> ReadLimit:
        return JetStreamStreamReader(self._options).getDefaultReadLimit()

    def latestOffset(self, start: Raw, limit: ReadLimit) -> Raw:
        """Where the next micro-batch ends in each stream; `start` itself when there is nothing new, or not enough."""
        begins = self._known(start)
        news = {name: self._reader(name).news(begin) for name, begin in begins.items()}
        if self._wait.goes_on(sum(one.count for one in news.values()), at_once=self._there is not None):
            return start
        ends = self._ends(news, limit)
        for name in _some(self._options) if self._there is None else self._there:
            if name not in begins:
                ends[name] = self._newcomer(name).initialOffset()
        if ends == begins:
            return start
        self._wait.begin()
        return _offset(ends)

    def partitions(self, start: Raw, end: Raw) -> list[Part]:
        begins, ends = _streams(start), _streams(end)
        return [
            part
            for name, stop in ends.items()
            if name in begins
            for part in self._reader(name).partitions(begins[name], stop)
        ]

    def commit(self, end: Raw) -> None:
        for name, stop in _streams(end).items():
            self._reader(name).commit(stop)

    def reportLatestOffset(self) -> Raw:
        return _offset({name: reader.reportLatestOffset() for name, reader in self._readers.items()})

    def stop(self) -> None:
        for reader in self._readers.values():
            reader.stop()

    # -- decisions -------------------------------------------------------------------------------------------------

    def _ends(self, news: dict[str, News], limit: ReadLimit) -> Raw:
        """Divide the rows among the streams; those with much to read get what the others leave."""
        order = sorted(news, key=lambda name: news[name].count)
        left = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        ends = {}
        for index, name in enumerate(order):
            one, allowed = news[name], limit
            if left is not None:
                share = math.ceil(left / (len(order) - index))
                if not share:
                    ends[name] = one.start
                    continue
                allowed = ReadMaxRows(share)
            ends[name] = self._reader(name).next_offset(one, allowed)
            if left is not None:
                left = max(0, left - max(0, int(ends[name]["sequence"]) - one.begin.sequence))
        return {name: ends[name] for name in sorted(ends)}

    def _known(self, start: Raw) -> Raw:
        """The streams of an offset that the query still reads."""
        found = _streams(start)
        wanted = set(found) if self._options.pattern else set(self._options.streams)
        if gone := sorted(set(found) - wanted):
            words = f"the checkpoint has offsets of {', '.join(gone)}, which the query no longer reads"
            if self._options.fail_on_data_loss:
                raise CheckpointMismatch(
                    f"{words}; add it to `streams`, or set failOnDataLoss=false to leave it behind"
                )
            log.warning("%s", words)
        return {name: found[name] for name in found if name in wanted}


def _offset(streams: Raw) -> Raw:
    return {"version": VERSION, STREAMS: streams}


def _streams(raw: Raw) -> Raw:
    if STREAMS not in raw:
        raise CheckpointMismatch(
            f"the checkpoint belongs to a query over stream {raw.get('stream')!r} alone, this one reads several; "
            "give each query a checkpointLocation of its own"
        )
    found: Raw = raw[STREAMS]
    return found
