"""The speed limits: frames built before the clock starts, written to a bare socket, answers only scanned."""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from typing import Any

from harness import Timed

BEING_REMOVED = 10049
"""The files of a large stream are still being removed: one of the same name cannot be made yet."""
ACK = re.compile(rb'"type":"ack","seq":(\d+),"msgs":(\d+)')


class RawConnection:
    """A socket that has said CONNECT and subscribed to its inbox."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.inbox = f"_INBOX.{secrets.token_hex(4)}"
        self._read_until(b"\r\n")
        self.socket.sendall(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nPING\r\n')
        self._read_until(b"PONG\r\n")
        self.socket.sendall(f"SUB {self.inbox}.> 1\r\n".encode())

    def ask(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        payload = json.dumps(body).encode() if body else b""
        self.socket.sendall(f"PUB {subject} {self.inbox}.ask {len(payload)}\r\n".encode() + payload + b"\r\n")
        seen = self._read_until(b"}\r\n")
        answer: dict[str, Any] = json.loads(seen[seen.index(b"{") :])
        return answer

    def close(self) -> None:
        self.socket.close()

    def _read_until(self, mark: bytes) -> bytes:
        seen = b""
        while mark not in seen:
            seen += self.socket.recv(1 << 16)
        return seen


def fresh_stream(port: int, name: str, subjects: list[str], **config: Any) -> None:
    """Delete and create a stream, so that every round starts with an empty one."""
    raw = RawConnection(port)
    raw.ask(f"$JS.API.STREAM.DELETE.{name}")
    wanted = {"name": name, "subjects": subjects, "storage": "file", **config}
    deadline = time.monotonic() + 10
    while True:
        answer = raw.ask(f"$JS.API.STREAM.CREATE.{name}", wanted)
        if answer.get("error", {}).get("err_code") != BEING_REMOVED or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    raw.close()
    if "error" in answer:
        raise RuntimeError(answer["error"])


def stored(port: int, stream: str) -> int:
    """How many messages the stream holds."""
    raw = RawConnection(port)
    answer = raw.ask(f"$JS.API.STREAM.INFO.{stream}")
    raw.close()
    return int(answer["state"]["messages"])


def atomic(port: int, subject: str, data: bytes, count: int, size: int = 1000) -> Timed:
    """Atomic batches one after the other, as prebuilt bytes: the first message asks, the last commits."""
    raw = RawConnection(port)
    batches = [_atomic_batch(raw.inbox, subject, data, size) for _ in range(count // size)]
    started = time.perf_counter()
    for batch in batches:
        raw.socket.sendall(batch)
        raw._read_until(b'"count":%d}' % size)
    seconds = time.perf_counter() - started
    raw.close()
    return Timed(len(batches) * size, seconds)


def _atomic_batch(inbox: str, subject: str, data: bytes, size: int) -> bytes:
    ident = secrets.token_hex(8)
    frames = []
    for number in range(1, size + 1):
        commit = "Nats-Batch-Commit: 1\r\n" if number == size else ""
        headers = f"NATS/1.0\r\nNats-Batch-Id: {ident}\r\nNats-Batch-Sequence: {number}\r\n{commit}\r\n".encode()
        reply = f"{inbox}.b " if number in (1, size) else ""
        frames.append(f"HPUB {subject} {reply}{len(headers)} {len(headers) + len(data)}\r\n".encode())
        frames.append(headers + data + b"\r\n")
    return b"".join(frames)


def fast(port: int, subject: str, data: bytes, count: int, flow: int, outstanding: int) -> Timed:
    """Fast ingest as prebuilt bytes, with the same window of unacknowledged messages as our publisher."""
    raw = RawConnection(port)
    prefix = f"{raw.inbox}.{secrets.token_hex(8)}.{flow}.fail."
    frames = [
        f"PUB {subject} {prefix}{n}.{0 if n == 1 else 1}.$FI {len(data)}\r\n".encode() + data + b"\r\n"
        for n in range(1, count + 1)
    ]
    step = flow // 2 or 1
    chunks = [(len(part), b"".join(part)) for n in range(1, count, step) if (part := frames[n : n + step])]
    end = f"PUB {subject} {prefix}{count + 1}.3.$FI 0\r\n\r\n".encode()
    started = time.perf_counter()
    raw.socket.sendall(frames[0])
    sent, acked, every, tail = 1, 0, 0, b""
    for size, chunk in chunks:
        while sent + size - acked > every * outstanding:
            tail = tail[-64:] + raw.socket.recv(1 << 16)
            if found := ACK.findall(tail):
                acked, every = int(found[-1][0]), int(found[-1][1])
        raw.socket.sendall(chunk)
        sent += size
    raw.socket.sendall(end)
    raw._read_until(b'"count":%d}' % count)
    seconds = time.perf_counter() - started
    raw.close()
    return Timed(count, seconds)


def acknowledged_pulls(port: int, stream: str, consumer: str, count: int, page: int) -> Timed:
    """Pull pages of a new consumer, and acknowledge each in one prebuilt write of which the last is answered.

    The stream's first `count` messages are the consumer's. Messages are counted, and not parsed.
    """
    raw = RawConnection(port)
    ask = json.dumps({"batch": page, "no_wait": True})
    pull = f"PUB $JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer} {raw.inbox}.pull {len(ask)}\r\n{ask}\r\n".encode()
    pages = [
        _acknowledgements(f"$JS.ACK.{stream}.{consumer}.1", first, min(first + page, count + 1), f"{raw.inbox}.ack")
        for first in range(1, count + 1, page)
    ]
    answered = f"MSG {raw.inbox}.ack ".encode()
    started = time.perf_counter()
    for size, acks in pages:
        raw.socket.sendall(pull)
        seen, tail = 0, b""
        while seen < size:
            chunk = tail + raw.socket.recv(1 << 18)
            seen += chunk.count(b"MSG facts.")
            tail = chunk[-9:]
        raw.socket.sendall(acks)
        raw._read_until(answered)
    seconds = time.perf_counter() - started
    raw.close()
    return Timed(count, seconds)


def _acknowledgements(prefix: str, first: int, stop: int, reply: str) -> tuple[int, bytes]:
    """How many they are, and their bytes."""
    lines = [f"PUB {prefix}.{number}.{number}.0.0" for number in range(first, stop)]
    lines[-1] += f" {reply}"
    return len(lines), b"".join(f"{line} 4\r\n+ACK\r\n".encode() for line in lines)
