"""Accepting connections within limits, so that idle, slow and numerous callers leave room for the others.

asyncio's own server accepts without a limit, gives a TLS handshake a minute, and logs a traceback for every failed
`accept`, hundreds in a row, when descriptors run out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError

HEAD_WITHIN = 10.0
"""Seconds from accepting a connection to the end of its first request head, with the TLS handshake."""
CLOSE_WITHIN = 5.0
"""Seconds that a caller has to take the end of a TLS connection."""
UNREAD_WITHIN = 60_000
"""Milliseconds after which the kernel drops a connection whose caller does not take what was sent."""
ACCEPT_PAUSE = 0.5
"""Seconds without an `accept` after one failed."""
WARN_EVERY = 10.0
"""Seconds between two warnings about the same."""
RESERVED_DESCRIPTORS = 64
"""Descriptors that are kept for everything but connections of callers: the broker, logs, files, libraries."""
ADMIN_CONNECTIONS = 32
"""Connections for operators, beside those of callers."""
FEWEST_CONNECTIONS = 8

log = logging.getLogger("penstock.gateway")


@dataclass(slots=True)
class Places:
    """Counts open connections, in all and by address."""

    total: int
    per_address: int
    taken: Counter[str] = field(default_factory=Counter)

    def take(self, address: str) -> bool:
        """Take a place, if there is one. Each that was taken must be given back with `free`."""
        origin = origin_of(address)
        if self.taken.total() >= self.total or self.taken[origin] >= self.per_address:
            return False
        self.taken[origin] += 1
        return True

    def free(self, address: str) -> None:
        origin = origin_of(address)
        self.taken[origin] -= 1
        if self.taken[origin] <= 0:
            del self.taken[origin]


def origin_of(address: str) -> str:
    """What counts as one address: IPv6 by its network of 64 bits, of which one caller has all."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))


def places_within_descriptors(total: int, per_address: int, descriptors: int | None = None) -> Places:
    """Places for callers, lowered in proportion when the process may not open that many descriptors.

    Raises `ConfigError` when next to none are left.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if descriptors is None else descriptors
    if limit == resource.RLIM_INFINITY:
        return Places(total, per_address)
    room = limit - RESERVED_DESCRIPTORS - ADMIN_CONNECTIONS
    if room >= total:
        return Places(total, per_address)
    if room < FEWEST_CONNECTIONS:
        raise ConfigError(
            f"a process that may open {limit} files has no room for callers: raise the limit (`ulimit -n 4096`)"
        )
    log.warning(
        "at most %d connections at a time, not %d: this process may open %d files (`ulimit -n`)", room, total, limit
    )
    return Places(room, max(1, per_address * room // total))


class Listener:
    """Accepts on a bound socket, in the shape that uvicorn asks of an asyncio server.

    `make` gets what the protocol must call when its connection has ended.
    """

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[Callable[[], None]], asyncio.Protocol],
        places: Places,
        context: ssl.SSLContext | None,
        refused: Counter[str],
        backlog: int,
    ) -> None:
        self._bound = bound
        self._make = make
        self._places = places
        self._context = context
        self._refused = refused
        self._warned: dict[str, float] = {}
        self._opening: set[asyncio.Task[None]] = set()
        bound.setblocking(False)
        bound.listen(backlog)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        self._accepting.cancel()
        for task in self._opening:
            task.cancel()
        self._bound.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._opening, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._bound)
            except OSError as exc:  # descriptors or memory ran out, or the caller has gone already
                self._warn("accept", f"a connection could not be accepted ({exc.strerror or exc}); trying again")
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            if self._places.take(address[0]):
                task = asyncio.create_task(self._open(accepted, address[0]))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
            else:
                accepted.close()
                self._refused["connections"] += 1
                self._warn("places", f"connections from {address[0]} are refused: there are too many, see `limits`")
            await asyncio.sleep(0)  # a flood of connections must not keep everything else waiting

    async def _open(self, accepted: socket.socket, address: str) -> None:
        """Hand a connection to its protocol, after the TLS handshake, and see to it that its place is given back."""
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._places.free(address)

        protocol = self._make(end)
        tls: dict[str, Any] = (
            {"ssl": self._context, "ssl_handshake_timeout": HEAD_WITHIN, "ssl_shutdown_timeout": CLOSE_WITHIN}
            if self._context
            else {}
        )
        try:
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_WITHIN)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: protocol, accepted, **tls)
        except OSError:  # no TLS, a refused certificate, too slow, or gone
            self._refused["handshake"] += 1
            accepted.close()
            end()
        except BaseException:
            accepted.close()
            end()
            raise

    def _warn(self, kind: str, text: str) -> None:
        now = time.monotonic()
        if now - self._warned.get(kind, -WARN_EVERY) >= WARN_EVERY:
            self._warned[kind] = now
            log.warning("%s", text)
