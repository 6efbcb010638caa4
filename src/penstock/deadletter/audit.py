"""Audit of dead letters: one record per letter that was replayed or discarded, and two per chunk of a replay.

The record of a letter also prevents a second replay, and a late second capture. The records of a chunk say what was
about to be published where, so that the next run can find out how far a killed one came, however long ago that was.
"""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from penstock.deadletter import streams
from penstock.deadletter.inventory import messages
from penstock.deadletter.letters import FiledLetter
from penstock.errors import FeatureMissing, MessageNotFound, NotFound
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json, StoredMessage, StreamInfo
from penstock.publish.reserved import LetterSubject
from penstock.settings import Settings

VERSION: Final = 1
REPLAYED, DISCARDED = "replayed", "discarded"
BEGUN, ENDED = "begun", "ended"

FiledPlace = tuple[str, int, str]
"""Where a letter is or was stored: stream, sequence and time."""


def this_user() -> str:
    """Return the default actor: the current user."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        name = "unknown"
    return f"{name}@{socket.gethostname()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deed:
    """What is done in one run, by whom, and why."""

    run: str
    actor: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRecord:
    """A letter that was replayed or discarded."""

    action: str
    deed: Deed
    letter: FiledLetter
    target: tuple[str, int] | None = None
    """Stream and sequence of the message that the replay has stored."""
    edited: bool = False
    only_failed: bool = False
    """Whether the message is only for the consumer that gave up."""

    def json(self) -> Json:
        letter = self.letter.letter
        told: Json = {
            "version": VERSION,
            "action": self.action,
            "run": self.deed.run,
            "actor": self.deed.actor,
            "reason": self.deed.reason,
            "letter": self.letter.id,
            "filed": {
                "stream": self.letter.stream,
                "subject": self.letter.subject,
                "sequence": self.letter.sequence,
                "time": self.letter.time.isoformat(),
            },
            "origin": {
                "stream": letter.stream,
                "subject": letter.subject,
                "sequence": letter.sequence,
                "consumer": letter.consumer,
                "pipeline": letter.pipeline,
            },
            "event_id": letter.event_id,
            "error": letter.failure.type,
            "fingerprint": letter.fingerprint,
        }
        if self.target:
            stored = {"stream": self.target[0], "sequence": self.target[1]}
            told["replay"] = {
                **stored,
                "replays": letter.replays + 1,
                "message_id": self.letter.message_id,
                "edited": self.edited,
                "only_failed": self.only_failed,
            }
        return told

    @property
    def subject(self) -> LetterSubject:
        return LetterSubject(streams.settled_subject(self.letter.id))

    def encode(self) -> bytes:
        return _encoded(self.json())


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayChunk:
    """Letters that are about to be replayed together."""

    deed: Deed
    number: int
    letters: tuple[str, ...]
    """The message ids of their replays."""
    floors: dict[str, int] = field(default_factory=dict)
    """The last sequence of each stream concerned, before anything was published: replays can only be after it."""
    edited: bool = False
    only_failed: bool = False

    @property
    def subject(self) -> LetterSubject:
        return LetterSubject(streams.run_subject(self.deed.run))

    def begun(self) -> bytes:
        said = {"letters": self.letters, "floors": self.floors, "edited": self.edited, "only_failed": self.only_failed}
        return self._said(BEGUN, **said, actor=self.deed.actor, reason=self.deed.reason)

    def ended(self, how: str) -> bytes:
        """`how` it ended: by itself, or found by a later run."""
        return self._said(ENDED, how=how)

    def _said(self, state: str, **more: Any) -> bytes:
        return _encoded({"version": VERSION, "run": self.deed.run, "chunk": self.number, "state": state, **more})


def _encoded(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


# -- reading ---------------------------------------------------------------------------------------------------------


def open_chunks(records: Iterable[Json]) -> list[ReplayChunk]:
    """Return the chunks that were started and have no end record."""
    found: dict[tuple[str, int], ReplayChunk] = {}
    for raw in records:
        key = (raw["run"], raw["chunk"])
        if raw["state"] == BEGUN:
            deed = Deed(run=raw["run"], actor=raw.get("actor", ""), reason=raw.get("reason", ""))
            found[key] = ReplayChunk(
                deed=deed,
                number=raw["chunk"],
                letters=tuple(raw["letters"]),
                floors=raw["floors"],
                edited=raw.get("edited", False),
                only_failed=raw.get("only_failed", False),
            )
        else:
            found.pop(key, None)
    return list(found.values())


def settled(records: Iterable[Json]) -> Iterator[FiledPlace]:
    """Yield where replayed or discarded letters were stored."""
    for raw in records:
        yield raw["filed"]["stream"], raw["filed"]["sequence"], raw["filed"]["time"]


def place(filed: FiledLetter) -> FiledPlace:
    return filed.stream, filed.sequence, filed.time.isoformat()


async def audit_stream(jetstream: JetStream) -> StreamInfo:
    """Return the audit stream; creates it if it does not exist."""
    try:
        return await jetstream.stream_info(streams.AUDIT)
    except NotFound:
        return await jetstream.create_stream(streams.audit_config())


async def first_since(jetstream: JetStream, info: StreamInfo, moment: datetime) -> int:
    """The sequence of the first record that was stored at or after a moment; one beyond the last when there is none."""
    try:
        return (await jetstream.get_message(info.name, since=moment)).sequence
    except MessageNotFound:
        return info.state.last_seq + 1
    except FeatureMissing:
        return info.state.first_seq


def records(settings: Settings, info: StreamInfo, subject: str, first: int = 0) -> Iterator[tuple[StoredMessage, Json]]:
    """The records on a subject from `first` on, in order; what is no record is left out. Blocking.

    One by one, since an audit may tell of more letters than fit into memory.
    """
    begin = max(first, info.state.first_seq)
    if begin > info.state.last_seq:
        return
    for message in messages(settings, info, begin, info.state.last_seq, (subject,)):
        try:
            raw = json.loads(message.data)
        except (ValueError, RecursionError):
            continue
        if isinstance(raw, dict) and raw.get("version") == VERSION:
            yield message, raw
