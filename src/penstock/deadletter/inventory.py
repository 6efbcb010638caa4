"""Reads dead letters from their streams."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.deadletter.letters import FiledLetter, read
from penstock.deadletter.selection import Selection
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import StoredMessage, StreamInfo
from penstock.jetstream.reader import read_messages
from penstock.jetstream.rows import Range
from penstock.settings import Settings
from penstock.subjects import DLQ_SUBJECTS, holds_dead_letters


async def letter_streams(jetstream: JetStream) -> list[StreamInfo]:
    """The streams that hold dead letters and nothing else."""
    found = await jetstream.streams(DLQ_SUBJECTS)
    return [info for info in found if holds_dead_letters(info.config.get("subjects") or ())]


def letters(settings: Settings, streams: list[StreamInfo], wanted: Selection | None = None) -> Iterator[FiledLetter]:
    """Yield the letters that existed when the streams were read, oldest first in each stream."""
    for info in streams:
        for message in messages(settings, info, info.state.first_seq, info.state.last_seq):
            filed = read(message)
            if wanted is None or wanted.matches(filed):
                yield filed


def messages(
    settings: Settings, info: StreamInfo, first: int, last: int, subjects: tuple[str, ...] = ()
) -> Iterator[StoredMessage]:
    """The messages of a stream from `first` to `last`, without a trace on the server where it would count."""
    direct = info.config.get("retention", "limits") != "limits"
    wanted = Range(stream=info.name, first=max(first, 1), last=last, subjects=subjects, direct=direct)
    yield from read_messages(settings, wanted)
