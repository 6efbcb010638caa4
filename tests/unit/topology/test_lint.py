"""Every lint rule finds what it is for, at the right line, and is silent when it is mended."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
from tests.unit.topology.lint_cases import CASES, LintCase, one

from penstock.errors import ConfigError
from penstock.topology.lint import count, lint
from penstock.topology.load import load
from penstock.topology.lock import lock_of, lock_path, read_lock, write_lock
from penstock.topology.rules import RULES, Finding

ELSEWHERE = {"A01", "A02"}
"""Rules that need a second file; test_asyncapi.py has them."""


def findings(folder: Path, text: str, lock: str | None = None) -> list[Finding]:
    path = folder / "penstock.yaml"
    path.write_text(text)
    if lock is not None:
        lock_path(path).write_text(lock)
    return lint(load(path), read_lock(lock_path(path)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_broken_platform_is_found_at_its_line_and_a_mended_one_is_not(case: LintCase, tmp_path: Path) -> None:
    broken = [f for f in findings(tmp_path, case.broken, case.lock) if f.code == case.code]
    assert broken, f"{case.code} was not found"
    assert broken[0].line == case.line
    assert broken[0].message
    assert broken[0].fix
    assert case.code not in {f.code for f in findings(tmp_path, case.mended, case.lock)}


def test_every_rule_has_a_case() -> None:
    assert {case.code for case in CASES} | ELSEWHERE == set(RULES)


def test_a_finding_can_be_switched_off_with_a_reason(tmp_path: Path) -> None:
    assert "D01" in {f.code for f in findings(tmp_path, one("max_deliver: 5"))}
    text = one('max_deliver: 5, ignore: {D01: "the caller retries"}')
    assert "D01" not in {f.code for f in findings(tmp_path, text)}


def test_findings_come_in_the_order_of_the_file_and_are_counted(tmp_path: Path) -> None:
    found = findings(tmp_path, one("max_deliver: 5, ack_policy: none").replace(", ack_wait: 30s", ""))
    assert [f.line for f in found] == sorted(f.line for f in found)
    assert count(found)["error"] == sum(f.severity == "error" for f in found) > 0


# -- the lock file ---------------------------------------------------------------------------------------------------


def test_a_lock_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text(
        one("filters: [s.a, s.b]")
        + "pipelines: {p: {from: {stream: S, consumer: px}, to: {format: parquet, path: x}}}\n"
    )
    lock = lock_of(load(path))
    write_lock(lock_path(path), lock)
    assert lock_path(path).name == "penstock.lock.yaml"
    assert read_lock(lock_path(path)) == lock
    assert set(lock.consumers) == {"c", "px"}


def test_a_missing_lock_file_is_a_note(tmp_path: Path) -> None:
    (note,) = [f for f in findings(tmp_path, "streams: {S: {max_age: 1d}}") if f.code == "N05"]
    assert "there is no lock file" in note.message


def test_a_renamed_consumer_is_found_with_its_new_name(tmp_path: Path) -> None:
    lock = "version: 1\nstreams: [S, DLQ]\nconsumers: {old: {streams: [S], filters: [s.a]}}\n"
    renamed = [f.message for f in findings(tmp_path, one("filter: s.a"), lock) if f.code == "N01"]
    assert renamed == ["consumer 'old' of stream 'S' looks renamed to 'c'"]


def test_a_damaged_lock_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"penstock\.lock\.yaml:1:10"):
        findings(tmp_path, one(""), "version: 99\nstreams: []\nconsumers: {}\n")


def platform_of(size: int) -> str:
    """`size` streams, one in two a workqueue, with four consumers each."""
    streams = "".join(
        f"  S{n}: {{subjects: [d{n % 7}.s{n}.>], max_age: 7d, retention: {('limits', 'workqueue')[n % 2]}}}\n"
        for n in range(size)
    )
    consumers = "".join(
        f"  c{n}x{m}: {{stream: S{n}, filter: d{n % 7}.s{n}.a{m}, ack_wait: 30s, max_deliver: 5, dlq: dlq.s.a}}\n"
        for n in range(size)
        for m in range(4)
    )
    return f"streams:\n{streams}  DLQ: {{subjects: [dlq.>], max_age: 30d}}\nconsumers:\n{consumers}"


def work(folder: Path, size: int) -> int:
    """How many function calls it takes to read and look over a platform of this size."""
    path = folder / "penstock.yaml"
    path.write_text(platform_of(size))
    write_lock(lock_path(path), lock_of(load(path)))
    calls = 0

    def counting(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(counting)
    try:
        lint(load(path), read_lock(lock_path(path)))
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_grows_with_the_platform_and_not_with_its_square(tmp_path: Path) -> None:
    small, large = work(tmp_path, 60), work(tmp_path, 240)
    assert large < 5 * small, f"{small} calls for 60 streams, {large} for 240"
