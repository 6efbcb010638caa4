"""What a benchmark found: as rows for a terminal, as JSON, and as a section of docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import Bench, Figure, Goal

from penstock.server.embedded import find_binary

RESULT_COLUMNS = ("contestant", "median", "min – max", "ratio (min – max)")
GOAL_COLUMNS = ("goal", "measured", "met")
PLOTS = "benchmarks"
"""The folder of the pictures, beside docs/benchmarks.md."""


def result_rows(bench: Bench) -> list[tuple[str, str, str, str]]:
    rows = []
    for one in bench.contestants.values():
        spread = f"{min(one.rates):,.0f} – {max(one.rates):,.0f}"
        rows.append((one.name, f"{one.median:,.0f}", spread, _ratio(bench, one.name, one.limit)))
    return rows


def goal_rows(bench: Bench) -> list[tuple[str, str, str]]:
    ratios = [(goal, bench.ratio(goal.contestant, goal.of)) for goal in bench.goals]
    rows = [
        (
            f"{goal.contestant} {_bound(goal)} × {goal.of}",
            f"{ratio.median:.2f} × ({ratio.least:.2f} – {ratio.most:.2f})",
            _yes(goal.holds(ratio.median)),
        )
        for goal, ratio in ratios
    ]
    for figure in (one for one in bench.figures if not one.column):
        name = f"{figure.name} {_bound(figure)} {figure.unit}" if figure.met is not None else figure.name
        rows.append((name, f"{figure.value:,.1f} {figure.unit}", _yes(figure.met)))
    return rows


def grid(bench: Bench) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heading and rows of the figures that have a column; no rows without any."""
    of = {(figure.name, figure.column): figure for figure in bench.figures if figure.column}
    names, columns = dict.fromkeys(name for name, _ in of), dict.fromkeys(column for _, column in of)
    units = {figure.column: f" ({figure.unit})" if figure.unit else "" for figure in of.values()}
    rows = [(name, *(_cell(of.get((name, column))) for column in columns)) for name in names]
    return ("", *(column + units[column] for column in columns)), rows


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    value = round(float(figure.value), 1)
    return f"{value:,.0f}" if value.is_integer() else f"{value:,.1f}"


def as_json(bench: Bench, date: str, machine: dict[str, str]) -> dict[str, Any]:
    contestants = [
        {"name": c.name, "rates": c.rates, "median": c.median, "min": min(c.rates), "max": max(c.rates)}
        | ({"limit": c.limit, "ratio": bench.ratio(c.name, c.limit).median} if c.limit else {})
        for c in bench.contestants.values()
    ]
    goals = [
        {"contestant": g.contestant, "of": g.of, "at_least": g.at_least, "at_most": g.at_most}
        | {"ratio": (ratio := bench.ratio(g.contestant, g.of).median), "met": g.holds(ratio)}
        for g in bench.goals
    ]
    figures = [
        {
            "name": f"{f.name}: {f.column}" if f.column else f.name,
            "value": f.value,
            "unit": f.unit,
            "at_least": f.at_least,
            "at_most": f.at_most,
            "met": f.met,
        }
        for f in bench.figures
    ]
    return {
        "benchmark": bench.name,
        "about": bench.about,
        "command": command(bench),
        "date": date,
        "machine": machine,
        "rounds": bench.rounds,
        "quick": bench.quick,
        "unit": bench.unit,
        "contestants": contestants,
        "goals": goals,
        "figures": figures,
        "met": bench.met,
    }


def command(bench: Bench) -> str:
    """What to type to run it again."""
    how = f"--soak {bench.soak_seconds / 60:g}" if bench.soak_seconds else f"--rounds {bench.rounds}"
    return f"penstock bench {bench.name} {how}" + (" --quick" if bench.quick else "")


def section(bench: Bench, date: str, machine: dict[str, str]) -> str:
    """The benchmark's part of docs/benchmarks.md, without its markers."""
    lines = [f"`{command(bench)}` on {date}. {bench.about}".rstrip(), ""]
    lines += ["Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()) + ".", ""]
    if bench.contestants:
        titles = (RESULT_COLUMNS[0], f"median {bench.unit}", *RESULT_COLUMNS[2:])
        lines += [*_markdown(titles, result_rows(bench), right=(1, 2)), ""]
        lines += [f"![{bench.unit} of each contestant]({PLOTS}/{bench.name}.svg)", ""]
    heading, cells = grid(bench)
    if cells:
        lines += [*_markdown(heading, cells, right=range(1, len(heading))), ""]
    if rows := goal_rows(bench):
        lines += [*_markdown(GOAL_COLUMNS, rows), ""]
    return "\n".join(lines)


def section_name(bench: Bench) -> str:
    """A long run has a section of its own."""
    return f"{bench.name} soak" if bench.soak_seconds else bench.name


def replaced(document: str, name: str, text: str) -> str:
    """`document` with the benchmark's marked section replaced, or appended when it has none."""
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    block = f"{start}\n{text.strip()}\n{end}"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(document):
        return pattern.sub(lambda _: block, document)
    return f"{document.rstrip()}\n\n## {name}\n\n{block}\n".lstrip("\n")


def machine_facts(checkout: Path) -> dict[str, str]:
    """What the figures were measured on."""
    server = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "nats-server": server.rsplit("v", 1)[-1],
        "nats-py": _version("nats-py"),
        "pyspark": _version("pyspark"),
        "commit": _commit(checkout),
        "load average before the run": f"{os.getloadavg()[0]:.1f}",
    }


def _ratio(bench: Bench, name: str, limit: str | None) -> str:
    if limit is None:
        return "the limit" if any(c.limit == name for c in bench.contestants.values()) else ""
    ratio = bench.ratio(name, limit)
    return f"{ratio.median:.2f} × {limit} ({ratio.least:.2f} – {ratio.most:.2f})"


def _bound(goal: Goal | Figure) -> str:
    lower = f"≥ {goal.at_least:g}" if goal.at_least is not None else ""
    upper = f"≤ {goal.at_most:g}" if goal.at_most is not None else ""
    return " and ".join(filter(None, (lower, upper)))


def _yes(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "NO"


def _markdown(heading: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    rule = ["---:" if column in right else "---" for column in range(len(heading))]
    return ["| " + " | ".join(row) + " |" for row in (heading, rule, *rows)]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit(checkout: Path) -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
