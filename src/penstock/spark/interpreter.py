"""Which Python Spark starts for tasks, for planning and to find data sources: it must be one that has this package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import penstock
from penstock.errors import ConfigError

TASKS = "PYSPARK_PYTHON"
"""Read by PySpark when a session starts; `python3` when it is not set."""
DRIVER = "PYSPARK_DRIVER_PYTHON"
"""Read by Spark's JVM when it looks for data sources; the one above when it is not set."""
SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit, which has chosen one Python for the driver and the tasks."""
ANSWER_WITHIN = 60.0  # seconds
ASK = "import sys, penstock; print('%d.%d' % sys.version_info[:2], penstock.__version__)"


def choose() -> None:
    """Make sessions that start from now on use this Python, unless the user or spark-submit has chosen one."""
    if sys.executable and TASKS not in os.environ and SUBMITTED not in os.environ:
        os.environ[TASKS] = sys.executable
        os.environ.setdefault(DRIVER, sys.executable)


def check(executable: str, added: Sequence[str] = ()) -> None:
    """Raise unless a session's Python has this package; `added` are the paths of packages that are sent to it."""
    if executable == sys.executable:
        return
    here = "{}.{}".format(*sys.version_info[:2]), penstock.__version__
    if (problem := _problem(executable, added, here)) is not None:
        raise ConfigError(f"Spark runs {executable!r}, {problem}: {_fix(executable)}")


def _problem(executable: str, added: Sequence[str], here: tuple[str, str]) -> str | None:
    paths = filter(None, (*added, os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            [executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=ANSWER_WITHIN
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"which does not run ({exc})"
    if done.returncode:
        return f"which cannot import penstock ({(done.stderr.splitlines() or ['no reason given'])[-1]})"
    python, version = done.stdout.split()
    if (python, version) == here:
        return None
    return f"which is Python {python} with penstock {version}, and this is Python {here[0]} with penstock {here[1]}"


def _fix(executable: str) -> str:
    chosen = os.environ.get(TASKS)
    if chosen and chosen != executable:
        return (
            f"call spark.stop() and create the session again; {TASKS} is {chosen!r} by now, since penstock.spark was "
            "imported. Import it before the first session"
        )
    return f"install penstock-nats[spark] there, or set {TASKS} to {sys.executable!r} before the session starts"
