"""What `penstock pipeline` shows: tables of states, and a running view of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Self

from rich.console import RenderableType
from rich.live import Live

from penstock.cli.common import Column, err, table
from penstock.errors import PenstockError
from penstock.observe.collecting import consumer_status
from penstock.observe.pipelines import PipelineStatus
from penstock.observe.status import ConsumerStatus
from penstock.settings import Settings
from penstock.spark.link import Link
from penstock.spark.progress import PipelineProgress, now
from penstock.topology.model import PipelineSpec, Platform
from penstock.units import format_duration, format_size

RIGHT = "right"
LIVE_COLUMNS = ("batch", "rows", "rows/s", "took", "rows behind", "behind", "rows kept", "bytes kept")


def listing(found: Sequence[PipelineStatus], platform: Platform | None) -> RenderableType:
    """One line a pipeline: what flows where, and whether it keeps up."""
    specs = platform.pipelines if platform else {}
    rows = (
        (one.name, ", ".join(one.streams), _sinks(specs.get(one.name)), _trigger(specs.get(one.name)), one.state,
         _count(one.behind_rows), _age(one.behind) if one.behind_rows else "")
        for one in found
    )  # fmt: skip
    columns: list[Column] = ["pipeline", "reads", "writes", "runs", "state", ("rows behind", RIGHT), ("behind", RIGHT)]
    return table(f"Pipelines ({len(found)})", columns, rows)


def status_table(found: Sequence[PipelineStatus]) -> RenderableType:
    """One line a pipeline: its last micro-batch, its state, its trouble."""
    columns: list[Column] = [
        "pipeline", "state", ("rows behind", RIGHT), ("behind", RIGHT), ("batch", RIGHT), ("ended", RIGHT),
        ("took", RIGHT), ("rows/s", RIGHT), ("kept rows", RIGHT), ("bad", RIGHT), "error",
    ]  # fmt: skip
    return table(f"Pipelines ({len(found)})", columns, (_status_row(one) for one in found))


def _status_row(one: PipelineStatus) -> tuple[Any, ...]:
    behind = (_count(one.behind_rows), _age(one.behind) if one.behind_rows else "")
    if (last := one.progress) is None:
        return (one.name, one.state, *behind, *[""] * 7)
    return (one.name, one.state, *behind, last.batch, _ago(last.batch_ended), f"{last.batch_seconds:.1f} s",
            f"{last.rows_per_second:,.0f}", f"{last.state_rows:,}", last.bad_records, last.error)  # fmt: skip


def _sinks(spec: PipelineSpec | None) -> str:
    return ", ".join(sink.stream or sink.path or "console" for sink in spec.sinks) if spec else ""


def _trigger(spec: PipelineSpec | None) -> str:
    if spec is None:
        return ""
    return f"every {format_duration(spec.trigger.every)}" if spec.trigger.every is not None else "once"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _age(age: timedelta) -> str:
    return format_duration(timedelta(seconds=round(age.total_seconds())))


def _ago(time: datetime | None) -> str:
    return f"{_age(now() - time)} ago" if time else ""


def to_json(one: PipelineStatus) -> dict[str, Any]:
    """A pipeline for machines: durations are seconds, times RFC 3339."""
    return {
        "name": one.name,
        "state": one.state,
        "streams": list(one.streams),
        "consumer": one.consumer,
        "rows_behind": one.behind_rows,
        "seconds_behind": None if one.behind_rows is None else one.behind.total_seconds(),
        "progress": one.progress.json() if one.progress else None,
    }


class LiveView:
    """Shows every micro-batch as it ends: a table that changes on a terminal, else a line each, on stderr."""

    def __init__(self, settings: Settings, quiet: bool = False) -> None:
        self._link = Link(settings, patience=settings.timeout)
        self._quiet = quiet
        self._rows: dict[str, tuple[str, ...]] = {}
        self._live = Live(console=err, transient=True, auto_refresh=False) if err.is_terminal and not quiet else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        self._link.close()

    def show(self, progress: PipelineProgress) -> None:
        """One more micro-batch of a pipeline."""
        if self._quiet:
            return
        self._rows[progress.pipeline] = row = self._row(progress)
        if self._live:
            columns: list[Column] = ["pipeline", *((name, RIGHT) for name in LIVE_COLUMNS)]
            self._live.update(table(None, columns, self._rows.values()), refresh=True)
        else:
            cells = (f"{name} {cell}" for name, cell in zip(LIVE_COLUMNS, row[1:], strict=True) if cell)
            err.print(f"{progress.pipeline}: {', '.join(cells)}", soft_wrap=True)

    def _row(self, progress: PipelineProgress) -> tuple[str, ...]:
        return (
            progress.pipeline,
            str(progress.batch),
            f"{progress.batch_rows:,}",
            f"{progress.rows_per_second:,.0f}",
            f"{progress.batch_seconds:.1f} s",
            *self._behind(progress),
            f"{progress.state_rows:,}",
            format_size(progress.state_bytes),
        )

    def _behind(self, progress: PipelineProgress) -> tuple[str, str]:
        """Rows and time behind, by the durable consumers; blank when the server does not say."""
        try:
            found = [self._consumer(stream, progress.consumer) for stream in progress.streams]
        except PenstockError:
            return "", ""
        there = [status for status in found if status]
        return f"{sum(one.lag_messages for one in there):,}", _age(max((one.lag for one in there), default=timedelta()))

    def _consumer(self, stream: str, name: str) -> ConsumerStatus | None:
        return self._link.call(lambda api: consumer_status(api, stream, name))
