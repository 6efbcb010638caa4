"""Read the groups of a platform file."""

from __future__ import annotations

from penstock import subjects
from penstock.errors import ConfigError
from penstock.topology.document import FilePlace, Node, Problems
from penstock.topology.fields import GROUP_FIELDS
from penstock.topology.kinds import read_record
from penstock.topology.model import GroupSpec, Json
from penstock.units import from_nanoseconds
from penstock.workers.options import group_name
from penstock.workers.partitions import Hashed, SubjectPattern

PLAIN = (
    "hashed",
    "service",
    "owner",
    "purpose",
    "dlq",
    "max_deliver",
    "max_ack_pending",
    "start",
    "strategy",
    "ignore",
)
"""Fields that are taken as they are read."""


def group(name: str, node: Node, place: FilePlace, problems: Problems) -> GroupSpec | None:
    """One group of the file; None when it is too wrong to build, after saying so."""
    try:
        group_name(name)
    except ConfigError as exc:
        problems.add(place, str(exc))
    values = read_record(node, f"group {name!r}", GROUP_FIELDS, problems)
    if not values or not values.get("stream") or not values.get("partitions"):
        return None
    partitions = tuple(values["partitions"])
    if not _sound(node, partitions, values.get("hashed"), problems):
        return None
    return GroupSpec(
        name=name,
        stream=values["stream"],
        partitions=partitions,
        backoff=tuple(from_nanoseconds(one) for one in values.get("backoff", ())),
        line=place.line,
        lines={key: where.line for key, where in node.keys.items()},
        **_others(values),
    )


def _others(values: Json) -> Json:
    waits = {"ack_wait": from_nanoseconds(values["ack_wait"])} if "ack_wait" in values else {}
    return {**waits, **{key: values[key] for key in PLAIN if key in values}}


def _sound(node: Node, partitions: tuple[str, ...], hashed: int | None, problems: Problems) -> bool:
    """Whether the partitions are a pattern, or subjects that do not overlap; says so otherwise."""
    where = node.get("partitions") or node
    try:
        if len(partitions) == 1 and "{" in partitions[0]:
            SubjectPattern(partitions[0])
            if hashed:
                Hashed(hashed, partitions[0])
            return True
        if hashed:
            raise ConfigError("hashed goes with a pattern that has {partition} in it, such as orders.{partition}.>")
        for one in partitions:
            if wrong := "a pattern stands alone" if "{" in one else subjects.problem(one):
                raise ConfigError(f"{one!r} is no subject: {wrong}")
            if subjects.covered(one, [other for other in partitions if other is not one]):
                raise ConfigError(f"partition {one!r} overlaps another: a message belongs to one")
    except ConfigError as exc:
        problems.add(where, str(exc))
        return False
    return True
