"""The control-plane connection: nats-py behind one door, its errors translated in one place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client

from penstock.broker.jetstream import JetStream
from penstock.errors import (
    AccessDenied,
    BrokerUnreachable,
    DeadlineExceeded,
    JetStreamDisabled,
    PenstockError,
    Unavailable,
)
from penstock.settings import Settings

AUTHORIZATION_VIOLATION = "authorization violation"  # the protocol's own words: `-ERR 'Authorization Violation'`


class Broker:
    """One open connection and the JetStream API on it."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.jetstream = JetStream(self.request, settings.domain, settings.timeout)

    @property
    def server_version(self) -> str:
        """The version of the server we are connected to, such as `2.15.1`."""
        version = self.client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    async def request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        """Send one request, return the body of the answer."""
        with translated(self.settings, subject, timeout):
            message = await self.client.request(subject, payload, timeout=timeout)
            return message.data

    async def publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None, reply: str = "") -> None:
        """Publish without waiting for anybody."""
        with translated(self.settings, subject, self.settings.timeout):
            await self.client.publish(subject, data, reply=reply, headers=headers)

    async def close(self) -> None:
        if not self.client.is_closed:
            await self.client.close()


@asynccontextmanager
async def connect(settings: Settings, **options: Any) -> AsyncIterator[Broker]:
    """A connection for the length of the block. `options` go to nats-py as they are.

    Raises `BrokerUnreachable` when no server answers in time and `AccessDenied` when one says no.
    """
    broker = Broker(await _open(settings, options), settings)
    try:
        yield broker
    finally:
        await broker.close()


async def _open(settings: Settings, options: dict[str, Any]) -> Client:
    seen: list[Exception] = []

    async def remember(error: Exception) -> None:
        seen.append(error)

    client = Client()
    arguments = {
        "servers": list(settings.servers),
        "connect_timeout": settings.timeout,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": 0.1,
        "name": "penstock",
        "error_cb": remember,
        "user": settings.user,
        "password": settings.password,
        "token": settings.token,
        "user_credentials": settings.credentials,
        "tls": settings.ssl_context(),
        "tls_handshake_first": settings.tls_first,
        **options,
    }
    try:
        # nats-py tries for ever with unlimited reconnects: the deadline is ours.
        await asyncio.wait_for(client.connect(**arguments), settings.timeout)
    except (TimeoutError, OSError, nats.errors.Error) as exc:
        await _abandon(client)
        raise _connect_error(settings, [*seen, exc]) from exc
    return client


async def _abandon(client: Client) -> None:
    with suppress(OSError, nats.errors.Error):  # it never was open; the caller raises the reason
        await client.close()


def _connect_error(settings: Settings, seen: list[Exception]) -> PenstockError:
    if any(AUTHORIZATION_VIOLATION in str(error).lower() for error in seen):
        return AccessDenied(
            f"{', '.join(settings.servers)} refused the login (authorization violation); "
            "check --credentials, or user, password and token in PENSTOCK_USER, PENSTOCK_PASSWORD, PENSTOCK_TOKEN"
        )
    telling = [error for error in seen if not isinstance(error, TimeoutError | nats.errors.NoServersError)]
    reason = str(telling[-1]) if telling else f"no answer within {settings.timeout:g} s"
    return BrokerUnreachable(settings.servers, reason)


@contextmanager
def translated(settings: Settings, subject: str, timeout: float) -> Iterator[None]:
    """Turn nats-py's errors into ours. The only place that names them."""
    try:
        yield
    except nats.errors.NoRespondersError as exc:
        if subject.startswith("$JS."):
            raise JetStreamDisabled(_where(settings)) from exc
        raise Unavailable(f"nobody answers on {subject!r}") from exc
    except (nats.errors.TimeoutError, TimeoutError) as exc:
        raise DeadlineExceeded(subject, timeout) from exc
    except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError, OSError) as exc:
        raise BrokerUnreachable(settings.servers, str(exc) or type(exc).__name__) from exc
    except nats.errors.Error as exc:
        raise Unavailable(f"{subject}: {exc}") from exc


def _where(settings: Settings) -> str:
    domain = f" (domain {settings.domain!r})" if settings.domain else ""
    return ", ".join(settings.servers) + domain
