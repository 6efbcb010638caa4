"""Whatever a file holds, loading it ends in a platform that lint can look over, or in a `ConfigError`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.topology.test_asyncapi import check

from penstock.errors import ConfigError
from penstock.topology import asyncapi
from penstock.topology.catalog import catalog
from penstock.topology.fields import CONSUMER_FIELDS, ENVIRONMENT_FIELDS, PIPELINE_FIELDS, STREAM_FIELDS
from penstock.topology.kinds import (
    Count,
    Deliver,
    Duration,
    Field,
    Flag,
    Kind,
    ListOf,
    Moment,
    Name,
    OneOf,
    Percent,
    RecordKind,
    Size,
    Subject,
    Template,
    TextKind,
    TextMap,
    WordOr,
)
from penstock.topology.lint import lint
from penstock.topology.load import load

WORDS = (
    "S",
    "T",
    "s.a",
    "s.>",
    "dlq.s.a",
    "7d",
    "0",
    "64MiB",
    "old",
    "all",
    "none",
    "x: y",
    "${NO}",
    "*",
    ">",
    "",
    "a b",
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-2, 10), st.floats(allow_nan=False), st.sampled_from(WORDS))
junk: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=2)
)


def records(fields: tuple[Field, ...], depth: int = 0) -> st.SearchStrategy[Any]:
    """A mapping with some of the fields, each with something that may or may not fit, now and then plain junk."""
    chosen = {field.key: values(field, depth) for field in fields}
    return st.one_of(st.fixed_dictionaries({}, optional=chosen), junk) if depth < 3 else junk


def values(field: Field, depth: int) -> st.SearchStrategy[Any]:
    kind = field.kind
    if isinstance(kind, WordOr):
        return scalars | records(tuple(kind.record.fields), depth + 1)
    if isinstance(kind, RecordKind):
        return records(tuple(kind.fields), depth + 1)
    if isinstance(kind, ListOf) and isinstance(kind.item, RecordKind):
        return st.lists(records(tuple(kind.item.fields), depth + 1), max_size=2)
    return scalars if depth else st.one_of(scalars, junk)


def named(*, of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.dictionaries(st.sampled_from(("S", "T", "c", "a.b")), of, max_size=3), junk)


platforms = st.fixed_dictionaries(
    {},
    optional={
        "environments": named(of=records(ENVIRONMENT_FIELDS)),
        "streams": named(of=records(STREAM_FIELDS)),
        "consumers": named(of=records(CONSUMER_FIELDS)),
        "pipelines": named(of=records(PIPELINE_FIELDS)),
        "asyncapi": scalars,
        "name": scalars,
    },
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(tree=platforms | junk)
def test_any_tree_loads_or_is_refused_with_an_error_of_ours(
    tree: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(yaml.safe_dump(tree))
    with suppress(ConfigError):
        lint(load(path, variables={}))


def fitting(kind: Kind) -> st.SearchStrategy[Any]:
    """Something that this kind accepts."""
    match kind:
        case RecordKind():
            return fitting_record(kind.fields)
        case WordOr():
            return fitting(kind.first.kind) | fitting(kind.record)
        case ListOf():
            return st.lists(fitting(kind.item), min_size=max(1, kind.least), max_size=2)
        case Flag():
            return st.booleans()
        case Count():
            return st.integers(max(1, kind.least), min(kind.most or 3, 3))
        case OneOf():
            return st.sampled_from(kind.words)
        case Subject():
            return st.sampled_from(("s.a", "s.b", "t.a", "dlq.s.a") + (() if kind.literal else ("s.*", "s.>", "t.>")))
    fixed: dict[type, tuple[Any, ...]] = {
        Size: ("1MiB", 512),
        Duration: ("1s", "45s", "7d"),
        Name: ("S", "T"),
        TextKind: ("x", "S"),
        TextMap: ({"D01": "known"},),
        Moment: ("2026-01-31T12:00:00Z",),
        Percent: ("10%",),
        Deliver: ("all", "last", {"start_sequence": 3}),
        Template: ("t.x", "dlq.x", "s.>"),
    }
    return st.sampled_from(fixed[type(kind)])


def fitting_record(fields: Sequence[Field]) -> st.SearchStrategy[Any]:
    own = [field for field in fields if field.key not in ("asyncapi", "domain")]
    required = {field.key: fitting(field.kind) for field in own if field.required}
    return st.fixed_dictionaries(
        required, optional={field.key: fitting(field.kind) for field in own if not field.required}
    )


well_formed = st.fixed_dictionaries(
    {"streams": st.fixed_dictionaries({name: fitting_record(STREAM_FIELDS) for name in ("S", "T")})},
    optional={
        "consumers": st.dictionaries(st.sampled_from(("a", "b", "S")), fitting_record(CONSUMER_FIELDS), max_size=3),
        "pipelines": st.dictionaries(st.sampled_from(("p", "q")), fitting_record(PIPELINE_FIELDS), max_size=2),
    },
)


def tidied(tree: Any) -> Any:
    """Take out the few things that exclude each other, so that the file loads."""
    for stream in tree["streams"].values():
        if "mirror" in stream:
            stream.pop("subjects", None)
            stream.pop("sources", None)
        for origin in [*stream.get("sources", ()), stream.get("mirror", {})]:
            if "consumer" in origin:
                origin["consumer"]["deliver_subject"] = "d.x"
    for consumer in tree.get("consumers", {}).values():
        if "filter" in consumer:
            consumer.pop("filters", None)
    for flow in tree.get("pipelines", {}).values():
        flow["from"] = {**flow["from"], "stream": "S"}
        flow["from"].pop("streams", None)
        flow.pop("function", None)
        flow.pop("trigger", None)
        flow["to"] = [
            {"stream": "T", "subject": "t.a"} if "stream" in sink else {"format": "x", "path": "y"}
            for sink in flow["to"]
        ]
    return tree


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(tree=well_formed.map(tidied))
def test_any_platform_can_be_looked_over_and_goes_through_asyncapi_unchanged(
    tree: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "fuzz.yaml"
    path.write_text(yaml.safe_dump(tree))
    platform = load(path, variables={})
    lint(platform)
    catalog(platform)
    document = asyncapi.document(platform)
    check(document)
    (folder / "api.yaml").write_text(yaml.safe_dump(document))
    path.write_text(yaml.safe_dump({**tree, "asyncapi": "api.yaml"}))
    again = load(path, variables={})
    assert again.consumers.keys() == platform.consumers.keys()
    for name, consumer in again.consumers.items():
        assert consumer.config == platform.consumers[name].config
    assert "A01" not in {finding.code for finding in lint(again)}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(alphabet=" \n\t:-[]{}#&*!|>'\"%@`abS0.$", max_size=60))
def test_any_text_loads_or_is_refused_with_an_error_of_ours(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text)
    with suppress(ConfigError):
        load(path, variables={})
