"""A JSON Schema of the platform file, for editors that complete and check YAML: from the same tables as the loader.

It takes whatever the loader takes. It does not refuse all that the loader refuses: what one field says about another,
and whether names are declared, only the loader knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.jetstream.model import Json
from penstock.topology.fields import (
    CONSUMER_FIELDS,
    ENVIRONMENT_FIELDS,
    GROUP_FIELDS,
    PIPELINE_FIELDS,
    SERVICE_FIELDS,
    STREAM_FIELDS,
    Overlay,
)
from penstock.topology.gateway import GATEWAY_FIELDS, GATEWAY_IDENTITY_FIELDS, Identities
from penstock.topology.kinds import (
    UNLIMITED,
    Count,
    Deliver,
    Duration,
    Field,
    Flag,
    Kind,
    ListOf,
    OneOf,
    RecordKind,
    Size,
    TextMap,
    WordOr,
)

VARIABLE: Json = {"type": "string", "pattern": r"\$\{"}
"""`${NAME}` may stand for any value."""
TEXT: Json = {"type": ["string", "number", "boolean"]}


def schema() -> Json:
    """The whole file."""
    sections = {
        "name": {"type": "string", "description": "Marks what this platform owns on its servers."},
        "asyncapi": {"type": "string", "description": "Path of the AsyncAPI document of the events."},
        "history": {**TEXT, "description": "How long `penstock ui` keeps what it sees, such as 1d."},
        "environments": _by_name(ENVIRONMENT_FIELDS, empty=True),
        "streams": _by_name(STREAM_FIELDS, empty=True),
        "consumers": _by_name(CONSUMER_FIELDS),
        "groups": _by_name(GROUP_FIELDS),
        "pipelines": _by_name(PIPELINE_FIELDS),
        "services": _by_name(SERVICE_FIELDS),
        "gateway": _object(GATEWAY_FIELDS),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "penstock.yaml",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _by_name(fields: Sequence[Field], empty: bool = False) -> Json:
    one = _object(fields)
    return {"type": ["object", "null"], "additionalProperties": {"anyOf": [one, {"type": "null"}]} if empty else one}


def _object(fields: Sequence[Field], partial: bool = False) -> Json:
    found: Json = {
        "type": "object",
        "properties": {one.key: {"description": one.doc, **of_kind(one.kind)} for one in fields},
        "additionalProperties": False,
    }
    required = [one.key for one in fields if one.required]
    return found if partial or not required else {**found, "required": required}


def of_kind(kind: Kind) -> Json:
    """The schema of a kind of value."""
    if isinstance(kind, RecordKind):
        return _object(kind.fields)
    if isinstance(kind, WordOr):
        return {"anyOf": [of_kind(kind.first.kind), of_kind(kind.record)]}
    if isinstance(kind, ListOf):
        item = of_kind(kind.item)
        return {"anyOf": [{"type": "array", "items": item}, item]}
    if isinstance(kind, Flag):
        return {"anyOf": [{"type": "boolean"}, VARIABLE]}
    if isinstance(kind, Count):
        number: Json = {"type": "integer", **({"maximum": kind.most} if kind.most is not None else {})}
        return {"anyOf": [number, VARIABLE, *([{"const": UNLIMITED}] if kind.unlimited is not None else [])]}
    if isinstance(kind, Duration | Size):
        return {"type": ["string", "integer"], "examples": ["30s" if isinstance(kind, Duration) else "64MiB"]}
    if isinstance(kind, OneOf):
        words = [*kind.words, *(kind.spellings or ())]
        return {"anyOf": [{"enum": words}, {"type": "string"}]}
    if isinstance(kind, TextMap):
        return {"type": "object", "additionalProperties": TEXT}
    if isinstance(kind, Deliver):
        start = {"start_sequence": {"type": "integer"}, "start_time": {"type": "string"}}
        return {"anyOf": [of_kind(kind.words), {"type": "object", "properties": start, "additionalProperties": False}]}
    if isinstance(kind, Identities):
        return {"type": "object", "additionalProperties": _object(GATEWAY_IDENTITY_FIELDS)}
    if isinstance(kind, Overlay):
        return {"type": ["object", "null"]}
    return TEXT
