"""Changes how a living stream reads an origin, without losing or repeating a message.

To the server a source with another consumer is another source, which starts over: what was copied would be copied
again. So the old one is taken out, what it has copied is found, and the new one begins right behind that.

1. note the intention, and how far the old source is, in the stream's metadata, and take it out with the same update
   (crash after: the note says what is left to do; nothing flows, nothing is lost);
2. find the last message that the old source has copied;
3. have the new consumer, moved behind it (crash after: found as it should be, and moved again);
4. bind the new source and remove the note with the same update (crash after: done, but for an old consumer);
5. remove the old consumer, if it was ours.
An Interest origin would delete what nobody waits for, so there the new consumer is made before step 1. A WorkQueue
origin takes no second consumer, and keeps what nobody has taken, so there the old one goes before step 3.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Self

from penstock.broker.jetstream import JetStream
from penstock.broker.model import Json, StreamInfo
from penstock.errors import ConfigError, ConsumerNotFound, MessageNotFound, Unavailable
from penstock.sourcing import links, modes

NOTE = "penstock.migration"
HEADER = "Nats-Stream-Source"
SETTLES = 0.5
"""Seconds in which messages that were on their way when the source was taken out are stored."""


class MigrationRefused(ConfigError):
    """The source cannot be changed like this without losing or repeating messages. Nothing was done."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One source that is to be read in another way."""

    stream: str
    old: Json
    """As the server has it now."""
    new: Json
    """As it is to be, with its consumer."""
    consumer: Json
    """The consumer's configuration, where Penstock makes it; empty when it is somebody else's."""
    copied: int = 0
    """Origin sequence that the old source had copied when it was taken out, at least."""
    above: int = 0
    """The stream's last sequence at that moment."""

    @property
    def origin(self) -> str:
        return str(self.new["name"])

    @property
    def api(self) -> str | None:
        return (self.new.get("external") or {}).get("api")

    def note(self) -> str:
        return json.dumps(
            {name: getattr(self, name) for name in ("stream", "old", "new", "consumer", "copied", "above")}
        )

    @classmethod
    def noted(cls, info: StreamInfo) -> Self | None:
        """The migration that was begun on this stream, and not finished."""
        text = (info.config.get("metadata") or {}).get(NOTE)
        return cls(**json.loads(text)) if text else None


def check(migration: Migration, info: StreamInfo) -> None:
    """Raise `MigrationRefused` for what cannot be done."""
    who = f"the source {migration.origin!r} of {migration.stream!r}"
    if not migration.new.get("consumer"):
        raise MigrationRefused(
            f"{who}: the server remembers how far an ephemeral source was, and would copy again what came since; "
            "to go back, make a new stream, and source into that"
        )
    twins = [one for one in info.config.get("sources") or () if one["name"] == migration.origin]
    if len(twins) > 1:
        raise MigrationRefused(f"{who}: the stream reads it {len(twins)} times, and their copies cannot be told apart")


async def run(js: JetStream, migration: Migration) -> int:
    """Carry it out, or finish what was begun; returns the origin sequence behind which the new source begins."""
    there = js.at_prefix(migration.api) if migration.api else js
    info = await js.stream_info(migration.stream)
    begun = Migration.noted(info)
    retention = (await there.stream_info(migration.origin)).config.get("retention", "limits")
    if begun is None:
        check(migration, info)
        await _checked_consumer(there, migration)
        if retention == "interest":
            await _have_consumer(there, migration)
        begun = await _take_out(js, migration, info)
    copied = await _copied(js, begun)
    if retention == "workqueue":
        await _remove_old(there, begun)
    await _have_consumer(there, begun)
    await _move(there, begun, copied, retention)
    await _bind(js, begun)
    await _remove_old(there, begun)
    return copied


async def _checked_consumer(there: JetStream, migration: Migration) -> None:
    """A consumer of somebody else's must be there, and fit, before anything is touched."""
    if migration.consumer:
        return
    wanted = migration.new["consumer"]
    found = await there.consumer_info(migration.origin, wanted["name"])
    if wrong := list(modes.misfits(found.config, wanted["deliver_subject"])):
        raise MigrationRefused(f"consumer {wanted['name']!r} of {migration.origin!r}: {'; '.join(wrong)}")


async def _take_out(js: JetStream, migration: Migration, info: StreamInfo) -> Migration:
    source = next((one for one in info.sources if one.name == migration.origin), None)
    begun = Migration(
        migration.stream,
        migration.old,
        migration.new,
        migration.consumer,
        copied=source.raw.get("seq", 0) if source else 0,
        above=info.state.last_seq,
    )

    def change(config: Json) -> Json:
        rest = [one for one in config.get("sources") or () if one["name"] != migration.origin]
        return {**config, "sources": rest, "metadata": {**(config.get("metadata") or {}), NOTE: begun.note()}}

    await js.update_stream(migration.stream, change)
    return begun


async def _copied(js: JetStream, begun: Migration) -> int:
    """Origin sequence of the last message that the old source has copied, once nothing more of it comes."""
    last = -1
    while last != (now := (await js.stream_info(begun.stream)).state.last_seq):
        last = now
        await asyncio.sleep(SETTLES)
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
        name, found = _source_of(message.headers)
        if name == begun.origin:
            copied = max(copied, found)
    return copied


def _source_of(values: dict[str, list[str]]) -> tuple[str, int]:
    """Origin and sequence of a message that a source has copied: `NAME[:hash…] SEQUENCE FILTER …`."""
    parts = values.get(HEADER, [""])[0].split(" ")
    return (parts[0].split(":")[0], int(parts[1])) if len(parts) > 1 else ("", 0)


async def _have_consumer(there: JetStream, migration: Migration) -> None:
    if migration.consumer:
        try:
            await there.consumer_info(migration.origin, migration.consumer["name"])
        except ConsumerNotFound:
            await there.create_consumer(migration.origin, migration.consumer)


async def _move(there: JetStream, begun: Migration, copied: int, retention: str) -> None:
    """Put the new consumer right behind what is copied; what the old one left unacknowledged is copied, too."""
    name = begun.new["consumer"]["name"]
    if not copied:
        return
    await there.reset_consumer(begun.origin, name, copied + 1)
    if retention == "workqueue":
        subject = (begun.consumer or begun.new).get("filter_subject")
        await there.purge_stream(begun.origin, subject=subject, before_seq=copied + 1)


async def _bind(js: JetStream, begun: Migration) -> None:
    def change(config: Json) -> Json:
        rest = [one for one in config.get("sources") or () if one["name"] != begun.origin]
        kept = {key: value for key, value in (config.get("metadata") or {}).items() if key != NOTE}
        return {**config, "sources": [*rest, begun.new], "metadata": kept}

    await js.update_stream(begun.stream, change)


async def _remove_old(there: JetStream, begun: Migration) -> None:
    """Remove the consumer of the old source: the server's own, or ours. One of the user's stays."""
    old = (begun.old.get("consumer") or {}).get("name")
    if old == begun.new["consumer"]["name"]:
        return
    found = (
        await links.automatic(there, begun.origin, begun.stream)
        if old is None
        else next((one for one in await there.consumers(begun.origin) if one.name == old), None)
    )
    if found and (old is None or modes.is_managed(found.config)):
        try:
            await there.delete_consumer(begun.origin, found.name)
        except ConsumerNotFound:
            return  # the server was faster: it removes its own
