"""Which server a platform needs. Pure.

Older servers leave out what they do not know without a word, so the question has to be asked before anything is sent.
"""

from __future__ import annotations

from penstock.errors import FeatureMissing
from penstock.jetstream import features, metadata
from penstock.jetstream.features import Feature, HasVersion
from penstock.jetstream.model import Json
from penstock.topology.model import DEDICATED
from penstock.topology.resource import Desired

PLATFORM = Feature("a declared platform", "2.10.0", 0)
"""Metadata, several filters, updates that never create: without them there is no plan."""


def require(desired: Desired, server: HasVersion) -> None:
    """Raise `FeatureMissing` for the first thing declared that the server lacks, naming the resource."""
    features.require(server, PLATFORM)
    for resource, config in desired.configs.items():
        for feature in features.of_stream(config) if resource.consumer is None else _of_consumer(config):
            if not features.supports(server, feature):
                name = f"{resource}: {feature.name}"
                raise FeatureMissing(name, server.server_version, feature.version)


def _of_consumer(config: Json) -> list[Feature]:
    """A dedicated reader resets its consumer to get in order what was not confirmed."""
    dedicated = (config.get("metadata") or {}).get(metadata.READER) == DEDICATED
    return [*features.of_consumer(config), *([features.CONSUMER_RESET] if dedicated else [])]
