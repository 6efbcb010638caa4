"""`penstock pipeline`: run the declared Spark pipelines, and see from anywhere how far they are."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.common import (
    EXIT_ATTENTION,
    EXIT_ERROR,
    EXIT_OK,
    Column,
    Context,
    fail,
    json_option,
    out,
    print_json,
    show_result,
    sync,
    table,
    usage,
)
from penstock.cli.pipeline_view import LiveView, listing, status_table, to_json
from penstock.cli.platform import env_option
from penstock.jetstream import connect
from penstock.observe.pipelines import Declared, PipelineStatus, collect_pipelines
from penstock.settings import Settings
from penstock.topology.load import load
from penstock.topology.model import Platform

if TYPE_CHECKING:  # Spark takes a second to import, and only `run` needs it
    from penstock.spark.runs import PipelineResult

DEFAULT_FILE = "penstock.yaml"
names_argument = click.argument("names", nargs=-1, metavar="[NAME]…")
file_option = click.option("--file", type=click.Path(dir_okay=False), metavar="FILE",
                           help=f"Platform file.  [default: {DEFAULT_FILE}, where there is one]")  # fmt: skip


@click.group()
def pipeline() -> None:
    """Spark pipelines of the declared platform.

    \b
    Example:
      penstock pipeline run usage_hourly
      penstock pipeline status
    """


@pipeline.command("ls")
@names_argument
@file_option
@env_option
@json_option
@click.pass_obj
@sync
async def ls(context: Context, names: tuple[str, ...], file: str | None, env: str | None, as_json: bool) -> int:
    """List the pipelines, or those named: what they read and write, their state, how far behind they are.

    Without a platform file, what the server knows is listed.

    \b
    Example:
      penstock pipeline ls --file examples/gpuaas/penstock.yaml
    """
    platform = _platform(file, env)
    found = await _collected(context, platform, names)
    show_result(as_json, {"version": 1, "pipelines": [to_json(one) for one in found]}, listing(found, platform))
    return EXIT_OK


@pipeline.command(epilog="Exit code 2: a pipeline has failed, or was running and is silent.")
@names_argument
@file_option
@env_option
@json_option
@click.pass_obj
@sync
async def status(context: Context, names: tuple[str, ...], file: str | None, env: str | None, as_json: bool) -> int:
    """Show how each pipeline is doing: rows and time behind, its last micro-batch, its state, its errors.

    \b
    Example:
      penstock pipeline status usage_hourly --json
    """
    found = await _collected(context, _platform(file, env), names)
    show_result(as_json, {"version": 1, "pipelines": [to_json(one) for one in found]}, status_table(found))
    return EXIT_ATTENTION if any(one.needs_attention for one in found) else EXIT_OK


@pipeline.command()
@click.argument("names", nargs=-1, metavar="NAME…")
@click.option("--all", "run_all", is_flag=True, help="Every pipeline of the file.")
@click.option("--file", type=click.Path(dir_okay=False), default=DEFAULT_FILE, show_default=True, help="Platform file.")
@env_option
@click.option("--master", default="local[*]", show_default=True, metavar="URL",
              help="Where Spark runs, such as spark://host:7077.")  # fmt: skip
@click.option("--once", is_flag=True, help="Take what is there now and end, whatever the trigger says.")
@click.option("--base", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Where relative paths of sinks and checkpoints start.  [default: the file's folder]")  # fmt: skip
@click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A Spark setting; may be repeated.")
@click.option("--verbose", is_flag=True, help="Spark's own log and stack traces too.")
@json_option
@click.pass_obj
def run(context: Context, names: tuple[str, ...], run_all: bool, file: str, env: str | None, master: str, once: bool,
        base: Path | None, conf: tuple[str, ...], verbose: bool, as_json: bool) -> int:  # fmt: skip
    """Run pipelines until they have read everything, or until they are stopped.

    SIGINT and SIGTERM let the micro-batches that are under way finish; the next run continues after them.

    \b
    Example:
      penstock pipeline run usage_hourly balance_watch --once
      penstock pipeline run --all --master spark://spark-0:7077
    """
    platform = load(file, env)
    chosen = tuple(platform.pipelines) if run_all else names
    if not chosen:
        usage(f"name a pipeline, or give --all; {file} declares {', '.join(platform.pipelines) or 'none'}")
    from penstock.spark.pipelines import pipeline as found
    from penstock.spark.runs import run as run_pipelines
    from penstock.spark.session import running

    settings = context.settings_below_flags(**platform.environment.settings_overrides())
    flows = [found(platform, name, settings, base) for name in dict.fromkeys(chosen)]
    conf_given = dict(_setting(one) for one in conf)
    with (
        running("penstock", master, conf_given, verbose) as spark,
        _stop_on_signal() as stop,
        LiveView(settings, quiet=as_json) as view,
    ):
        results = run_pipelines(spark, flows, once, stop, view.show)
    return _report(results, as_json)


@pipeline.command()
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), default="penstock.zip",
              show_default=True, help="The archive to write.")  # fmt: skip
@click.option("--file", type=click.Path(dir_okay=False), default=DEFAULT_FILE, show_default=True, help="Platform file.")
@env_option
def package(output: Path, file: str, env: str | None) -> None:
    """Write what executors must import as one archive, for spark-submit.

    The archive has this package and the Python modules that the file's pipelines name. What those need in turn must be
    installed where executors run; docs/pipelines.md says how.

    \b
    Example:
      penstock pipeline package -o penstock.zip
    """
    from penstock.spark import submit
    from penstock.spark.pipelines import pipeline as found
    from penstock.spark.session import package_archive

    platform = load(file, env)
    modules = {path for name in platform.pipelines for path in found(platform, name, Settings()).modules()}
    package_archive(output, sorted(modules))
    out.print(f"wrote {output}; use it with:", soft_wrap=True)
    out.print(f"  spark-submit --py-files {output} {submit.__file__} {file} NAME…", soft_wrap=True)


def _report(results: Sequence[PipelineResult], as_json: bool) -> int:
    if as_json:
        ended = [{**one.progress.json(), "outputs": list(one.outputs)} for one in results]
        print_json({"version": 1, "pipelines": ended})
    else:
        columns: list[Column] = [
            "pipeline",
            "state",
            ("read", "right"),
            ("written", "right"),
            ("bad", "right"),
            ("batches", "right"),
        ]
        rows = [
            (r.name, r.state, f"{r.rows_read:,}", f"{r.rows_written:,}", r.progress.bad_records, r.progress.batches)
            for r in results
        ]
        out.print(table(None, columns, rows))
    failures = [one.error for one in results if one.error]
    for failure in failures:
        fail(str(failure))
    return EXIT_ERROR if failures else EXIT_OK


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        usage(f"--conf {text!r}: write KEY=VALUE, such as spark.executor.memory=2g")
    return key, value


@contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second signal ends the process as usual."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def heard(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, heard)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _platform(file: str | None, env: str | None) -> Platform | None:
    if file is None and not Path(DEFAULT_FILE).is_file():
        return None
    return load(file or DEFAULT_FILE, env)


async def _collected(context: Context, platform: Platform | None, names: Sequence[str]) -> list[PipelineStatus]:
    overrides = platform.environment.settings_overrides() if platform else {}
    async with connect(context.settings_below_flags(**overrides)) as broker:
        found = await collect_pipelines(broker.jetstream, _declared(platform))
    return _named(found, names)


def _named(found: Sequence[PipelineStatus], names: Sequence[str]) -> list[PipelineStatus]:
    """Those of these names, or all."""
    known = [one.name for one in found]
    if unknown := [name for name in names if name not in known]:
        hint = f"; the platform file is given as --file {unknown[0]}" if Path(unknown[0]).is_file() else ""
        usage(f"there is no pipeline {unknown[0]!r}; known are {', '.join(known) or 'none'}{hint}")
    return [one for one in found if not names or one.name in names]


def _declared(platform: Platform | None) -> list[Declared]:
    if platform is None:
        return []
    specs = platform.pipelines.values()
    return [Declared(spec.name, platform.streams_read_by(spec), spec.consumer) for spec in specs]
