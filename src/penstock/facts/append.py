"""Appends facts: one fact per id and subject, for as long as the stream keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock import retry
from penstock.errors import ApiError, ConfigError, MessageNotFound, PenstockError, Unavailable
from penstock.facts.errors import FactConflict
from penstock.facts.fact import (
    DIGEST_HEADER,
    EXPECT_NONE,
    EXPECT_STREAM,
    ID_HEADER,
    Appended,
    NewFact,
    checked_headers,
    digest,
    stored_subject,
)
from penstock.jetstream.connection import Broker, NoStream, WrongRevision, publish_answer
from penstock.jetstream.fetch import until_set
from penstock.jetstream.model import StoredMessage
from penstock.wire.frames import Message
from penstock.wire.headers import Headers

FACTS_AT_ONCE = 1_000
"""Facts that are published in one write, before any of their answers is read."""
BYTES_AT_ONCE = 4 * 1024 * 1024
LOOKS_AT_ONCE = 100
"""Facts that were there before and are compared at the same time."""
OTHER_STREAM = 10060
"""The server's code for a message that was expected in another stream."""


class Writer:
    """Appends facts over one link; any number of tasks may use it.

    There is one durable step a fact: the server stores the message if its subject, which contains the id, has none. A
    crash before or after it leaves a fact that is stored or not, and it may be appended again in either case. This
    class also retries, up to the settings' timeout, while answers are lost.
    """

    def __init__(self, link: Broker) -> None:
        self._link = link

    async def append(self, fact: NewFact, stream: str | None) -> Appended:
        """Store the fact, or find it stored. Raises `FactConflict` when the id is stored with other content."""
        made = _Marked.of(fact, stream)

        async def once() -> Appended:
            try:
                answer = await self._link.publish(made.subject, fact.data, made.headers)
                return Appended(answer["stream"], answer["seq"], existed=False)
            except WrongRevision as exc:
                return _same(await self._found(exc.stream, made.subject), made)
            except ApiError as exc:
                raise await self._refused(exc, made, stream) from exc

        return await retry.retrying(once, within=self._link.settings.timeout)

    async def append_all(self, facts: Sequence[NewFact], stream: str | None) -> tuple[Appended, ...]:
        """Store facts in their order, many at a time, and tell the outcome of each, also of those that conflict.

        Raises before anything is sent when one of them cannot be a fact.
        """
        made = [_Marked.of(fact, stream) for fact in facts]
        done: dict[int, Appended] = {}
        for part in _parts(made):

            async def once(part: range = part) -> None:
                await self._stored(made, [at for at in part if at not in done], stream, done)

            await retry.retrying(once, within=self._link.settings.timeout)
        return tuple(done[at] for at in range(len(made)))

    async def _stored(
        self, made: Sequence[_Marked], wanted: Sequence[int], stream: str | None, done: dict[int, Appended]
    ) -> None:
        """Publish these facts in one write, and enter the outcome of each; raises what a retry may settle, or not."""
        there: list[tuple[int, str]] = []
        for at, message in zip(wanted, await self._answers([made[at] for at in wanted]), strict=True):
            try:
                answer = publish_answer(f"append to {made[at].fact.subject!r}", message)
                done[at] = Appended(answer["stream"], answer["seq"], existed=False)
            except WrongRevision as exc:
                there.append((at, exc.stream))
            except ApiError as exc:
                raise await self._refused(exc, made[at], stream) from exc
        for start in range(0, len(there), LOOKS_AT_ONCE):
            some = there[start : start + LOOKS_AT_ONCE]
            found = await asyncio.gather(*(self._found(where, made[at].subject) for at, where in some))
            done.update({at: _compared(one, made[at]) for (at, _), one in zip(some, found, strict=True)})

    async def _answers(self, made: Sequence[_Marked]) -> list[Message]:
        """Publish these facts, and return the server's answer to each."""
        connection = await self._link.ready()
        inbox, found, ended = self._link.settings.new_inbox(), dict[str, Message](), asyncio.Event()

        def take(message: Message) -> None:
            found[message.subject] = message
            if len(found) == len(made):
                ended.set()

        replies = [f"{inbox}.{number}" for number in range(len(made))]
        sent = b"".join(
            connection.publication(one.subject, one.fact.data, one.headers, reply)
            for one, reply in zip(made, replies, strict=True)
        )
        sid = await connection.subscribe(f"{inbox}.*", handler=take, then=sent)
        try:
            await until_set(self._link, connection, ended, self._link.settings.timeout, "answers to appended facts")
        finally:
            if connection.connected:
                await connection.unsubscribe(sid)
        return [found[reply] for reply in replies]

    async def _refused(self, error: ApiError, made: _Marked, stream: str | None) -> PenstockError:
        """The error for a fact that a server did not take."""
        if isinstance(error, NoStream):
            if await self._link.jetstream.stream_names(made.subject):
                return Unavailable(f"the stream of {made.fact.subject!r} does not answer")
            return ConfigError(_no_stream(made.fact.subject, made.subject))
        if error.err_code == OTHER_STREAM:
            return ConfigError(f"stream {stream!r} does not take {made.fact.subject!r}: another one does")
        return error

    async def _found(self, stream: str, stored: str) -> StoredMessage:
        try:
            return await self._link.jetstream.get_message(stream, last_of=stored)
        except MessageNotFound as exc:
            # Just deleted, or not yet applied by all servers of a cluster: a retry decides.
            raise Unavailable(f"stream {stream!r} has a fact on {stored!r} and does not show it") from exc


class _Marked(NamedTuple):
    """A fact as it is published."""

    fact: NewFact
    subject: str
    mark: str
    headers: Headers

    @classmethod
    def of(cls, fact: NewFact, stream: str | None) -> _Marked:
        stored, own = stored_subject(fact.subject, fact.id), checked_headers(fact.headers)
        mark = digest(fact.data, own)
        marked = {**own, ID_HEADER: fact.id, DIGEST_HEADER: mark, EXPECT_NONE: "0"}
        if stream:
            marked[EXPECT_STREAM] = stream
        return cls(fact, stored, mark, marked)


def _parts(made: Sequence[_Marked]) -> Iterator[range]:
    """Places of facts that are published in one write."""
    start = size = 0
    for at, one in enumerate(made):
        size += len(one.fact.data)
        if at + 1 - start == FACTS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield range(start, at + 1)
            start, size = at + 1, 0
    if start < len(made):
        yield range(start, len(made))


def _compared(found: StoredMessage, made: _Marked) -> Appended:
    """The stored fact of an id, and whether it is this one."""
    same = _header(found.headers, ID_HEADER) == made.fact.id and _header(found.headers, DIGEST_HEADER) == made.mark
    return Appended(found.stream, found.sequence, existed=same, conflict=not same)


def _same(found: StoredMessage, made: _Marked) -> Appended:
    """Return the stored fact, if it is this one."""
    compared = _compared(found, made)
    if compared.conflict:
        raise FactConflict(made.fact.id, made.fact.subject, found.stream, found.sequence)
    return compared


def _header(headers: Mapping[str, list[str]], name: str) -> str | None:
    return next(iter(headers.get(name, [])), None)


def _no_stream(subject: str, stored: str) -> str:
    return (
        f"no stream takes {stored!r}: a fact lies on its subject with one more token, made of its id, so that a stream "
        f"for facts captures `{subject}.*`, or all with `{subject.partition('.')[0]}.>`"
    )
