"""What the proof pages count with works without Spark."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest


@pytest.mark.parametrize("name", ["chunks", "digests", "history", "packing", "stored"])
def test_what_is_read_of_the_ledger_needs_no_spark(name: str) -> None:
    source = inspect.getsource(importlib.import_module(f"penstock.spark.{name}"))
    imported = [node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert {one for one in imported if one.startswith(("pyspark", "penstock.spark"))} <= {
        "penstock.spark.chunks",
        "penstock.spark.digests",
        "penstock.spark.packing",
    }
