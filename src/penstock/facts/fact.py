"""A fact, and how it is stored in a stream. Pure.

A fact is stored on its subject plus one token derived from its id: `orders.created` with id `o-17` is stored on
`orders.created.<key>`. So the server itself refuses a second fact of the same id, for as long as it keeps the first:
the subject is expected to have no message. No step can be lost between a fact and an index of ids.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime

from penstock import subjects
from penstock.errors import ConfigError
from penstock.wire.frames import Message
from penstock.wire.headers import Headers

ID_HEADER = "Penstock-Fact-Id"
DIGEST_HEADER = "Penstock-Fact-Digest"
KEY_BYTES = 18
MOST_ID_BYTES = 512
EXPECT_NONE = "Nats-Expected-Last-Subject-Sequence"
EXPECT_STREAM = "Nats-Expected-Stream"
OWN_HEADERS = frozenset({ID_HEADER, DIGEST_HEADER, EXPECT_NONE, EXPECT_STREAM})
"""Headers that `append` adds, and that readers do not see."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact, or any other message, as a reader gets it."""

    stream: str
    sequence: int
    subject: str
    """As it was appended, without the token of its id."""
    id: str | None
    """None for a message that was published by other means."""
    data: bytes = field(repr=False)
    headers: dict[str, list[str]] = field(repr=False)
    stored_at: datetime
    attempt: int
    """How often it was delivered, including this delivery."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a fact is stored; `existed` when it was there before."""

    stream: str
    sequence: int
    existed: bool


def key_of(fact_id: str) -> str:
    """The token that stands for an id."""
    return base64.urlsafe_b64encode(hashlib.sha256(fact_id.encode()).digest()[:KEY_BYTES]).decode()


def stored_subject(subject: str, fact_id: str) -> str:
    """Where a fact is stored. Refuses what is no literal subject, or no id."""
    if wrong := subjects.problem(subject):
        raise ConfigError(f"{subject!r} cannot be the subject of a fact: {wrong}")
    if not subjects.is_literal(subject) or subject.startswith("$"):
        raise ConfigError(f"{subject!r} cannot be the subject of a fact: no wildcards, and no `$` at its start")
    if subjects.is_dead_letter(subject):
        raise ConfigError(f"{subject!r} cannot be the subject of a fact: it belongs to dead letters")
    _check_id(fact_id)
    return f"{subject}.{key_of(fact_id)}"


def _check_id(fact_id: str) -> None:
    """Refuse what would not come back from a header as it was written."""
    try:
        size = len(fact_id.encode())
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{fact_id!r} cannot be the id of a fact: it is no text that UTF-8 can say") from exc
    if not 1 <= size <= MOST_ID_BYTES:
        raise ConfigError(f"the id of a fact has 1 to {MOST_ID_BYTES} bytes, not {size}")
    if fact_id != fact_id.strip():
        raise ConfigError(f"{fact_id!r} cannot be the id of a fact: take away the space at its ends")


def digest(data: bytes, headers: Headers | None = None) -> str:
    """Return the digest that two facts of one id must share: of data and headers, whatever the order of the headers."""
    found = hashlib.sha256()
    for name in sorted(headers or {}):
        value = (headers or {})[name]
        for one in (value,) if isinstance(value, str) else value:
            found.update(f"{name}\0{one}\0".encode("utf-8", "surrogateescape"))
    found.update(b"\0" + data)
    return found.hexdigest()[:32]


def checked_headers(headers: Headers | None) -> Headers:
    """Return a fact's own headers. Those with a meaning for the server, and our own, are refused."""
    for name in headers or {}:
        if name.lower().startswith(("nats-", "penstock-fact-")):
            raise ConfigError(
                f"a fact cannot have the header {name!r}: it means something to the server or to Penstock"
            )
    return headers or {}


def fact_of(stream: str, message: Message, sequence: int, attempt: int, stored_ns: int) -> Fact:
    """The fact in a delivered message."""
    headers = message.header_values()
    ids = headers.get(ID_HEADER)
    subject = message.subject
    if ids and subject.endswith(f".{key_of(ids[0])}"):
        subject = subject.rpartition(".")[0]
    return Fact(
        stream=stream,
        sequence=sequence,
        subject=subject,
        id=ids[0] if ids else None,
        data=message.data,
        headers={name: values for name, values in headers.items() if name not in OWN_HEADERS},
        stored_at=datetime.fromtimestamp(stored_ns / 1e9, UTC),
        attempt=attempt,
    )
