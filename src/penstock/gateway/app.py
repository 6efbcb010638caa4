"""The gateway as an ASGI application: authentication, rate limits, and then the service."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from penstock.errors import PenstockError
from penstock.facts import Facts
from penstock.gateway.bounds import codecs
from penstock.gateway.grants import Grants, NotAuthenticated
from penstock.gateway.limits import Allowance, TooMany
from penstock.gateway.metrics import Metrics
from penstock.gateway.service import METHODS, Service, caller
from penstock.gateway.v1.facts_connect import FactServiceASGIApplication
from penstock.observe.collecting import consumer_status
from penstock.observe.status import ConsumerStatus
from penstock.topology.model import GatewaySpec
from penstock.web.server import PEER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ENCODINGS = frozenset({b"identity", b"gzip", b""})
KINDS = (b"application/proto", b"application/json")
ONCE = frozenset(
    {b"authorization", b"content-type", b"content-encoding", b"connect-protocol-version", b"connect-timeout-ms"}
)
"""Headers that may occur only once: with two it would be unclear which one counts."""
READY_WITHIN = 2.0  # seconds
CALL_MARGIN = 30.0  # seconds beyond the longest wait that a call may take with its body


class Gateway:
    """Answers calls, health and metrics. Has no state that another process would need."""

    def __init__(self, facts: Facts, spec: GatewaySpec) -> None:
        self.facts = facts
        self.metrics = Metrics()
        self.draining = False
        self._limits = spec.limits
        self._grants = Grants(spec)
        self._allowances = {
            one.name: Allowance(spec.limits.rate, spec.limits.concurrent) for one in self._grants.identities
        }
        service = Service(facts, spec.limits, self.metrics)
        self._calls = FactServiceASGIApplication(service, read_max_bytes=spec.limits.body, codecs=codecs())
        self._paths = {f"{self._calls.path}/{method}" for method in METHODS}

    # -- calls -------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application for callers: calls, and `/healthz` for load balancers that cannot reach the other port."""
        if scope["type"] != "http":
            return
        if scope["path"] == "/healthz":
            await _answer(send, 200, b"ok\n")
            return
        try:
            allowance = self._enter(scope)
        except NotAuthenticated as exc:
            await self._refuse(send, 401, "unauthenticated", str(exc))
        except TooMany as exc:
            await self._refuse(send, 429, "resource_exhausted", str(exc))
        except Unacceptable as exc:
            await self._refuse(send, exc.status, exc.code, exc.reason)
        else:
            await self._call(scope, receive, send, allowance)

    def _enter(self, scope: Scope) -> Allowance:
        """Authenticate the caller, and check its limits; the body is not read before."""
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"").decode("latin-1") or None
        peer = scope.get("state", {}).get(PEER)
        identity = self._grants.caller(peer, authorization, datetime.now(UTC))
        _check_text(scope["headers"])
        _check(scope["method"], headers, self._limits.body)
        if scope["path"] not in self._paths:
            raise Unacceptable(404, "unimplemented", f"there are {', '.join(METHODS)} below {self._calls.path}")
        allowance = self._allowances[identity.name]
        allowance.enter(time.monotonic())
        caller.set(identity)
        return allowance

    async def _call(self, scope: Scope, receive: Receive, send: Send, allowance: Allowance) -> None:
        self.metrics.running += 1
        try:
            async with asyncio.timeout(self._limits.wait.total_seconds() + CALL_MARGIN):
                await self._calls(scope, receive, send)
        except TimeoutError:
            self.metrics.refused["too_slow"] += 1
        finally:
            self.metrics.running -= 1
            allowance.leave()

    async def _refuse(self, send: Send, status: int, code: str, message: str) -> None:
        self.metrics.refused[code] += 1
        body = json.dumps({"code": code, "message": message}).encode()
        await _answer(send, status, body, b"application/json")

    # -- health and metrics ------------------------------------------------------------------------------------------

    async def admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application for operators: `/healthz`, `/readyz` and `/metrics`, on a port that callers do not see."""
        if scope["type"] != "http":
            return
        match scope["path"]:
            case "/healthz":
                await _answer(send, 200, b"ok\n")
            case "/readyz":
                ready = await self.ready()
                await _answer(send, 200 if ready else 503, b"ready\n" if ready else b"not ready\n")
            case "/metrics":
                text = self.metrics.text(await self._progress(), await self.ready())
                await _answer(send, 200, text, b"text/plain; version=0.0.4")
            case _:
                await _answer(send, 404, b"/healthz, /readyz and /metrics are here\n")

    async def ready(self) -> bool:
        """Whether this process can take calls: the broker answers, and the gateway is not shutting down."""
        if self.draining:
            return False
        try:
            async with asyncio.timeout(READY_WITHIN):
                await self.facts.link.jetstream.account_info()
        except (PenstockError, TimeoutError):
            return False
        return True

    async def _progress(self) -> list[ConsumerStatus]:
        """The granted consumers, as far as the broker answers about them; scrapers do not wait long for the rest."""
        granted = sorted({pair for one in self._grants.identities for pair in one.consumers})
        found: list[ConsumerStatus] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_WITHIN):
                for stream, consumer in granted:
                    with suppress(PenstockError):
                        status = await consumer_status(self.facts.link.jetstream, stream, consumer)
                        found += [status] if status else []
        return found


class Unacceptable(PenstockError):
    """A request of an unsupported kind."""

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(status, code, reason)
        self.status = status
        self.code = code
        self.reason = reason


def _check(method: str, headers: Mapping[bytes, bytes], most: int) -> None:
    """Refuse everything but unary Connect calls. gRPC would need HTTP/2."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if method != "POST":
        raise Unacceptable(405, "unimplemented", "calls are POST requests")
    if kind not in KINDS:
        raise Unacceptable(415, "unimplemented", "calls have the content type application/proto or application/json")
    if headers.get(b"content-encoding", b"identity").strip().lower() not in ENCODINGS:
        raise Unacceptable(415, "unimplemented", "calls are compressed with gzip, or not at all")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length[:20]) > most:
        raise Unacceptable(413, "resource_exhausted", f"a request has at most {most} bytes")


def _check_text(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse headers that Connect's library would fail on, or would interpret differently than we did."""
    seen: set[bytes] = set()
    for name, value in headers:
        try:
            value.decode()
        except UnicodeDecodeError:
            raise Unacceptable(400, "invalid_argument", f"the header {name.decode('latin-1')!r} is no UTF-8") from None
        if name in ONCE and name in seen:
            raise Unacceptable(400, "invalid_argument", f"the header {name.decode()!r} is given twice")
        seen.add(name)


async def _answer(send: Send, status: int, body: bytes, kind: bytes = b"text/plain") -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
