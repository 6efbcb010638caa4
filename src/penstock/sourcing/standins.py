"""An ephemeral source that a stream had before, and has again, under a form that the server takes for a new one. Pure.

The server knows a source by its origin, filter and transforms, and finds in the copies how far it was. A source that
comes back after a durable one was in its place would go on where it was left, and copy again what the durable one has
copied since. Transforms that change no subject make it another source, which begins where it is told to. What stands
for what is noted in the stream's metadata, so that a plan sees no difference.
"""

from __future__ import annotations

import json

from penstock import subjects
from penstock.jetstream.model import Json

NOTE = "penstock.standins"
IDENTITY = ("filter_subject", "subject_transforms", "opt_start_seq", "opt_start_time")


def stand_in(source: Json, start: int, number: int) -> Json | None:
    """The `number`th form of an ephemeral source, which begins at `start`; None when it has none."""
    transforms = _transforms(source, number)
    if transforms is None:
        return None
    kept = {key: value for key, value in source.items() if key not in IDENTITY}
    return {**kept, "subject_transforms": transforms, "opt_start_seq": start}


def _transforms(source: Json, number: int) -> list[Json] | None:
    given: list[Json] = list(source.get("subject_transforms") or ())
    if not given and source.get("filter_subject", ">") == ">":
        return _everything(number)
    if not given:
        given = [_unchanged(source["filter_subject"])]
    never = f"_penstock.again.{number}"
    if any(subjects.overlap(never, one.get("src") or ">") for one in given):
        return None
    return [*given, {"src": never, "dest": never}]


def _everything(number: int) -> list[Json]:
    """Subjects of one token, of two, up to `number`, and all longer ones: together every subject, as it is."""
    exact = [_unchanged(".".join("*" * tokens)) for tokens in range(1, number + 1)]
    return [*exact, _unchanged(".".join("*" * number) + ".>")]


def _unchanged(filter_: str) -> Json:
    """A transform that leaves every subject of the filter as it is."""
    tokens, stars = [], 0
    for token in filter_.split("."):
        stars += token == "*"
        tokens.append(f"{{{{wildcard({stars})}}}}" if token == "*" else token)
    return {"src": filter_, "dest": ".".join(tokens)}


def noted(source: Json, start: int, metadata: dict[str, str]) -> tuple[Json, dict[str, str]]:
    """The next form of a source that comes back, and the metadata that says what it stands for."""
    known = _known(metadata)
    number = max(known.get(key, {}).get("number", 0) for key in (_key(source), source["name"])) + 1
    form = stand_in(source, start, number)
    assert form is not None, "a migration to what has no stand-in is refused before it begins"
    known[_key(source)] = {"number": number, "for": source, "is": form}
    return form, {**metadata, NOTE: json.dumps(known)}


def in_place(wanted: Json, actual: Json) -> Json:
    """The wanted configuration of a stream, with the forms that stand for its sources on the server."""
    known = _known(actual.get("metadata") or {})
    if not known or not wanted.get("sources"):
        return wanted
    return {**wanted, "sources": [_form(known, source) for source in wanted["sources"]]}


def _form(known: Json, source: Json) -> Json:
    entry = known.get(_key(source)) or known.get(source["name"]) or {}  # earlier versions left the prefix out
    form: Json = entry["is"] if entry.get("for") == source else source
    return form


def _key(source: Json) -> str:
    """Return the key of a source, with its prefix: origins of other domains may have the same name."""
    api = (source.get("external") or {}).get("api")
    return f"{source['name']} {api}" if api else str(source["name"])


def _known(metadata: dict[str, str]) -> Json:
    known: Json = json.loads(metadata.get(NOTE) or "{}")
    return known
