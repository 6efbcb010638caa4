"""A dead letter as a value: what failed, its origin, the reason, and its form as a message. No I/O."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Final

from penstock.deadletter import headers as names
from penstock.jetstream.consumer import AckSubject
from penstock.jetstream.model import StoredMessage, parse_time

MESSAGE_LIMIT: Final = 1_000
"""Characters kept of an error's message."""
STACK_LIMIT: Final = 8_000
"""Characters kept of a stack trace, from its end, which says most."""
VALUE_LIMIT: Final = 1_000
BY_WORKER, BY_ADVISORY, BY_RECONCILIATION = "worker", "advisory", "reconciliation"
UNKNOWN_ERROR: Final = "unknown"
MESSAGE_ID: Final = "Nats-Msg-Id"
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Headers = Mapping[str, tuple[str, ...]]
"""Header name to its values."""

_NAME = re.compile(r"[!-9;-~]+")
"""What can be the name of a header; a message may carry others, which cannot be sent on."""
_BREAKS = re.compile(r"[\r\n\0]+")
_UNTOLD = re.compile(r"[\r\n\0\ud800-\udfff]")
"""Characters that subjects may contain and header values may not. With a space instead, it is no valid subject."""
_ESCAPES = {"\\": "\\\\", "\n": "\\n"}
_ESCAPED = re.compile(r"\\(.)")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line \d+, in (?P<function>\S+)', re.MULTILINE)
_VARYING = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b(?=\w*\d)[0-9a-f]{12,}\b|\d+", re.I)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a message could not be processed."""

    type: str = UNKNOWN_ERROR
    message: str = ""
    stack: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What an exception says about itself, with its stack."""
        stack = "".join(traceback.format_exception(error))
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 -- a user's exception class: it must not prevent its letter
            text = ""
        return cls(type(error).__qualname__, one_line(text, MESSAGE_LIMIT), stack[-STACK_LIMIT:])

    @property
    def template(self) -> str:
        """The message without what differs from one event to the next: numbers, UUIDs, digests."""
        return _VARYING.sub("#", self.message)

    @property
    def fingerprint(self) -> str:
        """The same for failures of the same cause: type, template of the message, and function that raised."""
        frames = _FRAME.findall(self.stack)
        place = ":".join((frames[-1][0].rpartition("/")[2], frames[-1][1])) if frames else ""
        return _digest(self.type, self.template, place)[:8]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A message that a consumer gave up on."""

    subject: str
    stream: str
    sequence: int
    stored: datetime | None
    """When the message was stored, by the server's clock; None when it is gone and the time is unknown."""
    consumer: str | None
    body: bytes
    headers: Headers = field(default_factory=dict)
    """The message's own headers, as they were."""
    deliveries: int = 0
    """How often it was delivered; 0 when that is not known."""
    failure: Failure = Failure()
    first_failure: datetime | None = None
    """When the event first failed, also before a replay; None when that was not recorded."""
    last_failure: datetime | None = None
    event_id: str | None = None
    replays: int = 0
    """How often the event was replayed before it failed again."""
    pipeline: str | None = None
    """The Spark pipeline that wrote it among its bad records."""
    worker: str | None = None
    """The worker that gave up, where the consumer's name stands for several and each has letters of its own."""
    captured_by: str = BY_WORKER
    body_gone: bool = False
    """The message was no longer in its stream when the letter was made: there is nothing to replay."""

    @property
    def id(self) -> str:
        """Id of the letter: the same for every capture of this message of this consumer, and unique otherwise."""
        return letter_id(self.stream, self.worker or self.reader, self.sequence, self.stored)

    @property
    def reader(self) -> str:
        """The consumer or pipeline that gave up."""
        return self.consumer or self.pipeline or "unknown"

    @property
    def fingerprint(self) -> str:
        return self.failure.fingerprint

    def message_headers(self) -> dict[str, list[str]]:
        """The headers of the message that carries the letter: the message's own, and what the letter adds."""
        usable = {name: values for name, values in self.headers.items() if _NAME.fullmatch(name)}
        own = {_carried(name): [one_line(value) for value in values] for name, values in usable.items()}
        return {**own, **{name: [value] for name, value in self._added().items()}}

    def _added(self) -> dict[str, str]:
        values = {
            names.LETTER: self.id,
            names.STREAM: self.stream,
            names.SUBJECT: _UNTOLD.sub(" ", self.subject),
            names.SEQUENCE: str(self.sequence),
            names.STORED: _time(self.stored),
            names.CONSUMER: self.consumer,
            names.WORKER: self.worker,
            names.PIPELINE: self.pipeline,
            names.DELIVERIES: str(self.deliveries) if self.deliveries else None,
            names.ERROR: one_line(self.failure.type, VALUE_LIMIT),
            names.REASON: one_line(self.failure.message, MESSAGE_LIMIT),
            names.STACK: escaped(self.failure.stack[-STACK_LIMIT:]),
            names.FINGERPRINT: self.fingerprint,
            names.FIRST_FAILURE: _time(self.first_failure),
            names.LAST_FAILURE: _time(self.last_failure),
            names.EVENT_ID: one_line(self.event_id or "", VALUE_LIMIT),
            names.REPLAYS: str(self.replays) if self.replays else None,
            names.CAPTURED_BY: self.captured_by,
            names.BODY: "gone" if self.body_gone else None,
        }
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True)
class FiledLetter:
    """A letter and the message that carries it."""

    letter: DeadLetter
    stream: str
    """The stream of dead letters."""
    subject: str
    sequence: int
    time: datetime

    @property
    def id(self) -> str:
        """The id in its header; a letter that has none, such as a bad record, is named by the message it lies in."""
        if self.subject.endswith(f".{self.letter.id}"):
            return self.letter.id
        return letter_id(self.stream, "", self.sequence, self.time)

    @property
    def short_id(self) -> str:
        """A prefix of the id, for display."""
        return self.id.partition(".")[0]

    @property
    def message_id(self) -> str:
        """Names this letter and no other, not even a later one of the same message."""
        return f"{self.id}.{self.sequence}"


def of_message(  # every argument is a fact about one delivery; grouping them would only move the list
    *,
    subject: str,
    stream: str,
    sequence: int,
    stored: datetime | None,
    consumer: str,
    body: bytes,
    headers: Mapping[str, list[str]],
    deliveries: int,
    failure: Failure,
    failed_at: datetime,
    first_failure: datetime | None = None,
    worker: str | None = None,
    captured_by: str = BY_WORKER,
    body_gone: bool = False,
) -> DeadLetter:
    """Build the letter of a message that failed for good; headers of an earlier replay are kept."""
    own = {name: tuple(values) for name, values in headers.items() if not name.startswith(names.PREFIX)}
    known = _parsed(_first(headers, names.FIRST_FAILURE)) or first_failure
    return DeadLetter(
        subject=subject,
        stream=stream,
        sequence=sequence,
        stored=stored,
        consumer=consumer,
        body=body,
        headers=own,
        deliveries=deliveries,
        failure=failure,
        first_failure=known or (failed_at if deliveries == 1 else None),
        last_failure=failed_at,
        event_id=_first(headers, names.EVENT_ID) or event_id(body, headers),
        replays=_number(_first(headers, names.REPLAYS)),
        worker=worker,
        captured_by=captured_by,
        body_gone=body_gone,
    )


def read(message: StoredMessage) -> FiledLetter:
    """Parse the letter in a message of a dead-letter stream, whatever program wrote it.

    A bad record of a Spark pipeline is a letter with fewer headers, and a message without any is one whose origin is
    not known.
    """
    given = message.headers
    added = {name: values[0] for name, values in given.items() if name.startswith(names.PREFIX) and values}
    own = {_original(name): tuple(values) for name, values in given.items() if _is_own(name)}
    last = _parsed(added.get(names.LAST_FAILURE)) or message.time
    letter = DeadLetter(
        subject=added.get(names.SUBJECT, ""),
        stream=added.get(names.STREAM, ""),
        sequence=_number(added.get(names.SEQUENCE)),
        stored=_parsed(added.get(names.STORED)),
        consumer=added.get(names.CONSUMER),
        body=message.data,
        headers=own,
        deliveries=_number(added.get(names.DELIVERIES)),
        failure=Failure(
            added.get(names.ERROR) or ("bad record" if names.PIPELINE in added else UNKNOWN_ERROR),
            added.get(names.REASON, ""),
            unescaped(added.get(names.STACK, "")),
        ),
        first_failure=_parsed(added.get(names.FIRST_FAILURE)),
        last_failure=last,
        event_id=added.get(names.EVENT_ID) or event_id(message.data, given),
        replays=_number(added.get(names.REPLAYS)),
        pipeline=added.get(names.PIPELINE),
        worker=added.get(names.WORKER),
        captured_by=added.get(names.CAPTURED_BY, ""),
        body_gone=names.BODY in added,
    )
    return FiledLetter(letter, message.stream, message.subject, message.sequence, message.time or EPOCH)


@dataclass(frozen=True, slots=True)
class FailedDelivery:
    """What the reply subject of a delivered message tells."""

    stream: str
    consumer: str
    deliveries: int
    sequence: int
    stored: datetime

    @classmethod
    def parse(cls, reply: str) -> FailedDelivery:
        told = AckSubject.parse(reply)
        return cls(told.stream, told.consumer, told.deliveries, told.sequence, told.stored)

    def letter(
        self,
        *,
        subject: str,
        body: bytes,
        headers: Mapping[str, list[str]],
        failure: Failure,
        failed_at: datetime,
        first_failure: datetime | None = None,
    ) -> DeadLetter:
        """The letter that a worker makes of a delivery on which it gives up."""
        return of_message(
            subject=subject,
            stream=self.stream,
            sequence=self.sequence,
            stored=self.stored,
            consumer=self.consumer,
            body=body,
            headers=headers,
            deliveries=self.deliveries,
            failure=failure,
            failed_at=failed_at,
            first_failure=first_failure,
        )


def letter_id(stream: str, reader: str, sequence: int, stored: datetime | None) -> str:
    """Two tokens: who gave up on which sequence, and when the message was stored.

    The time is there because a stream that was deleted and made again counts its sequences from 1 again. A time that is
    not known counts as 0.
    """
    micros = (stored - EPOCH) // timedelta(microseconds=1) if stored else 0
    return f"{_digest(stream, reader, str(sequence))}.{micros}"


def any_time(id_: str) -> str:
    """Return a filter for the id with any time in it: for a message that is gone and whose time is unknown."""
    return f"{id_.partition('.')[0]}.*"


def event_id(body: bytes, headers: Mapping[str, list[str]]) -> str | None:
    """What names the event: `event_id` of its JSON, or else its message id."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict) and isinstance(document.get("event_id"), str | int):
        return str(document["event_id"])
    return _first(headers, MESSAGE_ID) or _first(headers, names.OWN + MESSAGE_ID)


def is_for(headers: Mapping[str, list[str]], stream: str, consumer: str) -> bool:
    """Whether a delivered message concerns this consumer: a replay may be meant for one consumer only."""
    only = _first(headers, names.ONLY)
    return only is None or only == f"{stream}/{consumer}"


# -- as header values ----------------------------------------------------------------------------------------------


def one_line(text: str, limit: int | None = None) -> str:
    """Text that can be a header's value: no line breaks, no NUL, only what UTF-8 can say, and not too long."""
    clean = _BREAKS.sub(" ", text).encode("utf-8", "replace").decode()
    return clean if limit is None or len(clean) <= limit else f"{clean[: limit - 1]}…"


def escaped(text: str) -> str:
    """Lines of text as one header value."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return one_line("".join(_ESCAPES.get(char, char) for char in lines))


def unescaped(value: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], value)


def _carried(name: str) -> str:
    """The server acts on `Nats-` headers: on a letter they are only kept."""
    return names.OWN + name if name.lower().startswith("nats-") else name


def _original(name: str) -> str:
    return name.removeprefix(names.OWN)


def _is_own(name: str) -> bool:
    return name.startswith(names.OWN) or not name.startswith((names.PREFIX, "Nats-"))


def _digest(*parts: str) -> str:
    return blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def _time(moment: datetime | None) -> str | None:
    return moment.astimezone(UTC).isoformat() if moment else None


def _parsed(text: str | None) -> datetime | None:
    try:
        return parse_time(text or "")
    except ValueError:
        return None  # written by another program


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


def _first(headers: Mapping[str, list[str]], name: str) -> str | None:
    return next(iter(headers.get(name) or ()), None)
