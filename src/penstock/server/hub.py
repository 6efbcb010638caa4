"""Finding the port where a server takes leaf nodes, when someone names the one where it takes clients."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from penstock.errors import ConfigError
from penstock.settings import without_login
from penstock.wire import resolve

CLIENT_PORT = 4222
LEAF_PORT = 7422
LEAF_OFFSET = LEAF_PORT - CLIENT_PORT
"""How far above the client port `penstock server` listens for leaf nodes, as NATS's own defaults do."""


def leaf_url(url: str, timeout: float = 2.0) -> str:
    """The URL that a leaf must be given to join the server at `url`.

    That is `url` itself when leaf nodes are welcome there, or when nobody answers: the hub may come later. For a
    client port it is the leaf-node port of the same server, when that is where it usually is.
    """
    parts, host, given = address(url)
    port = given or LEAF_PORT
    info = _info(host, port, timeout)
    netloc = parts.netloc if given else f"{parts.netloc}:{port}"
    if info is None or "leafnode_urls" in info:
        return f"{parts.scheme}://{netloc}" if "://" in url else f"nats://{netloc}"
    there = _info(host, port + LEAF_OFFSET, timeout)
    if there and there.get("server_id") == info.get("server_id"):
        return f"{parts.scheme}://{netloc.removesuffix(f':{port}')}:{port + LEAF_OFFSET}"
    raise ConfigError(
        f"{without_login(url)} is where that server takes clients; a leaf joins at its leaf-node port, which is not "
        f"{port + LEAF_OFFSET}: name it (`penstock server` prints it, nats-server has it in `leafnodes`)"
    )


def address(url: str) -> tuple[SplitResult, str, int | None]:
    """A hub's URL in parts, its host, and its port if it names one."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:  # brackets that do not close, a port that is no number or out of range
        host = None
    if not host:
        raise ConfigError(f"leaf_of: {without_login(url)!r} is not a URL such as nats://hub.example:{LEAF_PORT}")
    return parts, host, port


def _info(host: str, port: int, timeout: float) -> dict[str, Any] | None:
    """What the server at this port says first, or None when nothing comes that a NATS server would say."""
    try:
        verb, _, fields = _first_line(host, port, timeout).partition(b" ")
        info = json.loads(fields) if verb == b"INFO" else None
    except (OSError, OverflowError, ValueError, RecursionError):
        return None
    return info if isinstance(info, dict) else None


def _first_line(host: str, port: int, timeout: float) -> bytes:
    """What the first address of the host that answers says."""
    *others, last = resolve.hosts(host, port, timeout)
    for address in others:
        with suppress(OSError):
            return _line_of(address, port, timeout)
    return _line_of(last, port, timeout)


def _line_of(address: str, port: int, timeout: float) -> bytes:
    with socket.create_connection((address, port), timeout) as connection, connection.makefile("rb") as lines:
        return lines.readline(65536)
