"""Inspects a streaming plan for the properties that decide how its result is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A streaming aggregation: its rows change from one micro-batch to the next."""

    key: tuple[str, ...] | None
    """The output columns that name a group; None when some of them are not in the output as they are."""


def aggregation(frame: DataFrame) -> Aggregation | None:
    """The outermost streaming aggregation of a plan; None when every row it gives is final."""
    plan = frame._jdf.queryExecution().analyzed()
    node = next((node for node in _nodes(plan) if node.nodeName() == "Aggregate" and node.isStreaming()), None)
    if node is None:
        return None
    in_output = {attribute.exprId().id(): attribute.name() for attribute in _items(plan.output())}
    selected = list(_items(node.aggregateExpressions()))
    names = [in_output.get(_selected_as(group, selected)) for group in _items(node.groupingExpressions())]
    return Aggregation(tuple(name for name in names if name) if all(names) else None)


def _selected_as(group: Any, selected: list[Any]) -> int | None:
    """The identity under which a grouping expression is selected as it is; it keeps it wherever it is passed on."""
    for expression in selected:
        value = expression.child() if expression.nodeName() == "Alias" else expression
        if value.semanticEquals(group):
            identity: int = expression.exprId().id()
            return identity
    return None


def scans(frame: DataFrame) -> int:
    """How many times a streaming plan reads a source, all of its sources together."""
    plan = frame._jdf.queryExecution().analyzed()
    return sum(node.isStreaming() and node.children().isEmpty() for node in _nodes(plan))


STATELESS = {
    "ArrowEvalPython",
    "BatchEvalPython",
    "EventTimeWatermark",
    "Filter",
    "Generate",
    "MapInArrow",
    "MapInPandas",
    "PythonMapInArrow",
    "Project",
    "Repartition",
    "RepartitionByExpression",
    "StreamingRelation",
    "StreamingRelationV2",
    "SubqueryAlias",
    "Union",
    "View",
}
"""Nodes of a plan that give of each micro-batch what they would give of its rows by themselves."""


def is_stateless(frame: DataFrame) -> bool:
    """Whether the result of a micro-batch depends on nothing but its own rows, as far as we know the plan's nodes."""
    plan = frame._jdf.queryExecution().analyzed()
    return all(node.nodeName() in STATELESS or _joins_a_table(node) for node in _nodes(plan) if node.isStreaming())


def _joins_a_table(node: Any) -> bool:
    streaming = [child for child in _items(node.children()) if child.isStreaming()]
    return bool(node.nodeName() == "Join") and len(streaming) == 1


def _nodes(plan: Any) -> Iterator[Any]:
    """The plan's nodes, outermost first."""
    yield plan
    for child in _items(plan.children()):
        yield from _nodes(child)


def _items(seq: Any) -> Iterator[Any]:
    """A Scala sequence."""
    for index in range(seq.size()):
        yield seq.apply(index)
