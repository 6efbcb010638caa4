"""What a lint rule is: a pure function from the platform to the places that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from penstock.subjects import Index
from penstock.topology.lock import Lock
from penstock.topology.model import ConsumerSpec, GroupSpec, PipelineSpec, Platform, StreamSpec

Spec = StreamSpec | ConsumerSpec | GroupSpec | PipelineSpec
SECTIONS = {StreamSpec: "streams", ConsumerSpec: "consumers", GroupSpec: "groups", PipelineSpec: "pipelines"}


class Severity(StrEnum):
    """How bad a finding is, worst first."""

    ERROR = "error"
    """The server refuses it, or messages are lost or repeated."""
    WARNING = "warning"
    """It works until something else goes wrong."""
    INFO = "info"
    """Worth knowing."""


@dataclass(frozen=True)  # no slots: what several rules need is worked out once and kept
class Case:
    """What the rules look at."""

    platform: Platform
    lock: Lock | None = None
    """The names seen before; None when there is no lock file yet."""

    @cached_property
    def readers(self) -> Mapping[str, Sequence[ConsumerSpec]]:
        """The consumers of each stream, in the order of the file."""
        found: dict[str, list[ConsumerSpec]] = {name: [] for name in self.platform.streams}
        for consumer in self.platform.consumers.values():
            found[consumer.stream].append(consumer)
        return found

    @cached_property
    def captures(self) -> Index[tuple[str, StreamSpec]]:
        """The streams by the subjects that they declare, each with that subject."""
        index: Index[tuple[str, StreamSpec]] = Index()
        for stream in self.platform.streams.values():
            for subject in stream.config.get("subjects", ()):
                index.add(subject, (subject, stream))
        return index

    @cached_property
    def read_by_sources(self) -> frozenset[tuple[str, str]]:
        """Stream and name of every consumer through which a declared source reads."""
        origins = (origin for stream in self.platform.streams.values() for origin in stream.origins)
        return frozenset((origin.name, origin.consumer.name) for origin in origins if origin.consumer)

    @cached_property
    def packed(self) -> frozenset[str]:
        """The streams that hold packs: those of pipelines, and of declared streams that flow into them."""
        platform = self.platform
        flows_to: dict[str, list[str]] = {}
        for stream in platform.streams.values():
            for origin in stream.origins:
                if not origin.is_external:
                    flows_to.setdefault(origin.name, []).append(stream.name)
        sinks = (sink for flow in platform.pipelines.values() for sink in flow.sinks)
        reached = {sink.stream for sink in sinks if sink.stream and platform.packing_of(sink)}
        reached |= {stream.name for stream in platform.streams.values() if stream.packs and not stream.is_dead_letters}
        waiting = list(reached)
        while waiting:
            further = [name for name in flows_to.get(waiting.pop(), ()) if name not in reached]
            reached.update(further)
            waiting += further
        return frozenset(reached)


@dataclass(frozen=True, slots=True)
class Hit:
    """One place that breaks a rule."""

    message: str
    fix: str
    line: int
    path: str
    """Where in the file, as keys: `consumers.relay.ack_wait`."""
    ignore: Mapping[str, str] = field(default_factory=dict)
    """Codes that the owner of this place has said do not apply."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing `lint` has to say."""

    code: str
    severity: Severity
    message: str
    fix: str
    line: int
    path: str

    def to_json(self) -> dict[str, str | int]:
        return {
            "code": self.code,
            "severity": self.severity.value,
            "message": self.message,
            "fix": self.fix,
            "line": self.line,
            "path": self.path,
        }


Check = Callable[[Case], Iterable[Hit]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with its code; the code never changes its meaning."""

    code: str
    severity: Severity
    title: str
    """What is wrong, in a few words."""
    why: str
    """What happens if it stays, for the reference."""
    check: Check

    def findings(self, case: Case) -> Iterable[Finding]:
        for hit in self.check(case):
            if self.code not in hit.ignore:
                yield Finding(self.code, self.severity, hit.message, hit.fix, hit.line, hit.path)


RULES: dict[str, Rule] = {}
"""Every rule by its code; filled when the modules of this package are imported."""


def rule(code: str, severity: Severity, title: str, why: str) -> Callable[[Check], Check]:
    """Register a check under a code."""

    def register(check: Check) -> Check:
        assert code not in RULES, f"two lint rules have the code {code}"
        RULES[code] = Rule(code, severity, title, why, check)
        return check

    return register


def at(spec: Spec, key: str | None, message: str, fix: str) -> Hit:
    """A hit at a key of a stream, consumer, group or pipeline, or at the thing itself."""
    path = f"{SECTIONS[type(spec)]}.{spec.name}" + (f".{key}" if key else "")
    return Hit(message, fix, spec.line_of(key) if key else spec.line, path, spec.ignore)
