"""`scripts/mutations` runs tests against changed code; only a test that fails means that the change was noticed."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; it has no suffix, and finds its list beside itself."""
    monkeypatch.syspath_prepend(SCRIPTS)
    loader = SourceFileLoader("mutations", str(SCRIPTS / "mutations"))
    spec = importlib.util.spec_from_loader("mutations", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutations", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("new", "noticed", "words"),
    [
        ("ID_BYTES = 8", True, "test_a_receipt_comes_back_as_it_was_signed"),
        ("ID_BYTES = 3 * 3", False, "all tests passed"),
        ("import nowhere_at_all", False, "the tests could not run"),
    ],
    ids=["another behaviour", "the same behaviour", "no import"],
)
def test_only_a_test_that_fails_counts(script: Any, new: str, noticed: bool, words: str) -> None:
    result = script.run_one(
        script.Mutation(
            name="made-up",
            file="src/penstock/facts/receipt.py",
            old="ID_BYTES = 9",
            new=new,
            breaks="The length of page ids.",
            tests=("tests/unit/facts/test_receipts.py",),
        )
    )
    assert (result.noticed, words in result.by) == (noticed, True), result
