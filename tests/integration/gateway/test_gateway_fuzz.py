"""The gateway against requests that nobody meant: never an error of its own, and never data that was not granted."""

from __future__ import annotations

import asyncio
import base64
import random
import socket
import ssl
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from protobuf.wkt import Duration
from tests.integration.gateway.zone import Zone, connected, send
from tests.support.gateways import TOKENS

from penstock.facts import Facts
from penstock.gateway.v1.facts_pb import AppendFactRequest, ConfirmReceiptRequest, FetchFactsRequest, Header
from penstock.testing import eventually

SEED = 20_261_116
SERVICE = "/penstock.facts.v1.FactService"
CALLS = ("FetchFacts", "ConfirmReceipt", "AppendFact")
JSON, PROTO = "application/json", "application/proto"
SECRET = b"for the eyes of edge only"
MINE = {"Authorization": f"Bearer {TOKENS['other']}", "Connect-Timeout-Ms": "20000"}
"""The caller is granted `other_reader` and `facts.other.*`, and waits for nothing."""


def is_orderly(status: int, headers: Mapping[str, str] | None = None) -> bool:
    """Whether the answer is one, or a refusal; no connection is dropped over a request in valid HTTP.

    Of the gateway's own failures only 503 is permitted: the broker is away. 504 answers who wants no time to be taken.
    """
    in_no_time = (headers or {}).get("Connect-Timeout-Ms") in ("0", "1")
    return 200 <= status < 500 or status == 503 or (status == 504 and in_no_time)


def shows_secret(answer: bytes) -> bool:
    return SECRET in answer or base64.b64encode(SECRET) in answer


# -- requests with a body of the right kind, and wrong in what they say ------------------------------------------------


class Words(NamedTuple):
    """What requests name: the caller's own, and what is none of its business."""

    consumers: tuple[str, ...]
    streams: tuple[str, ...]
    receipts: tuple[str, ...]
    subjects: tuple[str, ...]


WRONG_JSON = [
    "7", "-1", "1e999", "-0.5", "4294967296", "99999999999999999999999", '"99999999999999999999"', "NaN", "true",
    "null", "[]", "{}", "[[[]]]", '"\\ud800"', '"\\u0000"', '""', '"1e9s"', '"-5s"', '"315576000001s"',
    '{"seconds": 1}', '[{"name": 3}]', '[{"name": "A", "values": "b"}]', '"%%%"', f'"{"x" * 3_000}"', "[" * 500,
]  # fmt: skip


def json_body(rng: random.Random, call: str, words: Words) -> bytes:
    """An object with the right fields, some of which have values of another kind, or beyond every limit."""
    data = base64.b64encode(rng.randbytes(4)).decode()
    good: dict[str, dict[str, Sequence[str | int]]] = {
        "FetchFacts": {"consumerName": words.consumers, "stream": words.streams, "limit": (5,), "wait": ("0.01s",)},
        "ConfirmReceipt": {"consumerName": words.consumers, "stream": words.streams, "receipt": words.receipts},
        "AppendFact": {"subject": words.subjects, "id": (str(rng.random()),), "data": (data,), "stream": words.streams},
    }
    fields = {name: _json(rng.choice(values)) for name, values in good[call].items()}
    while rng.random() < 0.4:
        fields[rng.choice([*fields, "headers", "unknown", "consumer_name"])] = rng.choice(WRONG_JSON)
    text = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    return f"{{{text}}}".encode()


def _json(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def proto_body(rng: random.Random, call: str, words: Words) -> bytes:
    """A message, followed by fields with the wrong wire type, numbers without end, and lengths that lie."""
    consumer, stream = rng.choice(words.consumers), rng.choice(words.streams)
    made: FetchFactsRequest | ConfirmReceiptRequest | AppendFactRequest
    match call:
        case "FetchFacts":
            made = FetchFactsRequest(consumer_name=consumer, stream=stream, limit=5, wait=Duration(nanos=10_000_000))
        case "ConfirmReceipt":
            made = ConfirmReceiptRequest(consumer_name=consumer, stream=stream, receipt=rng.choice(words.receipts))
        case _:
            header = Header(name=rng.choice(["A", "A", "A", "", "Nats-Rollup", "a b"]), values=["x", ""])
            made = AppendFactRequest(
                subject=rng.choice(words.subjects), id=str(rng.random()), data=b"x", headers=[header], stream=stream
            )
    body = made.to_binary()
    while rng.random() < 0.4:
        body += wrong_field(rng)
    return body


def wrong_field(rng: random.Random) -> bytes:
    """A field of any number (0 is none) and any of the eight wire types (two of which do not exist)."""
    kind = rng.randrange(8)
    tag = bytes([rng.randrange(8) << 3 | kind])
    if kind == 0:
        return tag + b"\xff" * rng.choice([1, 5, 9, 12]) + b"\x01"
    if kind == 2:
        content = rng.randbytes(rng.randrange(20))
        return tag + bytes([rng.choice([len(content), len(content) + 1, 127])]) + content
    return tag + rng.randbytes({1: 8, 5: 4}.get(kind, rng.randrange(3)))


class Request(NamedTuple):
    call: str
    encoding: str
    kind: str
    body: bytes


OTHER_KINDS = ["application/grpc", "application/grpc+proto", "application/grpc-web+proto", "application/connect+json",
               "application/connect+proto", "application/xml", "text/plain", ""]  # fmt: skip


def wrong_requests(rng: random.Random, words: Words, count: int) -> Iterator[Request]:
    """As many for each call and each encoding: most say what they are, and some are cut off, or called another kind."""
    for number in range(count):
        call, encoding = CALLS[number % 3], (JSON, PROTO)[number // 3 % 2]
        body, kind = (json_body if encoding == JSON else proto_body)(rng, call, words), encoding
        chance = rng.random()
        if chance < 0.1:
            kind = JSON if encoding == PROTO else PROTO
        elif chance < 0.2:
            kind, body = rng.choice(OTHER_KINDS), envelope(rng, body)
        if rng.random() < 0.15:
            body = body[: rng.randrange(len(body) + 1)]
        yield Request(call, encoding, kind, body)


def envelope(rng: random.Random, body: bytes) -> bytes:
    """As streaming kinds have it: flags and a length, which may lie, before the message."""
    length = rng.choice([len(body), 0, 1, len(body) + 100, 2**32 - 1])
    return bytes([rng.choice([0, 1, 2, 0x80, 255])]) + struct.pack(">I", length) + body


def test_no_body_of_any_call_and_encoding_gets_what_is_not_granted_or_breaks_the_gateway(zone: Zone) -> None:
    rng = random.Random(SEED)
    seen: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    with zone.client("edge") as edge, zone.client(token="other") as mine:
        edge.append_fact("facts.edge.secret", "s", SECRET)
        theirs = edge.fetch_facts("edge_reader", 10, wait=15).receipt or ""
        mine.append_fact("facts.other.own", "o", b"own")
        own = mine.fetch_facts("other_reader", 1, wait=15).receipt or ""
        before = asyncio.run(_of_others(zone))
        words = Words(
            consumers=("other_reader",) * 3 + ("edge_reader", "busy_reader", "nobody", "", "*", ">", "other_reader.x"),
            streams=("", "", "FACTS", "OTHER", "KV_penstock_facts", "../FACTS"),
            receipts=(own,) * 5 + (theirs, theirs[:-1], f"{own.rpartition('.')[0]}.{theirs.rpartition('.')[2]}", ""),
            subjects=("facts.other.a",) * 3
            + ("facts.edge.a", "facts.other.*", "facts.>", "dlq.a", "$KV.penstock_facts.x", "facts.other.a.b", ""),
        )
        connection = connected(zone)
        for request in wrong_requests(rng, words, 1_200):
            headers = {**MINE, "Content-Type": request.kind}
            status, answer = send(connection, "POST", f"{SERVICE}/{request.call}", headers, request.body)
            assert is_orderly(status), (SEED, request, answer)
            assert not shows_secret(answer), (SEED, request)
            seen[request.call, request.encoding][status] += 1
        connection.close()
        for call in CALLS:
            for encoding in (JSON, PROTO):
                statuses = seen[call, encoding]
                assert all(statuses[status] > 3 for status in (200, 400, 403, 415)), (SEED, call, encoding, statuses)
        assert asyncio.run(_of_others(zone)) == before
        assert 'outcome="internal"' not in zone.gateway.look("/metrics")[1]
        assert not edge.confirm_receipt("edge_reader", theirs).already


async def _of_others(zone: Zone) -> tuple[dict[str, int], list[tuple[str, int, int, int]]]:
    """All that the caller must not change: the facts on other subjects, and where the other readers are."""
    async with Facts(zone.broker.settings) as facts:
        js = facts.link.jetstream
        stored = (await js.stream_info("FACTS", subjects_filter=">")).state.subjects
        readers = [one for one in await js.consumers("FACTS") if one.name != "other_reader"]
        places = [(one.name, one.ack_floor_stream_seq, one.delivered_stream_seq, one.ack_pending) for one in readers]
        return {one: count for one, count in stored.items() if not one.startswith("facts.other.")}, places


def test_the_check_for_secrets_finds_them_in_both_encodings(zone: Zone) -> None:
    """What `edge` itself is told is what nobody else may be told."""
    with zone.client("edge") as edge:
        edge.append_fact("facts.edge.secret", "shown", SECRET)
    papers = {"Authorization": f"Bearer {TOKENS['edge']}"}
    bodies = {
        JSON: b'{"consumerName": "edge_reader", "wait": "15s"}',
        PROTO: FetchFactsRequest(consumer_name="edge_reader", wait=Duration(seconds=15)).to_binary(),
    }
    connection = connected(zone)
    for kind, body in bodies.items():
        with zone.client("edge") as edge:
            edge.append_fact("facts.edge.secret", kind, SECRET)
        status, answer = send(connection, "POST", f"{SERVICE}/FetchFacts", {**papers, "Content-Type": kind}, body)
        assert (status, shows_secret(answer)) == (200, True)
    connection.close()


# -- requests that are wrong as such -----------------------------------------------------------------------------------


def odd_requests(rng: random.Random) -> Iterator[tuple[str, str, dict[str, str], bytes]]:
    """Requests by somebody with a valid token who does not know, or does not want to know, the protocol."""
    good = {
        "FetchFacts": FetchFactsRequest(consumer_name="edge_reader", limit=5).to_binary(),
        "ConfirmReceipt": ConfirmReceiptRequest(consumer_name="edge_reader", receipt="pr1.AAAA.AAAA").to_binary(),
        "AppendFact": AppendFactRequest(subject="facts.edge.x", id="fuzz", data=b"x").to_binary(),
    }
    texts = [b"{", b"[]", b"null", b"{}", b'"' * 50, b"[" * 5_000, b"\xff\xfe", b'{"limit": 1, "limit": 2}']
    odd = {
        "Connect-Protocol-Version": ["1", "2", "x"],
        "Connect-Timeout-Ms": ["1", "0", "-1", "99999999999999999999", "x"],
        "Content-Encoding": ["gzip", "br", "zstd", "identity", "?"],
        "Grpc-Timeout": ["1S", "x"],
    }
    paths = ["", "/", *(f"/{call}" for call in CALLS), "/Nothing", "/FetchFacts/", "/%2e%2e/x", "/" + "a" * 3_000]
    for _ in range(250):
        name = rng.choice(list(good))
        likely = rng.random() < 0.6
        body = bytearray(good[name] if likely else rng.choice([*texts, rng.randbytes(rng.randrange(200))]))
        for _ in range(rng.randrange(3)):
            if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
        headers = {"Content-Type": PROTO if likely else rng.choice([JSON, PROTO, *OTHER_KINDS])}
        for header, values in odd.items():
            if rng.random() < 0.1:
                headers[header] = rng.choice(values)
        method = "POST" if rng.random() < 0.8 else rng.choice(["GET", "PUT", "DELETE", "OPTIONS"])
        yield method, f"/{name}" if likely else rng.choice(paths), headers, bytes(body)


def test_whatever_is_sent_the_gateway_refuses_it_in_order_and_lives_on(zone: Zone) -> None:
    """With the token of an identity that is granted nothing of what the requests name."""
    rng, before, statuses = random.Random(SEED), zone.state(), Counter[int]()
    connection = connected(zone)
    for method, path, headers, body in odd_requests(rng):
        status, answer = send(connection, method, SERVICE + path, {**MINE, **headers}, body)
        statuses[status] += 1
        assert is_orderly(status, headers), (SEED, method, path, headers, body)
        assert not shows_secret(answer), (SEED, method, path, headers, body)
    assert statuses[403] > 5, f"some requests were to be understood and not granted: {statuses}"
    connection.close()
    assert zone.state() == before
    with zone.client("edge") as client:
        client.fetch_facts("edge_reader", 1)


def test_requests_that_break_off_leave_nothing_behind(zone: Zone) -> None:
    before = zone.state()
    head = f"Host: x\r\nAuthorization: Bearer {TOKENS['other']}\r\nContent-Type: {JSON}\r\n"
    for call in CALLS:
        line = f"POST {SERVICE}/{call} HTTP/1.1\r\n"
        for rest in (
            f"{line}{head}Content-Length: 500\r\n\r\n{{",
            f"{line}{head}Transfer-Encoding: chunked\r\n\r\n5\r\n{{",
            f"{line}{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            f"{line}{head}",
            f"{line}{head}Content-Length: -1\r\n\r\n",
            f"{line}{head}Content-Length: {10**30}\r\n\r\n",
        ):
            _send_and_hang_up(zone, rest.encode())
    eventually(lambda: "running 0.0\n" in zone.gateway.look("/metrics")[1], what="no call under way")
    assert 'outcome="internal"' not in zone.gateway.look("/metrics")[1]
    assert zone.state() == before


def _send_and_hang_up(zone: Zone, data: bytes) -> None:
    parts = urlsplit(zone.gateway.url)
    context = ssl.create_default_context(cafile=zone.papers.ca)
    with (
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=parts.hostname) as secured,
    ):
        secured.sendall(data)
