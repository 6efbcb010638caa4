"""Changes how a stream in use reads an origin, without losing or repeating a message.

To the server a source with another consumer is another source, which starts over: what was copied would be copied
again. So the old one is removed, what it has copied is found, and the new one starts right after that.

1. note the intention, and how far the old source is, in the stream's metadata, and take it out with the same update
   (crash after: the note says what is left to do; nothing flows, nothing is lost);
2. find the last message that the old source has copied;
3. have the new consumer, moved behind it (crash after: found as it should be, and moved again);
4. bind the new source and remove the note with the same update (crash after: done, but for an old consumer);
5. remove the old consumer, if it was ours.
An Interest origin deletes what no consumer waits for, so there the new consumer is created before step 1, and where the
server creates it, the old one is deleted only after that. A WorkQueue origin allows no second consumer, and keeps what
was not taken, so there the old one is deleted before step 3. Mirrors differ: see `mirrors`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import string
import time
from dataclasses import dataclass, replace
from typing import Self

from penstock.errors import ConfigError, ConsumerNotFound, MessageNotFound, Unavailable
from penstock.jetstream.api import MOVABLE, JetStream
from penstock.jetstream.model import ConsumerInfo, Json, StreamInfo
from penstock.sourcing import links, modes, standins

NOTE = "penstock.migration"
HEADER = "Nats-Stream-Source"
DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
SETTLES = 0.5
"""Seconds in which messages in transit when the source was removed are stored."""
MADE_WITHIN = 60.0
"""Seconds in which the server creates its own consumer: after a failure it waits 30 before it retries."""


class MigrationRefused(ConfigError):
    """The source cannot be changed like this without losing or repeating messages. Nothing was done."""


@dataclass(frozen=True, slots=True)
class SourceMigration:
    """One source, or the mirror, whose mode changes."""

    stream: str
    old: Json
    """As the server has it now."""
    new: Json
    """As it is to be, with its consumer; without one it is the server's to make."""
    consumer: Json
    """The consumer's configuration, if Penstock creates it; empty when the user does."""
    copied: int = 0
    """Origin sequence that the old source had copied when it was taken out, at least."""
    above: int = 0
    """The stream's last sequence at that moment."""
    mirror: bool = False
    filters: list[str] | None = None
    """What the old source reads; empty: everything. None: unknown, so nothing may be removed for it."""

    @property
    def origin(self) -> str:
        return str(self.new["name"])

    @property
    def api(self) -> str | None:
        return (self.new.get("external") or {}).get("api")

    def reads(self, source: Json) -> bool:
        """Whether a source, as configured or as the server reports it, has the origin of this migration."""
        return source["name"] == self.origin and ((source.get("external") or {}).get("api") or None) == self.api

    @property
    def new_name(self) -> str | None:
        return (self.new.get("consumer") or {}).get("name")

    @property
    def old_name(self) -> str | None:
        return (self.old.get("consumer") or {}).get("name")

    def note(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def noted(cls, info: StreamInfo) -> Self | None:
        """Return the unfinished migration of this stream."""
        text = (info.config.get("metadata") or {}).get(NOTE)
        return cls(**json.loads(text)) if text else None


def check(migration: SourceMigration, info: StreamInfo) -> None:
    """Raise `MigrationRefused` if this migration is not possible."""
    who = f"the source {migration.origin!r} of {migration.stream!r}"
    twins = [one for one in info.config.get("sources") or () if migration.reads(one)]
    if len(twins) > 1:
        raise MigrationRefused(f"{who}: the stream reads it {len(twins)} times, and their copies cannot be told apart")
    if not migration.mirror and not migration.new_name and not standins.stand_in(migration.new, 1, 1):
        raise MigrationRefused(
            f"{who}: the server remembers how far an ephemeral source with these subject_transforms was, and would "
            "copy again what came since; make a new stream, and source into that"
        )


async def run(js: JetStream, migration: SourceMigration) -> int:
    """Carry it out, or finish what was begun; returns the origin sequence behind which the new source begins."""
    there = js.at_prefix(migration.api) if migration.api else js
    info = await js.stream_info(migration.stream)
    begun = SourceMigration.noted(info)
    retention = (await there.stream_info(migration.origin)).config.get("retention", "limits")
    if begun is None:
        check(migration, info)
        migration = await with_consumer(there, migration)
        if retention == "interest":
            await have_consumer(there, migration)
        begun = await _take_out(js, migration, info)
    copied = await _copied(js, begun)
    await place(there, begun, copied, retention)
    await _bind(js, begun, copied)
    await remove_old(there, begun)
    return copied


# -- consumers ---------------------------------------------------------------------------------------------------------


async def with_consumer(there: JetStream, migration: SourceMigration) -> SourceMigration:
    """The migration with all that is needed of both consumers; one of the user's must fit, or is made like the old."""
    migration = replace(migration, filters=await _filters(there, migration))
    if migration.consumer or migration.new_name is None:
        return migration
    subject = migration.new["consumer"]["deliver_subject"]
    try:
        found = await there.consumer_info(migration.origin, migration.new_name)
    except ConsumerNotFound:
        return replace(migration, consumer=_like_the_old(migration, migration.new_name, subject))
    wrong = list(modes.misfits(found.config, subject))
    if found.config.get("deliver_policy") not in MOVABLE:
        wrong.append(f"its deliver policy is {found.config.get('deliver_policy')}, with which it cannot be moved")
    if wrong:
        raise MigrationRefused(f"consumer {found.name!r} of {migration.origin!r}: {'; '.join(wrong)}")
    return migration


async def _filters(there: JetStream, migration: SourceMigration) -> list[str] | None:
    """Return what the old source reads, queried while its consumer exists: afterwards it is unknown."""
    if migration.old_name is None:
        return modes.filters(migration.old)
    try:
        return list((await there.consumer_info(migration.origin, migration.old_name)).filters)
    except ConsumerNotFound:
        return None


def _like_the_old(migration: SourceMigration, name: str, subject: str) -> Json:
    """The configuration of a consumer of the user's own that is not there yet: it reads what the old source reads."""
    if migration.filters is None:
        raise MigrationRefused(
            f"consumer {name!r} of {migration.origin!r} does not exist, nor does the one that the source has now; "
            "make it with `penstock sources create-consumer`"
        )
    base = {**modes.required(name, subject), "deliver_policy": "all", "max_ack_pending": modes.MAX_ACK_PENDING}
    return {**base, **modes.filtered(migration.filters)}


async def have_consumer(there: JetStream, migration: SourceMigration) -> None:
    """Create the new consumer if Penstock creates it, and it does not exist."""
    if migration.consumer:
        try:
            await there.consumer_info(migration.origin, migration.consumer["name"])
        except ConsumerNotFound:
            await there.create_consumer(migration.origin, migration.consumer)


async def place(there: JetStream, begun: SourceMigration, copied: int, retention: str) -> None:
    """Move the new consumer to right after what is copied; what the old one left unacknowledged is copied, too."""
    if retention == "workqueue":
        await _delete(there, begun, await _old(there, begun))
        await _remove_copied(there, begun, copied)
    await have_consumer(there, begun)
    if not copied:
        return
    if begun.new_name:
        await there.reset_consumer(begun.origin, begun.new_name, copied + 1)
    elif retention == "interest" and begun.old_name and await _old(there, begun):
        # It holds the messages until the server's own consumer exists, and releases those that are copied.
        await there.reset_consumer(begun.origin, begun.old_name, copied + 1)


async def _remove_copied(there: JetStream, begun: SourceMigration, copied: int) -> None:
    """Remove what is copied and was not acknowledged. Only what the old source reads: the rest is not ours."""
    if begun.filters is None or not copied:
        return
    for subject in begun.filters or (None,):
        await there.purge_stream(begun.origin, subject=subject, before_seq=copied + 1)


async def remove_old(there: JetStream, begun: SourceMigration) -> None:
    """Remove the consumer of the old source: the server's own, or ours. One of the user's stays."""
    if begun.new_name is None:
        await _server_has_its_own(there, begun)
    found = await _old(there, begun)
    if found and (begun.old_name is None or modes.is_managed(found.config)):
        await _delete(there, begun, found)


async def _old(there: JetStream, begun: SourceMigration) -> ConsumerInfo | None:
    """The consumer of the old source, if it is another than the new one, and can be seen."""
    if begun.old_name is None:
        return await links.automatic(there, begun.origin, begun.stream) if begun.new_name else None
    if begun.old_name == begun.new_name:
        return None
    return next((one for one in await there.consumers(begun.origin) if one.name == begun.old_name), None)


async def _delete(there: JetStream, begun: SourceMigration, found: ConsumerInfo | None) -> None:
    if found:
        try:
            await there.delete_consumer(begun.origin, found.name)
        except ConsumerNotFound:
            return  # the server deleted its own consumer first


async def _server_has_its_own(there: JetStream, begun: SourceMigration) -> None:
    """On WorkQueue and Interest origins, wait for the durable that the server makes itself."""
    if (await there.stream_info(begun.origin)).config.get("retention", "limits") == "limits":
        return
    deadline = time.monotonic() + MADE_WITHIN
    while await links.automatic(there, begun.origin, begun.stream) is None:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the server of {begun.stream!r} has not made a consumer of {begun.origin!r} in {MADE_WITHIN:g} s; the "
                f"old one, {begun.old_name!r}, still holds its messages: delete it when the new one is there"
            )
        await asyncio.sleep(SETTLES)


# -- the stream --------------------------------------------------------------------------------------------------------


async def _take_out(js: JetStream, migration: SourceMigration, info: StreamInfo) -> SourceMigration:
    source = next((one for one in info.sources if migration.reads(one.raw)), None)
    begun = replace(migration, copied=source.raw.get("seq", 0) if source else 0, above=info.state.last_seq)

    def change(config: Json) -> Json:
        rest = [one for one in config.get("sources") or () if not migration.reads(one)]
        return {**config, "sources": rest, "metadata": {**(config.get("metadata") or {}), NOTE: begun.note()}}

    await js.update_stream(migration.stream, change)
    return begun


async def _copied(js: JetStream, begun: SourceMigration) -> int:
    """Origin sequence of the last message that the old source has copied, once nothing more of it comes."""
    last = await still(js, begun.stream)
    copied, sequence = begun.copied, begun.above
    while sequence < last:
        try:
            message = await js.get_message(begun.stream, sequence + 1, next_of=">")
        except MessageNotFound:
            break
        if message.sequence != sequence + 1:
            raise Unavailable(
                f"messages of {begun.stream!r} behind {sequence} were removed before they could be looked at; stop the "
                "readers that remove them, and start again"
            )
        sequence = message.sequence
        marks, found = _source_of(message.headers)
        if marks[0] == begun.origin and (begun.api is None or server_hash(begun.api) in marks[1:]):
            copied = max(copied, found)
    return copied


async def still(js: JetStream, stream: str) -> int:
    """The stream's last sequence, once that no longer moves."""
    last = -1
    while last != (now := (await js.stream_info(stream)).state.last_seq):
        last = now
        await asyncio.sleep(SETTLES)
    return last


def _source_of(values: dict[str, list[str]]) -> tuple[list[str], int]:
    """Origin, with the hashes that tell it from others, and sequence of a copy: `NAME[:hash…] SEQUENCE FILTER …`."""
    parts = values.get(HEADER, [""])[0].split(" ")
    return (parts[0].split(":"), int(parts[1])) if len(parts) > 1 else ([""], 0)


def server_hash(text: str) -> str:
    """What the server writes for an API prefix in the header of a copy."""
    return "".join(DIGITS[byte % len(DIGITS)] for byte in hashlib.sha256(text.encode()).digest()[:8])


async def _bind(js: JetStream, begun: SourceMigration, copied: int) -> None:
    def change(config: Json) -> Json:
        rest = [one for one in config.get("sources") or () if not begun.reads(one)]
        kept = {key: value for key, value in (config.get("metadata") or {}).items() if key != NOTE}
        new = begun.new
        if begun.new_name is None:
            new, kept = standins.noted(begun.new, copied + 1, kept)
        return {**config, "sources": [*rest, new], "metadata": kept}

    await js.update_stream(begun.stream, change)
