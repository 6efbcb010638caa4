"""A TCP proxy in front of a real server that loses what a test wants lost: single messages, or the connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

Drop = Callable[[bytes], bool]
"""Told the control line of a message (`PUB subject reply size`, `MSG subject sid size`); True loses the message."""


def keep_all(_: bytes) -> bool:
    return False


class LossyProxy:
    """Forwards to a server on loopback; `drop_up` and `drop_down` lose messages, `cut` breaks connections.

    Connections are taken one after the other or side by side, each with two threads. With `whole`, bytes are passed on
    as they come, also those of a compressed or encrypted link between servers; then there is only `cut`.
    """

    def __init__(self, port: int, whole: bool = False) -> None:
        self._server = ("127.0.0.1", port)
        self._whole = whole
        self.drop_up: Drop = keep_all
        """What the client publishes."""
        self.drop_down: Drop = keep_all
        """What the server delivers."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._refusing = False
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self, refuse: bool = False) -> None:
        """Break all connections at once; with `refuse`, new ones too until `allow`."""
        with self._lock:
            self._refusing = refuse
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _close(*pair)

    def allow(self) -> None:
        self._refusing = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._listener)  # the shutdown in it ends an accept that waits
        self.cut(refuse=True)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                if self._refusing:
                    _close(client)
                    continue
                with suppress(OSError):  # the server is down
                    self._connect(client)
                    continue
                _close(client)

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection(self._server)
        with self._lock:
            if self._refusing:  # since a moment ago
                _close(client, server)
                return
            self._pairs.append((client, server))
        up = (client, server, lambda line: self.drop_up(line))
        down = (server, client, lambda line: self.drop_down(line))
        for source, target, drop in (up, down):
            work, args = (_relay, (source, target)) if self._whole else (_forward, (source, target, drop))
            threading.Thread(target=work, args=args, daemon=True).start()


def _forward(source: socket.socket, target: socket.socket, drop: Drop) -> None:
    with suppress(OSError), source.makefile("rb") as stream:
        while line := stream.readline():
            body = stream.read(_body_size(line))
            if not (body and drop(line.rstrip())):
                target.sendall(line + body)
    _close(source, target)


def _relay(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    _close(source, target)


def _body_size(line: bytes) -> int:
    """Bytes that follow a control line, with their line end; 0 when nothing follows."""
    verb, _, rest = line.partition(b" ")
    return int(rest.split()[-1]) + 2 if verb.upper() in (b"PUB", b"HPUB", b"MSG", b"HMSG") else 0


def _close(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            one.close()
