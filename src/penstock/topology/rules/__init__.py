"""The lint rules, one module a noun."""

from penstock.topology.rules import (
    consumers,
    contracts,
    deadletters,
    delivery,
    groups,
    names,
    origins,
    packing,
    pipelines,
    readers,
    streams,
)
from penstock.topology.rules.rule import RULES, Case, Finding, Hit, Rule, Severity

__all__ = [
    "RULES",
    "Case",
    "Finding",
    "Hit",
    "Rule",
    "Severity",
    "consumers",
    "contracts",
    "deadletters",
    "delivery",
    "groups",
    "names",
    "origins",
    "packing",
    "pipelines",
    "readers",
    "streams",
]
