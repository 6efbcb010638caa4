"""What is asked of a server that a leaf is to join."""

from __future__ import annotations

import socket
import threading
from typing import NoReturn

import pytest

from penstock.server.hub import leaf_url


@pytest.mark.parametrize(
    "greeting", [b"INFO 5\r\n", b"INFO " + b"[" * 60_000 + b"\r\n", b"\xff\r\n", b"INFO {\r\n", b""]
)
def test_whatever_answers_there_the_url_is_taken_as_it_is(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(greeting)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"nats://127.0.0.1:{listener.getsockname()[1]}"
        assert leaf_url(url) == url
        thread.join()


def test_a_silent_name_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    silence, answered = threading.Event(), list[object]()

    def silent(*args: object, **named: object) -> NoReturn:
        silence.wait(60)
        answered.append(args)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        assert leaf_url("nats://hub.test:7422", 0.1) == "nats://hub.test:7422"
        assert answered == []
    finally:
        silence.set()
