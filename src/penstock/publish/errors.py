"""Errors of atomic batches, by what happened; each says what to do next.

ApiError
└── BatchRejected            the server said no: nothing of the batch is stored
    ├── NotEnabled           the stream does not take atomic batches
    ├── TooLarge             more messages than one batch may have
    ├── Gap                  members did not reach the stream
    ├── TimedOut             the server gave the batch up after its limit of silence
    ├── DuplicateId          a message id of the batch is already in the stream's window
    │   └── RepeatedId       a message id comes twice in the batch
    ├── StreamFull           the stream is at a limit, and set to refuse what is new
    ├── WrongSequence        an expected last sequence was not the last one
    ├── UnsupportedHeader    a header that batches may not carry
    ├── BadId                a batch id the server does not take
    └── TooManyInFlight      retryable: too many batches under way at once
Unavailable
└── NobodyListens            no stream stores the subject, for longer than the publisher's `no_responders_timeout`
OutcomeUnknown
└── BatchOutcomeUnknown      the commit was sent and not answered: ask `resolve`
"""

from __future__ import annotations

from penstock.errors import ApiError, OutcomeUnknown, ServerBusy, Unavailable
from penstock.jetstream.codes import WRONG_LAST_SEQUENCE, api_error
from penstock.publish.model import MAX_BATCH_ID, MAX_MESSAGES, BatchRef


class BatchRejected(ApiError):
    """The server refused a batch. Nothing of it is stored."""

    def __init__(self, stream: str, batch_id: str, code: int, err_code: int, description: str) -> None:
        super().__init__(f"batch {batch_id!r} for stream {stream!r}", code, err_code, description)
        self.args = (stream, batch_id, code, err_code, description)
        self.stream = stream
        self.batch_id = batch_id

    def __str__(self) -> str:
        return f"{self.what} was rejected, nothing of it is stored: {self.reason}"

    @property
    def told(self) -> tuple[str, str, int, int, str]:
        """The server's answer, for building a more specific error."""
        return self.stream, self.batch_id, self.code, self.err_code, self.description

    @property
    def reason(self) -> str:
        """What happened and what to do next, in one clause."""
        return f"{self.description} (server error {self.err_code})"


class NotEnabled(BatchRejected):
    """The stream does not take atomic batches."""

    @property
    def reason(self) -> str:
        return (
            f"the stream does not allow atomic batches; set `allow_atomic: true` for {self.stream} in penstock.yaml "
            "and run `penstock apply`"
        )


class TooLarge(BatchRejected):
    """The batch has more messages than the server takes in one."""

    @property
    def reason(self) -> str:
        return (
            f"it has more messages than one batch may have ({MAX_MESSAGES}, unless the server says otherwise); split "
            "it, or use chunked=True, where each chunk is atomic by itself"
        )


class Gap(BatchRejected):
    """Members of the batch did not reach the stream, so the server dropped all of it."""

    def __init__(
        self, stream: str, batch_id: str, code: int, err_code: int, description: str, strangers: tuple[str, ...] = ()
    ) -> None:
        super().__init__(stream, batch_id, code, err_code, description)
        self.args = (stream, batch_id, code, err_code, description, strangers)
        self.strangers = strangers
        """Subjects of the batch that the stream does not have."""

    @property
    def reason(self) -> str:
        if self.strangers:
            return f"these subjects are not the stream's: {', '.join(self.strangers[:5])}; publish them elsewhere"
        return (
            "messages of it did not reach the stream; one may be larger than the stream's max_msg_size, the stream's "
            "leader may have changed meanwhile, or somebody else used the same batch id"
        )


class TimedOut(BatchRejected):
    """The server dropped the batch because no member arrived for too long."""

    def __init__(
        self, stream: str, batch_id: str, code: int, err_code: int, description: str, idle: float = 0.0
    ) -> None:
        super().__init__(stream, batch_id, code, err_code, description)
        self.args = (stream, batch_id, code, err_code, description, idle)
        self.idle = idle
        """Seconds between its first bytes and its end."""

    @property
    def reason(self) -> str:
        return (
            f"it was open for {self.idle:.1f} s, and the server drops a batch after 10 s without a message; "
            "add messages before `flush`, or commit sooner"
        )


class DuplicateId(BatchRejected):
    """A message id of the batch is in the stream's duplicate window already."""

    def __init__(
        self, stream: str, batch_id: str, code: int, err_code: int, description: str, ids: tuple[str, ...] = ()
    ) -> None:
        super().__init__(stream, batch_id, code, err_code, description)
        self.args = (stream, batch_id, code, err_code, description, ids)
        self.ids = ids
        """The ids of the batch, of which at least one is the duplicate."""

    @property
    def message_id(self) -> str | None:
        """The duplicate id, when it can only be that one: the server does not name it."""
        return self.ids[0] if len(self.ids) == 1 else None

    @property
    def reason(self) -> str:
        if self.message_id is not None:
            return f"message id {self.message_id!r} is already stored; it may be this very batch from an earlier try"
        some = ", ".join(map(repr, self.ids[:5]))
        return f"one of its {len(self.ids)} message ids is already stored ({some}{', …' if len(self.ids) > 5 else ''})"


class RepeatedId(DuplicateId):
    """A message id comes twice in the batch."""

    @property
    def reason(self) -> str:
        return f"message id {self.message_id!r} comes twice in it; each message of a batch needs an id of its own"


class StreamFull(BatchRejected):
    """The stream is at its limit of messages or bytes, and its `discard: new` refuses what is more."""

    @property
    def reason(self) -> str:
        return (
            f"the stream is full ({self.description}) and refuses what is new; raise its limit, or make room, "
            "and publish again"
        )


class WrongSequence(BatchRejected):
    """The last sequence of the stream, or of a subject, was not the expected one: another publisher wrote meanwhile."""

    def __init__(
        self,
        stream: str,
        batch_id: str,
        code: int,
        err_code: int,
        description: str,
        expected: tuple[int, ...] = (),
        actual: int | None = None,
    ) -> None:
        super().__init__(stream, batch_id, code, err_code, description)
        self.args = (stream, batch_id, code, err_code, description, expected, actual)
        self.expected = expected
        """What the members of the batch expected, in their order."""
        self.actual = actual
        """The actual last sequence; None while another write to the same subject is in progress."""

    @property
    def reason(self) -> str:
        expected = " or ".join(map(str, self.expected))
        what = f"last sequence {expected} was expected" if expected else "a header expects another last sequence"
        found = "another write is under way" if self.actual is None else f"it is {self.actual}"
        return f"{what}, and {found}; read again, then retry"


class UnsupportedHeader(BatchRejected):
    """A member carries a header that has no meaning inside a batch."""

    @property
    def reason(self) -> str:
        return f"{self.description}; leave that header out"


class BadId(BatchRejected):
    """The server does not take this batch id."""

    @property
    def reason(self) -> str:
        return f"a batch id has 1 to {MAX_BATCH_ID} characters, this one has {len(self.batch_id)}"


class TooManyInFlight(BatchRejected):
    """The stream, or the server, has too many open batches; the publisher has waited and retried."""

    retryable = True

    @property
    def reason(self) -> str:
        return "too many batches are under way on this stream or server; try again later, with fewer at once"


class NobodyListens(Unavailable):
    """No stream stores messages of this subject."""

    retryable = False

    def __init__(self, stream: str, subject: str, tried_for: float = 0.0) -> None:
        super().__init__(stream, subject, tried_for)
        self.stream = stream
        self.subject = subject
        self.tried_for = tried_for
        """Seconds for which the batch was retried."""

    def after(self, seconds: float) -> NobodyListens:
        """Return the same error with the seconds spent on retries."""
        return NobodyListens(self.stream, self.subject, seconds)

    def __str__(self) -> str:
        tried = f" (tried for {self.tried_for:.1f} s)" if self.tried_for else ""
        return f"no stream listens on {self.subject!r}{tried}: check the subjects of stream {self.stream!r}"


class BatchOutcomeUnknown(OutcomeUnknown):
    """The commit of a batch was sent, and no answer came: all of it is stored, or nothing.

    `ref` is what `resolve` needs to find out, now or from another process.
    """

    def __init__(self, ref: BatchRef, reason: str) -> None:
        super().__init__(ref, reason)
        self.ref = ref
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"whether batch {self.ref.batch_id!r} is stored in {self.ref.stream!r} is not known ({self.reason}); "
            "resolve() finds out"
        )


DISABLED, MISSING_SEQUENCE, INCOMPLETE, UNSUPPORTED_HEADER, BAD_ID = 10174, 10175, 10176, 10177, 10179
TOO_LARGE, BAD_COMMIT, DUPLICATE, TOO_MANY = 10199, 10200, 10201, 10210
WRONG_SEQUENCE, DUPLICATE_BUSY = 10071, 10158
NOT_STORED = 10077
"""The store refused it: the text says whether a limit of the stream is the reason."""
OTHER_STREAM = 10060
"""The batch arrived at another stream than its first message expects."""

BY_ERR_CODE: dict[int, type[BatchRejected]] = {
    DISABLED: NotEnabled,
    INCOMPLETE: Gap,
    OTHER_STREAM: Gap,
    UNSUPPORTED_HEADER: UnsupportedHeader,
    BAD_ID: BadId,
    TOO_LARGE: TooLarge,
    DUPLICATE: DuplicateId,
    DUPLICATE_BUSY: TooManyInFlight,
    TOO_MANY: TooManyInFlight,
    **dict.fromkeys(WRONG_LAST_SEQUENCE, WrongSequence),
}


def rejection(stream: str, batch_id: str, raw: dict[str, object]) -> ApiError:
    """The error for the `error` object of a batch's answer, without what only the batch itself knows."""
    general = api_error(f"batch {batch_id!r} for stream {stream!r}", raw)
    kind = BY_ERR_CODE.get(general.err_code, BatchRejected)
    if general.err_code == NOT_STORED and "exceeded" in general.description:
        kind = StreamFull
    elif kind is BatchRejected and isinstance(general, ServerBusy):
        return general  # as any publish may get it: no leader, the server's storage full
    return kind(stream, batch_id, general.code, general.err_code, general.description)
