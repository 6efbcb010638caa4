"""Plans, results and findings as JSON. The form is a promise: `docs/plan-json.md` describes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.jetstream.model import Json
from penstock.topology.compare import FieldChange
from penstock.topology.lint import Concerns
from penstock.topology.plan import Change, Plan
from penstock.topology.resource import Resource
from penstock.topology.risk import Risk
from penstock.topology.verify import Check, Deviation

VERSION = 1
"""Raised when a field changes its meaning or goes. New fields may come without that."""


def plan_json(plan: Plan, concerns: Concerns) -> Json:
    counts = plan.counts()
    return {
        "version": VERSION,
        "platform": plan.platform,
        "changes": [change_json(change) for change in plan.changes],
        "orphans": [resource_json(resource) for resource in plan.orphans],
        "unreached": _unreached_json(plan),
        "summary": {str(risk): counts[risk] for risk in Risk} | {"unchanged": len(plan.unchanged)},
        **_concerns_json(concerns),
    }


def result_json(
    plan: Plan, concerns: Concerns, done: Sequence[Change], failed: Change | None = None, error: str | None = None
) -> Json:
    """What an apply did: `done`, `failed` and `not_done` together are the plan's changes."""
    not_tried = plan.changes[len(done) + (failed is not None) :]
    return {
        "version": VERSION,
        "platform": plan.platform,
        "done": [change_json(change) for change in done],
        "failed": None if failed is None else change_json(failed),
        "not_done": [change_json(change) for change in not_tried],
        "error": error,
        "unchanged": len(plan.unchanged),
        "unreached": _unreached_json(plan),
        **_concerns_json(concerns),
    }


def _unreached_json(plan: Plan) -> list[Json]:
    return [{**resource_json(one.resource), "reason": one.reason} for one in plan.unreached]


def _concerns_json(concerns: Concerns) -> Json:
    return {"renames": [one.to_json() for one in concerns.renames], "lint_warnings": concerns.warnings}


def findings_json(platform: str, findings: Iterable[Deviation], error: str | None = None) -> Json:
    """What a verification found; `error` says why nothing could be looked at."""
    found = list(findings)
    return {
        "version": VERSION,
        "platform": platform,
        "healthy": not found and error is None,
        "error": error,
        "checks": {
            str(check): error is None and not any(finding.check is check for finding in found) for check in Check
        },
        "findings": [
            {
                "check": str(finding.check),
                **resource_json(finding.resource),
                "problem": finding.problem,
                "fields": [
                    {"name": field.name, "declared": field.after, "actual": field.before} for field in finding.fields
                ],
            }
            for finding in found
        ],
    }


def change_json(change: Change) -> Json:
    return {
        "kind": str(change.kind),
        "risk": str(change.risk),
        **resource_json(change.resource),
        "reason": change.reason,
        "owner": change.owner,
        "fields": [_field_json(field) for field in change.fields],
    }


def resource_json(resource: Resource) -> Json:
    named = {"type": resource.type, "stream": resource.stream, "name": resource.name}
    return {**named, "api": resource.api} if resource.api else named


def _field_json(field: FieldChange) -> Json:
    return {"name": field.name, "before": field.before, "after": field.after}
