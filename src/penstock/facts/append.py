"""Appends facts: one fact per id and subject, for as long as the stream keeps it."""

from __future__ import annotations

from collections.abc import Mapping

from penstock import retry
from penstock.errors import ApiError, ConfigError, MessageNotFound, Unavailable
from penstock.facts.errors import FactConflict
from penstock.facts.fact import (
    DIGEST_HEADER,
    EXPECT_NONE,
    EXPECT_STREAM,
    ID_HEADER,
    Appended,
    checked_headers,
    digest,
    stored_subject,
)
from penstock.jetstream.connection import Broker, NoStream, WrongRevision
from penstock.jetstream.model import StoredMessage
from penstock.wire.headers import Headers

OTHER_STREAM = 10060
"""The server's code for a message that was expected in another stream."""


class Writer:
    """Appends facts over one link; any number of tasks may use it.

    There is one durable step: the server stores the message if its subject, which contains the id, has none. A crash
    before or after it leaves a fact that is stored or not, and it may be appended again in either case. This class also
    retries, up to the settings' timeout, while answers are lost.
    """

    def __init__(self, link: Broker) -> None:
        self._link = link

    async def append(
        self, subject: str, fact_id: str, data: bytes, headers: Headers | None, stream: str | None
    ) -> Appended:
        """Store the fact, or find it stored. Raises `FactConflict` when the id is stored with other content."""
        stored, own = stored_subject(subject, fact_id), checked_headers(headers)
        mark = digest(data, own)
        marked = {**own, ID_HEADER: fact_id, DIGEST_HEADER: mark, EXPECT_NONE: "0"}
        if stream:
            marked[EXPECT_STREAM] = stream

        async def once() -> Appended:
            try:
                answer = await self._link.publish(stored, data, marked)
                return Appended(answer["stream"], answer["seq"], existed=False)
            except WrongRevision as exc:
                return _same(await self._found(exc.stream, stored), subject, fact_id, mark)
            except NoStream as exc:
                if await self._link.jetstream.stream_names(stored):
                    raise Unavailable(f"the stream of {subject!r} does not answer") from exc
                raise ConfigError(_no_stream(subject, stored)) from exc
            except ApiError as exc:
                if exc.err_code != OTHER_STREAM:
                    raise
                raise ConfigError(f"stream {stream!r} does not take {subject!r}: another one does") from exc

        return await retry.retrying(once, within=self._link.settings.timeout)

    async def _found(self, stream: str, stored: str) -> StoredMessage:
        try:
            return await self._link.jetstream.get_message(stream, last_of=stored)
        except MessageNotFound as exc:
            # Just deleted, or not yet applied by all servers of a cluster: a retry decides.
            raise Unavailable(f"stream {stream!r} has a fact on {stored!r} and does not show it") from exc


def _same(found: StoredMessage, subject: str, fact_id: str, mark: str) -> Appended:
    """Return the stored fact, if it is this one."""
    if _header(found.headers, ID_HEADER) != fact_id or _header(found.headers, DIGEST_HEADER) != mark:
        raise FactConflict(fact_id, subject, found.stream, found.sequence)
    return Appended(found.stream, found.sequence, existed=True)


def _header(headers: Mapping[str, list[str]], name: str) -> str | None:
    return next(iter(headers.get(name, [])), None)


def _no_stream(subject: str, stored: str) -> str:
    return (
        f"no stream takes {stored!r}: a fact lies on its subject with one more token, made of its id, so that a stream "
        f"for facts captures `{subject}.*`, or all with `{subject.partition('.')[0]}.>`"
    )
