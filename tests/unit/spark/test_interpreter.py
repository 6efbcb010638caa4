"""Spark runs the Python that has this package, or says which one it runs instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.errors import ConfigError
from penstock.spark import interpreter
from penstock.spark.interpreter import DRIVER, SUBMITTED, TASKS

SOURCE = str(Path(penstock.__file__).parents[1])


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TASKS, DRIVER, SUBMITTED, "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """A Python that finds nothing but the standard library and `PYTHONPATH`."""
    return program(tmp_path / "python3", f'exec {sys.executable} -S "$@"')


def program(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_importing_the_package_makes_spark_run_this_python() -> None:
    told = f"os.environ['{TASKS}'], os.environ['{DRIVER}'], 'pyspark' in sys.modules"
    code = f"import os, sys, penstock.spark; print({told})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [sys.executable, sys.executable, "False"]


@pytest.mark.parametrize(
    "chosen", [{TASKS: "/opt/python"}, {SUBMITTED: "4711"}], ids=["by the user", "by spark-submit"]
)
def test_a_python_that_was_chosen_stays(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    interpreter.choose()
    assert {name: os.environ[name] for name in (TASKS, DRIVER, SUBMITTED) if name in os.environ} == chosen


def test_a_session_on_this_python_or_one_that_has_the_package_is_fine(other_python: str) -> None:
    interpreter.check(sys.executable)
    interpreter.check(other_python, [SOURCE])


def test_a_session_that_began_before_the_import_is_told_to_begin_again(other_python: str) -> None:
    interpreter.choose()
    with pytest.raises(ConfigError, match=r"cannot import penstock .*spark\.stop\(\) and create the session") as told:
        interpreter.check(other_python)
    assert other_python in str(told.value)
    assert sys.executable in str(told.value)


def test_a_chosen_python_without_the_package_is_named_with_the_fix(
    other_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TASKS, other_python)
    with pytest.raises(
        ConfigError, match=rf"install penstock-nats\[spark\] there, or set {TASKS} to '{sys.executable}'"
    ):
        interpreter.check(other_python)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("echo 3.9 0.0.1", "which is Python 3.9 with penstock 0.0.1"),
        ("exit 3", "cannot import penstock"),
        (None, "run"),
    ],
)
def test_another_version_and_a_program_that_does_not_run_are_told(tmp_path: Path, line: str | None, says: str) -> None:
    named = program(tmp_path / "other", line) if line else str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=says):
        interpreter.check(named)


def test_spark_goes_on_to_find_other_sources_where_this_one_cannot_be_imported() -> None:
    hide = "import sys; sys.modules['pyspark.sql.datasource'] = None"
    code = f"{hide}; import pyspark_penstock; print(hasattr(pyspark_penstock, 'DefaultSource'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False"]
    assert "Spark cannot use format jetstream" in done.stderr
