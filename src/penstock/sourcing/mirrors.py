"""Changes how a mirror reads its origin. The server never changes a mirror, so it is saved, and restored as another.

1. note the intention in the stream's metadata, and make it a plain stream with the same update: copying stops
   (crash after: the note says what is left to do; nothing flows, nothing is lost);
2. save the stream with its consumers to a file (crash after: it is saved again);
3. have the new consumer, moved behind what is copied: a mirror's last sequence is its origin's (crash after: again);
4. delete the stream (crash after: the file has everything, and the next run continues with it);
5. restore it from the file with the new mirror (crash after: done, but for an old consumer and the file);
6. remove the old consumer, if it was ours, and the file.
Readers of the mirror find it missing between 4 and 5. Origins are treated as `migrate` treats those of sources.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, StreamNotFound, Unavailable
from penstock.jetstream import codes
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import Json, StreamInfo
from penstock.private import open_private, write_private
from penstock.retry import retrying_blocking
from penstock.settings import Settings
from penstock.sourcing import migrate
from penstock.sourcing.migrate import NOTE, MigrationRefused, SourceMigration
from penstock.subjects import api_prefix
from penstock.wire import blocking

RESTORED = "penstock.restored"
"""In the metadata of a mirror: the backup that it was restored from. The server gives a restored stream a new age."""
CHUNK = 128 * 1024
INTERNAL_ERROR = 500
RESTORED_WITHIN = 10.0
"""Seconds in which a restore that failed inside the server is tried again."""
ANSWER_WITHIN = 60.0
"""Seconds for a chunk; the server may have to read or write a large one behind others."""


@dataclass(frozen=True, slots=True)
class Backup:
    """A saved mirror: its data, and a small file that says what it was and what it is to be."""

    folder: Path
    stream: str

    @property
    def data(self) -> Path:
        return self.folder / f"{self.stream}.snapshot"

    @property
    def about(self) -> Path:
        return self.folder / f"{self.stream}.json"

    def facts(self) -> Json:
        facts: Json = json.loads(self.about.read_text())
        return facts

    def remove(self) -> None:
        self.about.unlink(missing_ok=True)
        self.data.unlink(missing_ok=True)


def interrupted(folder: Path) -> list[SourceMigration]:
    """Return migrations whose mirror may exist only in a file."""
    found = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [SourceMigration(**json.loads(path.read_text())["migration"]) for path in found]


async def run(js: JetStream, settings: Settings, migration: SourceMigration, folder: Path) -> int:
    """Run the migration, or finish an interrupted one; returns the sequence after which the mirror continues."""
    there = js.at_prefix(migration.api) if migration.api else js
    retention = (await there.stream_info(migration.origin)).config.get("retention", "limits")
    backup, info = Backup(folder, migration.stream), await _info(js, migration.stream)
    begun = SourceMigration.noted(info) if info else migration
    if info and begun is None:
        if backup.about.exists():
            _require_restored(info, backup)
            return await _finished(there, migration, info.state.last_seq, backup)
        begun = await _stopped(js, there, migration, info, retention)
    assert begun is not None, "noted, begun just now, or read from the file"
    if info:
        await migrate.still(js, begun.stream)
        await asyncio.to_thread(save, settings, begun, backup)
    copied = int(backup.facts()["state"]["last_seq"])
    await migrate.place(there, begun, copied, retention)
    if info:
        await js.delete_stream(begun.stream)
    await asyncio.to_thread(restore, settings, backup)
    return await _finished(there, begun, copied, backup)


async def _info(js: JetStream, stream: str) -> StreamInfo | None:
    try:
        return await js.stream_info(stream)
    except StreamNotFound:
        return None


async def _stopped(
    js: JetStream, there: JetStream, migration: SourceMigration, info: StreamInfo, retention: str
) -> SourceMigration:
    """Step 1."""
    if info.config.get("storage") == "memory":
        raise MigrationRefused(f"mirror {migration.stream!r} lives in memory, and the server saves only files")
    begun = await migrate.with_consumer(there, migration)
    if retention == "interest":
        await migrate.have_consumer(there, begun)
    await js.update_stream(migration.stream, lambda config: _plain(config, begun))
    return begun


def _require_restored(info: StreamInfo, backup: Backup) -> None:
    """Raise unless the stream is the one in the file: another one of that name is no reason to delete the file."""
    mark = backup.facts().get("restored")
    if not mark or (info.config.get("metadata") or {}).get(RESTORED) != mark:
        raise MigrationRefused(
            f"stream {info.name!r} was recreated after its migration was interrupted; what it held before is in "
            f"{str(backup.data)!r}: delete the stream and run this again, or delete {str(backup.about)!r} to give it up"
        )


def _plain(config: Json, begun: SourceMigration) -> Json:
    """Return the configuration of a plain stream with an unused subject: without one the server would use its name."""
    metadata = {**(config.get("metadata") or {}), NOTE: begun.note()}
    return {**config, "mirror": None, "subjects": [_nobodys(begun.stream)], "metadata": metadata}


def _nobodys(stream: str) -> str:
    return f"_penstock.migrating.{stream}"


def _restored(config: Json, begun: SourceMigration, mark: str) -> Json:
    kept = {key: value for key, value in config.items() if key not in ("subjects", "mirror")}
    metadata = {key: value for key, value in (config.get("metadata") or {}).items() if key != NOTE}
    return {**kept, "mirror": begun.new, "metadata": {**metadata, RESTORED: mark}}


async def _finished(there: JetStream, begun: SourceMigration, copied: int, backup: Backup) -> int:
    await migrate.remove_old(there, begun)
    backup.remove()
    return copied


# -- files -------------------------------------------------------------------------------------------------------------


def save(settings: Settings, begun: SourceMigration, backup: Backup) -> None:
    """Step 2: the data first, what it is about last, both forced to disk."""
    backup.folder.mkdir(parents=True, exist_ok=True)
    backup.about.unlink(missing_ok=True)
    with blocking.connect(settings, name="penstock migrate") as connection, open_private(backup.data) as file:
        inbox = settings.new_inbox()
        connection.subscribe(inbox)
        ask = {"deliver_subject": inbox, "chunk_size": CHUNK}
        about = _asked(connection, settings, f"STREAM.SNAPSHOT.{begun.stream}", json.dumps(ask).encode())
        for chunk in _chunks(connection, begun.stream):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    note, mark = json.loads(begun.note()), secrets.token_hex(8)
    config = _restored(about["config"], begun, mark)
    facts = {"migration": note, "config": config, "state": about["state"], "restored": mark}
    draft = backup.about.with_suffix(".draft")
    write_private(draft, json.dumps(facts))
    draft.replace(backup.about)


def _chunks(connection: blocking.BlockingConnection, stream: str) -> Iterator[bytes]:
    while True:
        message = connection.receive(ANSWER_WITHIN)
        code, text = message.status or (0, "")
        if code >= 400:
            raise Unavailable(f"stream {stream!r} could not be saved: {code} {text}")
        if not message.data:
            return
        yield message.data
        if message.reply:
            connection.publish(message.reply, b"")


class NotRestored(ConfigError):
    """The server refused to restore a saved stream. Its file stays."""

    def __init__(self, stream: str, reason: str, data: str, transient: bool) -> None:
        super().__init__(stream, reason, data, transient)
        self.stream, self.reason, self.data, self.transient = stream, reason, data, transient

    def __str__(self) -> str:
        return (
            f"the server does not take stream {self.stream!r} back ({self.reason}); its messages are in {self.data!r}, "
            "and the next run tries again"
        )


def restore(settings: Settings, backup: Backup) -> None:
    """Step 5. Raises `NotRestored` when the server refuses it; the file stays.

    A failure inside the server is retried: while it still removes the directories of the deleted stream, it may fail
    to create new ones.
    """

    def is_transient(error: BaseException) -> bool:
        return isinstance(error, NotRestored) and error.transient

    retrying_blocking(lambda: _restore(settings, backup), RESTORED_WITHIN, retry_on=is_transient)


def _restore(settings: Settings, backup: Backup) -> None:
    facts = backup.facts()
    with blocking.connect(settings, name="penstock migrate") as connection, backup.data.open("rb") as file:
        ask = {"config": facts["config"], "state": facts["state"]}
        verb = f"STREAM.RESTORE.{backup.stream}"
        target = str(_asked(connection, settings, verb, json.dumps(ask).encode())["deliver_subject"])
        while chunk := file.read(CHUNK):
            _refused(backup, connection.request(target, chunk, timeout=ANSWER_WITHIN).data)
        _refused(backup, connection.request(target, b"", timeout=ANSWER_WITHIN).data)


def _refused(backup: Backup, answer: bytes) -> None:
    error = json.loads(answer).get("error") if answer else None
    if error:
        transient = error.get("code") == INTERNAL_ERROR
        raise NotRestored(backup.stream, str(error.get("description")), str(backup.data), transient)


def _asked(connection: blocking.BlockingConnection, settings: Settings, verb: str, body: bytes) -> Json:
    subject = f"{api_prefix(settings.domain)}.{verb}"
    answer: Json = json.loads(connection.request(subject, body, timeout=ANSWER_WITHIN).data)
    if error := answer.get("error"):
        raise codes.refusal(verb, error)
    return answer
