"""An atomic batch without I/O: its members as bytes to send, the server's answers as an ack or an error.

The server takes the members of a batch in order and keeps them aside. Only the first and the last need an answer: the
first says whether the server has room, the last whether all is stored. So a whole batch can be sent in one go. When
the first is refused, the server refuses the rest as well, since it does not know the batch: nothing is stored.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from penstock.errors import ConfigError, PenstockError, ServerBusy
from penstock.publish import errors
from penstock.publish.model import MAX_BATCH_ID, MAX_MESSAGES, BatchAck, BatchRef
from penstock.publish.reserved import check_unreserved
from penstock.subjects import is_literal, matches
from penstock.wire import frames, headers
from penstock.wire.headers import Headers
from penstock.wire.session import NO_RESPONDERS

BATCH_ID = "Nats-Batch-Id"
BATCH_SEQUENCE = "Nats-Batch-Sequence"
BATCH_COMMIT = "Nats-Batch-Commit"
MESSAGE_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
EXPECTED_LAST = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_OF_SUBJECT = "Nats-Expected-Last-Subject-Sequence"
INCREMENT = "Nats-Incr"
"""Header with the increment of a counter. The server refuses expectations beside it, also that of a stream."""
UNSUPPORTED = "Nats-Expected-Last-Msg-Id"

GIVEN_UP_AFTER = 10.0
"""Seconds of silence after which the server drops a batch."""
PIECE = 250
"""Members that are encoded and sent at once."""
NEVER_A_SEQUENCE = 2**40
"""A number that no batch and no stream reaches: a message that claims it is refused, and never stored."""

_RESERVED = {name.lower() for name in (BATCH_ID, BATCH_SEQUENCE, BATCH_COMMIT, EXPECTED_STREAM)}
_COMMIT = headers.line(BATCH_COMMIT, "1")
_END_OF_BATCH = headers.line(BATCH_COMMIT, "eob")
_SEQUENCE_LINES = [b"%d\r\n" % n for n in range(MAX_MESSAGES + 2)]
_INCREMENT_LINE = f"{INCREMENT}: ".encode()
MAX_PUBLISHER = 32
_PUBLISHER = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_PUBLISHER}}}")
_NUMBER = re.compile(r"\d+")


def new_id(publisher: str | None = None) -> str:
    """Return a unique batch id; short, since every message carries it and the stream keeps it."""
    return f"{publisher}.{secrets.token_hex(8)}" if publisher else secrets.token_hex(8)


def checked_publisher(name: str | None) -> str | None:
    """Refuse a name that cannot begin a batch id."""
    if name is not None and not _PUBLISHER.fullmatch(name):
        raise ConfigError(f"a publisher's name has 1 to {MAX_PUBLISHER} letters, digits, - and _, and {name!r} is none")
    return name


class Batch:
    """The members of one batch, in order, with the answers they may get. Used once."""

    def __init__(self, stream: str, batch_id: str | None = None, end_of_batch: bool = False) -> None:
        self.stream = stream
        self.batch_id = new_id() if batch_id is None else batch_id
        if not 1 <= len(self.batch_id.encode()) <= MAX_BATCH_ID:
            raise self._local(errors.BadId, errors.BAD_ID)
        self.end_of_batch = end_of_batch
        """Commit with a message that is not stored, instead of with the last member."""
        self.subjects: list[bytes] = []
        self.payloads: list[bytes] = []
        self.lines: list[bytes] | None = None
        """Header lines of each member; None while none has any."""
        self.message_ids: list[str] = []
        self.expected: list[int] = []
        self.sent = 0
        """Members whose bytes were taken for sending."""
        self.over = False
        """Whether it was committed or dropped, whatever the outcome."""
        self._prefix = b"NATS/1.0\r\n" + headers.line(BATCH_ID, self.batch_id) + BATCH_SEQUENCE.encode() + b": "

    def __len__(self) -> int:
        return len(self.subjects)

    # -- members ---------------------------------------------------------------------------------------------------

    def add(
        self,
        subject: str,
        data: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        expected_last_sequence: int | None = None,
        expected_last_subject_sequence: int | None = None,
    ) -> int:
        """Add a member, and return its number, counted from 0. See `atomic.AtomicBatch.add` for what it means."""
        # Called once a message: each check is one comparison when all is well.
        if self.over or len(self.payloads) >= MAX_MESSAGES:
            self._check_room(1)
        if type(data) is not bytes:
            _check_data((data,))
        encoded = literal_subject(subject)
        own = self._checked_headers(headers) if headers else b""
        if message_id is not None:
            own += self._message_id_line(message_id)
        if expected_last_sequence is not None or expected_last_subject_sequence is not None:
            own += self._expectation_lines(encoded, expected_last_sequence, expected_last_subject_sequence)
        if own or self.lines is not None:
            self._lines_of_all().append(own)
        self.subjects.append(encoded)
        self.payloads.append(data)
        return len(self.payloads) - 1

    def extend(
        self,
        subjects: str | Sequence[str],
        payloads: Sequence[bytes],
        headers: Sequence[Headers | None] | None = None,
        message_id: str | None = None,
    ) -> None:
        """Add many members at once, with little work for each: one subject for all, or one each.

        `message_id` goes to the last of them: it names the batch as a whole for the stream's duplicate window, since
        one duplicate rejects all.
        """
        count = len(payloads)
        if not count:
            return
        self._check_room(count)
        _check_data(payloads)
        encoded = _encoded_subjects(subjects, count)
        own = [self._checked_headers(one) for one in headers] if headers else None
        if own is not None and len(own) != count:
            raise ConfigError(f"{count} messages came with headers for {len(own)}")
        self._extend_lines(own, count)
        self.subjects.extend(encoded)
        self.payloads.extend(payloads)
        if message_id is not None:
            self._lines_of_all()[-1] += self._message_id_line(message_id)

    def extend_encoded(
        self, subjects: Sequence[bytes], payloads: Sequence[bytes], lines: Sequence[bytes], expected: int | None = None
    ) -> None:
        """Add members whose subjects and header lines are bytes of the wire already, as they came from another stream.

        Nothing is checked or added: a last sequence that the lines expect is named in `expected`, for error messages.
        """
        self._check_room(len(payloads))
        self._extend_lines(list(lines), len(payloads))
        self.subjects.extend(subjects)
        self.payloads.extend(payloads)
        if expected is not None:
            self.expected.append(expected)

    def _lines_of_all(self) -> list[bytes]:
        if self.lines is None:
            self.lines = [b""] * len(self)
        return self.lines

    def _extend_lines(self, own: list[bytes] | None, count: int) -> None:
        if own is not None or self.lines is not None:
            self._lines_of_all().extend(own or [b""] * count)

    def end(self) -> None:
        """Close the batch: nothing can be added or sent any more. Raises when it was closed before."""
        self.check_open()
        self.over = True

    def check_open(self) -> None:
        """Raise when it was committed or dropped."""
        if self.over:
            raise ConfigError(f"batch {self.batch_id!r} was committed or dropped already: make a new one")

    def _check_room(self, more: int) -> None:
        self.check_open()
        if len(self) + more > MAX_MESSAGES:
            raise self._local(errors.TooLarge, errors.TOO_LARGE)

    def _checked_headers(self, given: Headers | None) -> bytes:
        if not given:
            return b""
        for name in given:
            if not isinstance(name, str):
                raise ConfigError(f"headers are names and their values, and {name!r} is no name")
            if name.lower() in _RESERVED:
                raise ConfigError(f"header {name!r} is written by the batch itself: leave it out")
            if name.lower() == UNSUPPORTED.lower():
                raise self._local(errors.UnsupportedHeader, errors.UNSUPPORTED_HEADER, f"{name} cannot be used")
        return headers.lines(given)

    def _message_id_line(self, message_id: str) -> bytes:
        check_message_id(message_id)
        if message_id in self.message_ids:
            raise errors.RepeatedId(*self._local(errors.RepeatedId, errors.DUPLICATE).told, (message_id,))
        self.message_ids.append(message_id)
        return headers.line(MESSAGE_ID, message_id)

    def _expectation_lines(self, subject: bytes, last: int | None, last_of_subject: int | None) -> bytes:
        made = b""
        if last is not None:
            if self.subjects:
                raise ConfigError("only the first message of a batch can expect a last sequence of the stream")
            made += headers.line(EXPECTED_LAST, str(last))
        if last_of_subject is not None:
            if subject in self.subjects:
                raise ConfigError(
                    f"only the first message on {subject.decode()!r} in a batch can expect that subject's last sequence"
                )
            made += headers.line(EXPECTED_LAST_OF_SUBJECT, str(last_of_subject))
        self.expected.extend(number for number in (last, last_of_subject) if number is not None)
        return made

    # -- bytes to send ---------------------------------------------------------------------------------------------

    def ahead(self, first_reply: str) -> bytes:
        """The members that can go out before the commit: all that are not sent, but the last, which may commit."""
        stop = len(self) if self.end_of_batch else len(self) - 1
        return self._encoded(stop, first_reply, None)

    def commit(self, first_reply: str, last_reply: str) -> Iterator[bytes]:
        """Everything that is not sent, and the commit, in pieces: the server works on one while the next is encoded."""
        if not self.subjects:
            raise ConfigError("a batch needs at least one message")
        for stop in range(self.sent + PIECE, len(self), PIECE):
            yield self._encoded(stop, first_reply, None)
        if not self.end_of_batch:
            yield self._encoded(len(self), first_reply, last_reply)
        else:
            lines = _SEQUENCE_LINES[len(self) + 1] + _END_OF_BATCH
            end = _published(self.subjects[-1], last_reply, self._prefix + lines + b"\r\n", b"")
            yield self._encoded(len(self), first_reply, None) + end

    @property
    def first_answers(self) -> bool:
        """Whether the bytes of `commit` make the server answer to the first member, besides the last."""
        return self.sent == 0 and (len(self) > 1 or self.end_of_batch)

    @property
    def first_subject(self) -> str:
        """The subject of its first member, also used to query the batch."""
        return self.subjects[0].decode() if self.subjects else ""

    def rewind(self) -> None:
        """Send everything again from the start: the server has refused the first member."""
        self.sent = 0

    def abandon(self) -> bytes:
        """Return a message that makes the server drop the batch at once, instead of after its timeout."""
        return drop(self.batch_id, self.subjects[0]) if self.sent else b""

    def _encoded(self, stop: int, first_reply: str, commit_reply: str | None) -> bytes:
        start, self.sent = self.sent, max(stop, self.sent)
        if start >= stop:
            return b""
        parts = self._plain(start, stop)
        if start == 0:
            parts[0] = self._special(0, first_reply)
        if commit_reply is not None:
            parts[-1] = self._special(stop - 1, commit_reply, _COMMIT)
        return b"".join(parts)

    def _plain(self, start: int, stop: int) -> list[bytes]:
        """Members without an answer. This runs once a message: it is written to be short, not pretty."""
        prefix, size = self._prefix, len(self._prefix) + 2
        rows = zip(
            self.subjects[start:stop], self.payloads[start:stop], _SEQUENCE_LINES[start + 1 : stop + 1], strict=True
        )
        if self.lines is None:
            return [
                b"HPUB %b %d %d\r\n%b%b\r\n%b\r\n"
                % (subject, head := size + len(number), head + len(data), prefix, number, data)
                for subject, data, number in rows
            ]
        return [
            b"HPUB %b %d %d\r\n%b%b%b\r\n%b\r\n"
            % (subject, head := size + len(number) + len(own), head + len(data), prefix, number, own, data)
            for (subject, data, number), own in zip(rows, self.lines[start:stop], strict=True)
        ]

    def _special(self, index: int, reply: str, commit: bytes = b"") -> bytes:
        return _published(self.subjects[index], reply, self._block(index, commit), self.payloads[index])

    def _block(self, index: int, commit: bytes) -> bytes:
        own = self.lines[index] if self.lines is not None else b""
        return b"".join((self._frame_lines(index), own, commit, b"\r\n"))

    def _frame_lines(self, index: int) -> bytes:
        # The server compares the stream at the commit: a batch never ends up in another one that has its subjects.
        bound = index == 0 and not self._counts
        stream = headers.line(EXPECTED_STREAM, self.stream) if bound else b""
        return self._prefix + _SEQUENCE_LINES[index + 1] + stream

    @property
    def _counts(self) -> bool:
        """Whether its first member is an increment of a counter."""
        return self.lines is not None and is_increment(self.lines[0])

    def check_subjects(self, known_subjects: Sequence[str]) -> None:
        """Refuse increments of counters in other streams, which no header keeps away from them."""
        if self._counts and (strangers := self._strangers(known_subjects)):
            raise errors.Gap(*self._local(errors.Gap, errors.OTHER_STREAM).told, strangers)

    def check_sizes(self, max_payload: int) -> None:
        """Refuse a member so large that the server would close the connection."""
        own = max(map(len, self.lines)) if self.lines else 0
        most = max(map(len, self.payloads), default=0) + own + len(self._frame_lines(0)) + len(_COMMIT) + 4
        if most <= max_payload:
            return
        for index, data in enumerate(self.payloads):
            size = len(data) + len(self._block(index, _COMMIT))
            if size > max_payload:
                raise ConfigError(
                    f"message {index} of the batch, for {self.subjects[index].decode()!r}, has {size} bytes with its "
                    f"headers; this server takes {max_payload}: make it smaller, or raise the server's max_payload"
                )

    # -- answers ---------------------------------------------------------------------------------------------------

    def accepted(self, first: frames.Message) -> None:
        """Take the answer to the first member. Raises why the server does not take the batch."""
        if error := self._error_in(first, self.subjects[0]):
            raise error

    def verdict(
        self, first: frames.Message | None, last: frames.Message, idle: float, known_subjects: Sequence[str] = ()
    ) -> BatchAck:
        """The ack of the commit. Raises what the server answered instead: nothing is stored then.

        When the first member was refused, that is the reason, and the answer to the last only says that the batch is
        unknown. `idle` is how long the server heard nothing, `known_subjects` are the stream's: both tell why members
        are missing.
        """
        error = self._error_in(last, self.subjects[-1])
        if error is None:
            ack = json.loads(last.data)
            return BatchAck(ack["stream"], ack["seq"], ack["batch"], ack["count"])
        if first is not None:
            self.accepted(first)
        raise self._explained(error, idle, known_subjects)

    def _error_in(self, answer: frames.Message, subject: bytes) -> PenstockError | None:
        status = answer.status
        if status and status[0] == NO_RESPONDERS:
            return errors.NobodyListens(self.stream, subject.decode())
        raw = json.loads(answer.data).get("error") if answer.data else None
        if raw is None:
            return None
        return self._detailed(errors.rejection(self.stream, self.batch_id, raw))

    def _detailed(self, error: PenstockError) -> PenstockError:
        """Add details that the batch knows and the server does not report."""
        if isinstance(error, errors.DuplicateId):
            return errors.DuplicateId(*error.told, tuple(self.message_ids))
        if isinstance(error, errors.WrongSequence):
            found = _NUMBER.search(error.description)
            actual = int(found[0]) if found else None
            return errors.WrongSequence(*error.told, tuple(self.expected), actual)
        return error

    def _explained(self, error: PenstockError, idle: float, known_subjects: Sequence[str]) -> PenstockError:
        if not isinstance(error, errors.Gap):
            return error
        if idle >= GIVEN_UP_AFTER:
            return errors.TimedOut(*error.told, idle)
        return errors.Gap(*error.told, self._strangers(known_subjects))

    def _strangers(self, known_subjects: Sequence[str]) -> tuple[str, ...]:
        """Return the subjects of the batch that the stream does not have; empty when the stream's are not known."""
        if not known_subjects:
            return ()
        mine = dict.fromkeys(subject.decode() for subject in self.subjects)
        return tuple(one for one in mine if not any(matches(known, one) for known in known_subjects))

    def ref(self, after: int) -> BatchRef:
        """What `resolve` needs; `after` is a sequence the stream had before."""
        return BatchRef(self.stream, self.batch_id, len(self), self.subjects[-1].decode(), after)

    def _local(self, kind: type[errors.BatchRejected], err_code: int, description: str = "") -> errors.BatchRejected:
        return kind(self.stream, self.batch_id, 400, err_code, description or "refused before it was sent")


def drop(batch_id: str, subject: bytes, reply: str = "") -> bytes:
    """A message that makes the server drop the batch of this id, if it is still open, and that is never stored."""
    block = headers.encode({BATCH_ID: batch_id, BATCH_SEQUENCE: str(NEVER_A_SEQUENCE)})
    return _published(subject, reply, block, b"")


def probe(subject: bytes, reply: str) -> bytes:
    """A message that is never stored; the stream's leader answers it with the last sequence it has given out.

    On a replicated stream that can be ahead of what is stored: those writes are still being agreed upon.
    """
    return _published(subject, reply, headers.encode({EXPECTED_LAST: str(NEVER_A_SEQUENCE)}), b"")


def ask_id(subject: bytes, message_id: str, reply: str) -> bytes:
    """A batch that is never stored; the answer is another one when the stream has the message id in its window.

    The server looks at the members in order, and the second one expects what cannot be. An expectation beside the id
    itself would not do: a single server looks at it before the id, and a mismatch of `UNSUPPORTED` blocks a
    replicated stream (nats-server 2.15).
    """
    batch_id = new_id()
    first = {BATCH_ID: batch_id, BATCH_SEQUENCE: "1", MESSAGE_ID: message_id}
    last = {BATCH_ID: batch_id, BATCH_SEQUENCE: "2", BATCH_COMMIT: "1", EXPECTED_LAST_OF_SUBJECT: str(NEVER_A_SEQUENCE)}
    return _published(subject, "", headers.encode(first), b"") + _published(subject, reply, headers.encode(last), b"")


def is_stored(subject: str, message_id: str, answer: frames.Message) -> bool:
    """Whether the answer to `ask_id` says that the id is there. Raises when the server could not say."""
    error = errors.rejection(subject, message_id, json.loads(answer.data or b"{}").get("error") or {})
    if isinstance(error, errors.WrongSequence | errors.DuplicateId):
        return isinstance(error, errors.DuplicateId)
    raise ServerBusy(f"message id {message_id!r} on {subject!r}", 503, error.err_code, error.description)


def is_increment(lines: bytes) -> bool:
    """Whether these header lines are of an increment of a counter."""
    return lines.startswith(_INCREMENT_LINE) or b"\r\n" + _INCREMENT_LINE in lines


def probed(answer: frames.Message) -> int:
    """The sequence in the answer to a probe; 0 when the server refused it for another reason."""
    error = json.loads(answer.data).get("error", {}) if answer.data else {}
    found = _NUMBER.search(error.get("description", ""))
    return int(found[0]) if found and error.get("err_code") == errors.WRONG_SEQUENCE else 0


@lru_cache(maxsize=10_000)  # once a message, and subjects repeat
def literal_subject(subject: str) -> bytes:
    """The subject as bytes, if a message can be published to it. Every publisher takes its subjects from here."""
    if not isinstance(subject, str):
        raise ConfigError(f"a subject is text, not {subject!r}")
    frames.checked_subject(subject)
    check_unreserved(subject)
    if not is_literal(subject):
        raise ConfigError(f"{subject!r} has a wildcard: messages are published to one subject")
    try:
        return subject.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{subject!r} is not a subject: it is no text (half a surrogate pair)") from None


def check_message_id(message_id: str) -> None:
    """Refuse an id that the server would treat as missing, and store the message twice."""
    if message_id == "":
        raise ConfigError("the message id is empty, which the server takes for none: leave it out, or give one")


def _encoded_subjects(subjects: str | Sequence[str], count: int) -> Iterable[bytes]:
    if isinstance(subjects, str):
        return [literal_subject(subjects)] * count
    if len(subjects) != count:
        raise ConfigError(f"{count} messages came with {len(subjects)} subjects")
    known = {subject: literal_subject(subject) for subject in set(subjects)}
    return [known[subject] for subject in subjects]


def _check_data(payloads: Sequence[bytes]) -> None:
    for kind in set(map(type, payloads)):
        if not issubclass(kind, bytes | bytearray | memoryview):
            raise ConfigError(f"message data is bytes, not {kind.__name__}: encode it first")


def _published(subject: bytes, reply: str, block: bytes, data: bytes) -> bytes:
    to = b"%b %b" % (subject, reply.encode()) if reply else subject
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (to, len(block), len(block) + len(data), block, data)
