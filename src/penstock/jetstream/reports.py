"""What nats-py reports through its callbacks: why connecting fails, what is forbidden, that a connection broke."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import nats.errors

from penstock.errors import AccessDenied, BrokerUnreachable, ConnectionLost, PenstockError
from penstock.settings import Settings
from penstock.wire.session import as_checked

# The protocol names its errors only in words; nats-py hands some of them on in lower case.
AUTHORIZATION_VIOLATION = "authorization violation"
PERMISSIONS_VIOLATION = "permissions violation"
REPORTS_KEPT = 20
PATIENCE = 1.0  # seconds: so long a server may be down for a restart before we give up on it

ErrorCallback = Callable[[Exception], Awaitable[None]]
Callback = Callable[[], Awaitable[None]]


class PlainServer(nats.errors.Error):
    """The settings ask for TLS, and the server does not offer it."""


class GaveUp(Exception):
    """Connecting is hopeless. nats-py, which would try for ever, does not know this error and lets it pass."""


class Reports:
    """Collects what nats-py reports, and decides while connecting when to give up."""

    def __init__(self, settings: Settings, on_error: ErrorCallback | None, on_disconnect: Callback | None) -> None:
        self.settings = settings
        self.seen: deque[Exception] = deque(maxlen=REPORTS_KEPT)
        self.connecting = True
        self._started = time.monotonic()
        self._on_error = on_error
        self._on_disconnect = on_disconnect
        self._waiting: dict[asyncio.Future[None], str] = {}

    async def error(self, error: Exception) -> None:
        """nats-py's `error_cb`."""
        self.seen.append(error)
        if self.connecting and self._hopeless(error):
            raise GaveUp
        text = str(error).lower()
        if PERMISSIONS_VIOLATION in text:
            self._deny(text)
        if self._on_error:
            await self._on_error(error)

    async def disconnected(self) -> None:
        """nats-py's `disconnected_cb`."""
        servers = ", ".join(self.settings.servers)
        for future in list(self._waiting):
            _fail(future, ConnectionLost(servers, "it broke while we waited for an answer"))
        if self._on_disconnect:
            await self._on_disconnect()

    def _hopeless(self, error: Exception) -> bool:
        if is_final(error):
            return True
        waited = time.monotonic() - self._started
        return len(self.seen) >= len(self.settings.servers) and waited >= PATIENCE

    def _deny(self, text: str) -> None:
        for future, subject in list(self._waiting.items()):
            names = {f'"{one.lower()}"' for one in (subject, as_checked(subject, self.settings.domain))}
            if any(name in text for name in names) or self.settings.inbox_prefix.lower() in text:
                reason = f"{subject}: {text.removeprefix('nats: ')}"
                _fail(future, AccessDenied(f"{reason}; give this user the permission, or use another"))

    @contextmanager
    def watching(self, subject: str) -> Iterator[asyncio.Future[None]]:
        """A future that fails as soon as a request to `subject` can no longer be answered."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = subject
        try:
            yield future
        finally:
            del self._waiting[future]
            future.cancel()

    def connect_error(self, last: BaseException) -> PenstockError:
        """Why there is no connection, in words one can act on."""
        errors = [*self.seen, last]
        servers = ", ".join(self.settings.servers)
        final = next((error for error in errors if is_final(error)), None)
        if final:
            return AccessDenied(f"{servers} {_refusal(final)}")
        telling = [e for e in errors if not isinstance(e, TimeoutError | GaveUp | nats.errors.NoServersError)]
        reason = str(telling[-1]) if telling else f"no answer within {self.settings.timeout:g} s"
        return BrokerUnreachable(self.settings.servers, reason)


def is_final(error: BaseException) -> bool:
    """Whether another try with the same settings is pointless."""
    return isinstance(error, ssl.SSLError | PlainServer) or AUTHORIZATION_VIOLATION in str(error).lower()


def _refusal(error: BaseException) -> str:
    if isinstance(error, PlainServer):
        return "does not offer TLS, and the settings ask for it; enable TLS there, or drop the TLS settings and tls://"
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"has a certificate that is not trusted ({error.verify_message}); "
            "name the CA that signed it with --tls-ca or PENSTOCK_TLS_CA"
        )
    if isinstance(error, ssl.SSLError):
        return (
            f"ended the TLS handshake ({error.reason or error}); does it want a client certificate? "
            "Give one it trusts with --tls-cert and --tls-key or PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY"
        )
    return (
        "refused the login (authorization violation); check --credentials, or user, password and token "
        "in PENSTOCK_USER, PENSTOCK_PASSWORD, PENSTOCK_TOKEN"
    )


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # it counts as seen: the request may have been answered in the same moment
