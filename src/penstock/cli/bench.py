"""`penstock bench`: the benchmarks, each beside its peers, as ratios. Runs from a source checkout."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import penstock
from penstock.cli.common import EXIT_ATTENTION, EXIT_OK, err, json_option, out, print_json, progress, table
from penstock.cli.terminal import echo
from penstock.errors import ConfigError, UsageError

ROUNDS = 5
QUICK_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class How:
    """How much of a benchmark is run."""

    rounds: int
    quick: bool
    soak_seconds: float
    """Above 0: only the long run."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The benchmarks of a checkout. They are no part of the installed package, so they are found at run time."""

    checkout: Path
    harness: Any
    report: Any

    @property
    def names(self) -> list[str]:
        return self._found("bench_")

    @property
    def peers(self) -> list[str]:
        """Benchmarks beside products that must be fetched first: they run only when they are named."""
        return self._found("peer_")

    def chosen(self, names: tuple[str, ...]) -> list[str]:
        """`names`, or all but the peers; an unknown one is wrong usage."""
        known = self.names + self.peers
        for name in names:
            if name not in known:
                raise UsageError(f"there is no benchmark {name!r}; there are: {', '.join(known) or 'none'}")
        return list(names) or self.names

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"peer_{name}" if name in self.peers else f"bench_{name}")

    def check_soaks(self, names: list[str]) -> None:
        """Raises wrong usage for benchmarks that have no long run."""
        for name in names:
            if not getattr(self.module(name), "SOAKS", False):
                raise UsageError(f"benchmark {name!r} has no long run; leave --soak out")

    def _found(self, prefix: str) -> list[str]:
        return sorted(path.stem.removeprefix(prefix) for path in _folder(self.checkout).glob(f"{prefix}*.py"))


def suite(checkout: Path | None = None) -> Suite:
    """The benchmarks of the checkout that this package runs from."""
    checkout = checkout or Path(penstock.__file__).resolve().parents[2]
    folder = _folder(checkout)
    if not (folder / "harness.py").is_file():
        raise ConfigError(
            f"benchmarks run from a source checkout, and {checkout} is none (it has no tests/bench); "
            "clone the repository and run `make bench` there"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return Suite(checkout, importlib.import_module("harness"), importlib.import_module("report"))


@click.command(epilog="Exit code 2 says that a goal was missed.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--rounds", type=click.IntRange(1), help=f"Rounds.  [default: {ROUNDS}, {QUICK_ROUNDS} with --quick]")
@click.option("--quick", is_flag=True, help="Less work a round: a first impression, not a result.")
@click.option(
    "--soak", type=click.FloatRange(0, min_open=True), metavar="MINUTES", help="Only the long run, and so long."
)
@click.option("--write", is_flag=True, help="Put the results into docs/benchmarks.md.")
@click.option("--list", "only_list", is_flag=True, help="Print the names of the benchmarks.")
@json_option
def bench(
    names: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    soak: float | None,
    write: bool,
    only_list: bool,
    as_json: bool,
) -> int:
    """Run benchmarks, each beside its peers, in turns, in one run.

    Compare ratios: absolute speeds move with the machine and its other work.

    \b
    Example:
      penstock bench publish --quick
      penstock bench --rounds 7 --write
      penstock bench workers --soak 30
    """
    benchmarks = suite()
    chosen = benchmarks.chosen(names)
    if only_list:
        print_json(chosen) if as_json else echo("\n".join(chosen))
        return EXIT_OK
    how = How(rounds or (QUICK_ROUNDS if quick else ROUNDS), quick, 60 * (soak or 0.0))
    if soak:
        benchmarks.check_soaks(chosen)
    machine = benchmarks.report.machine_facts(benchmarks.checkout)
    documents = [_run(benchmarks, name, how, write, machine, as_json) for name in chosen]
    if as_json:
        print_json(documents)
    return EXIT_OK if all(document["met"] for document in documents) else EXIT_ATTENTION


def _run(
    benchmarks: Suite,
    name: str,
    how: How,
    write: bool,
    machine: dict[str, str],
    as_json: bool,
) -> dict[str, Any]:
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    with benchmarks.harness.benchmark(benchmarks.module(name), name, how.rounds, how.quick, how.soak_seconds) as made:
        with progress() as bar:
            task = bar.add_task(f"bench {name}", total=made.steps)
            made.execute(lambda step: bar.update(task, advance=1, description=f"bench {name}: {step}"))
        if not as_json:
            _show(benchmarks.report, made)
        if write:
            _write(benchmarks, made, date, machine)
        document: dict[str, Any] = benchmarks.report.as_json(made, date, machine)
        return document


def _show(report: Any, made: Any) -> None:
    heading = report.RESULT_COLUMNS
    if made.contestants:
        columns = [heading[0], (f"{heading[1]} {made.unit}", "right"), (heading[2], "right"), heading[3]]
        out.print(table(f"{made.name}: {made.about}", columns, report.result_rows(made)))
    titles, cells = report.grid(made)
    if cells:
        out.print()
        out.print(table(None, [(one, "right") if one else one for one in titles], cells))
    if rows := report.goal_rows(made):
        out.print()
        out.print(table(None, report.GOAL_COLUMNS, rows))
    out.print()


def _write(benchmarks: Suite, made: Any, date: str, machine: dict[str, str]) -> None:
    path = benchmarks.checkout / "docs" / "benchmarks.md"
    path.parent.mkdir(exist_ok=True)
    document = path.read_text() if path.exists() else "# Benchmarks\n"
    name, section = benchmarks.report.section_name(made), benchmarks.report.section(made, date, machine)
    path.write_text(benchmarks.report.replaced(document, name, section))
    if made.contestants:
        picture = path.parent / benchmarks.report.PLOTS / f"{made.name}.svg"
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(importlib.import_module("plots").plot(made))
    err.print(f"wrote {name} to {path.relative_to(benchmarks.checkout)}")


def _folder(checkout: Path) -> Path:
    return checkout / "tests" / "bench"
