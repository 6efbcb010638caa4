"""The list of `scripts/mutations` stays in step with the source, the tests and the page about them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "mutations"


def loaded_list() -> Any:
    spec = importlib.util.spec_from_file_location("mutations_list", ROOT / "scripts" / "mutations_list.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


MUTATIONS = loaded_list().MUTATIONS
TWO_EACH = {"publish", "spark", "workers", "facts", "sourcing", "deadletter"}
"""Packages that promise the most about loss, duplicates and order."""


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_mutation_changes_one_place_and_the_code_still_compiles(mutation: Any) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    assert mutation.new not in (mutation.old, "")
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_the_tests_that_must_notice_a_mutation_exist(mutation: Any) -> None:
    assert mutation.tests
    for test in mutation.tests:
        path, _, function = test.partition("::")
        text = (ROOT / path).read_text()
        assert not function or f"def {function}(" in text, test


def test_every_package_has_a_mutation_and_those_that_promise_most_have_two() -> None:
    counts = Counter(mutation.package for mutation in MUTATIONS)
    packages = {path.parent.name for path in (ROOT / "src" / "penstock").glob("*/__init__.py")}
    assert counts.keys() == packages
    assert {package for package in TWO_EACH if counts[package] < 2} == set()


def test_names_are_unique_and_no_package_is_called_like_a_mutation() -> None:
    names = Counter(mutation.name for mutation in MUTATIONS)
    assert set(names.values()) == {1}
    assert not names.keys() & {mutation.package for mutation in MUTATIONS}


def test_the_page_about_testing_has_the_table_of_today() -> None:
    table = script("--table").stdout
    assert table.count("\n") == len(MUTATIONS) + 2
    assert table in (ROOT / "docs" / "testing.md").read_text(), "paste the output of `scripts/mutations --table`"


@pytest.mark.parametrize("arguments", [("no-such-mutation",), ("--unknown",), ("--list", "--sanity")])
def test_wrong_usage_exits_64(arguments: tuple[str, ...]) -> None:
    done = script(*arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert "error: " in done.stderr


def test_help_has_an_example() -> None:
    assert "scripts/mutations forged-receipt" in script("--help").stdout
