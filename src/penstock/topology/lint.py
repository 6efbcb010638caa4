"""Look a declared platform over before a server ever sees it."""

from __future__ import annotations

from penstock.topology.lock import Lock
from penstock.topology.model import Platform
from penstock.topology.rules import RULES, Case, Finding, Severity

SEVERITIES = tuple(Severity)


def lint(platform: Platform, lock: Lock | None = None) -> list[Finding]:
    """Everything the rules find, in the order of the file. Pure."""
    case = Case(platform, lock)
    found = [finding for rule in RULES.values() for finding in rule.findings(case)]
    return sorted(found, key=lambda f: (f.line, SEVERITIES.index(f.severity), f.code, f.path))


def count(findings: list[Finding]) -> dict[str, int]:
    """How many findings there are of each severity."""
    return {severity.value: sum(f.severity is severity for f in findings) for severity in SEVERITIES}
