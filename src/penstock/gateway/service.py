"""The four calls of the gateway: checks grants, calls facts, and maps errors to Connect's."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from protobuf.wkt import Duration, Timestamp

from penstock import errors
from penstock.facts import Fact, FactConflict, Facts, ForeignReceipt, ForgedReceipt, NewFact, Page, StaleReceipt
from penstock.gateway import bounds
from penstock.gateway.grants import NotGranted, check_subject, granted_consumer
from penstock.gateway.metrics import Metrics
from penstock.gateway.v1 import facts_pb as pb
from penstock.gateway.v1.facts_connect import FactService
from penstock.topology.model import GatewayIdentity, GatewayLimits

T = TypeVar("T")
Context = RequestContext[Any, Any]

caller: ContextVar[GatewayIdentity] = ContextVar("penstock_gateway_caller")
"""The identity of the current call."""

log = logging.getLogger("penstock.gateway")

DEFAULT_LIMIT = 100
ANSWER_MARGIN = 0.1
"""Seconds before the caller's deadline at which a fetch stops waiting, so that the answer still arrives."""
ANSWER_SHARE = 0.1
"""Or this share of the time that the caller gave, if that is more."""

FETCH, CONFIRM, APPEND, APPEND_MANY = "FetchFacts", "ConfirmReceipt", "AppendFact", "AppendFacts"
METHODS = (FETCH, CONFIRM, APPEND, APPEND_MANY)

OUTCOMES = {
    "stored": pb.AppendedFact.Outcome.STORED,
    "existed": pb.AppendedFact.Outcome.EXISTED,
    "conflict": pb.AppendedFact.Outcome.CONFLICT,
}

REASONS = {
    StaleReceipt: (Code.FAILED_PRECONDITION, pb.FactError.Reason.STALE_RECEIPT),
    ForgedReceipt: (Code.INVALID_ARGUMENT, pb.FactError.Reason.FORGED_RECEIPT),
    ForeignReceipt: (Code.PERMISSION_DENIED, pb.FactError.Reason.FOREIGN_RECEIPT),
}
CODES: tuple[tuple[type[errors.PenstockError], Code], ...] = (
    (NotGranted, Code.PERMISSION_DENIED),
    (errors.ConfigError, Code.INVALID_ARGUMENT),
    (errors.NotFound, Code.NOT_FOUND),
    (errors.DeadlineExceeded, Code.DEADLINE_EXCEEDED),
    (errors.Unavailable, Code.UNAVAILABLE),
    (errors.ServerBusy, Code.UNAVAILABLE),
)
"""The first match counts."""
UNEXPECTED = (Code.INTERNAL, Code.NOT_FOUND, Code.UNAVAILABLE)
"""Codes that are also logged for the operator."""
OWN_WORDS = (NotGranted, errors.ConfigError)
"""Errors whose text is meant for the caller; others may name internal servers and subjects."""


class Service(FactService):
    """`FactService` over one `Facts`."""

    def __init__(self, facts: Facts, limits: GatewayLimits, metrics: Metrics) -> None:
        self._facts = facts
        self._limits = limits
        self._metrics = metrics

    async def fetch_facts(self, request: pb.FetchFactsRequest, ctx: Context) -> pb.FetchFactsResponse:
        async def fetch() -> pb.FetchFactsResponse:
            stream = _granted(request.consumer_name, request.stream)
            limit = min(request.limit or DEFAULT_LIMIT, self._limits.page)
            page = await self._facts.fetch_facts(
                request.consumer_name,
                limit,
                stream=stream,
                wait=self._wait(request.wait, ctx),
                max_bytes=self._limits.page_bytes,
            )
            self._metrics.facts[FETCH] += len(page)
            return _response(page)

        return await self._told(FETCH, fetch)

    async def confirm_receipt(self, request: pb.ConfirmReceiptRequest, ctx: Context) -> pb.ConfirmReceiptResponse:
        async def confirm() -> pb.ConfirmReceiptResponse:
            stream = _granted(request.consumer_name, request.stream)
            done = await self._facts.confirm_receipt(request.consumer_name, request.receipt, stream=stream)
            self._metrics.facts[CONFIRM] += not done.already
            return pb.ConfirmReceiptResponse(first=done.first, last=done.last, already=done.already)

        return await self._told(CONFIRM, confirm)

    async def append_fact(self, request: pb.AppendFactRequest, ctx: Context) -> pb.AppendFactResponse:
        async def append() -> pb.AppendFactResponse:
            bounds.check_name("stream", request.stream)
            fact = _new_fact(request)
            done = await self._facts.append_fact(
                fact.subject, fact.id, fact.data, headers=fact.headers, stream=request.stream or None
            )
            self._metrics.facts[APPEND] += not done.existed
            return pb.AppendFactResponse(stream=done.stream, sequence=done.sequence, existed=done.existed)

        return await self._told(APPEND, append)

    async def append_facts(self, request: pb.AppendFactsRequest, ctx: Context) -> pb.AppendFactsResponse:
        async def append() -> pb.AppendFactsResponse:
            bounds.check_name("stream", request.stream)
            bounds.check_count(request.facts)
            facts = [_new_fact(one) for one in request.facts]
            done = await self._facts.append_facts(facts, stream=request.stream or None)
            self._metrics.facts[APPEND_MANY] += sum(one.outcome == "stored" for one in done)
            told = [
                pb.AppendedFact(stream=one.stream, sequence=one.sequence, outcome=OUTCOMES[one.outcome]) for one in done
            ]
            return pb.AppendFactsResponse(facts=told)

        return await self._told(APPEND_MANY, append)

    def _wait(self, asked: Duration | None, ctx: Context) -> float:
        """Return how long a fetch may wait: the minimum of the request, the limit, and the caller's deadline."""
        wanted = asked.seconds + asked.nanos / 1e9 if asked else 0.0
        if wanted < 0:
            raise errors.ConfigError(f"a fetch cannot wait {wanted:g} s: leave the wait out, or ask for 0 s or more")
        longest = min(wanted, self._limits.wait.total_seconds())
        if ctx.timeout_ms is not None:
            left = ctx.timeout_ms / 1000
            longest = min(longest, left - max(ANSWER_MARGIN, left * ANSWER_SHARE))
        return max(longest, 0.0)

    async def _told(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        """Count a call, and turn our errors into Connect's."""
        began, outcome = time.perf_counter(), "canceled"
        try:
            answer = await call()
            outcome = "ok"
            return answer
        except errors.PenstockError as exc:
            told = connect_error(exc)
            outcome = told.code.value
            if told.code in UNEXPECTED:
                log.warning("%s by %s: %s", method, caller.get().name, exc)
            raise told from exc
        except Exception:
            outcome = "internal"
            log.exception("%s by %s failed", method, caller.get().name)
            raise
        finally:
            self._metrics.called(method, outcome, time.perf_counter() - began)


def _granted(consumer: str, stream: str) -> str:
    """The stream of a consumer that the caller may use."""
    bounds.check_name("consumer", consumer)
    bounds.check_name("stream", stream)
    return granted_consumer(caller.get(), consumer, stream)


def _new_fact(given: pb.AppendFactRequest | pb.NewFact) -> NewFact:
    """A fact that the caller may append."""
    bounds.check_subject_size(given.subject)
    check_subject(caller.get(), given.subject)
    return NewFact(given.subject, given.id, given.data, bounds.checked_headers(given.headers))


def connect_error(error: errors.PenstockError) -> ConnectError:
    """Return the Connect error that a caller gets."""
    if isinstance(error, FactConflict):
        detail = pb.FactError(reason=pb.FactError.Reason.CONFLICT, stream=error.stream, sequence=error.sequence)
        return ConnectError(Code.ALREADY_EXISTS, str(error), [detail])
    for kind, (code, reason) in REASONS.items():
        if isinstance(error, kind):
            return ConnectError(code, str(error), [pb.FactError(reason=reason)])
    code = next((code for kind, code in CODES if isinstance(error, kind)), Code.INTERNAL)
    return ConnectError(code, str(error) if isinstance(error, OWN_WORDS) else _words(code))


def _words(code: Code) -> str:
    match code:
        case Code.NOT_FOUND:
            return "the consumer or stream of this grant does not exist on the broker"
        case Code.UNAVAILABLE | Code.DEADLINE_EXCEEDED:
            return "the broker did not answer in time; try again"
        case _:
            return "the gateway failed; its log says why"


# -- facts as messages -------------------------------------------------------------------------------------------------


def _response(page: Page) -> pb.FetchFactsResponse:
    return pb.FetchFactsResponse(
        facts=[_fact(fact) for fact in page.facts],
        receipt=page.receipt or "",
        pending=page.pending,
        retry_after=duration(page.retry_after) if page.retry_after else None,
    )


def _fact(fact: Fact) -> pb.Fact:
    told = pb.Fact()  # setting fields takes half the time of passing them
    subject, fact_id, headers, stored_at = fact.parts()
    seconds = math.floor(stored_at.timestamp())  # the rest is added, also before 1970
    told.stream = fact.stream
    told.sequence = fact.sequence
    told.subject = _clean(subject)
    told.id = _clean(fact_id or "")
    told.data = fact.data
    if headers:
        told.headers = [pb.Header(name=_clean(name), values=_cleaned(values)) for name, values in headers.items()]
    told.stored_at = Timestamp(seconds=seconds, nanos=stored_at.microsecond * 1000)
    told.attempt = fact.attempt
    return told


def duration(length: timedelta) -> Duration:
    return Duration(seconds=int(length.total_seconds()), nanos=length.microseconds * 1000)


def _cleaned(values: Iterable[str]) -> list[str]:
    return [_clean(value) for value in values]


def _clean(text: str) -> str:
    """Text that protobuf takes: bytes in a subject or header that are no UTF-8 are shown as question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
