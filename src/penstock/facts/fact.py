"""A fact, and how it is stored in a stream. Pure.

A fact is stored on its subject plus one token derived from its id: `orders.created` with id `o-17` is stored on
`orders.created.<key>`. So the server itself refuses a second fact of the same id, for as long as it keeps the first:
the subject is expected to have no message. No step can be lost between a fact and an index of ids.
"""

from __future__ import annotations

import hashlib
import re
from binascii import b2a_base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from penstock import subjects
from penstock.errors import ConfigError
from penstock.wire import headers as header_block
from penstock.wire.headers import Headers

ID_HEADER = "Penstock-Fact-Id"
DIGEST_HEADER = "Penstock-Fact-Digest"
KEY_BYTES = 18
MOST_ID_BYTES = 512
EXPECT_NONE = "Nats-Expected-Last-Subject-Sequence"
EXPECT_STREAM = "Nats-Expected-Stream"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_PLAIN = re.compile(
    rb"NATS/1\.0\r\nPenstock-Fact-Id: ([!-~](?:[ -~]*[!-~])?)\r\nPenstock-Fact-Digest: [0-9a-f]+\r\n"
    rb"Nats-Expected-Last-Subject-Sequence: 0\r\n(?:Nats-Expected-Stream: [ -~]+\r\n)?\r\n"
)
"""The header block of a fact without headers of its own, as `append` writes it."""
OWN_HEADERS = frozenset({ID_HEADER, DIGEST_HEADER, EXPECT_NONE, EXPECT_STREAM})
"""Headers that `append` adds, and that readers do not see."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact, or any other message, as a reader gets it.

    Of a fact that was delivered, subject, id, headers and time are parsed when one of them is first asked for.
    """

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
    _source: ReceivedFact | None = field(default=None, init=False, repr=False, compare=False)

    def parts(self) -> FactParts:
        """Subject, id, headers and time: for all of many facts, this is cheaper than asking for one after the other."""
        if self._source is not None:
            return self._source.parts()
        return FactParts(self.subject, self.id, self.headers, self.stored_at)

    if not TYPE_CHECKING:  # else any attribute would pass the type checker

        def __getattr__(self, name: str) -> Any:
            """Called for a part that was not parsed yet."""
            source = None if name == "_source" else self._source
            if name not in FactParts._fields or source is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            parts = source.parts()
            _set_subject(self, parts[0])
            _set_id(self, parts[1])
            _set_headers(self, parts[2])
            _set_stored_at(self, parts[3])
            _set_source(self, None)
            return getattr(parts, name)


class ReceivedFact(Protocol):
    """What a fact is made of: a delivered message, or an answer of a gateway."""

    @property
    def sequence(self) -> int: ...

    @property
    def data(self) -> bytes: ...

    @property
    def attempt(self) -> int: ...

    def parts(self) -> FactParts:
        """Parse the rest."""
        ...


class FactParts(NamedTuple):
    """What a delivered fact is asked for later, if at all."""

    subject: str
    id: str | None
    headers: dict[str, list[str]]
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class NewFact:
    """A fact to append."""

    subject: str
    id: str
    """Names the fact within its subject."""
    data: bytes = field(repr=False)
    headers: Headers | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a fact is stored; `existed` when it was there before."""

    stream: str
    sequence: int
    existed: bool
    conflict: bool = False
    """Of many appended at once: a fact of this id was there before, with other content, and stays as it is."""

    @property
    def outcome(self) -> Literal["stored", "existed", "conflict"]:
        if self.conflict:
            return "conflict"
        return "existed" if self.existed else "stored"


def key_of(fact_id: str) -> str:
    """The token that stands for an id."""
    raw = hashlib.sha256(fact_id.encode()).digest()[:KEY_BYTES]
    return b2a_base64(raw, newline=False).translate(_URL_SAFE).decode()  # base64.urlsafe_b64encode, in half the time


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


_new = object.__new__
_set_stream, _set_sequence, _set_data, _set_attempt, _set_source = (
    getattr(Fact, name).__set__ for name in ("stream", "sequence", "data", "attempt", "_source")
)
_set_subject, _set_id, _set_headers, _set_stored_at = (getattr(Fact, name).__set__ for name in FactParts._fields)


def received_facts(
    stream: str, found: Sequence[ReceivedFact], attempts: Sequence[int] | None = None
) -> tuple[Fact, ...]:
    """Facts whose other parts are parsed when one of them is asked for: as `Fact(…)`, in a fraction of the time.

    `attempts` where they are not those of the server.
    """
    facts = []
    for one in found:
        fact = _new(Fact)
        _set_stream(fact, stream)
        _set_sequence(fact, one.sequence)
        _set_data(fact, one.data)
        _set_attempt(fact, one.attempt)
        _set_source(fact, one)
        facts.append(fact)
    if attempts:
        for fact, attempt in zip(facts, attempts, strict=True):
            _set_attempt(fact, attempt)
    return tuple(facts)


def parts_of(subject: str, headers: bytes, stored_us: int) -> FactParts:
    """Parse subject and header block of a delivered fact, which was stored so many microseconds after 1970."""
    stored_at = EPOCH + timedelta(0, 0, stored_us)
    own: dict[str, list[str]] = {}
    if plain := _PLAIN.fullmatch(headers):
        fact_id = plain[1].decode()
    else:
        found = header_block.parse(headers)
        own = {name: values for name, values in found.items() if name not in OWN_HEADERS}
        if not (ids := found.get(ID_HEADER)):
            return FactParts(subject, None, own, stored_at)
        fact_id = ids[0]
    base, _, key = subject.rpartition(".")
    return FactParts(base if key == key_of(fact_id) else subject, fact_id, own, stored_at)
