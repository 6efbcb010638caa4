"""The benchmark harness: turns, ratios, goals, memory, and the section it writes."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from penstock.cli import main
from penstock.cli.bench import suite
from penstock.errors import ConfigError, UsageError

if TYPE_CHECKING:  # the benchmarks are on the path only once `suite` has found them
    from harness import Bench, Figure, Timed

harness, report = suite().harness, suite().report


def contest(rounds: int = 3) -> tuple[list[str], AbstractContextManager[Bench]]:
    """A benchmark of two contestants with known times: `ours` does half of what `limit` does."""
    order: list[str] = []

    def work(name: str, count: int) -> Callable[[], Timed]:
        def timed() -> Timed:
            order.append(name)
            made: Timed = harness.Timed(count, 2.0)
            return made

        return timed

    def run(bench: Bench) -> None:
        bench.add("limit", work("limit", 200))
        bench.add("ours", work("ours", 100), limit="limit")
        bench.goal("ours", of="limit", at_least=0.5)

    return order, harness.benchmark(SimpleNamespace(run=run), "demo", rounds, False)


def test_the_picture_has_a_bar_for_each_contestant_as_long_as_its_median() -> None:
    plots = importlib.import_module("plots")
    _, made = contest()
    with made as bench:
        bench.execute()
        picture = ElementTree.fromstring(plots.plot(bench))
    texts = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"limit", "ours", "100", "50"} <= set(texts)
    bars = [one for one in picture.iter("{http://www.w3.org/2000/svg}rect") if one.get("x") == str(plots.NAMES)]
    widths = [float(one.attrib["width"]) for one in bars if one.get("width") != "12"]
    assert widths[0] == 2 * widths[1]


def test_contestants_take_turns_at_being_first() -> None:
    order, made = contest(rounds=3)
    with made as bench:
        bench.execute()
    assert order == ["limit", "ours", "ours", "limit", "limit", "ours"]


def test_ratios_compare_the_rates_of_the_same_round_and_decide_the_goals() -> None:
    _, made = contest()
    with made as bench:
        bench.execute()
        assert bench.contestants["limit"].rates == [100.0] * 3
        assert bench.ratio("ours", "limit").median == 0.5
        met = [bench.met]
        bench.goal("ours", of="limit", at_least=0.51)
        met.append(bench.met)
        assert met == [True, False]
        assert [row[2] for row in report.goal_rows(bench)] == ["yes", "NO"]


def test_a_missed_figure_misses_the_benchmark() -> None:
    _, made = contest()
    with made as bench:
        bench.probe(lambda: [harness.Figure(name="memory growth", value=9.0, unit="MiB", at_most=8)])
        bench.execute()
        assert not bench.met
        assert report.as_json(bench, "today", {})["figures"][0]["met"] is False


def test_many_figures_of_each_of_many_are_shown_as_a_grid() -> None:
    _, made = contest()

    def measured(of: str, seconds: float, messages: int) -> list[Figure]:
        return [
            harness.Figure(name=of, column="took", value=seconds, unit="s"),
            harness.Figure(name=of, column="messages", value=messages, unit=""),
        ]

    with made as bench:
        bench.probe(lambda: [*measured("small", 0.25, 1200), *measured("large", 1.5, 34000)])
        bench.execute()
        assert report.grid(bench) == (
            ("", "took (s)", "messages"),
            [("small", "0.2", "1,200"), ("large", "1.5", "34,000")],
        )
        assert "| large | 1.5 | 34,000 |" in report.section(bench, "2026-01-01", {"cores": "2"})
        assert len(report.goal_rows(bench)) == 1


def test_scratch_directory_and_entered_resources_are_closed_at_the_end() -> None:
    _, made = contest()
    with made as bench:
        (bench.scratch / "file").write_text("x")
    assert not bench.scratch.exists()


def test_a_limit_that_was_never_added_is_an_error() -> None:
    bench = harness.Bench("demo", 1)
    with pytest.raises(ValueError, match="no contestant 'limit'"):
        bench.add("ours", lambda: 1, limit="limit")
    bench.close()


def test_writing_replaces_only_the_section_of_that_benchmark() -> None:
    _, made = contest()
    with made as bench:
        bench.execute()
        text = report.section(bench, "2026-01-01", {"cores": "2"})
    document = report.replaced("# Benchmarks\n\nby hand\n", "demo", text)
    assert "| ours | 50 | 50 – 50 | 0.50 × limit (0.50 – 0.50) |" in document
    again = report.replaced(document + "\nafter\n", "demo", "new text")
    assert "by hand" in again
    assert "after" in again
    assert "new text" in again
    assert "| ours |" not in again


def test_memory_of_a_child_that_keeps_growing_is_seen_as_growth() -> None:
    growing = "import time\nheld=[]\nfor _ in range(25):\n held.append(bytearray(4 << 20)); time.sleep(0.06)"
    steady = "import time\nheld=bytearray(4 << 20)\ntime.sleep(2)"
    assert harness.memory_of([sys.executable, "-c", growing], every=0.01).growth() > 16 << 20
    flat = harness.memory_of([sys.executable, "-c", steady], every=0.01)
    assert flat.growth() < 4 << 20 < flat.peak


def test_the_list_is_json_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, read in ((["--list"], str.split), (["--list", "--json"], json.loads)):
        with pytest.raises(SystemExit) as ended:
            main.run(["bench", *arguments])
        assert (ended.value.code, read(capsys.readouterr().out)) == (0, suite().names)


def test_a_long_run_is_for_benchmarks_that_have_one_and_has_a_section_of_its_own() -> None:
    with pytest.raises(UsageError, match="'plan' has no long run"):
        suite().check_soaks(["workers", "plan"])
    with harness.benchmark(SimpleNamespace(run=lambda _: None), "demo", 3, False, 90.0) as bench:
        assert (report.command(bench), report.section_name(bench)) == ("penstock bench demo --soak 1.5", "demo soak")


def test_growth_is_the_last_quarter_over_the_first() -> None:
    workers = suite().module("workers")
    assert workers.grown([1, 1, 9, 9, 9, 9, 3, 3]) == 2
    assert workers.grown([5]) == 0


def test_unknown_benchmarks_are_wrong_usage() -> None:
    with pytest.raises(UsageError, match="no benchmark 'nope'"):
        suite().chosen(("nope",))


def test_outside_a_checkout_the_command_says_where_to_run_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source checkout"):
        suite(tmp_path)
