"""The control-plane connection: nats-py behind one door, its errors translated in one place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.client import Client

from penstock.errors import BrokerUnreachable, DeadlineExceeded, JetStreamDisabled, Unavailable
from penstock.jetstream.api import JetStream
from penstock.jetstream.reports import GaveUp, PlainServer, Reports
from penstock.settings import Settings
from penstock.wire import login

# Without a handler, Python prints a library's warnings on stderr; whoever configures logging still gets them.
logging.getLogger("nats").addHandler(logging.NullHandler())

RECONNECT_EVERY = 0.1  # seconds
LOOK_EVERY = 0.01  # seconds
CLOSE_WITHIN = 2.0  # seconds


class Broker:
    """One open connection and the JetStream API on it. It reconnects by itself, for as long as it takes."""

    def __init__(self, client: Client, settings: Settings, reports: Reports) -> None:
        self.client = client
        self.settings = settings
        self._reports = reports
        self.jetstream = JetStream(self.request, settings.domain, settings.timeout)

    @property
    def server_version(self) -> str:
        """The version of the server we are connected to, such as `2.15.1`."""
        version = self.client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    async def request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        """Send one request, return the body of the answer.

        Nothing is sent while the connection is down: `BrokerUnreachable` and `Unavailable` mean that nothing happened.
        After `ConnectionLost` and `DeadlineExceeded` the request may or may not have been carried out.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        await self._until_connected(deadline)
        with self._reports.watching(subject) as trouble, translated(self.settings, subject, timeout):
            remaining = max(deadline - loop.time(), 0.001)
            answer = asyncio.ensure_future(self.client.request(subject, payload, timeout=remaining))
            try:
                await asyncio.wait((answer, trouble), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    trouble.result()
                message = await answer
            finally:
                answer.cancel()
            return message.data

    async def _until_connected(self, deadline: float) -> None:
        """nats-py keeps what is sent while it reconnects, and would send it long after the caller has given up."""
        while not self.client.is_connected:
            if self.client.is_closed or asyncio.get_running_loop().time() >= deadline:
                raise BrokerUnreachable(self.settings.servers, "the connection is lost")
            await asyncio.sleep(LOOK_EVERY)

    async def publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None, reply: str = "") -> None:
        """Publish without waiting for anybody."""
        with translated(self.settings, subject, self.settings.timeout):
            await self.client.publish(subject, data, reply=reply, headers=headers)

    async def close(self) -> None:
        await _close(self.client)


@asynccontextmanager
async def connect(settings: Settings, **options: Any) -> AsyncIterator[Broker]:
    """A connection for the length of the block. `options` go to nats-py as they are.

    Raises `BrokerUnreachable` when no server answers, and `AccessDenied` at once when one refuses the login or TLS
    does not come about. Never waits longer than the settings' timeout.
    """
    reports = Reports(settings, options.pop("error_cb", None), options.pop("disconnected_cb", None))
    broker = Broker(await _open(settings, options, reports), settings, reports)
    try:
        yield broker
    finally:
        await broker.close()


class _Client(Client):
    """nats-py would go on in plain text, password and all, when a server does not offer the TLS we asked for."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and "tls" in self.options and not (info.get("tls_required") or self._encrypted):
            raise PlainServer
        await super()._process_info(info, initial_connection)

    @property
    def _encrypted(self) -> bool:
        """Whether TLS came before INFO."""
        scheme = self._current_server.uri.scheme if self._current_server else ""
        return bool(self.options["tls_handshake_first"]) or scheme == "wss"


async def _open(settings: Settings, options: dict[str, Any], reports: Reports) -> Client:
    client = _Client()
    arguments = {
        "servers": list(settings.servers),
        "dont_randomize": True,
        "connect_timeout": settings.timeout,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": RECONNECT_EVERY,
        "name": "penstock",
        "user": settings.user,
        "password": settings.password,
        "token": settings.token,
        "inbox_prefix": settings.inbox_prefix,
        **_signer(settings),
        "tls": settings.ssl_context(),
        "tls_handshake_first": settings.tls_first,
        **options,
        "error_cb": reports.error,
        "disconnected_cb": reports.disconnected,
    }
    try:
        await asyncio.wait_for(client.connect(**arguments), settings.timeout)
        if not client.is_connected:  # nats-py takes an end of file in place of the first PONG for success
            raise nats.errors.UnexpectedEOF
    except (TimeoutError, OSError, nats.errors.Error, GaveUp) as exc:
        reports.connecting = False
        await _close(client)
        raise reports.connect_error(exc) from exc
    reports.connecting = False
    return client


def _signer(settings: Settings) -> dict[str, str]:
    """The login by a signature, as nats-py takes it: a file with a JWT, or a seed alone."""
    if not settings.credentials:
        return {}
    path = Path(settings.credentials)
    login.signed(path, "a trial")  # nats-py's own complaint about a bad file is an assertion
    seed = login.seed_without_jwt(path)
    return {"nkeys_seed_str": seed} if seed else {"user_credentials": settings.credentials}


async def _close(client: Client) -> None:
    """Close for good, whatever state it is in. nats-py waits for ever on a connection whose TLS handshake failed."""
    with suppress(TimeoutError, OSError, nats.errors.Error):  # it is closed all the same; nobody is left to tell
        if client._reading_task:
            await asyncio.wait_for(client.close(), CLOSE_WITHIN)
    if client._transport:
        client._transport.close()  # type: ignore[no-untyped-call]  # nats-py has no types here


@contextmanager
def translated(settings: Settings, subject: str, timeout: float) -> Iterator[None]:
    """Turn nats-py's errors into ours. The only place that names them."""
    try:
        yield
    except nats.errors.NoRespondersError as exc:
        if subject.startswith("$JS."):
            raise JetStreamDisabled(_where(settings, subject)) from exc
        raise Unavailable(f"nobody answers on {subject!r}") from exc
    except (nats.errors.TimeoutError, TimeoutError) as exc:
        raise DeadlineExceeded(subject, timeout) from exc
    except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError, OSError) as exc:
        raise BrokerUnreachable(settings.servers, str(exc) or type(exc).__name__) from exc
    except nats.errors.Error as exc:
        raise Unavailable(f"{subject}: {exc}") from exc


def _where(settings: Settings, subject: str) -> str:
    """The servers, and the domain that the API subject names: `$JS.<domain>.API.…`."""
    _, first, *_ = subject.split(".")
    domain = f" (domain {first!r})" if first != "API" else ""
    return ", ".join(settings.servers) + domain
