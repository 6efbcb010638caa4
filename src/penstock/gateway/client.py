"""Clients of the gateway with the calls, the values and the errors of `penstock.facts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from inspect import isawaitable
from pathlib import Path
from typing import Any, NamedTuple, Self

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from pyqwest import Client, HTTPTransport, SyncClient, SyncHTTPTransport

from penstock import errors
from penstock.coroutines import blocked
from penstock.facts import (
    Appended,
    Confirmation,
    FactConflict,
    ForeignReceipt,
    ForgedReceipt,
    NewFact,
    Page,
    StaleReceipt,
)
from penstock.facts.fact import EPOCH, FactParts, received_facts
from penstock.gateway.service import duration
from penstock.gateway.v1 import facts_pb as pb
from penstock.gateway.v1.facts_connect import FactServiceClient, FactServiceClientSync
from penstock.wire.headers import Headers

ANSWER_WITHIN = 10.0
"""Seconds for an answer, beside the time that a fetch waits for facts."""
CALL_FACTS = 500
"""Facts that are appended by one call, at most."""
CALL_BYTES = 1024 * 1024
FACT_MARGIN = 512
"""Bytes that a fact takes in a call beside its data, about."""
SIZES: dict[str, Any] = {"send_compression": None, "read_max_bytes": 64 * 1024 * 1024}

_REASONS = {
    pb.FactError.Reason.STALE_RECEIPT: StaleReceipt,
    pb.FactError.Reason.FORGED_RECEIPT: ForgedReceipt,
    pb.FactError.Reason.FOREIGN_RECEIPT: ForeignReceipt,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLogin:
    """A client's credentials, and the CA that it trusts."""

    token: str | None = None
    """A bearer token."""
    ca: str | Path | None = None
    """CA of the gateway's certificate; the system's CAs when left out."""
    cert: str | Path | None = None
    """Client certificate; goes with `key`."""
    key: str | Path | None = None

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def transport(self) -> dict[str, Any]:
        files = {"tls_ca_cert": self.ca, "tls_cert": self.cert, "tls_key": self.key}
        given = {name: Path(path).read_bytes() for name, path in files.items() if path}
        return {"tls_include_system_certs": self.ca is None, **given}


class GatewayClient:
    """Calls a gateway, or any number of them behind one address, from asyncio."""

    def __init__(
        self,
        url: str,
        login: GatewayLogin | None = None,
        *,
        timeout: float = ANSWER_WITHIN,
        compress: bool = False,
    ) -> None:
        """`compress` requests compressed pages: less traffic between zones, more work for both sides."""
        self._login = login or GatewayLogin()
        self._timeout = timeout
        self._connect(url, {"accept_compression": ()} if not compress else {})

    def _connect(self, url: str, choices: dict[str, Any]) -> None:
        self._transport: Any = HTTPTransport(**self._login.transport())
        self._client: Any = FactServiceClient(url, http_client=Client(self._transport), **SIZES, **choices)

    async def fetch_facts(
        self, consumer_name: str, limit: int = 100, *, stream: str | None = None, wait: float = 0.0
    ) -> Page:
        """See `Facts.fetch_facts`; the gateway may give fewer facts and wait less than asked for."""
        waits = duration(timedelta(seconds=wait)) if wait > 0 else None
        request = pb.FetchFactsRequest(consumer_name=consumer_name, limit=limit, stream=stream or "", wait=waits)
        with _told(consumer_name):
            return _page(request, await self._answer(self._client.fetch_facts, request, wait))

    async def confirm_receipt(
        self, consumer_name: str, receipt: str | None, *, stream: str | None = None
    ) -> Confirmation:
        """See `Facts.confirm_receipt`."""
        request = pb.ConfirmReceiptRequest(consumer_name=consumer_name, receipt=receipt or "", stream=stream or "")
        with _told(consumer_name):
            answer = await self._answer(self._client.confirm_receipt, request)
            return Confirmation(request.stream, consumer_name, answer.first, answer.last, answer.already)

    async def append_fact(
        self, subject: str, fact_id: str, data: bytes, *, headers: Headers | None = None, stream: str | None = None
    ) -> Appended:
        """See `Facts.append_fact`."""
        request = _append(subject, fact_id, data, headers, stream)
        with _told(fact_id, subject):
            answer = await self._answer(self._client.append_fact, request)
            return Appended(answer.stream, answer.sequence, answer.existed)

    async def append_facts(self, facts: Sequence[NewFact], *, stream: str | None = None) -> tuple[Appended, ...]:
        """See `Facts.append_facts`; many facts are sent in several calls, one after the other."""
        done: list[Appended] = []
        for some in _calls(facts):
            request = pb.AppendFactsRequest(facts=[_new_fact(one) for one in some], stream=stream or "")
            with _told(f"{len(some)} facts"):
                answer = await self._answer(self._client.append_facts, request)
            done += [_appended(one) for one in answer.facts]
        return tuple(done)

    async def _answer(self, call: Callable[..., Any], request: Any, wait: float = 0.0) -> Any:
        """Return the gateway's answer; the generated clients return it, or an awaitable."""
        said = call(request, headers=self._login.headers(), timeout_ms=int((self._timeout + wait) * 1000))
        return await said if isawaitable(said) else said

    async def close(self) -> None:
        await self._client.close()
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _BlockingCalls(GatewayClient):
    """`GatewayClient` whose calls block."""

    def _connect(self, url: str, choices: dict[str, Any]) -> None:
        self._transport = SyncHTTPTransport(**self._login.transport())
        self._client = FactServiceClientSync(url, http_client=SyncClient(self._transport), **SIZES, **choices)

    async def close(self) -> None:
        self._client.close()
        self._transport.close()


class BlockingGatewayClient:
    """The same without an event loop; any number of threads may use it."""

    def __init__(
        self,
        url: str,
        login: GatewayLogin | None = None,
        *,
        timeout: float = ANSWER_WITHIN,
        compress: bool = False,
    ) -> None:
        """See `GatewayClient`."""
        self.inner = _BlockingCalls(url, login, timeout=timeout, compress=compress)

    fetch_facts = blocked(GatewayClient.fetch_facts)
    confirm_receipt = blocked(GatewayClient.confirm_receipt)
    append_fact = blocked(GatewayClient.append_fact)
    append_facts = blocked(GatewayClient.append_facts)
    close = blocked(GatewayClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- values ---------------------------------------------------------------------------------------------------


def _append(
    subject: str, fact_id: str, data: bytes, headers: Headers | None, stream: str | None
) -> pb.AppendFactRequest:
    given = _headers(headers)
    return pb.AppendFactRequest(subject=subject, id=fact_id, data=data, headers=given, stream=stream or "")


def _new_fact(fact: NewFact) -> pb.NewFact:
    return pb.NewFact(subject=fact.subject, id=fact.id, data=fact.data, headers=_headers(fact.headers))


def _headers(headers: Headers | None) -> list[pb.Header]:
    return [
        pb.Header(name=name, values=[value] if isinstance(value, str) else list(value))
        for name, value in (headers or {}).items()
    ]


def _calls(facts: Sequence[NewFact]) -> Iterator[Sequence[NewFact]]:
    """The facts of each call: few enough, and with few enough bytes, for any gateway."""
    start = size = 0
    for at, fact in enumerate(facts):
        size += len(fact.data) + FACT_MARGIN
        if at > start and (size > CALL_BYTES or at - start == CALL_FACTS):
            yield facts[start:at]
            start, size = at, len(fact.data) + FACT_MARGIN
    if facts:
        yield facts[start:]


def _appended(told: pb.AppendedFact) -> Appended:
    outcome = told.outcome
    return Appended(
        told.stream,
        told.sequence,
        existed=outcome == pb.AppendedFact.Outcome.EXISTED,
        conflict=outcome == pb.AppendedFact.Outcome.CONFLICT,
    )


def _page(request: pb.FetchFactsRequest, answer: pb.FetchFactsResponse) -> Page:
    after, facts = answer.retry_after, answer.facts
    stream = facts[0].stream if facts else request.stream
    return Page(
        stream=stream,
        consumer=request.consumer_name,
        facts=received_facts(stream, [_ToldFact(one.sequence, one.data, one.attempt, one) for one in facts]),
        receipt=answer.receipt or None,
        pending=answer.pending,
        retry_after=timedelta(seconds=after.seconds, microseconds=after.nanos // 1000) if after else None,
    )


class _ToldFact(NamedTuple):
    """A fact in the answer of a gateway."""

    sequence: int
    data: bytes
    attempt: int
    fact: pb.Fact

    def parts(self) -> FactParts:
        fact, at = self.fact, self.fact.stored_at
        stored_at = EPOCH + timedelta(seconds=at.seconds, microseconds=at.nanos // 1000) if at else EPOCH
        headers = {header.name: list(header.values) for header in fact.headers}
        return FactParts(fact.subject, fact.id or None, headers, stored_at)


@contextmanager
def _told(name: str, subject: str = "") -> Iterator[None]:
    """Turn Connect's errors back into ours."""
    try:
        yield
    except ConnectError as exc:
        raise _error(exc, name, subject) from exc


def _error(error: ConnectError, name: str, subject: str) -> errors.PenstockError:
    detail = next((one.value(pb.FactError) for one in error.details), None)
    if detail is not None and detail.reason == pb.FactError.Reason.CONFLICT:
        return FactConflict(name, subject, detail.stream, detail.sequence)
    if detail is not None and (kind := _REASONS.get(detail.reason)):
        return kind(name, error.message.partition(": ")[2] or error.message)
    match error.code:
        case Code.UNAUTHENTICATED | Code.PERMISSION_DENIED:
            return errors.AccessDenied(f"the gateway refused it: {error.message}")
        case Code.INVALID_ARGUMENT:
            return errors.ConfigError(error.message)
        case Code.NOT_FOUND:
            return errors.NotFound("the gateway's broker", 404, 0, error.message)
        case Code.UNAVAILABLE | Code.RESOURCE_EXHAUSTED | Code.DEADLINE_EXCEEDED | Code.CANCELED:
            return errors.Unavailable(f"the gateway could not answer: {error.message}")
        case _:
            return errors.PenstockError(f"the gateway failed: {error.message}")
