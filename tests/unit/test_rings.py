"""`scripts/rings`: what it reads from a run of pytest, and the table that it keeps."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "rings"


def loaded() -> Any:
    loader = importlib.machinery.SourceFileLoader("rings", str(SCRIPT))
    spec = importlib.util.spec_from_loader("rings", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules["rings"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


rings = loaded()
OUTPUT = """
FAILED tests/unit/a/test_b.py::test_c[an x] - AssertionError: no
ERROR tests/unit/a/test_b.py::test_d
= {} in 467.47s (0:07:47) =
"""


@pytest.mark.parametrize(
    ("closing", "passed", "failed"),
    [
        ("2993 passed", 2993, 0),
        ("1 failed, 2 passed, 3 deselected", 2, 1),
        ("1 failed, 20 passed, 2 errors", 20, 3),
        ("no tests ran", 0, 0),
    ],
)
def test_the_closing_line_gives_the_counts(closing: str, passed: int, failed: int) -> None:
    found = rings.outcome(OUTPUT.format(closing))
    assert found == (passed, failed, ["test_c[an x]", "test_d"])


def test_a_new_row_is_the_last_of_its_ring_and_old_ones_go() -> None:
    page = f"before\n{rings.BEGIN}\n{rings.END}\nafter\n"
    for number in range(rings.KEPT["kills"] + 2):
        page = rings.with_row(page, rings.Run("kills", f"c{number}", "now", "quiet", "20:00", 100, 0, ""))
    page = rings.with_row(page, rings.Run("test", "t", "now", "quiet", "8:00", 3000, 1, "test_x"))
    assert page.startswith("before\n<!-- rings -->\n| ring | commit")
    assert page.endswith("<!-- /rings -->\nafter\n")
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith(("| test", "| kills"))]
    assert rows == [["| test", "t"], *(["| kills", f"c{number}"] for number in range(2, 6))]


def test_the_page_has_a_place_for_the_table() -> None:
    page = rings.PAGE.read_text()
    assert 0 < page.index(rings.BEGIN) < page.index(rings.END)


def test_wrong_usage_exits_64() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "everything"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[0][:6]) == (64, "error:")
