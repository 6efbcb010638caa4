"""Runs contestants beside each other, in turns, in one run: what counts is their ratio, not the machine.

A benchmark is a file `bench_<name>.py` here with `run(bench: Bench) -> None`. It registers contestants, goals and
probes; the harness runs them after `run` has returned, and closes what `bench.enter` opened at the very end.

    def run(bench: Bench) -> None:
        server = bench.enter(EmbeddedServer(data=bench.scratch / "nats"))
        count = bench.size(200_000, quick=20_000)
        bench.add("raw bytes", lambda: raw(server, count))
        bench.add("ours", lambda: ours(server, count), limit="raw bytes")
        bench.goal("ours", of="raw bytes", at_least=0.8)
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed:
    """What `work` returns when it takes its own time, so that set-up inside it is not counted."""

    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One way to do the work. `work` returns how many units it did, or a `Timed`."""

    name: str
    work: Callable[[], int | Timed]
    before: Callable[[], object] | None = None
    """Runs before each round, outside the clock."""
    limit: str | None = None
    """The contestant that this one is shown as a ratio of."""
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """`contestant` should reach at least (or, with `at_most`, stay below) so many times the rate of `of`."""

    contestant: str
    of: str
    at_least: float | None = None
    at_most: float | None = None

    def holds(self, ratio: float) -> bool:
        return within(ratio, self.at_least, self.at_most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A single measured value, such as memory, with an optional goal."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    column: str = ""
    """Where many are measured of each of many: which one this is. They are shown as a grid, a row a name."""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.at_least is None and self.at_most is None:
            return None
        return within(self.value, self.at_least, self.at_most)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How two contestants compare: the median of the rounds' own ratios, and their spread."""

    median: float
    least: float
    most: float


class Bench:
    """What one benchmark registers, and the results once it ran."""

    def __init__(self, name: str, rounds: int, quick: bool = False, soak_seconds: float = 0.0) -> None:
        self.name = name
        self.rounds = rounds
        self.quick = quick
        self.soak_seconds = soak_seconds
        """Above 0: only the long run, of so many seconds. For benchmarks that have one and say so with `SOAKS`."""
        self.unit = "messages/s"
        self.about = ""
        """One line under the heading: what is measured."""
        self.contestants: dict[str, Contestant] = {}
        self.goals: list[Goal] = []
        self.figures: list[Figure] = []
        self._probes: list[Callable[[], Sequence[Figure]]] = []
        self._open = ExitStack()
        self.scratch = Path(self._open.enter_context(_scratch()))
        """A directory of this run, removed at its end."""

    def size(self, full: int, *, quick: int) -> int:
        """How much work to do: the full form, or the short one of `--quick`."""
        return quick if self.quick else full

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Open something (a server) for the length of the run."""
        return self._open.enter_context(manager)

    def add(
        self,
        name: str,
        work: Callable[[], int | Timed],
        *,
        before: Callable[[], object] | None = None,
        limit: str | None = None,
    ) -> None:
        """Register a contestant; `limit` must have been added before it."""
        if limit is not None:
            self._known(limit)
        self.contestants[name] = Contestant(name=name, work=work, before=before, limit=limit)

    def goal(self, contestant: str, *, of: str, at_least: float | None = None, at_most: float | None = None) -> None:
        self._known(contestant)
        self._known(of)
        self.goals.append(Goal(contestant=contestant, of=of, at_least=at_least, at_most=at_most))

    def probe(self, work: Callable[[], Sequence[Figure]]) -> None:
        """Register a measurement that runs once, after the rounds, such as memory."""
        self._probes.append(work)

    def ratio(self, contestant: str, of: str) -> Ratio:
        """The two are compared round by round, since both rounds saw the same neighbours on the machine."""
        pairs = zip(self.contestants[contestant].rates, self.contestants[of].rates, strict=True)
        ratios = [one / other for one, other in pairs]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))

    @property
    def steps(self) -> int:
        """How many calls of `on_step` a run makes."""
        return self.rounds * len(self.contestants) + len(self._probes)

    def execute(self, on_step: Callable[[str], object] = lambda _: None) -> None:
        """Run everything that was registered; `on_step` hears the name of what just ran."""
        for number in range(self.rounds):
            for contestant in _turned(list(self.contestants.values()), number):
                contestant.rates.append(_rate(contestant))
                on_step(contestant.name)
        for probe in self._probes:
            self.figures.extend(probe())
            on_step("probe")

    def close(self) -> None:
        self._open.close()

    @property
    def met(self) -> bool:
        """Whether every goal was met."""
        ratios = all(goal.holds(self.ratio(goal.contestant, goal.of).median) for goal in self.goals)
        return ratios and all(figure.met is not False for figure in self.figures)

    def _known(self, name: str) -> None:
        if name not in self.contestants:
            raise ValueError(f"benchmark {self.name!r} has no contestant {name!r}; there are {list(self.contestants)}")


@contextmanager
def benchmark(module: ModuleType, name: str, rounds: int, quick: bool, soak_seconds: float = 0.0) -> Iterator[Bench]:
    """A benchmark with everything registered; what it opened is closed at the end of the block."""
    bench = Bench(name, rounds, quick, soak_seconds)
    try:
        module.run(bench)
        yield bench
    finally:
        bench.close()


def within(value: float, at_least: float | None, at_most: float | None) -> bool:
    return (at_least is None or value >= at_least) and (at_most is None or value <= at_most)


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a process over its life, sampled, in bytes."""

    samples: tuple[int, ...]
    peak: int

    def growth(self, warm_up: float = 0.3) -> int:
        """How much higher the median of the last third is than that of the samples just after the warm-up."""
        settled = self.samples[int(len(self.samples) * warm_up) :]
        third = max(1, len(settled) // 3)
        return int(statistics.median(settled[-third:]) - statistics.median(settled[:third]))


def rss(pid: int, key: str = "VmRSS") -> int:
    """Resident bytes of a process now (`VmHWM`: at its highest), 0 when it is gone. Linux only."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(key)), 0)


def memory_of(command: Sequence[str], every: float = 0.1) -> Memory:
    """Run a child process to its end and watch its memory. Raises when it fails."""
    child = subprocess.Popen(command)
    try:
        return watch_memory(child.pid, child.poll, every)
    finally:
        if child.poll() is None:
            child.kill()
        if child.wait() != 0:
            raise subprocess.CalledProcessError(child.returncode, list(command))


def watch_memory(pid: int, ended: Callable[[], object], every: float = 0.1) -> Memory:
    """Sample a process until `ended` returns something other than None."""
    samples, peak = [], 0
    while ended() is None:
        if now := rss(pid):
            samples.append(now)
            peak = max(peak, rss(pid, "VmHWM"))
        time.sleep(every)
    return Memory(tuple(samples), peak)


def memory_during(pid: int, work: Callable[[], object], every: float = 0.1) -> Memory:
    """Sample a process (also our own) while `work` runs here."""
    found: list[Memory] = []
    done = threading.Event()
    watcher = threading.Thread(target=lambda: found.append(watch_memory(pid, lambda: done.is_set() or None, every)))
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return found[0]


def peak_during(command: str, work: Callable[[], object], every: float = 0.05) -> int:
    """The most bytes that any process below ours with `command` in its command line held while `work` ran."""
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(every):
            peak = max([peak, *(rss(pid) for pid in _below(os.getpid()) if command in _command_line(pid))])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return peak


def _below(pid: int) -> set[int]:
    """The processes that were started by a process, and by those."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").glob("[0-9]*")}
    found: set[int] = set()
    fresh = {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def _parent(process: Path) -> int:
    try:
        # The command's name stands in parentheses and may have spaces; state and parent follow.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended meanwhile
        return 0


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _rate(contestant: Contestant) -> float:
    if contestant.before:
        contestant.before()
    gc.collect()
    started = time.perf_counter()
    done = contestant.work()
    if isinstance(done, Timed):
        return done.count / done.seconds
    return done / (time.perf_counter() - started)


def _turned(items: list[Contestant], by: int) -> list[Contestant]:
    """The same order, starting at another one each round, so that nobody is always first."""
    shift = by % len(items) if items else 0
    return items[shift:] + items[:shift]


@contextmanager
def _scratch() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="penstock-bench-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
