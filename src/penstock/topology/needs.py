"""Which server version a platform needs. Pure.

Older servers leave out what they do not know without a word, so the question has to be asked before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from penstock.broker.model import Json
from penstock.errors import FeatureMissing
from penstock.topology.fields import CONSUMER_BY_WIRE, STREAM_BY_WIRE
from penstock.topology.kinds import Field
from penstock.topology.resource import Desired, Resource

OLDEST = "2.10"
"""Metadata, several filters, and updates that fail rather than create: without them there is no plan."""
SOURCE_CONSUMER = "2.14"


def require(desired: Desired, version: str) -> None:
    """Raise `FeatureMissing` for the first thing declared that a server of this version lacks."""
    if _number(version) < _number(OLDEST):
        raise FeatureMissing("a declared platform", version, OLDEST)
    for resource, config in desired.configs.items():
        for name, since in _features(resource, config):
            if _number(version) < _number(since):
                raise FeatureMissing(f"`{name}` of {resource}", version, since)


def _features(resource: Resource, config: Json) -> Iterator[tuple[str, str]]:
    table: Mapping[str, Field] = STREAM_BY_WIRE if resource.consumer is None else CONSUMER_BY_WIRE
    for name, value in config.items():
        field = table.get(name)
        if field and field.since and value != field.default:
            yield field.key, field.since
    for origin in [config.get("mirror"), *(config.get("sources") or ())]:
        if origin and origin.get("consumer"):
            yield f"the consumer of source {origin['name']}", SOURCE_CONSUMER


def _number(version: str) -> tuple[int, ...]:
    """`2.15.1-RC.2` as (2, 15): features come with minor versions."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
