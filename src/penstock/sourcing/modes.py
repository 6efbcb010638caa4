"""The ways a stream can read another one, and the durable consumer that two of them need. Pure.

The server knows two forms: a source without a consumer (it makes one itself), and one that names a consumer which
exists. Server-managed is ours: Penstock makes the consumer and binds the source to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum

from penstock.jetstream.metadata import SOURCING
from penstock.jetstream.model import Json

HEARTBEAT = 1_000_000_000
"""Nanoseconds; the server takes no other for `ack_policy: flow_control`."""
MAX_ACK_PENDING = 65_536
"""Messages on their way before the origin waits. The server's own default of 1,000 halves the speed."""
MOVED = ("filter_subject", "opt_start_seq", "opt_start_time")
"""Fields of a source that belong to its consumer once it has a durable one."""
NO_DOMAIN = "_"
"""Stands for a domain that is not known, or has no name."""
DOMAIN_API = re.compile(r"\$JS\.([^.]+)\.API")
AUTOMATIC = ("JS_SRC_", "JS_MIRROR_")
"""How the server names consumers that it makes itself."""


class Mode(StrEnum):
    """How a stream reads its origin."""

    EPHEMERAL = "ephemeral"
    """The server makes the consumer: without acknowledgements on Limits, a durable of its own elsewhere."""
    SERVER_MANAGED = "server-managed"
    """A named durable that Penstock creates and keeps up to date."""
    USER_MANAGED = "user-managed"
    """A named durable that the user creates."""


def mode_of(source: Json, consumer: Json | None) -> Mode:
    """From what the server shows: the source, and the configuration of its consumer where that is known."""
    if not source.get("consumer"):
        return Mode.EPHEMERAL
    return Mode.SERVER_MANAGED if is_managed(consumer or {}) else Mode.USER_MANAGED


def is_managed(consumer: Json) -> bool:
    """Whether Penstock made this consumer for a source."""
    return SOURCING in (consumer.get("metadata") or {})


def reader_of(consumer: Json) -> str | None:
    """Return the stream that reads through a consumer, by its creator's metadata: Penstock's, or the server's."""
    marks = consumer.get("metadata") or {}
    return next((marks[key] for key in (SOURCING, "_nats.src.stream", "_nats.mirror.stream") if marks.get(key)), None)


def default_deliver_subject(stream: str, source: Json, consumer: str, reader: str | None = None) -> str:
    """Where a server-managed consumer delivers: the same on every apply, another one for every source.

    Domains that are linked share their subjects, so it names both: `reader` is the domain of the reading stream.
    """
    external = source.get("external") or {}
    here = place(reader)
    there = place(external["api"]) if external.get("api") else here
    return f"{_deliver_prefix(source)}.{here}.{stream}.{there}.{source['name']}.{consumer}"


def is_default_deliver_subject(subject: str, stream: str, source: Json, consumer: str) -> bool:
    """Whether Penstock chose this subject: in the form above, whatever the domains, or in the one before it."""
    prefix, origin = f"{_deliver_prefix(source)}.", f"{source['name']}.{consumer}"
    if not subject.startswith(prefix):
        return False
    rest = subject.removeprefix(prefix)
    tokens = rest.split(".")
    return rest == f"{stream}.{origin}" or (len(tokens) == 5 and tokens[1] == stream and ".".join(tokens[3:]) == origin)


def reader_place(consumer: Json) -> str | None:
    """The domain, as `place` writes it, of the stream that reads through a managed consumer; None when not known."""
    tokens = str(consumer.get("deliver_subject") or "").split(".")
    reader = reader_of(consumer)
    known = len(tokens) >= 5 and reader is not None and tokens[-4] == reader
    return tokens[-5] if known and len(tokens) > 5 and tokens[-5] != NO_DOMAIN else None


def place(domain_or_api: str | None) -> str:
    """A domain or an API prefix as one token of a subject: `$JS.site1.API` is `site1`."""
    if not domain_or_api:
        return NO_DOMAIN
    if match := DOMAIN_API.fullmatch(domain_or_api):
        return match[1]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", domain_or_api).strip("-") or NO_DOMAIN


def _deliver_prefix(source: Json) -> str:
    return str((source.get("external") or {}).get("deliver") or "penstock.source").rstrip(".")


def managed_consumer(stream: str, source: Json, consumer: str, deliver_subject: str) -> Json:
    """The consumer of a server-managed source: the filter and start of the source, everything else by the rules."""
    config = {**required(consumer, deliver_subject), **start(source), **filtered(filters(source))}
    return {**config, "max_ack_pending": MAX_ACK_PENDING, "metadata": {SOURCING: stream}}


def required(consumer: str, deliver_subject: str) -> Json:
    """What every consumer of a source must have."""
    return {
        "name": consumer,
        "durable_name": consumer,
        "deliver_subject": deliver_subject,
        "ack_policy": "flow_control",
        "flow_control": True,
        "idle_heartbeat": HEARTBEAT,
        "max_deliver": -1,
    }


def start(source: Json) -> Json:
    """Where a consumer begins, from the start of a source."""
    if seq := source.get("opt_start_seq"):
        return {"deliver_policy": "by_start_sequence", "opt_start_seq": seq}
    if time := source.get("opt_start_time"):
        return {"deliver_policy": "by_start_time", "opt_start_time": time}
    return {"deliver_policy": "all"}


def filters(source: Json) -> list[str]:
    """What a source reads of its origin; nothing: everything. A transform filters too."""
    if subject := source.get("filter_subject"):
        return [subject]
    return [transform["src"] for transform in source.get("subject_transforms") or () if transform.get("src")]


def filtered(subjects: list[str]) -> Json:
    """The fields of a consumer that reads these subjects."""
    if len(subjects) == 1:
        return {"filter_subject": subjects[0]}
    return {"filter_subjects": subjects} if subjects else {}


def misfits(config: Json, deliver_subject: str) -> Iterator[str]:
    """Why a source cannot read through this consumer; nothing when it can."""
    if not config.get("durable_name"):
        yield "it is not durable"
    if not config.get("deliver_subject"):
        yield "it is a pull consumer, and a source needs a push consumer"
    elif config["deliver_subject"] != deliver_subject:
        yield f"it delivers to {config['deliver_subject']!r}, and the source listens on {deliver_subject!r}"
    if config.get("deliver_group"):
        yield f"it delivers to the queue group {config['deliver_group']!r}, of which a source is no member"
    if config.get("ack_policy") != "flow_control":
        yield f"its ack_policy is {config.get('ack_policy')}, not flow_control"
    if not config.get("flow_control"):
        yield "flow_control is off"
    if config.get("idle_heartbeat") != HEARTBEAT:
        yield "its idle_heartbeat is not 1s"
    if config.get("ack_wait") or config.get("backoff"):
        yield "it has an ack_wait or backoff: flow control acknowledges, so there is nothing to wait for"
    if config.get("max_deliver", -1) > 0:
        yield f"its max_deliver is {config['max_deliver']}: what is lost on the way must come again, however often"
    if config.get("headers_only"):
        yield "headers_only is on: the copies would have no data"


def shares_window(config: Json) -> bool:
    """Whether messages of several origins, or of one and of publishers, share a duplicate window."""
    origins = len(config.get("sources") or ())
    return bool(config.get("duplicate_window")) and origins > 0 and origins + bool(config.get("subjects")) > 1
