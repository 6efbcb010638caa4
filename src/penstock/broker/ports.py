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

    They lie below the kernel's own range: from inside it, an outgoing connection of anybody could take the port while
    the server is down for a restart. Someone may still be quicker than the server; whoever starts it tries again then.
    """
    found: set[int] = set()
    for _ in range(TRIES):
        if len(found) == count:
            return list(found)
        port = _draw.randrange(LOWEST, _ephemeral_from())
        if _is_free(port, host):
            found.add(port)
    raise ServerFailed(f"found no free port on {host} in {TRIES} tries")


def _is_free(port: int, host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _ephemeral_from() -> int:
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return EPHEMERAL_FROM
    return low if low > LOWEST + 1_000 else EPHEMERAL_FROM
