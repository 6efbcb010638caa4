"""Finds unused consumers, deletes them with their position on record, and restores them.

The server knows when a consumer was last active, but forgets it at a restart. So the position is recorded at the first
check, and a consumer counts as unused only if a later check finds it unchanged.

Pruning, in order: 1. the position is recorded (crash after: nothing was deleted); 2. the consumer is deleted.
Restoring: 1. the consumer is created, paused; 2. it is moved to its position; 3. it is resumed (crash before: it
exists, paused for at most a minute, and restoring again continues); 4. the record is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from penstock.errors import AlreadyExists, ConfigError, FeatureMissing
from penstock.facts.store import FactStore
from penstock.jetstream.api import JetStream, refuse_beyond_end
from penstock.jetstream.connection import Broker
from penstock.jetstream.features import CONSUMER_RESET
from penstock.jetstream.model import ConsumerInfo, Json

MOVABLE = ("all", "by_start_sequence", "by_start_time")
"""Deliver policies with which the server allows a reset."""
PAUSED_FOR = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Seen:
    """Where a consumer was, and since when it is known to have been there."""

    at: str
    """RFC 3339."""
    delivered: int
    floor: int

    def fits(self, info: ConsumerInfo) -> bool:
        return (self.delivered, self.floor) == (info.delivered_consumer_seq, info.ack_floor_consumer_seq)


@dataclass(frozen=True, slots=True)
class PrunedPosition:
    """A pruned consumer: all that is needed to restore it."""

    stream: str
    name: str
    config: Json
    ack_floor: int
    delivered: int
    pending: int
    pruned_at: str
    idle_since: str

    def encoded(self) -> bytes:
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        value = json.loads(raw)
        value.pop("version")
        return cls(**value)


def idle_since(info: ConsumerInfo, seen: Seen | None, now: datetime) -> datetime:
    """Return since when a consumer is unused, as far as that is known; `now` when it is in use, or not known."""
    if info.waiting or info.push_bound:
        return now
    remembered = [at for at in (info.last_delivered, info.last_acked) if at]
    if remembered:
        return max(remembered)
    if info.delivered_consumer_seq == 0 and info.created:
        return info.created
    return datetime.fromisoformat(seen.at) if seen and seen.fits(info) else now


def restored(position: PrunedPosition) -> Json:
    """Return the configuration of a consumer that starts at its position, whatever its original start."""
    start = {"deliver_policy": "by_start_sequence", "opt_start_seq": position.ack_floor + 1}
    kept = {key: value for key, value in position.config.items() if key not in ("opt_start_time", "pause_until")}
    return {**kept, **start}


class Governance:
    """Finds, prunes and restores the unused consumers of an account."""

    def __init__(self, link: Broker) -> None:
        self._js: JetStream = link.jetstream
        self._store = FactStore(link)

    async def idle(self, consumers: Iterable[ConsumerInfo], now: datetime) -> list[tuple[ConsumerInfo, timedelta]]:
        """Return how long each consumer has been idle. What the server does not know is recorded for the next check."""
        found = []
        for info in consumers:
            key = f"seen.{info.stream}.{info.name}"
            kept = await self._store.get(key)
            seen = Seen(**json.loads(kept[0])) if kept and kept[0] else None
            since = idle_since(info, seen, now)
            if seen is None or not seen.fits(info):
                look = Seen(since.isoformat(), info.delivered_consumer_seq, info.ack_floor_consumer_seq)
                await self._store.put(key, json.dumps(asdict(look)).encode(), kept[1] if kept else 0)
            found.append((info, max(now - since, timedelta())))
        return found

    async def prune(self, info: ConsumerInfo, idle: timedelta, now: datetime) -> PrunedPosition:
        """Record the consumer's position, then delete it."""
        position = PrunedPosition(
            stream=info.stream,
            name=info.name,
            config=info.config,
            ack_floor=info.ack_floor_stream_seq,
            delivered=info.delivered_stream_seq,
            pending=info.unprocessed,
            pruned_at=now.isoformat(),
            idle_since=(now - idle).isoformat(),
        )
        key = _pruned(info.stream, info.name)
        kept = await self._store.get(key)
        await self._store.put(key, position.encoded(), kept[1] if kept else 0)
        await self._js.delete_consumer(info.stream, info.name)
        return position

    async def pruned(self) -> list[PrunedPosition]:
        """Return pruned consumers that were not restored."""
        values = [await self._store.get(key) for key in await self._store.keys("pruned.>")]
        return [PrunedPosition.parse(value[0]) for value in values if value and value[0]]

    async def restore(self, stream: str, name: str) -> ConsumerInfo:
        """Restore a pruned consumer at its position; messages after its ack floor are delivered (again)."""
        key = _pruned(stream, name)
        kept = await self._store.get(key)
        if not kept or not kept[0]:
            raise ConfigError(
                f"no consumer {name!r} of stream {stream!r} was pruned; `penstock consumer restore` lists them"
            )
        position = PrunedPosition.parse(kept[0])
        refuse_beyond_end(await self._js.stream_info(stream), position.ack_floor + 1)
        try:
            await self._bring_back(position)
        except AlreadyExists as exc:
            raise ConfigError(
                f"stream {stream!r} has a consumer {name!r} again, with another configuration; remove it first, "
                f"or move it to sequence {position.ack_floor + 1} with `penstock consumer reset`"
            ) from exc
        await self._store.put(key, b"", kept[1])
        return await self._js.consumer_info(stream, name)

    async def _bring_back(self, position: PrunedPosition) -> None:
        """Restore its own configuration if the server can move it, so that it is as declared; otherwise a new start."""
        stream, name = position.stream, position.name
        if position.config.get("deliver_policy") in MOVABLE and await self._can_reset():
            paused = {"pause_until": (datetime.now(UTC) + PAUSED_FOR).isoformat()}
            await self._make({**position.config, **paused}, position)
            await self._js.reset_consumer(stream, name, max(position.ack_floor + 1, 1))
            await self._js.resume_consumer(stream, name)
        else:
            await self._js.create_consumer(stream, restored(position))

    async def _make(self, config: Json, position: PrunedPosition) -> None:
        """Create the consumer, or find the one that an earlier attempt has created and not moved."""
        try:
            await self._js.create_consumer(position.stream, config)
        except AlreadyExists:
            found = await self._js.consumer_info(position.stream, position.name)
            if found.delivered_consumer_seq or _plain(found.config) != _plain(position.config):
                raise

    async def _can_reset(self) -> bool:
        try:
            await self._js.require(CONSUMER_RESET)
        except FeatureMissing:
            return False
        return True


def _plain(config: Json) -> Json:
    return {key: value for key, value in config.items() if key not in ("pause_until", "metadata")}


def _pruned(stream: str, name: str) -> str:
    return f"pruned.{stream}.{name}"


def described(info: ConsumerInfo, idle: timedelta) -> dict[str, Any]:
    """Return governance's fields of a consumer, for JSON output."""
    told = info.config.get("metadata") or {}
    return {
        "idle_seconds": idle.total_seconds(),
        "owner": told.get("penstock.owner"),
        "purpose": told.get("penstock.purpose"),
        "service": told.get("penstock.service"),
        "platform": told.get("penstock.platform"),
        "declared": "penstock.platform" in told,
    }
