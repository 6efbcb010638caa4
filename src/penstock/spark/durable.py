"""The durable consumer that holds a query's committed position on the server: found or created, and checked."""

from __future__ import annotations

import logging
import secrets
import socket
from datetime import UTC, datetime
from typing import Any

from penstock import subjects as subject_rules
from penstock.errors import AccessDenied, ConfigError, ConsumerNotFound, InvalidConfiguration
from penstock.jetstream.metadata import QUERY
from penstock.jetstream.model import NANOSECONDS, ConsumerInfo, StreamInfo
from penstock.spark.link import Link
from penstock.spark.origin import needs_direct_get

log = logging.getLogger(__name__)

MAX_ACK_PENDING = 20_000
"""Maximum unacknowledged messages while a range is acknowledged."""

MOVABLE = ("all", "by_start_sequence", "by_start_time")
"""Deliver policies with which the server can reset a consumer."""


class UnfitConsumer(ConfigError):
    """The durable of a query cannot hold its position."""


class ConsumerTaken(UnfitConsumer):
    """The durable holds the position of another query."""

    def __init__(self, stream: str, consumer: str, theirs: str, ours: str) -> None:
        super().__init__(stream, consumer, theirs, ours)
        self.stream = stream
        self.consumer = consumer
        self.theirs = theirs
        self.ours = ours

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer!r} of stream {self.stream!r} holds the position of another query: "
            f"{self.theirs!r} has taken it over from this one, {self.ours!r}; give each query a consumer of its own. "
            "To go on with this query, stop the other one, and start this one with a new checkpoint: it continues "
            "where the consumer is"
        )


def new_owner() -> str:
    """A name for a query that begins without a checkpoint: where, when, and a token that makes it unique."""
    return f"{socket.gethostname()} {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {secrets.token_hex(4)}"


def owner(found: ConsumerInfo) -> str:
    """Return the query whose position it holds; empty when none is recorded."""
    return str((found.config.get("metadata") or {}).get(QUERY, ""))


def take(link: Link, found: ConsumerInfo, name: str) -> ConsumerInfo:
    """Assign the durable to the query of that name; another query is refused at its next commit."""
    metadata = {**(found.config.get("metadata") or {}), QUERY: name}
    try:
        return link.call(lambda api: api.update_consumer(found.stream, found.name, {"metadata": metadata}))
    except AccessDenied as exc:
        log.warning(
            "consumer %r cannot be marked as this query's, so a second query goes unnoticed: %s", found.name, exc
        )
        return found


def find(link: Link, info: StreamInfo, name: str) -> ConsumerInfo | None:
    """The durable, if there is one."""
    try:
        return link.call(lambda api: api.consumer_info(info.name, name))
    except ConsumerNotFound:
        return None


def ensure(link: Link, info: StreamInfo, name: str, subjects: tuple[str, ...]) -> ConsumerInfo:
    """Return the durable; creates it if it is missing. Raises `UnfitConsumer` when an existing one cannot be used."""
    found = find(link, info, name)
    if found is None:
        return _made(link, info, name, subjects)
    check(found, info, subjects)
    return found


def _made(link: Link, info: StreamInfo, name: str, subjects: tuple[str, ...]) -> ConsumerInfo:
    config = configuration(info, name, subjects)
    if threshold := (info.config.get("consumer_limits") or {}).get("inactive_threshold"):
        log.warning(
            "stream %r removes consumers that are inactive for %d s, consumer %r too: it does not keep the query's "
            "position for longer than that; raise the stream's consumer_limits.inactive_threshold",
            info.name, threshold // NANOSECONDS, name,
        )  # fmt: skip
    try:
        return link.call(lambda api: api.create_consumer(info.name, config))
    except InvalidConfiguration as exc:
        others = _rivals(link, info, subjects)
        if not others:
            raise
        raise UnfitConsumer(
            f"consumer {name!r} cannot be made: {info.name!r} is a WorkQueue stream, where a subject has at most one "
            f"consumer, and {', '.join(map(repr, others))} has what the query reads ({_shown(set(subjects))}); "
            "remove what is in the way, or read other `subjects`"
        ) from exc


def _rivals(link: Link, info: StreamInfo, subjects: tuple[str, ...]) -> list[str]:
    """The consumers of a WorkQueue stream that get some of these subjects."""
    if info.config.get("retention") != "workqueue":
        return []
    ours = subjects or (subject_rules.REST,)
    there = link.call(lambda api: api.consumers(info.name))
    return [one.name for one in there if subject_rules.any_overlap(ours, filters(one.config) or (subject_rules.REST,))]


def configuration(info: StreamInfo, name: str, subjects: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of a durable that delivers to no worker: it only holds what the query has committed."""
    limit = (info.config.get("consumer_limits") or {}).get("max_ack_pending") or MAX_ACK_PENDING
    config: dict[str, Any] = {
        "durable_name": name,
        "description": "position of a Spark query",
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "max_ack_pending": min(MAX_ACK_PENDING, limit) if limit > 0 else MAX_ACK_PENDING,
        "metadata": {"penstock.service": "spark"},
    }
    if len(subjects) == 1:
        config["filter_subject"] = subjects[0]
    elif subjects:
        config["filter_subjects"] = list(subjects)
    if needs_direct_get(info):
        config["headers_only"] = True  # acknowledging a range needs no bodies
    return config


def check(found: ConsumerInfo, info: StreamInfo, subjects: tuple[str, ...]) -> None:
    """Raise unless this durable can hold the position of a query over these subjects. Pure."""
    policies = ("explicit",) if info.config.get("retention") == "workqueue" else ("explicit", "all")
    policy = found.config.get("ack_policy")
    if policy not in policies:
        raise _unfit(found, f"it has ack policy {policy!r}, and {' or '.join(policies)} is needed")
    if found.config.get("deliver_subject"):
        raise _unfit(found, "it is a push consumer, and a pull consumer is needed")
    start = found.config.get("deliver_policy", "all")
    if start not in MOVABLE:
        raise _unfit(found, f"it delivers {start!r}, and the server moves only those that deliver {', '.join(MOVABLE)}")
    theirs, ours = set(filters(found.config)), set(subjects)
    if theirs != ours:
        raise _unfit(found, f"it filters {_shown(theirs)}, and the query reads {_shown(ours)}; they must be the same")


def filters(config: dict[str, Any]) -> tuple[str, ...]:
    """The filters of a consumer; none: every subject."""
    found = tuple(config.get("filter_subjects") or filter(None, [config.get("filter_subject")]))
    return () if found == (">",) else found


def floor(found: ConsumerInfo) -> int:
    """The last sequence up to which the durable has everything acknowledged."""
    start = int(found.config.get("opt_start_seq") or 1)
    return max(found.ack_floor_stream_seq, start - 1)


def _unfit(found: ConsumerInfo, why: str) -> UnfitConsumer:
    return UnfitConsumer(f"consumer {found.name!r} of stream {found.stream!r} cannot be used: {why}; name another one")


def _shown(filters_: set[str]) -> str:
    return ", ".join(sorted(filters_)) or "every subject"
