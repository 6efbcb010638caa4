"""Progress on the server: the query's durable consumer follows every committed micro-batch.

On a Limits stream the durable is reset to after the batch: one request, however large the batch was. On WorkQueue and
Interest streams a message is deleted when its consumer acknowledges it, so the batch is really acknowledged: the
durable delivers subjects and headers of the range, and each message is acknowledged.

On a WorkQueue there is a shorter way: no two consumers of it may have a message in common, so what the durable's filter
matches up to the batch's end belongs to no other consumer, and one purge up to there deletes it. The server moves the
durable along; on replicas it may have an older position after a change of leaders, and then nothing is left there to
deliver. Where a purge is not allowed, or could delete what was not read (`_may_purge`), messages are acknowledged.

All of it may be repeated. After a crash while acknowledging, or before a purge, the rest of the range is still stored,
and the next commit (of the same offset or a later one) handles it.
"""

from __future__ import annotations

import logging

from penstock.errors import AccessDenied, ApiError, OutcomeUnknown, Unavailable
from penstock.jetstream.consumer import ACK, NAK, PullEvent
from penstock.jetstream.model import ConsumerInfo, Retention, StreamInfo
from penstock.jetstream.requests import PullRequests
from penstock.settings import Settings
from penstock.spark import steps
from penstock.spark.durable import floor
from penstock.spark.link import Link
from penstock.spark.origin import needs_direct_get
from penstock.wire import frames
from penstock.wire.scan import Scanner
from penstock.wire.scanning import Stop

PULL = 5_000
"""Messages of one request while acknowledging."""
PULL_BYTES = 8 * 1024 * 1024
EXPIRES = 2.0  # seconds
SILENCE = 10.0  # seconds
ATTEMPTS = 3

log = logging.getLogger(__name__)
_denied: set[tuple[Settings, str]] = set()
"""Settings and streams for which the server has refused a purge."""


def commit(link: Link, info: StreamInfo, durable: ConsumerInfo, sequence: int) -> None:
    """Commit everything up to `sequence` on the durable, as it was just read."""
    if floor(durable) == sequence:
        return
    if not needs_direct_get(info):
        link.call(lambda api: api.reset_consumer(info.name, durable.name, sequence + 1))
    elif not (_may_purge(link, info, durable) and _purged(link, durable, sequence)):
        _acknowledge(link, info, durable.name, sequence)


def _may_purge(link: Link, info: StreamInfo, durable: ConsumerInfo) -> bool:
    """Whether everything that a purge up to the batch's end would delete was read by this query.

    Messages at or below the durable's position were not: the durable was moved forward, and they must stay.
    """
    if info.config.get("retention") != Retention.WORKQUEUE or info.config.get("deny_purge") or len(durable.filters) > 1:
        return False
    if (link.settings, info.name) in _denied:
        return False
    first = link.next_sequence(info.name, 1, durable.filters) if durable.filters else info.state.first_seq
    return first > floor(durable)


def _purged(link: Link, durable: ConsumerInfo, sequence: int) -> bool:
    """Delete what the durable has up to `sequence`. False when it was not allowed, or the outcome is unknown.

    1. purge (crash before: all is there, and the next commit deletes it; crash after: all is done)
    2. look whether something is left, as when a leader has lost the purge that it confirmed
    """
    subject = durable.filters[0] if durable.filters else None
    steps.reached(steps.PURGING)
    try:
        link.call(lambda api: api.purge_stream(durable.stream, subject=subject, before_seq=sequence + 1))
    except (AccessDenied, ApiError, OutcomeUnknown) as exc:
        log.info("acknowledging up to %d of stream %r, without a purge: %s", sequence, durable.stream, exc)
        if isinstance(exc, AccessDenied):
            _denied.add((link.settings, durable.stream))
        return False
    steps.reached(steps.PURGED)
    return not _first_left(link, link.call(lambda api: api.consumer_info(durable.stream, durable.name)), sequence)


def _acknowledge(link: Link, info: StreamInfo, durable: str, sequence: int) -> None:
    """Acknowledge all that the durable has up to `sequence`. Raises nothing when another client holds some of it."""
    attempts, reached = 0, -1
    while attempts < ATTEMPTS:
        found = link.persistently(lambda: _acknowledged(link, info, durable, sequence))
        if not (left := _first_left(link, found, sequence)):
            return
        attempts = 0 if floor(found) > reached else attempts + 1
        reached = floor(found)
    log.warning(
        "consumer %r of stream %r has not acknowledged sequence %d, and should be at %d: does somebody else pull from "
        "it? The next commit tries again",
        durable, info.name, left, sequence,
    )  # fmt: skip


def _acknowledged(link: Link, info: StreamInfo, durable: str, sequence: int) -> ConsumerInfo:
    """One attempt, which a slow server may end early. Returns the durable afterwards.

    1. take back what an earlier, interrupted commit left unanswered (crash after: it is unanswered still)
    2. pull, and acknowledge what comes (crash after: what was answered is gone, the rest is there)
    3. wait until the server has taken the last acknowledgement (crash after: all is done)
    """
    found = link.call(lambda api: api.consumer_info(info.name, durable))
    if floor(found) >= sequence:
        return found
    if found.ack_pending:
        link.call(lambda api: api.reset_consumer(info.name, durable))
    Acknowledging(link, found, sequence).run()
    return link.call(lambda api: api.consumer_info(info.name, durable))


def _first_left(link: Link, durable: ConsumerInfo, sequence: int) -> int:
    """The first message up to `sequence` that the durable has not acknowledged; 0: there is none."""
    if floor(durable) >= sequence:
        return 0
    found = link.next_sequence(durable.stream, floor(durable) + 1, durable.filters)
    return found if found <= sequence else 0


class Acknowledging:
    """Acknowledges a durable's messages up to a sequence, over one connection."""

    def __init__(self, link: Link, durable: ConsumerInfo, sequence: int) -> None:
        inbox = link.settings.new_inbox()
        self._requests = PullRequests(link.jetstream, durable.stream, durable.name, f"{inbox}.pull")
        self._connection = link.connection
        self._sequence = sequence
        self._position = floor(durable)
        self._most = min(PULL, int(durable.config.get("max_ack_pending") or PULL))
        self._sid = self._connection.subscribe(f"{inbox}.*")
        self._scanner = Scanner(durable.stream, self._sid)
        self._scanner.forget_order()  # redeliveries come in between
        self._last_reply = b""

    def run(self) -> None:
        """Acknowledge until the sequence is reached, or the durable has no more."""
        self._scanner.feed(self._connection.take_buffered())
        more = True
        while more and self._position < self._sequence:
            more = self._pulled(min(self._most, self._sequence - self._position))
        self._connection.give_back(self._scanner.rest())
        self._connection.unsubscribe(self._sid)
        if self._last_reply:
            self._connection.request(self._last_reply.decode(), ACK)

    def _pulled(self, count: int) -> bool:
        """Pull that many messages and acknowledge them. False when the durable has no more."""
        self._connection.send(self._requests.request(count, max_bytes=PULL_BYTES, expires=EXPIRES))
        answered = 0
        while self._requests.asked:
            found = self._scanner.next()
            if rows := self._scanner.rows:
                answered += rows
                self._requests.received(rows)
                self._answer()
                if not self._scanner.last_pending:
                    return False
            if found is Stop.MORE and self._requests.asked:
                self._scanner.received(self._connection.recv_into(self._scanner.space(), SILENCE))
            elif isinstance(found, frames.Ping):
                self._connection.send(frames.PONG)
            elif isinstance(found, frames.Message):
                self._status(found)
        return answered > 0

    def _status(self, message: frames.Message) -> None:
        """Count what will not come. The rest may come after the status: a consumer with replicas sends a message when
        its replicas know of it, and a status at once."""
        status = self._requests.status(message)
        if not (status and status.is_over) or status.event is PullEvent.REFUSED:
            raise Unavailable(f"acknowledging is interrupted: {status or message.subject}")

    def _answer(self) -> None:
        """Acknowledge the rows up to the sequence, nak those after it. The last acknowledgement waits for `run`."""
        answers = bytearray(_answer_frame(self._last_reply, ACK) if self._last_reply else b"")
        self._last_reply = b""
        for sequence, reply in zip(self._scanner.sequences(), self._scanner.replies(), strict=True):
            if sequence > self._sequence:
                answers += _answer_frame(reply, NAK)
                continue
            if self._last_reply:
                answers += _answer_frame(self._last_reply, ACK)
            self._last_reply = reply
        self._position = max(self._position, self._scanner.last_sequence)
        self._scanner.drop()
        if answers:
            self._connection.send(answers)


def _answer_frame(reply: bytes, answer: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (reply, len(answer), answer)
