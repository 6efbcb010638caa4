"""Look a declared platform over before a server ever sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from penstock.errors import ConfigError, PenstockError
from penstock.topology.lock import Lock
from penstock.topology.model import Platform
from penstock.topology.rules import RULES, Case, Finding, Severity

SEVERITIES = tuple(Severity)


def lint(platform: Platform, lock: Lock | None = None) -> list[Finding]:
    """Everything the rules find, in the order of the file. Pure."""
    case = Case(platform, lock)
    found = [finding for rule in RULES.values() for finding in rule.findings(case)]
    return sorted(found, key=lambda f: (f.line, SEVERITIES.index(f.severity), f.code, f.path))


class LintErrors(ConfigError):
    """The platform has mistakes that a server would refuse, or that would lose or repeat messages."""

    def __init__(self, path: str, findings: Sequence[Finding]) -> None:
        super().__init__(path, tuple(findings))
        self.path = path
        self.findings = tuple(findings)

    def __str__(self) -> str:
        first = self.findings[0]
        more = f", and {len(self.findings) - 1} more" if len(self.findings) > 1 else ""
        return (
            f"{self.path}:{first.line}: {first.message} ({first.code}{more}); mend it, or say why it does not apply "
            "with `ignore:`; `penstock lint` shows the fixes"
        )


RENAMES = frozenset({"N01", "N02", "N03", "N04"})
"""Rules that compare with the lock file: a plan shows them, and `apply` refuses them without --allow-destroy."""


@dataclass(frozen=True, slots=True)
class Concerns:
    """What a plan has to say about the file itself."""

    renames: tuple[Finding, ...] = ()
    """Names that hold a position or messages, and are gone."""
    warnings: int = 0

    def without(self, empty: Collection[str]) -> Concerns:
        """Without streams and consumers that the server holds nothing under: nothing is lost with those names."""
        return replace(self, renames=tuple(one for one in self.renames if one.path.partition(".")[2] not in empty))


class NamesGone(PenstockError):
    """Names that hold a position or messages are gone from the file. Nothing was done."""

    def __init__(self, path: str, findings: Sequence[Finding]) -> None:
        super().__init__(path, tuple(findings))
        self.path = path
        self.findings = tuple(findings)

    def __str__(self) -> str:
        first = self.findings[0]
        more = f", and {len(self.findings) - 1} more" if len(self.findings) > 1 else ""
        return (
            f"nothing was done: {self.path}:{first.line}: {first.message} ({first.code}{more}); {first.fix}, or add "
            "--allow-destroy"
        )


def require_names(platform: Platform, concerns: Concerns) -> None:
    """Raise `NamesGone` when a name that holds a position or messages is gone from the file."""
    if concerns.renames:
        raise NamesGone(str(platform.path), concerns.renames)


def require_sound(platform: Platform, lock: Lock | None = None) -> Concerns:
    """Raise `LintErrors` for what must not reach a server; returns what may, but should be known."""
    findings = lint(platform, lock)
    renames = [f for f in findings if f.code in RENAMES]
    errors = [f for f in findings if f.severity is Severity.ERROR and f.code not in RENAMES]
    if errors:
        raise LintErrors(str(platform.path), errors)
    return Concerns(tuple(renames), count(findings)[Severity.WARNING])


def count(findings: list[Finding]) -> dict[str, int]:
    """How many findings there are of each severity."""
    return {severity.value: sum(f.severity is severity for f in findings) for severity in SEVERITIES}
