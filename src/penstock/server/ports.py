"""Free ports that stay free while a server restarts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from penstock.errors import ServerFailed

FREE = -1
"""A port of the server's own choice."""
LOWEST = 10_000
EPHEMERAL_FROM = 32_768  # the kernel's default, where it does not say otherwise
TRIES = 1_000

_draw = random.SystemRandom()  # a test that seeds `random` must not make two processes choose alike


def free_ports(count: int, host: str) -> list[int]:
    """Different ports that nobody listens on right now.

    Raises `ServerFailed` when nobody could listen on that host at all.

    They lie below the kernel's own range: from inside it, an outgoing connection of anybody could take the port while
    the server is down for a restart. Someone may still be quicker than the server; whoever starts it tries again then.
    """
    family, address = _resolved(host)
    found: set[int] = set()
    for _ in range(TRIES):
        if len(found) == count:
            return list(found)
        port = _draw.randrange(LOWEST, _ephemeral_from())
        if _is_free(port, family, address):
            found.add(port)
    raise ServerFailed(f"found no free port on {host} in {TRIES} tries")


def _resolved(host: str) -> tuple[socket.AddressFamily, str]:
    """The address to listen on; looked up once, for a name that nobody knows can take seconds."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        _bind(0, family, str(address[0]))
    except (OSError, UnicodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ServerFailed(
            f"cannot listen on host {host!r} ({reason}); give an address of this machine, such as 127.0.0.1, "
            "or 0.0.0.0 for all of them"
        ) from exc
    return family, str(address[0])


def _is_free(port: int, family: socket.AddressFamily, address: str) -> bool:
    try:
        _bind(port, family, address)
    except OSError:
        return False
    return True


def _bind(port: int, family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))


def _ephemeral_from() -> int:
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return EPHEMERAL_FROM
    return low if low > LOWEST + 1_000 else EPHEMERAL_FROM
