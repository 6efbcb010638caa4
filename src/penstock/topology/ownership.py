"""Marks in a resource's metadata: who owns it, and what its owner declared last time.

`penstock.platform` names the platform that made or adopted the resource; only that platform may change or prune it. A
file without a name marks with the name of no platform in particular: such a resource is anybody's to change, and is
never pruned.
`penstock.declared` remembers which fields were declared, so that a line taken out of the file brings the server's
default back, while a field that somebody else set, and no file ever named, is left alone.
"""

from __future__ import annotations

from penstock.jetstream.metadata import DECLARED, DLQ, OWNER, PLATFORM, PURPOSE, READER, RENAMED_FROM, SERVICE
from penstock.jetstream.model import Json
from penstock.topology.model import DEFAULT_NAME, ConsumerSpec

NESTED = ("metadata", "consumer_limits")
"""Fields that are owned and compared key by key, as `metadata.KEY`: only the keys that are declared count."""
IDENTITY = frozenset({"name", "durable_name"})
"""Fields that are never taken back: without them it would be another resource."""


def owner(config: Json) -> str | None:
    """The platform that owns the resource."""
    return (config.get("metadata") or {}).get(PLATFORM)


def declared(config: Json) -> frozenset[str]:
    """The fields its owner declared last time."""
    written = (config.get("metadata") or {}).get(DECLARED, "")
    return frozenset(written.split()) - IDENTITY


def other_owner(config: Json, platform: str) -> str | None:
    """The other platform that owns the resource."""
    return None if owner(config) in (None, DEFAULT_NAME, platform) else owner(config)


def may_change(config: Json, platform: str | None) -> bool:
    """Whether the platform may change the resource; None is no platform at all."""
    return platform is not None and other_owner(config, platform) is None


def marked(config: Json, platform: str) -> Json:
    """The declared configuration with its marks."""
    marks = {PLATFORM: platform, DECLARED: " ".join(sorted(_names(config)))}
    return {**config, "metadata": {**(config.get("metadata") or {}), **marks}}


def described(spec: ConsumerSpec) -> Json:
    """The consumer's configuration with what the server would not know otherwise, so that `status` can show it."""
    known = {
        SERVICE: spec.service,
        DLQ: spec.dlq,
        OWNER: spec.owner,
        PURPOSE: spec.purpose,
        READER: spec.reader,
        RENAMED_FROM: spec.renamed_from,
    }
    told = {key: value for key, value in known.items() if value}
    return {**spec.config, "metadata": {**(spec.config.get("metadata") or {}), **told}} if told else spec.config


def _names(config: Json) -> set[str]:
    names = {name for name in config if name not in IDENTITY and name not in NESTED}
    names |= {f"{field}.{key}" for field in NESTED for key in config.get(field) or {}}
    return names | {"ack_wait"} if config.get("backoff") else names  # a backoff sets the ack wait with it


def is_mark(field: str) -> bool:
    """Whether a changed field is only one of our marks."""
    return field in (f"metadata.{PLATFORM}", f"metadata.{DECLARED}")
