"""Which declared fields differ from what the server shows. Pure.

Only declared fields are compared, and those that were declared last time. Two ways to say the same are the same: a
missing field and its zero value, -1 and 0 for "no limit", subjects in another order, one filter or a list of one, a
time in another zone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from penstock.jetstream import metadata
from penstock.jetstream.model import Json
from penstock.topology import ownership
from penstock.topology.ownership import NESTED

FILTER = "filter_subjects"
"""One name for the filters of a consumer, whether the server shows `filter_subject` or `filter_subjects`."""
LIMITS = frozenset({"max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size", "max_consumers", "max_deliver"})
"""Where 0, -1 and nothing all mean: no limit."""
UNORDERED = frozenset({"subjects", FILTER, "sources", "priority_groups"})
NOT_COMPARED = frozenset({"name", "durable_name", "pause_until"})
"""Who it is, and the pause: a consumer that somebody paused has not drifted."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field that differs; `metadata.KEY` for a key inside a field."""

    name: str
    before: Any
    after: Any
    """None: the field is taken out, and the server's default comes back."""


def differences(desired: Json, actual: Json, defaults: Mapping[str, Any] = MappingProxyType({})) -> list[FieldChange]:
    """What would have to change in `actual` for it to be as `desired`; in the order of the names.

    A field that is no longer declared differs only when the server has something else than its default.
    """
    wanted, found = normal(desired), normal(actual)
    fallback = {name: value for name, value in defaults.items() if name in _taken_out(wanted, actual)}
    after = {**dict.fromkeys(_taken_out(wanted, actual)), **normal(fallback), **wanted}
    changed = [name for name, value in after.items() if not _same(FieldChange(name, found.get(name), value))]
    return [FieldChange(name, found.get(name), wanted.get(name)) for name in sorted(changed)]


def _taken_out(wanted: Json, actual: Json) -> set[str]:
    """Fields that the file declared last time, and no longer does. Whoever does not own the resource knows of none."""
    if not ownership.may_change(actual, wanted.get(f"metadata.{metadata.PLATFORM}")):
        return set()
    before = {FILTER if name == "filter_subject" else name for name in ownership.declared(actual)}
    return before - set(wanted)


def _same(change: FieldChange) -> bool:
    return change.before == change.after or all(_is_nothing(change.name, v) for v in (change.before, change.after))


def _is_nothing(name: str, value: Any) -> bool:
    return not value or (value == -1 and name in LIMITS)


def normal(config: Json) -> Json:
    """The configuration with one spelling for everything that can be said in several ways."""
    flat: Json = {}
    for name, value in _with_implied(config).items():
        if value is None or name in NOT_COMPARED:
            continue
        if name in NESTED:
            flat |= {f"{name}.{key}": inner for key, inner in value.items() if not key.startswith("_nats.")}
        else:
            flat[name] = _normal_value(name, value)
    return flat


def _with_implied(config: Json) -> Json:
    config = dict(config)
    if "filter_subject" in config or FILTER in config:
        one = config.pop("filter_subject", None)
        config[FILTER] = config.get(FILTER) or ([one] if one else [])
    if config.get("backoff"):
        config["ack_wait"] = config["backoff"][0]  # the server sets it so, whatever was asked for
    if config.get("duplicate_window") == 0:
        del config["duplicate_window"]  # means: the server's default
    return config


def _normal_value(name: str, value: Any) -> Any:
    if name in LIMITS:
        return value if value > 0 else -1
    if name == "sample_freq":
        return str(value).removesuffix("%")
    if name == "opt_start_time":
        return datetime.fromisoformat(value).astimezone(UTC).isoformat()
    value = _without_empty(value)
    return sorted(value, key=_sort_key) if name in UNORDERED else value


def _without_empty(value: Any) -> Any:
    """Without members that are left out when empty: Go writes them or not, as it likes."""
    if isinstance(value, dict):
        return {key: inner for key, raw in value.items() if (inner := _without_empty(raw))}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _sort_key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def patched(config: Json, desired: Json, names: Iterable[str]) -> Json:
    """`config` with the named fields as `desired` has them; all other fields stay, also those nobody knows."""
    result = dict(config)
    for name in names:
        field, _, key = name.partition(".")
        if field in NESTED:
            result[field] = _put(result.get(field) or {}, key, (desired.get(field) or {}).get(key))
        elif name == FILTER:
            result = {k: v for k, v in result.items() if k not in ("filter_subject", FILTER)}
            result |= {k: desired[k] for k in ("filter_subject", FILTER) if desired.get(k)}
        else:
            result = _put(result, name, desired.get(name))
    return result


def _put(values: Json, key: str, value: Any) -> Json:
    rest = {k: v for k, v in values.items() if k != key}
    return rest if value is None else {**rest, key: value}
