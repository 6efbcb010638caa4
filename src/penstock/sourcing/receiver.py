"""Receives a stream as a sourcing server does: through a durable flow-control consumer, in order, without a gap.

A `Receiver` uses one connection. Any failure raises; a new receiver resumes at the position of the sink. It
acknowledges nothing by itself: `stored` says what the sink has, and only that is acknowledged at the origin.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from penstock.errors import ConfigError, DeadlineExceeded, ProtocolError, Unavailable
from penstock.jetstream.api import MOVABLE, JetStream
from penstock.jetstream.consumer import AckSubject
from penstock.jetstream.model import ConsumerInfo, Json
from penstock.jetstream.rows import fastest_scanner
from penstock.settings import Settings
from penstock.sourcing import modes
from penstock.sourcing.flow import Flow
from penstock.wire import blocking, frames
from penstock.wire.scanning import Rows, Scanning, Stop

if TYPE_CHECKING:
    from penstock.wire.scan import RecordBatch

SILENCE = 5.0
"""Seconds without any frame: the origin sends a heartbeat every second, so the consumer or the connection is gone."""
RESETS = 3
"""Resets in a row that may go without an effect."""
LOST_FOR = 1.0
"""Seconds that messages may come after a reset without a first one among them."""
LOOK = 0.25
"""Seconds after which an idle receiver hands control back."""
ENOUGH_ROWS = 2_000
GATHER = 0.0005
"""Seconds that a smaller chunk waits for more messages."""


class ReceiverInterrupted(Unavailable):
    """The origin is silent, or refuses a reset; a new receiver resumes at the position of the sink."""


class ReceivedChunk:
    """Messages in the order of the stream, valid until the next one is asked for."""

    def __init__(self, scanner: Scanning, first: int, stop: int, last_sequence: int) -> None:
        self._scanner = scanner
        self._first = first
        self._stop = stop
        self.last_sequence = last_sequence
        """Stream sequence of the last message; for `Receiver.stored`."""

    def __len__(self) -> int:
        return self._stop - self._first

    def rows(self) -> Rows:
        """Subjects, header lines, data and sequences as lists of bytes and numbers."""
        return self._scanner.pieces(self._first, self._stop)

    def record_batch(self) -> RecordBatch:
        """The same as an Arrow record batch of `wire.scan.SCHEMA`, once a chunk. Needs `penstock-nats[arrow]`."""
        batch = self._scanner.take()
        if isinstance(batch, list):
            raise ConfigError("record batches need Arrow and NumPy: pip install 'penstock-nats[arrow]'")
        return batch.slice(self._first, len(self))


class Receiver:
    """One connection to the origin, subscribed to where its consumer delivers."""

    def __init__(self, settings: Settings, stream: str, consumer: str, flow: Flow, api: str | None = None) -> None:
        """Connect, check the consumer, reset it, and subscribe. `flow.position` is what the sink has already."""
        self.flow = flow
        self.stream = stream
        self.consumer = consumer
        self.lag: int | None = None
        """Messages that the origin had behind the last one received; None until one has come."""
        self._connection = blocking.connect(settings, name="penstock receiver")
        self._jetstream = JetStream(self._connection.requester(), settings.domain, settings.timeout)
        if api:
            self._jetstream = self._jetstream.at_prefix(api)
        self._nobody = settings.new_inbox()
        self._resets = 0
        """Resets asked for since the numbering was last clear."""
        self._reset_at = time.monotonic()
        self._counted = 0
        """Rows waiting in the scanner that the flow knows of."""
        self._asked = True
        """Whether we asked for a reset whose first delivery has not come yet."""
        try:
            self._scanner = fastest_scanner()(stream, self._subscribed())
        except BaseException:
            self._connection.close()
            raise
        self._scanner.expect(None)
        self._scanner.feed(self._connection.take_buffered())

    def _subscribed(self) -> int:
        info = blocking.run(self._jetstream.consumer_info(self.stream, self.consumer))
        subject = checked(info)
        self.flow.gap()
        self.flow.gaps -= 1
        blocking.run(self._jetstream.reset_consumer(self.stream, self.consumer, self._target(info)))
        # The literal subject: the origin counts no other subscription as interest.
        return self._connection.subscribe(subject)

    def _target(self, info: ConsumerInfo) -> int | None:
        """Return where to resume: after what the sink has, if that moves forward and skips nothing needed; otherwise
        the ack floor.

        On WorkQueue and Interest streams what the sink has must be delivered again to be acknowledged.
        """
        ahead = self.flow.position > info.ack_floor_stream_seq
        movable = info.config.get("deliver_policy") in MOVABLE
        if not (ahead and movable):
            return None
        stream = blocking.run(self._jetstream.stream_info(self.stream))
        return self.flow.position + 1 if stream.config.get("retention", "limits") == "limits" else None

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the sink's side -------------------------------------------------------------------------------------------

    def chunks(self) -> Iterator[ReceivedChunk | None]:
        """Messages as they come; None from time to time when there are none. Never ends by itself."""
        quiet = 0.0
        while True:
            if not self._receive():
                quiet += LOOK
                if quiet >= SILENCE:
                    raise ReceiverInterrupted(
                        f"consumer {self.consumer!r} of {self.stream!r} is silent for {SILENCE:g} s"
                    )
                yield None
                continue
            quiet = 0.0
            yield from self._found()
            self._answer()

    def stored(self, sequence: int) -> None:
        """The sink has stored everything up to this stream sequence, for good: it may be acknowledged."""
        self.flow.stored = max(self.flow.stored, sequence)
        self._answer()

    def _answer(self) -> None:
        if due := self.flow.due():
            self._connection.send(b"".join(due))

    # -- receiving -------------------------------------------------------------------------------------------------

    def _receive(self, within: float = LOOK) -> bool:
        try:
            self._scanner.received(self._connection.recv_into(self._scanner.space(), within))
        except DeadlineExceeded:
            return False
        return True

    def _found(self) -> Iterator[ReceivedChunk]:
        """Everything in the buffer: rows as chunks, control messages handled in their place between them."""
        while True:
            found = self._scanner.next()
            if found is Stop.GAP:
                delivery = self._scanner.next_delivery()
                yield from self._rows()
                self._out_of_order(delivery)
            elif found is Stop.MORE and self._gathers():
                continue
            elif isinstance(found, Stop):
                yield from self._rows()
                if found is Stop.MORE:
                    return
            else:
                # Rows before a control message count before it, but need not be handed on before it.
                if self.flow.lost:
                    yield from self._rows()
                self._count()
                self._handle(found)

    def _gathers(self) -> bool:
        """Whether more has come for a chunk that is small yet: what a chunk costs is much the same for any size.

        Not while the origin waits for an answer, which it gets only once everything before it is handed on.
        """
        small = 0 < self._scanner.rows < ENOUGH_ROWS
        return small and not self.flow.lost and not self.flow.is_asked and self._receive(GATHER)

    def _count(self) -> None:
        """Let the flow know of rows that were found and not counted yet."""
        if not self.flow.lost and (new := self._scanner.rows - self._counted):
            self.flow.advance(new, self._scanner.last_sequence)
            self._counted = self._scanner.rows

    def _rows(self) -> Iterator[ReceivedChunk]:
        if self.flow.lost and self._scanner.rows:
            yield from self._resynchronize()
        elif self._scanner.rows:
            self._count()
            yield from self._new(0, self._scanner.rows)
        self._counted = 0
        self._scanner.drop()

    def _new(self, first: int, stop: int) -> Iterator[ReceivedChunk]:
        """The rows behind what the sink has: a reset may have brought some a second time."""
        self.lag = self._scanner.last_pending
        sequences = self._scanner.sequences()
        first = bisect_right(sequences, self.flow.position, first, stop)
        if first < stop:
            self.flow.position = sequences[stop - 1]
            yield ReceivedChunk(self._scanner, first, stop, self.flow.position)

    def _resynchronize(self) -> Iterator[ReceivedChunk]:
        kept = self.flow.resynchronized([delivery_of(reply) for reply in self._scanner.replies()], self._asked)
        if kept.stop > kept.first:
            self._asked, self._resets = False, 0
            self.flow.advance(kept.stop - kept.first, self._scanner.sequences()[kept.stop - 1])
            self._scanner.expect(kept.stop - kept.first + 1)
            yield from self._new(kept.first, kept.stop)
        elif time.monotonic() - self._reset_at > LOST_FOR:
            self._reset()  # delivery 1 went to another subscriber, or was lost
        if kept.gap:
            self._begin_anew()

    def _out_of_order(self, delivery: int) -> None:
        """Handle a gap: the consumer was reset by another client, or a message was lost in transit."""
        if delivery == 1:
            self.flow.renumbered()
            self.flow.lost = False
            self.flow.restarts += not self._asked
            self._asked = False
            self._scanner.expect(1)
        else:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Reset the consumer to its ack floor, and ignore deliveries until the numbering restarts."""
        self.flow.gap()
        self._reset()
        self._scanner.expect(None)

    def _reset(self) -> None:
        """Reset the consumer to after its ack floor. Delivery 1 is the answer; no other answer is awaited."""
        self._asked = True
        self._reset_at = time.monotonic()
        self._resets += 1
        if self._resets > RESETS:
            raise ReceiverInterrupted(
                f"consumer {self.consumer!r} of {self.stream!r} was reset {RESETS} times without effect; "
                "a new connection is tried"
            )
        subject = self._jetstream.subject(f"CONSUMER.RESET.{self.stream}.{self.consumer}")
        self._connection.send(frames.publish(subject, b"", reply=self._nobody))

    # -- control messages ------------------------------------------------------------------------------------------

    def _handle(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.Ping):
            self._connection.send(frames.PONG)
        elif isinstance(frame, frames.Err):
            raise ReceiverInterrupted(f"the server says: {frame.text}")
        elif isinstance(frame, frames.Message):
            self._control(frame)

    def _control(self, message: frames.Message) -> None:
        code, text = message.status or (0, "")
        if code != 100:
            raise ProtocolError(f"consumer {self.consumer!r} says {code} {text} on its deliver subject")
        understood = self.flow.asked(message.reply) if message.reply else self.flow.heartbeat(message)
        if not understood:
            self._begin_anew()
        elif not self.flow.lost and not self.flow.delivery:
            self._asked, self._resets = False, 0
            self._scanner.expect(1)


def checked(info: ConsumerInfo) -> str:
    """Return the deliver subject of the consumer. Raises `ConfigError` when it is not usable for a receiver."""
    subject = str(info.config.get("deliver_subject") or "")
    if wrong := list(modes.misfits(info.config, subject)):
        raise ConfigError(f"consumer {info.name!r} of {info.stream!r} cannot be received from: {'; '.join(wrong)}")
    return subject


def consumer_config(name: str, deliver_subject: str, subjects: tuple[str, ...] = (), **choices: object) -> Json:
    """A consumer to receive through, with filters and further choices such as `deliver_policy`."""
    base = {**modes.required(name, deliver_subject), "deliver_policy": "all", "max_ack_pending": modes.MAX_ACK_PENDING}
    return {**base, **modes.filtered(list(subjects)), **choices}


def delivery_of(reply: bytes) -> int:
    """The delivery number in the reply subject of a message."""
    return AckSubject.parse(reply.decode("utf-8", "surrogateescape")).consumer_sequence
