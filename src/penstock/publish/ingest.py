"""Fast ingest as a state machine: rows in, bytes out, replies in. No I/O and no clock.

A fast ingest is one ordered series of messages, counted from 1: their *positions*. On the wire it is one server batch
after the other (a *segment* each): the server ends a batch at a gap, after 10 s of silence, and when it restarts, and
only the answer that ends a batch says exactly how much of it is stored. Rows are kept until they are known to be
stored, so that the next segment continues where the last one really ended:

1. rows are sent while the window (the server's ack interval × `max_outstanding_acks`, and bytes) has room
   (crash after: what the server got is stored; the caller was told only about acknowledged positions);
2. a flow ack settles positions, and their rows are dropped (ack lost: a ping asks for it again);
3. the end of a segment is a commit without a message; its answer settles all of the segment, exactly;
4. on a new connection the open segment is ended the same way. Either the server still knows it, and the answer is
   exact: nothing lost, nothing twice. Or it has forgotten it, and the unacknowledged rows are *in doubt*:
   `IngestOptions.on_doubt` decides.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ApiError, DeadlineExceeded, FeatureMissing, PenstockError, ServerBusy
from penstock.jetstream.codes import api_error
from penstock.jetstream.features import FAST_INGEST
from penstock.publish import replies
from penstock.publish.interruptions import (
    FastIngestDisabled,
    IngestGap,
    IngestInterrupted,
    MessageRefused,
    WrongStream,
)
from penstock.publish.options import FastAck, IngestOptions, Lost
from penstock.publish.rows import MAX_LEADS, Row, bound_to, control, frames, has_id, subject_of
from penstock.wire.frames import MAX_MESSAGE, Message

UNANSWERED = 4
"""After this many pings without any answer the connection counts as dead."""
FRUITLESS = 10
"""After this many segments in a row that stored nothing, resending stops."""
REASON_WITHIN = 0.3
"""Seconds to wait for the reason of a gap."""
BUSY_DELAY = 0.1
"""Seconds before a busy server is retried."""


@dataclass(slots=True)
class Segment:
    """One server batch: positions `base` + 1 to `base` + `sent`."""

    batch: str
    base: int
    prefix: bytes
    lead: bytes
    """Subject of its first message, where pings and the end go too."""
    sent: int = 0
    acked: int = 0
    every: int = 0
    """The server's ack interval; 0 until its first answer."""
    ending: bool = False
    resumed: bool = False
    """What its end does not cover is sent again, in the next segment."""
    unsent_from: int = 0
    """With `on_gap="continue"`: the server got nothing from here on, and that is no loss, since it is sent again."""
    trouble: PenstockError | None = None
    """Why it ends early; raised when its end is known."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why single messages did not get into the batch; their gap is reported by the next message."""
    chunks: deque[tuple[int, int]] = field(default_factory=deque)
    """Last sequence and bytes of each chunk in flight."""
    bytes_in_flight: int = 0

    def sending(self, count: int, size: int) -> None:
        self.sent += count
        self.chunks.append((self.sent, size))
        self.bytes_in_flight += size

    def settle(self, seq: int) -> None:
        self.acked = seq
        while self.chunks and self.chunks[0][0] <= seq:
            self.bytes_in_flight -= self.chunks.popleft()[1]


class Ingest:
    """The series, its current segment, and what is settled. Time comes in as `now`, in seconds."""

    def __init__(
        self,
        stream: str,
        options: IngestOptions,
        inbox: str,
        on_lost: Callable[[Lost], object] = lambda _: None,
        batch_id: str = "",
    ) -> None:
        self.stream = stream
        self.options = options
        self.batch_id = batch_id or secrets.token_hex(6)
        self.stored = 0
        """Positions up to here are settled: stored, or (only with `on_gap="continue"`) lost."""
        self.added = 0
        """The position of the last row added."""
        self.sequence = 0
        """Stream sequence of the last message whose sequence is known; flow acks do not tell it."""
        self.lost = 0
        self.maybe_twice = 0
        self.error: PenstockError | None = None
        """Why the series cannot go on."""
        self.stalled = False
        """The server answers nothing at all: a new connection is needed."""
        self.max_payload = MAX_MESSAGE
        """Bytes of headers and data that the server takes."""
        self._inbox = inbox
        self._on_lost = on_lost
        self._rows: list[Row] = []
        """Positions `stored` + 1 to `added`; the first of them may be on their way."""
        self._segment: Segment | None = None
        self._segments = 0
        self._end_at = 0
        self._active = 0.0
        self._heard = 0.0
        self._asked: float | None = None
        self._unanswered = 0
        self._silent_since: float | None = None
        self._fruitless = 0
        self._retry_at = 0.0
        self._verdict: tuple[float, Segment] | None = None
        """A gap that ends the series, and until when a reason for it may still come."""
        self._busy_since: float | None = None
        self._unheard_since: float | None = None
        """When the server first reported no stream for a subject that this stream has never stored."""
        self._taken: set[bytes] = set()
        """Subjects of first messages that the stream has stored: "no responders" there is an outage, not a mistake."""

    # -- adding rows, and results ------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Rows that wait to be sent."""
        segment = self._segment
        return len(self._rows) - (segment.sent - segment.acked if segment else 0)

    @property
    def ending(self) -> bool:
        """Whether what `end` asked for is still to come."""
        return self._end_at > 0

    @property
    def settled(self) -> bool:
        """Nothing is on its way, and nothing is open at the server."""
        return not self._rows and self._segment is None

    def add(self, rows: Sequence[Row]) -> None:
        """Queue rows; they are kept until they are stored, so their data must not be changed."""
        self._rows.extend(rows)
        self.added += len(rows)

    def add_one(self, row: Row) -> int:
        """Queue a row, and return its position."""
        self._rows.append(row)
        self.added += 1
        return self.added

    def end(self) -> int:
        """Settle everything added so far, and return its last position. What is added later starts a new segment."""
        self._end_at = 0 if self.settled else self.added
        return self.added

    def ack(self) -> FastAck:
        """The result so far; final once `settled`."""
        count = self.stored - self.lost
        return FastAck(self.stream, self.sequence, self.batch_id, count, self.lost, self.maybe_twice)

    # -- sending -----------------------------------------------------------------------------------------------------

    def outgoing(self, now: float) -> bytes:
        """What to send now: rows that the window has room for, then the end, or a ping, when one is due."""
        if self._verdict and now >= self._verdict[0]:
            self.error = self.error or self._verdict[1].trouble
        if self.error or self._verdict or self.stalled or now < self._retry_at:
            return b""
        return self._next_rows(now) + self._next_control(now)

    def ping(self, now: float) -> bytes:
        """A question about the last ack; nothing when no batch is open."""
        segment = self._segment
        return self._ask(segment, now) if segment and not segment.ending else b""

    def connected(self, inbox: str, now: float) -> None:
        """Continue on a new connection: end the open segment on it, since the answer says what was stored."""
        self._inbox, self.stalled = inbox, False
        self._heard, self._unanswered, self._unheard_since = now, 0, None
        if segment := self._segment:
            segment.prefix = self._prefix(segment.batch)
            segment.resumed = True
            self._end_segment(segment)

    def _next_rows(self, now: float) -> bytes:
        if not self.unsent or (self._segment and self._segment.ending):
            return b""
        segment = self._segment or self._start()
        count = min(self.unsent, self._room(segment))
        if count <= 0:
            return b""
        at = segment.sent - segment.acked
        if segment.sent:
            data = frames(self._rows[at : at + count], segment.prefix, segment.sent + 1)
        else:
            # Otherwise another stream that has the subject, and allows fast ingest, would take the batch.
            bound = bound_to(self.stream, self._rows[0], self.max_payload)
            data = frames([bound], segment.prefix, 1, replies.START)
        segment.sending(count, len(data))
        self._active = self._heard = now
        return data

    def _start(self) -> Segment:
        self._segments += 1
        batch = self.batch_id if self._segments == 1 else f"{self.batch_id}-{self._segments}"
        self._segment = Segment(batch, self.stored, self._prefix(batch), self._rows[0][0])
        self._asked = None
        return self._segment

    def _prefix(self, batch: str) -> bytes:
        gap_ok = self.options.on_gap == "continue"
        return replies.subject_prefix(self._inbox, batch, self.options.flow, gap_ok).encode()

    def _room(self, segment: Segment) -> int:
        if segment.every == 0:  # the answer to the first message says how many more the server takes
            return 1 - segment.sent
        if segment.bytes_in_flight >= self.options.max_outstanding_bytes:
            return 0
        return segment.acked + segment.every * self.options.max_outstanding_acks - segment.sent

    def _next_control(self, now: float) -> bytes:
        segment = self._segment
        if segment is None:
            return b""
        if not segment.ending and self._is_at_end(segment, now):
            self._end_segment(segment)
        if segment.ending and self._asked is None:
            return self._ask(segment, now)
        since = max(self._heard, self._asked or 0.0)
        if _awaits_answer(segment) and now - since >= self.options.ack_timeout:
            return self._ask(segment, now)
        return b""

    def _is_at_end(self, segment: Segment, now: float) -> bool:
        last = segment.base + segment.sent
        if 0 < self._end_at <= last:
            return True
        if not self.unsent:
            return now - self._active >= self.options.idle_after
        # Full by bytes before the server's next ack is due: only the end settles what is in flight.
        full = segment.bytes_in_flight >= self.options.max_outstanding_bytes
        return full and segment.sent - segment.acked < segment.every

    def _end_segment(self, segment: Segment) -> None:
        segment.ending, self._asked = True, None

    def _ask(self, segment: Segment, now: float) -> bytes:
        """The end, or a ping; both are safe to repeat."""
        if self._silent_since is None:
            self._silent_since = now
        if self._unanswered >= UNANSWERED:
            self._stall(now - self._silent_since)
            return b""
        self._asked = now
        self._unanswered += 1
        if segment.ending:
            return control(segment.lead, segment.prefix, segment.sent + 1, replies.COMMIT_EOB)
        return control(segment.lead, segment.prefix, segment.sent, replies.PING)

    def _stall(self, silent_for: float) -> None:
        if silent_for > self.options.patience:
            self.error = DeadlineExceeded(f"fast ingest into {self._what}", silent_for)
        self.stalled = True

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> None:
        """Take a message that came to the inbox. Answers to segments that are over are of no interest."""
        reply = replies.parse(message)
        segment = self._segment
        if self._verdict and reply.batch == self._verdict[1].batch:
            self._explain(self._verdict[1], reply, now)
        if segment is None or reply.batch != segment.batch or self.error:
            return
        self._heard, self._unanswered, self._silent_since = now, 0, None
        match reply.answer:
            case replies.Ack(seq, every):
                self._started(segment, every)
                self._settle(segment, seq)
            case replies.GapReply() as gap:
                self._gap(segment, gap, now)
            case replies.RefusedReply(error):
                self._refused(segment, reply.seq, error, now)
            case replies.Ended(_, sequence, count):
                self._ended(segment, sequence, count, now)
            case replies.Failed(stream, error):
                self._failed(segment, reply, stream, error, now)
            case replies.NobodyListensReply():
                self._nobody_listens(segment, reply, now)
            case replies.Plain():
                self.error = FeatureMissing(FAST_INGEST.name, "older where the stream is", FAST_INGEST.version)

    def _started(self, segment: Segment, every: int) -> None:
        if not segment.every:
            if len(self._taken) >= MAX_LEADS:
                self._taken.clear()
            self._taken.add(segment.lead)
        segment.every = every
        self._busy_since = self._unheard_since = None

    def _settle(self, segment: Segment, seq: int) -> None:
        count = min(seq, segment.sent) - segment.acked
        if count > 0:
            del self._rows[:count]
            self.stored += count
            segment.settle(segment.acked + count)

    def _gap(self, segment: Segment, gap: replies.GapReply, now: float) -> None:
        last = min(gap.next - 1, segment.sent)
        if self.options.on_gap == "continue":
            if segment.resumed and gap.next > segment.sent:
                segment.unsent_from = gap.first
            else:
                self._report(segment, gap.first, last)
        else:
            segment.trouble = segment.trouble or IngestGap(
                self.stream, segment.base + gap.first - 1, segment.base + last
            )
            self._await_end(segment, now)

    def _refused(self, segment: Segment, seq: int, error: dict[str, Any], now: float) -> None:
        if self.options.on_gap == "continue":
            segment.reasons[seq] = str(error.get("description", ""))
            self._report(segment, seq, seq)
        else:
            refusal = self._refusal(segment, seq, error)
            if isinstance(refusal, ServerBusy):
                segment.resumed = True
                self._try_later(refusal, now)
            else:
                segment.trouble = segment.trouble or refusal
            self._await_end(segment, now)

    def _await_end(self, segment: Segment, now: float) -> None:
        """The server ends the segment by itself; ask only if that answer stays out."""
        segment.ending, self._asked = True, now

    def _ended(self, segment: Segment, sequence: int, count: int, now: float) -> None:
        if segment.unsent_from:
            count = min(count, segment.unsent_from - 1)
        self._settle(segment, count)
        self.sequence = sequence or self.sequence
        self._segment = self._busy_since = None
        if self.stored >= self._end_at:
            self._end_at = 0
        missing = segment.sent - segment.acked
        if missing and (segment.trouble is None or getattr(segment.trouble, "position", 0) > self.stored + 1):
            # Also when the trouble known so far is with a later message: the answer to the first one is not here yet.
            segment.trouble = IngestGap(self.stream, self.stored, self.stored + missing)
        self._fruitless = self._fruitless + 1 if missing and not segment.acked else 0
        if not isinstance(segment.trouble, IngestGap):
            self.error = segment.trouble
        elif not self._may_resend(segment):
            # The reason may be a subject of another stream, and that stream's answer still be on its way.
            other_subject = self._rows[0][0] != segment.lead
            self._verdict = now + (REASON_WITHIN if other_subject else 0.0), segment

    def _explain(self, segment: Segment, reply: replies.Reply, now: float) -> None:
        """Replace the gap that ended the series by its reason; one that may pass does not end it."""
        if reply.seq != segment.acked + 1 or reply.is_control:
            return
        match reply.answer:
            case replies.Failed(stream, error) if stream != self.stream:
                self.error = self._refusal(segment, reply.seq, error, stream)
            case replies.NobodyListensReply():
                self._verdict = None
                self._try_unheard_later(self._rows[0][0], now)

    def _may_resend(self, segment: Segment) -> bool:
        return (segment.resumed or self.options.on_gap == "resend") and self._fruitless < FRUITLESS

    def _failed(self, segment: Segment, reply: replies.Reply, stream: str, error: dict[str, Any], now: float) -> None:
        if error.get("err_code") == replies.UNKNOWN_BATCH and stream == self.stream:
            self._in_doubt(segment)
        elif reply.seq == 1:
            self._not_started(segment, stream, error, now)
        elif not reply.is_control:
            trouble = self._refusal(segment, reply.seq, error, stream)
            self._left_out(segment, reply.seq, trouble, str(error.get("description", "")), now)

    def _nobody_listens(self, segment: Segment, reply: replies.Reply, now: float) -> None:
        row = self._row(segment, reply.seq)
        if reply.seq == 1 and not reply.is_control:
            self._segment = None
            self._try_unheard_later(segment.lead, now)
        elif self.options.on_gap == "continue" and not reply.is_control and row and row[0] != segment.lead:
            segment.reasons[reply.seq] = "no stream takes its subject"
        else:  # the next segment begins with it, if the stream did not get it
            segment.resumed = True
            self._end_segment(segment)
            self._try_later(self._nobody, now)

    def _not_started(self, segment: Segment, stream: str, error: dict[str, Any], now: float) -> None:
        """The first message failed, so there is no batch, and nothing of the segment is stored."""
        found = self._refusal(segment, 1, error, stream)
        if error.get("err_code") == replies.BATCHED_DISABLED and stream == self.stream:
            self.error = FastIngestDisabled(self._what, 400, replies.BATCHED_DISABLED, str(error.get("description")))
        elif isinstance(found, ServerBusy):
            self._segment = None
            self._try_later(found, now)
        elif self.options.on_gap == "continue" and segment.sent == 1:
            self._segment = None
            self._on_lost(Lost(self.stored + 1, self.stored + 1, str(error.get("description", ""))))
            self.lost += 1
            self.stored += 1
            del self._rows[:1]
        else:
            self.error = found

    def _left_out(self, segment: Segment, seq: int, trouble: PenstockError, reason: str, now: float) -> None:
        """A message did not get into its batch: to the server that is a gap, found at whatever comes next."""
        if self.options.on_gap == "continue":
            segment.reasons[seq] = reason
            return
        if isinstance(trouble, ServerBusy):
            segment.resumed = True
            self._try_later(trouble, now)
        elif segment.trouble is None or isinstance(segment.trouble, IngestGap):
            segment.trouble = trouble
        self._end_segment(segment)

    def _try_unheard_later(self, lead: bytes, now: float) -> None:
        """Retry the message that no stream stores soon: a new stream is not known to every server at once."""
        if lead in self._taken:
            self._try_later(self._nobody, now)
            return
        self._unheard_since = now if self._unheard_since is None else self._unheard_since
        self._retry_at = now + BUSY_DELAY
        tried = now - self._unheard_since
        if tried >= min(self.options.patience, self.options.no_responders_timeout):
            self.error = WrongStream(lead[:-1].decode(), self.stored + 1, self.stream, "", tried)

    def _try_later(self, error: ServerBusy, now: float) -> None:
        self._busy_since = now if self._busy_since is None else self._busy_since
        self._retry_at = now + BUSY_DELAY
        if now - self._busy_since > self.options.patience:
            self.error = error

    def _in_doubt(self, segment: Segment) -> None:
        """The server has forgotten the batch: what it did not acknowledge may or may not be stored."""
        doubtful = self._rows[: segment.sent - segment.acked]
        without_id = sum(not has_id(row) for row in doubtful)
        self._segment = None
        trouble = segment.trouble
        self._fruitless = 0 if segment.acked else self._fruitless + 1
        ends_here = trouble is not None and not (isinstance(trouble, IngestGap) and self._may_resend(segment))
        if ends_here or self._fruitless >= FRUITLESS or (self.options.on_doubt == "fail" and without_id):
            self.error = IngestInterrupted(self.stream, self.stored, len(doubtful))
            self.error.__cause__ = trouble
        else:
            self.maybe_twice += without_id

    def _report(self, segment: Segment, first: int, last: int) -> None:
        reasons = {reason for seq in range(first, last + 1) if (reason := segment.reasons.pop(seq, ""))}
        self.lost += last - first + 1
        reason = "; ".join(sorted(reasons)) or "it never reached the stream"
        self._on_lost(Lost(segment.base + first, segment.base + last, reason))

    def _row(self, segment: Segment, seq: int) -> Row | None:
        at = seq - segment.acked - 1
        return self._rows[at] if 0 <= at < len(self._rows) else None

    def _refusal(self, segment: Segment, seq: int, error: dict[str, Any], stream: str = "") -> PenstockError:
        """The error for one message that the server would not store."""
        position, row = segment.base + seq, self._row(segment, seq)
        if stream and stream != self.stream:
            return WrongStream(subject_of(row) if row else "", position, self.stream, stream)
        found: ApiError = api_error(self._what, error)
        if isinstance(found, ServerBusy) or error.get("err_code") == replies.TOO_MANY_BATCHES:
            return ServerBusy(*found.args)
        return MessageRefused(found.what, found.code, found.err_code, found.description, position)

    @property
    def _nobody(self) -> ServerBusy:
        return ServerBusy(self._what, 503, 0, "nobody listens for it right now")

    @property
    def _what(self) -> str:
        return f"stream {self.stream!r}"


def _awaits_answer(segment: Segment) -> bool:
    """Whether an answer of the server is outstanding."""
    return segment.ending or segment.every == 0 or segment.sent - segment.acked >= segment.every
