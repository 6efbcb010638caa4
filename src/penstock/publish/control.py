"""The connection of a program that coordinates through KV: reopened on demand when it was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from penstock.jetstream.connection import Broker, WrongRevision
from penstock.jetstream.kv import Write, encoded
from penstock.publish.atomic import Publisher
from penstock.publish.errors import BatchOutcomeUnknown, WrongSequence
from penstock.settings import Settings
from penstock.wire import aio


class Control(Broker):
    """A connection for JetStream requests, KV buckets and atomic batches. Reopened on demand when it was lost."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(publisher.connection.settings, connection=publisher.connection)
        self.publisher = publisher

    @classmethod
    async def connect(cls, settings: Settings) -> Self:
        return cls(await Publisher.connect(settings))

    async def close(self) -> None:
        await self.publisher.close()

    async def ready(self) -> aio.Connection:
        """Return an open connection; raises `Unavailable` when there is none."""
        await self.publisher.ready()
        return await super().ready()

    def _opened_anew(self) -> None:
        """No effect: refusals are raised to the caller that waits, or logged when none does."""

    async def store_all(self, stream: str, prefix: str, writes: Sequence[Write]) -> list[int]:
        """Store several values of a bucket, or none, as one atomic batch; returns their revisions.

        Raises `WrongRevision` when one key has changed.
        """
        batch = self.publisher.atomic(stream)
        for one in writes:
            await batch.add(prefix + one.key, encoded(one.value), expected_last_subject_sequence=one.expected)
        try:
            ack = await batch.commit()
        except WrongSequence as exc:
            raise WrongRevision(f"write {len(writes)} keys", exc.code, exc.err_code, exc.description) from exc
        except BatchOutcomeUnknown:
            if (resolved := await batch.resolve()) is None:
                raise
            ack = resolved
        return list(ack.sequences)
