"""`penstock` by its entry point inside this process, which saves the second that each process takes to start."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from penstock.cli.main import penstock, run


def here(
    *arguments: str | Path, cwd: Path | None = None, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a process of its own would have done; of Penstock's variables it sees those that are given, and no others.

    Spark is the session of this process, where there is one.
    """
    stdout, stderr, command = io.StringIO(), io.StringIO(), [str(argument) for argument in arguments]
    with (
        patch.dict(os.environ, {**without_ours(), **(variables or {})}, clear=True),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as ended,
    ):
        run(command)
    return subprocess.CompletedProcess(command, int(ended.value.code or 0), stdout.getvalue(), stderr.getvalue())


def ended(*arguments: str | Path, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """As `here`; the command must exit with `code`."""
    done = here(*arguments, cwd=cwd)
    assert done.returncode == code, done
    return done


def invoked(*arguments: str) -> tuple[int, str]:
    """The exit code and the output of a command; raises what it raises, and may run in any thread."""
    done = CliRunner().invoke(penstock, arguments, standalone_mode=False)
    if done.exception:
        raise done.exception
    return int(done.return_value or 0), done.output


def without_ours() -> dict[str, str]:
    """The environment, without variables of Penstock."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
