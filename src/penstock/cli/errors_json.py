"""Errors as JSON, for scripts that asked for JSON and read nothing but stdout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.cli.common import print_json
from penstock.errors import PenstockError
from penstock.jetstream.model import Json

T = TypeVar("T")


def reported(command: Callable[..., T]) -> Callable[..., T]:
    """A command with `--json` whose errors are `told` as a document too."""

    @functools.wraps(command)
    def wrapper(*args: Any, as_json: bool, **kwargs: Any) -> T:
        with told(as_json):
            return command(*args, as_json=as_json, **kwargs)

    return wrapper


@contextmanager
def told(as_json: bool) -> Iterator[None]:
    """Print an error that ends the command as a document too; the error itself goes on, and decides the exit code."""
    try:
        yield
    except PenstockError as exc:
        if as_json:
            print_json(error_json(exc))
        raise


def error_json(error: PenstockError) -> Json:
    """`error` in words; for a file, `problems` with their places; for a file that lint refuses, its `findings`."""
    # Here, since they take long to import, and most commands know nothing of platform files.
    from penstock.topology.document import FileProblems
    from penstock.topology.lint import LintErrors
    from penstock.topology.plan_json import VERSION

    document: Json = {"version": VERSION, "error": str(error)}
    if isinstance(error, FileProblems):
        document["problems"] = [
            {"file": error.path, "line": one.line, "column": one.column, "message": one.message}
            for one in error.problems
        ]
    if isinstance(error, LintErrors):
        document["findings"] = [finding.to_json() for finding in error.findings]
    return document
