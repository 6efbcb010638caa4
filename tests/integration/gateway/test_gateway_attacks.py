"""The gateway against callers that mean harm: it lives on, and the calls of the others are answered."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from urllib.parse import urlsplit

import pytest
from tests.integration.gateway.zone import Zone, connected, send
from tests.support.gateways import TOKENS, RunningGateway, write_platform

from penstock.errors import ConfigError
from penstock.facts import Page
from penstock.gateway import BlockingGatewayClient
from penstock.testing import eventually
from penstock.wire import blocking

SERVICE = "/penstock.facts.v1.FactService"
JSON = "application/json"
EDGE = {"Authorization": f"Bearer {TOKENS['edge']}"}
_numbers = count(1)


def fresh() -> str:
    return f"attack-{next(_numbers)}"


def call(zone: Zone, method: str, body: object, **headers: str) -> tuple[int, str]:
    """Status and Connect code of a raw JSON call; a body of bytes goes out as it is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = connected(zone)
    status, answer = send(connection, "POST", f"{SERVICE}/{method}", {**EDGE, "Content-Type": JSON, **headers}, raw)
    connection.close()
    return status, "" if status == 200 else json.loads(answer)["code"]


def answers(zone: Zone) -> bool:
    with zone.client("edge") as client:
        return client.append_fact("facts.edge.alive", fresh(), b"").sequence > 0


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "start"),
    [
        ("AppendFact", b""),
        ("FetchFacts", b""),
        ("AppendFact", b'{"subject": '),
        ("AppendFact", b'{"subject": "\\\\\\"[", "headers": [{"name": '),
        ("FetchFacts", b'{"wait": '),
        ("FetchFacts", b'{"unknown": '),
    ],
)
def test_json_that_is_nested_deeply_is_refused_and_the_gateway_lives(zone: Zone, method: str, start: bytes) -> None:
    assert call(zone, method, start + b"[" * 20_000) == (400, "invalid_argument")
    assert zone.gateway.process.poll() is None
    assert answers(zone)


def test_a_subject_beyond_the_bound_is_refused_and_no_other_call_is_disturbed(zone: Zone) -> None:
    """5,000 bytes would exceed the control line, at which the server closes the connection that all callers share."""
    pages: list[Page] = []

    def wait() -> None:
        with zone.client(token="other") as client:
            pages.append(client.fetch_facts("other_reader", 1, wait=15))

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: "running 1.0\n" in zone.gateway.look("/metrics")[1], what="a fetch under way")
    subject = "facts.edge." + "x" * 5_000
    assert call(zone, "AppendFact", {"subject": subject, "id": fresh()}) == (400, "invalid_argument")
    with zone.client(token="other") as client:
        client.append_fact("facts.other.calm", fresh(), b"calm")
    waiting.join()
    assert [fact.data for fact in pages[0].facts] == [b"calm"]
    longest = "facts.edge." + "x" * (1_024 - len("facts.edge."))
    assert call(zone, "AppendFact", {"subject": longest, "id": fresh()}) == (200, "")


def test_very_many_headers_are_refused_before_they_are_looked_at(zone: Zone) -> None:
    file = write_platform(zone.folder, zone.broker.url, body="8MiB")
    with RunningGateway(file, *zone.papers.flags()) as wide:
        other = Zone(zone.broker, wide, zone.papers, zone.folder)
        many = [{"name": f"H{number}", "values": ["x"]} for number in range(100_000)]
        values = [{"name": "H", "values": ["x"] * 100_000}]
        large = [{"name": "H", "values": ["x" * 40_000]}]
        for headers in (many, values, large):
            body = {"subject": "facts.edge.h", "id": fresh(), "headers": headers}
            assert call(other, "AppendFact", body) == (400, "invalid_argument")
        few = [{"name": f"H{number}", "values": ["x"]} for number in range(200)]
        assert call(other, "AppendFact", {"subject": "facts.edge.h", "id": fresh(), "headers": few}) == (200, "")


@pytest.mark.parametrize("name", ["Penstock-Dlq-Only", "penstock-dlq-only", "PENSTOCK-anything"])
def test_headers_that_steer_workers_cannot_be_set_from_outside(zone: Zone, name: str) -> None:
    with zone.client("edge") as client, pytest.raises(ConfigError, match="reserved"):
        client.append_fact("facts.edge.h", fresh(), b"", headers={name: "x"})


def test_a_wait_below_nothing_is_refused(zone: Zone) -> None:
    for wait in ("-5s", "-0.000000001s"):
        assert call(zone, "FetchFacts", {"consumerName": "edge_reader", "wait": wait}) == (400, "invalid_argument")


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_method_that_is_not_there_is_told_in_the_words_of_connect(zone: Zone) -> None:
    for method in ("Nothing", "", "FetchFacts/"):
        assert call(zone, method, {}) == (404, "unimplemented")


def raw_answer(zone: Zone, request: bytes, source: str = "127.0.0.1") -> tuple[int, str]:
    with secured(zone, source) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["code"]


@contextmanager
def secured(zone: Zone, source: str = "127.0.0.1") -> Iterator[ssl.SSLSocket]:
    parts = urlsplit(zone.gateway.url)
    context = ssl.create_default_context(cafile=zone.papers.ca)
    address = (parts.hostname or "", parts.port or 0)
    with (
        socket.create_connection(address, timeout=30, source_address=(source, 0)) as plain,
        context.wrap_socket(plain, server_hostname=parts.hostname) as connection,
    ):
        yield connection


def head(*lines: bytes, method: bytes = b"POST", path: bytes = SERVICE.encode() + b"/FetchFacts") -> bytes:
    usual = (
        method + b" " + path + b" HTTP/1.1",
        b"Host: x",
        b"Connection: close",
        f"Authorization: Bearer {TOKENS['edge']}".encode(),
        b"Content-Type: application/json",
        b"Content-Length: 2",
    )
    return b"\r\n".join((*usual, *lines, b"", b"{}"))


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (head(b"X-Name: \xff\xfe"), (400, "invalid_argument")),
        (head(b"Connect-Timeout-Ms: \xe9"), (400, "invalid_argument")),
        (head(b"Content-Type: application/grpc"), (400, "invalid_argument")),
        (head(method=b"FROB"), (400, "invalid_argument")),
        (head(method=b"DELETE"), (405, "unimplemented")),
        (head(path=b"/\xff"), (400, "invalid_argument")),
        (b"\x16\x03\x01\x02\x00" * 10, (400, "invalid_argument")),
        (head(*(b"X-%d: y" % number for number in range(500))), (431, "resource_exhausted")),
        (head(b"X-Long: " + b"y" * 33_000), (431, "resource_exhausted")),
        (b"POST / HTTP/1.1\r\nX-Endless: " + b"y" * 33_000, (431, "resource_exhausted")),
    ],
    ids=range(10),
)
def test_requests_that_are_none_are_refused_in_the_words_of_connect(
    zone: Zone, request_: bytes, answer: tuple[int, str]
) -> None:
    assert raw_answer(zone, request_) == answer
    assert 'outcome="internal"' not in zone.gateway.look("/metrics")[1]


# -- connections -------------------------------------------------------------------------------------------------------


def test_idle_and_half_sent_requests_leave_room_for_the_others_and_are_closed(zone: Zone) -> None:
    """300 connections to a gateway that may open 256 files, some without a byte, some in the handshake or a head."""
    file = write_platform(zone.folder, zone.broker.url)
    with RunningGateway(file, *zone.papers.flags(), descriptors=256) as small, ExitStack() as stack:
        narrow = Zone(zone.broker, small, zone.papers, zone.folder)
        parts = urlsplit(small.url)
        held = [_hold(stack, (parts.hostname or "", parts.port or 0)) for _ in range(300)]
        for one in held[::2]:
            one.sendall(b"\x16\x03\x01")
        half = stack.enter_context(secured(narrow, "127.0.0.3"))
        half.sendall(b"POST / HTTP/1.1\r\nHost:")
        with secured(narrow, "127.0.0.2") as connection:
            connection.sendall(head())
            assert connection.recv(65536).startswith(b"HTTP/1.1 403")  # no such consumer, and an answer
        assert half.recv(1) == b""
        eventually(lambda: all(_closed(one) for one in held), within=30, what="all idle connections closed")
        with BlockingGatewayClient(small.url, zone.papers.login("edge")) as client:
            client.fetch_facts("edge_reader", 1)
        assert small.look("/healthz")[0] == 200
        assert len(small.log()) < 20_000


def _hold(stack: ExitStack, address: tuple[str, int]) -> socket.socket:
    held = stack.enter_context(socket.create_connection(address, timeout=30))
    held.setblocking(False)
    return held


def _closed(held: socket.socket) -> bool:
    try:
        return held.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


# -- what others publish -----------------------------------------------------------------------------------------------


def test_facts_on_subjects_that_only_the_server_takes_are_fetched(zone: Zone) -> None:
    """A control character in a subject ended the connection; bytes that are no UTF-8 were an error of the gateway."""
    stored = [b"facts.busy.a\x1bb", b"facts.busy.\x0c", b"facts.busy.\x7f", b"facts.busy.\xff"]
    with blocking.connect(zone.broker.settings) as publisher, zone.client(token="busy") as client:
        for subject in stored:
            publisher.send(b"PUB %b 1\r\nx\r\n" % subject)
        publisher.flush()
        found: list[str] = []
        while len(found) < len(stored):
            page = client.fetch_facts("busy_reader", 10, wait=15)
            found += [fact.subject for fact in page.facts]
            client.confirm_receipt("busy_reader", page.receipt)
    assert found == ["facts.busy.a\x1bb", "facts.busy.\x0c", "facts.busy.\x7f", "facts.busy.?"]
