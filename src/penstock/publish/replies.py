"""What the server says to a fast ingest: the reply subject that carries the control, and the answers to it. No I/O."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from penstock.errors import ProtocolError
from penstock.wire.frames import Message

SUFFIX = "$FI"
START, APPEND, COMMIT, COMMIT_EOB, PING = range(5)
"""Operations, in the reply subject's last number. `COMMIT_EOB` ends the batch without storing its own message."""

BATCHED_DISABLED = 10205
UNKNOWN_BATCH = 10208
TOO_MANY_BATCHES = 10211


class Ack(NamedTuple):
    """Everything up to `seq` is stored (in mode `ok`: or lost); the next answer comes after `every` more messages."""

    seq: int
    every: int


class GapReply(NamedTuple):
    """The messages from `first` up to, not including, `next` never reached the stream."""

    first: int
    next: int


class RefusedReply(NamedTuple):
    """The message was read and not stored; in mode `fail` the batch ends here."""

    error: dict[str, Any]


class Ended(NamedTuple):
    """The batch is over: its first `settled` messages are done with, the last is at stream sequence `sequence`.

    `sequence` is 0 when nothing was stored because all were duplicates.
    """

    stream: str
    sequence: int
    settled: int


class Failed(NamedTuple):
    """The message did not get as far as the batch."""

    stream: str
    error: dict[str, Any]


class Plain(NamedTuple):
    """A server that knows no fast ingest has stored the message by itself."""


class NobodyListensReply(NamedTuple):
    """No stream takes the subject right now."""


Answer = Ack | GapReply | RefusedReply | Ended | Failed | Plain | NobodyListensReply


class Reply(NamedTuple):
    """An answer, and which message of which batch it answers."""

    batch: str
    seq: int
    operation: int
    answer: Answer

    @property
    def is_control(self) -> bool:
        """It answers a ping or the end, not a message to store."""
        return self.operation in (COMMIT_EOB, PING)


def subject_prefix(inbox: str, batch: str, flow: int, gap_ok: bool) -> str:
    """The part of the reply subjects that all messages of a batch share; the sequence and the operation follow."""
    return f"{inbox}.{batch}.{flow}.{'ok' if gap_ok else 'fail'}."


def parse(message: Message) -> Reply:
    """The reply in a message that came to a fast ingest's inbox."""
    fields = message.subject.rsplit(".", 6)
    if len(fields) != 7 or fields[6] != SUFFIX or not (fields[4].isdigit() and fields[5].isdigit()):
        raise ProtocolError(f"an answer on {message.subject!r}, which is no fast ingest reply subject")
    return Reply(fields[1], int(fields[4]), int(fields[5]), _answer(message))


def _answer(message: Message) -> Answer:
    if message.status:
        return NobodyListensReply()
    try:
        fields = json.loads(message.data)
        return _parsed(fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ProtocolError(f"the server sent an invalid answer to fast ingest: {message.data[:200]!r}") from exc


def _parsed(fields: dict[str, Any]) -> Answer:
    match fields.get("type"):
        case "ack":
            return Ack(int(fields["seq"]), max(1, int(fields["msgs"])))
        case "gap":
            return GapReply(int(fields["last_seq"]), int(fields["seq"]))
        case "err":
            return RefusedReply(dict(fields["error"]))
        case None if "error" in fields:
            return Failed(str(fields.get("stream", "")), dict(fields["error"]))
        case None if "count" not in fields and "seq" in fields:
            return Plain()
        case None:
            return Ended(str(fields["stream"]), int(fields["seq"]), int(fields["count"]))
        case other:
            raise ValueError(other)
