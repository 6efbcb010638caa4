"""What a streaming plan does, as far as the way its result is written depends on it."""

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
    computed = _tree_pattern(frame, "AGGREGATE_EXPRESSION")
    grouped = _named(e for e in _items(node.aggregateExpressions()) if not e.containsPattern(computed))
    in_output = {identity: name for name, identity in _named(_items(plan.output()))}
    complete = len(grouped) == node.groupingExpressions().size()
    if not complete or not all(identity in in_output for _, identity in grouped):
        return Aggregation(None)
    return Aggregation(tuple(in_output[identity] for _, identity in grouped))


def scans(frame: DataFrame) -> int:
    """How many times a streaming plan reads a source, all of its sources together."""
    plan = frame._jdf.queryExecution().analyzed()
    return sum(node.isStreaming() and node.children().isEmpty() for node in _nodes(plan))


def _named(expressions: Iterator[Any]) -> list[tuple[str, int]]:
    """Name and identity of expressions; an attribute keeps its identity wherever it is passed on unchanged."""
    return [(e.name(), e.exprId().id()) for e in expressions]


def _nodes(plan: Any) -> Iterator[Any]:
    """The plan's nodes, outermost first."""
    yield plan
    for child in _items(plan.children()):
        yield from _nodes(child)


def _items(seq: Any) -> Iterator[Any]:
    """A Scala sequence."""
    for index in range(seq.size()):
        yield seq.apply(index)


def _tree_pattern(frame: DataFrame, name: str) -> Any:
    jvm: Any = frame.sparkSession._jvm
    return getattr(jvm.org.apache.spark.sql.catalyst.trees.TreePattern, name)()
