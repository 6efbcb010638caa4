"""The program that `spark-submit` runs: pipelines of a platform file, on the cluster that spark-submit was told of.

    penstock pipeline package -o penstock.zip
    spark-submit --master spark://host:7077 --py-files penstock.zip submit.py penstock.yaml usage_hourly

`penstock pipeline package` says where this file is.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # as a program its folder is on the search path, and the modules in it are not for everybody
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import argparse
import signal
import threading

from penstock.errors import PenstockError
from penstock.printable import visible
from penstock.settings import Settings
from penstock.spark.pipelines import pipeline
from penstock.spark.runs import run
from penstock.spark.session import running
from penstock.topology.load import load


def main(arguments: list[str] | None = None) -> int:
    """Run the pipelines; the exit code is 1 when one of them failed."""
    given = _parser().parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        platform = load(given.file, given.env)
        settings = Settings.load(**platform.environment.settings_overrides())
        flows = [pipeline(platform, name, settings, given.base) for name in given.names or platform.pipelines]
        with running("penstock", master=None) as spark:
            results = run(spark, flows, given.once, stop)
    except PenstockError as exc:
        print(visible(f"error: {exc}"), file=sys.stderr)
        return exc.exit_code
    for result in results:
        words = f"{result.rows_read} read, {result.rows_written} written, {result.progress.bad_records} bad"
        print(visible(f"{result.name}: {result.error or f'{result.state}, {words}'}"))
    return int(any(result.error for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="submit.py", description="Run pipelines of a platform file.")
    parser.add_argument("file", type=Path, help="the platform file")
    parser.add_argument("names", nargs="*", help="pipelines; all of the file when left out")
    parser.add_argument("--env", help="environment of the file")
    parser.add_argument("--once", action="store_true", help="take what is there now and end")
    parser.add_argument("--base", type=Path, help="where relative paths start; the file's folder when left out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
