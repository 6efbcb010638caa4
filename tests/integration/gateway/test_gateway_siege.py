"""The gateway under siege: attackers of every kind at once, while another caller's calls are answered throughout."""

from __future__ import annotations

import os
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import pytest
from tests.integration.gateway.test_gateway_fuzz import MINE, SEED, SERVICE, is_orderly, odd_requests
from tests.integration.gateway.zone import Zone, connected, send
from tests.support.gateways import TOKENS

DURATION = "FUZZ_SECONDS"
"""Environment variable: how long the long form takes."""
ANSWERED_WITHIN = 10.0  # seconds, on a machine that has much to do
HELD = 60
"""Connections that a slow sender holds at once; an address may have 128."""
JSON = {"Content-Type": "application/json"}


class Siege:
    """Attacks that go on until told to end, and what came of them."""

    def __init__(self, zone: Zone) -> None:
        self.zone = zone
        self.over = threading.Event()
        self.statuses: Counter[int] = Counter()
        self.attacks: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self, attack: Callable[[Siege, random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        while not self.over.is_set():
            with suppress(OSError):  # what senders of something else than valid HTTP are to get
                attack(self, rng)
            self.attacks[attack.__name__] += 1

    def request(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        connection = connected(self.zone)
        try:
            status, answer = send(connection, method, SERVICE + path, {**MINE, **headers}, body)
        finally:
            connection.close()
        self.statuses[status] += 1
        if not is_orderly(status, headers):
            self.problems.append(f"{status} for {method} {path} {headers} {body[:200]!r}: {answer[:200]!r}")

    def secured(self, certificate: str | None = None) -> ssl.SSLSocket:
        parts, context = urlsplit(self.zone.gateway.url), ssl.create_default_context(cafile=self.zone.papers.ca)
        if certificate:
            folder = self.zone.papers.folder
            context.load_cert_chain(folder / f"{certificate}.pem", folder / f"{certificate}.key")
        plain = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)
        try:
            return context.wrap_socket(plain, server_hostname=parts.hostname)
        except OSError:
            plain.close()
            raise


def nesting(siege: Siege, rng: random.Random) -> None:
    deep = rng.choice([b"[", b'{"a":', b'{"headers": [', b'{"wait": {']) * rng.choice([64, 65, 1_000, 20_000])
    siege.request("POST", rng.choice(["/FetchFacts", "/AppendFact", "/ConfirmReceipt"]), JSON, deep)


def sizes(siege: Siege, rng: random.Random) -> None:
    long = "x" * rng.choice([300, 5_000, 60_000, 200_000])
    many = ", ".join('{"name": "A", "values": ["b"]}' for _ in range(rng.choice([10, 1_000, 2_000])))
    body = rng.choice([
        f'{{"subject": "facts.other.{long}", "id": "1"}}',
        f'{{"subject": "facts.other.a", "id": "{long}"}}',
        f'{{"subject": "facts.other.a", "id": "1", "headers": [{many}]}}',
        f'{{"consumerName": "{long}"}}',
    ])  # fmt: skip
    siege.request("POST", rng.choice(["/AppendFact", "/FetchFacts"]), JSON, body.encode())


def odd(siege: Siege, rng: random.Random) -> None:
    for method, path, headers, body in odd_requests(rng):
        if siege.over.is_set():
            return
        siege.request(method, path, headers, body)


def slow(siege: Siege, rng: random.Random) -> None:
    """Many connections, on each of which a request never comes to its end."""
    head = f"POST {SERVICE}/FetchFacts HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['other']}\r\n".encode()
    begun = [
        b"",
        b"P",
        head,
        head + b"Content-Length: 500\r\n\r\n{",
        head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    ]
    with ExitStack() as held:
        some = [held.enter_context(siege.secured()) for _ in range(HELD)]
        for one in some:
            one.sendall(rng.choice(begun))
        for _ in range(rng.randrange(1, 20)):
            if siege.over.wait(0.2):
                return
            for one in rng.sample(some, 10):
                one.sendall(b"x")


def hang_up(siege: Siege, rng: random.Random) -> None:
    """A connection that is dropped in its handshake, or at once."""
    parts = urlsplit(siege.zone.gateway.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as plain:
        plain.sendall(rng.choice([b"", b"\x16\x03\x01", b"GET / HTTP/1.0\r\n\r\n", rng.randbytes(300)]))


def bad_certificate(siege: Siege, rng: random.Random) -> None:
    with siege.secured(rng.choice(["expired", "foreign", "stranger"])) as connection:
        connection.sendall(f"POST {SERVICE}/FetchFacts HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        answer = connection.recv(1000)
        if answer and not is_orderly(int(answer.split()[1])):
            siege.problems.append(f"to a bad certificate: {answer!r}")


ATTACKS = [nesting, sizes, odd, slow, hang_up, bad_certificate]


@pytest.mark.parametrize(
    "seconds",
    [5.0, pytest.param(600.0, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])],
    ids=["short", "soak"],
)
def test_other_callers_are_answered_throughout(zone: Zone, seconds: float) -> None:
    """`FUZZ_SECONDS=20` makes the long form shorter."""
    seconds = float(os.environ.get(DURATION, seconds)) if seconds > 100 else seconds
    siege, slowest, calls = Siege(zone), 0.0, 0
    threads = [threading.Thread(target=siege.run, args=(one, SEED + n)) for n, one in enumerate(ATTACKS)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + seconds
        with zone.client("edge") as edge:
            while time.monotonic() < deadline:
                begun = time.monotonic()
                edge.append_fact("facts.edge.siege", f"{SEED}-{begun}", b"x")
                page = edge.fetch_facts("edge_reader", 50, wait=5)
                if page.receipt:
                    edge.confirm_receipt("edge_reader", page.receipt)
                slowest, calls = max(slowest, time.monotonic() - begun), calls + 1
    finally:
        siege.over.set()
        for thread in threads:
            thread.join(60)
    print(f"{3 * calls} calls answered, {slowest:.1f} s at most for three; {siege.attacks}; {siege.statuses}")
    assert zone.gateway.process.poll() is None, zone.gateway.log()[-2000:]
    assert not siege.problems, siege.problems[:5]
    assert calls > seconds / ANSWERED_WITHIN
    assert slowest < ANSWERED_WITHIN, f"{slowest:.1f} s for three calls"
    assert all(siege.attacks[one.__name__] for one in ATTACKS), siege.attacks
    assert siege.statuses[400], siege.statuses
    status, metrics = zone.gateway.look("/metrics")
    assert status == 200
    assert 'outcome="internal"' not in metrics
    assert "Traceback" not in zone.gateway.log()
