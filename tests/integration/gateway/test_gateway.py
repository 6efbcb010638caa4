"""The gateway as a process behind TLS: who gets in, what they may do, what they are told, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from connectrpc.code import Code
from connectrpc.codec import proto_json_codec
from connectrpc.errors import ConnectError
from protobuf.wkt import Duration
from pyqwest import SyncClient, SyncHTTPTransport
from tests.integration.gateway.zone import Zone, prepare
from tests.support.gateways import TOKENS, Papers, RunningGateway, write_platform
from tests.support.pages import apply_platform, check_examples
from uvicorn.server import ServerState

from penstock.errors import AccessDenied, ConfigError, Unavailable
from penstock.facts import FactConflict, ForeignReceipt, ForgedReceipt, NewFact, Page
from penstock.gateway import BlockingGatewayClient, GatewayClient, GatewayLogin
from penstock.gateway.v1 import facts_pb as pb
from penstock.gateway.v1.facts_connect import FactServiceClientSync
from penstock.gateway.v1.facts_pb import AppendFactRequest, ConfirmReceiptRequest, FetchFactsRequest
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually
from penstock.web.server import HttpConnection

PATIENT = 15
"""Seconds that a fetch waits for what was just stored: the server tells a consumer of it a moment later."""
_numbers = count(1)


def receipt(page: Page) -> str:
    assert page.receipt
    return page.receipt


def fresh() -> str:
    return f"id-{next(_numbers)}"


# -- what it does ------------------------------------------------------------------------------------------------------


def test_a_fact_goes_round_through_the_gateway(zone: Zone) -> None:
    with zone.client("edge") as client:
        number = fresh()
        stored = client.append_fact("facts.edge.orders", number, b"\x00\xff", headers={"Zone": ["a", "b"]})
        assert client.append_fact("facts.edge.orders", number, b"\x00\xff", headers={"Zone": ["a", "b"]}).existed
        with pytest.raises(FactConflict) as conflict:
            client.append_fact("facts.edge.orders", number, b"else")
        assert (conflict.value.stream, conflict.value.sequence) == ("FACTS", stored.sequence)
        page = client.fetch_facts("edge_reader", 10, wait=PATIENT)
        (fact,) = page.facts
        assert (fact.id, fact.subject, fact.sequence) == (number, "facts.edge.orders", stored.sequence)
        assert (fact.data, fact.headers, fact.attempt) == (b"\x00\xff", {"Zone": ["a", "b"]}, 1)
        assert not client.confirm_receipt("edge_reader", receipt(page)).already
        assert client.confirm_receipt("edge_reader", receipt(page)).already
        with pytest.raises(ForgedReceipt):
            client.confirm_receipt("edge_reader", receipt(page)[:-2])


async def test_the_asyncio_client_does_the_same(zone: Zone) -> None:
    login = zone.papers.login(token=TOKENS["other"])
    async with GatewayClient(zone.gateway.url, login) as client:
        ids = [fresh() for _ in range(20)]
        await asyncio.gather(*(client.append_fact("facts.other.n", one, b"") for one in ids))
        came: list[str] = []
        while len(came) < len(ids):  # one page, unless the server has told the consumer of only some of them yet
            page = await client.fetch_facts("other_reader", 50, wait=PATIENT)
            came += [str(fact.id) for fact in page.facts]
            await client.confirm_receipt("other_reader", receipt(page))
        assert sorted(came) == sorted(ids)
        with pytest.raises(AccessDenied):
            await client.fetch_facts("edge_reader", 1)


def test_many_facts_go_through_in_one_call_and_each_says_what_became_of_it(zone: Zone) -> None:
    with zone.client(token="other") as client:
        facts = [NewFact("facts.other.many", fresh(), b"%d" % n, {"N": str(n)}) for n in range(1_100)]
        stored = client.append_facts(facts[:1])
        done = client.append_facts([*facts, NewFact("facts.other.many", facts[0].id, b"else")])
        assert [one.outcome for one in done] == ["existed", *["stored"] * 1_099, "conflict"]
        assert done[0].sequence == done[-1].sequence == stored[0].sequence
        came: list[tuple[str | None, bytes, dict[str, list[str]]]] = []
        while len(came) < len(facts):
            page = client.fetch_facts("other_reader", 500, wait=PATIENT)
            came += [(fact.id, fact.data, fact.headers) for fact in page.facts]
            client.confirm_receipt("other_reader", receipt(page))
        assert came == [(one.id, one.data, {"N": [one.data.decode()]}) for one in facts]


async def test_what_may_not_be_appended_alone_may_not_among_many(zone: Zone) -> None:
    login = zone.papers.login(token=TOKENS["other"])
    granted = NewFact("facts.other.many", fresh(), b"")
    async with GatewayClient(zone.gateway.url, login) as client:
        with pytest.raises(AccessDenied, match=r"'facts\.edge\.x' is not granted"):
            await client.append_facts([granted, NewFact("facts.edge.x", fresh(), b"")])
        with pytest.raises(ConfigError, match="reserved"):
            await client.append_facts([granted, NewFact("facts.other.x", fresh(), b"", {"Penstock-Dlq-Only": "1"})])
        assert (await client.append_facts([granted]))[0].outcome == "stored"
        page = await client.fetch_facts("other_reader", 500, wait=PATIENT)
        await client.confirm_receipt("other_reader", page.receipt)


def test_one_call_appends_a_bounded_number_of_facts(zone: Zone) -> None:
    login = zone.papers.login("edge")
    with SyncHTTPTransport(**login.transport()) as transport:
        client = FactServiceClientSync(zone.gateway.url, http_client=SyncClient(transport))
        many = [pb.NewFact(subject="facts.edge.x", id=fresh()) for _ in range(1_001)]
        with pytest.raises(ConnectError, match="at most 1000 facts"):
            client.append_facts(pb.AppendFactsRequest(facts=many))


@pytest.mark.parametrize("codec", ["proto", "json"])
def test_a_generated_client_speaks_both_encodings(zone: Zone, codec: str) -> None:
    login = zone.papers.login("edge")
    with SyncHTTPTransport(**login.transport()) as transport:
        choice: dict[str, Any] = {"codec": proto_json_codec()} if codec == "json" else {}
        client = FactServiceClientSync(zone.gateway.url, http_client=SyncClient(transport), **choice)
        number = fresh()
        stored = client.append_fact(AppendFactRequest(subject="facts.edge.x", id=number, data=b"\xff"))
        wait = Duration(seconds=PATIENT)
        page = client.fetch_facts(FetchFactsRequest(consumer_name="edge_reader", limit=10, wait=wait))
        assert [(fact.id, fact.sequence, fact.data) for fact in page.facts] == [(number, stored.sequence, b"\xff")]
        done = client.confirm_receipt(ConfirmReceiptRequest(consumer_name="edge_reader", receipt=page.receipt))
        assert (done.first, done.last) == (stored.sequence, stored.sequence)
        with pytest.raises(ConnectError) as refused:
            client.fetch_facts(FetchFactsRequest(consumer_name="other_reader"))
        assert refused.value.code is Code.PERMISSION_DENIED


def test_the_example_of_the_page_prints_what_the_page_says_on_the_pages_own_platform(
    nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", nats_server.url)
    papers = Papers(tmp_path)
    with RunningGateway(apply_platform("gateway.md", tmp_path, nats_server), *papers.flags()) as gateway:
        monkeypatch.setenv("GATEWAY_URL", gateway.url)
        monkeypatch.setenv("GATEWAY_CA", papers.ca)
        monkeypatch.setenv("GATEWAY_TOKEN", "example-token-0123456789")
        check_examples("gateway.md")


def test_a_page_of_one_gateway_is_confirmed_by_another(zone: Zone) -> None:
    file = write_platform(zone.folder, zone.broker.url)
    with RunningGateway(file, *zone.papers.flags()) as second, zone.client("edge") as client:
        client.append_fact("facts.edge.two", fresh(), b"")
        page = client.fetch_facts("edge_reader", 10, wait=PATIENT)
        with BlockingGatewayClient(second.url, zone.papers.login("edge")) as other:
            assert not other.confirm_receipt("edge_reader", receipt(page)).already
        assert client.confirm_receipt("edge_reader", receipt(page)).already


async def test_the_body_of_an_answer_does_not_wait_until_its_head_is_acknowledged() -> None:
    """Nagle's algorithm and a delayed acknowledgement together cost 40 ms a call; on by default for this socket."""

    async def unused(scope: object, receive: object, send: object) -> None: ...

    config = uvicorn.Config(unused, log_config=None)
    opened, closed = asyncio.Queue[socket.socket](), asyncio.Event()

    class Seen(HttpConnection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base has it
            super().connection_made(transport)
            opened.put_nowait(transport.get_extra_info("socket"))

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            asyncio.get_running_loop().call_soon(closed.set)  # the transport closes its socket after this

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = await asyncio.get_running_loop().create_server(
            lambda: Seen(config, ServerState(), {}), sock=listening
        )
        _, writer = await asyncio.open_connection(*listening.getsockname())
        async with serving, asyncio.timeout(10):
            assert (await opened.get()).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            await writer.wait_closed()
            await closed.wait()


# -- who gets in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("certificate", "token"),
    [
        (None, None),
        (None, "wrong"),
        (None, ""),
        (None, "late"),  # expired
        ("stranger", None),  # of the right CA, and no identity has its name
        ("expired", None),
        ("foreign", None),  # of another CA, with the name of an identity
        ("edge", "other"),  # two identities at once
        ("foreign", "edge"),
        ("stranger", "edge"),
    ],
)
def test_nobody_gets_in_without_valid_papers(zone: Zone, certificate: str | None, token: str | None) -> None:
    before = zone.state()
    with zone.client(certificate, token) as client:
        for call in (
            lambda: client.fetch_facts("edge_reader", 1),
            lambda: client.confirm_receipt("edge_reader", "pr1.AAAA.AAAA"),
            lambda: client.append_fact("facts.edge.x", "1", b""),
        ):
            with pytest.raises((AccessDenied, Unavailable)):  # the latter where TLS itself ends the conversation
                call()
    assert zone.state() == before


def test_whatever_is_not_granted_is_refused(zone: Zone) -> None:
    with zone.client("edge") as edge, zone.client(token="other") as other:
        edge.append_fact("facts.edge.secret", fresh(), b"")
        page = edge.fetch_facts("edge_reader", 10, wait=PATIENT)
        before = zone.state()
        for consumer in ("edge_reader", "busy_reader", "nobody", "", "*", "edge_reader.x", "../edge_reader"):
            with pytest.raises(AccessDenied):
                other.fetch_facts(consumer, 10)
            with pytest.raises(AccessDenied):
                other.confirm_receipt(consumer, receipt(page))
        for stream in ("OTHER", "KV_penstock_facts"):
            with pytest.raises(AccessDenied):
                other.fetch_facts("other_reader", 10, stream=stream)
        for subject in (
            "facts.edge.x",
            "facts.other",
            "facts.other.a.b",
            "facts.other.*",
            "facts.>",
            "$KV.x",
            "",
            ".",
            " ",
        ):
            with pytest.raises(AccessDenied):
                other.append_fact(subject, fresh(), b"")
        with pytest.raises(ForeignReceipt):
            other.confirm_receipt("other_reader", receipt(page))
        assert zone.state() == before
        edge.confirm_receipt("edge_reader", receipt(page))


def test_a_caller_can_be_made_to_show_a_certificate(zone: Zone) -> None:
    file = write_platform(zone.folder, zone.broker.url)
    with RunningGateway(file, *zone.papers.flags(), "--require-certificate") as strict:
        login = zone.papers.login(token=TOKENS["other"])
        with BlockingGatewayClient(strict.url, login) as client, pytest.raises(Unavailable):
            client.fetch_facts("other_reader", 1)
        with BlockingGatewayClient(strict.url, zone.papers.login("edge")) as client:
            client.fetch_facts("edge_reader", 1)


def test_a_client_refuses_a_gateway_that_it_does_not_trust(zone: Zone) -> None:
    login = GatewayLogin(token=TOKENS["edge"])  # the system's CAs do not know the gateway
    with BlockingGatewayClient(zone.gateway.url, login) as client, pytest.raises(Unavailable):
        client.fetch_facts("edge_reader", 1)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_pages_and_bodies_have_limits(zone: Zone) -> None:
    with zone.client(token="busy") as client:
        for _ in range(60):
            client.append_fact("facts.busy.n", fresh(), b"")
        page = client.fetch_facts("busy_reader", 5_000)
        assert len(page) == 50
        client.confirm_receipt("busy_reader", receipt(page))
        with pytest.raises(Unavailable, match="at most 65536 bytes"):
            client.append_fact("facts.busy.n", fresh(), b"x" * 70_000)
        with pytest.raises(ConfigError, match="Nats-Rollup"):
            client.append_fact("facts.busy.n", fresh(), b"", headers={"Nats-Rollup": "all"})


def test_rate_and_concurrency_have_limits(zone: Zone) -> None:
    file = write_platform(zone.folder, zone.broker.url, rate=2, concurrent=2)
    login = zone.papers.login(token=TOKENS["busy"])
    with zone.client(token="busy") as free, RunningGateway(file, *zone.papers.flags()) as tight:
        _drained(free)
        with BlockingGatewayClient(tight.url, login) as client:
            _two_at_a_time(tight, client, free)
            with pytest.raises(Unavailable, match="2 calls a second"):
                _fetch_often(client)
        with BlockingGatewayClient(tight.url, zone.papers.login("edge")) as other:
            other.fetch_facts("edge_reader", 1)  # a limit of its own
        assert 'refused_total{reason="resource_exhausted"}' in tight.look("/metrics")[1]


def _two_at_a_time(tight: RunningGateway, client: BlockingGatewayClient, free: BlockingGatewayClient) -> None:
    """Two calls wait for a fact each; a third one is refused."""
    pages: list[Page] = []

    def wait() -> None:
        pages.append(client.fetch_facts("busy_reader", 1, wait=PATIENT))

    waits = [threading.Thread(target=wait) for _ in "ab"]
    for one in waits:
        one.start()
    eventually(lambda: "running 2.0\n" in tight.look("/metrics")[1], what="two calls under way")
    with pytest.raises(Unavailable, match="2 calls of this identity are under way"):
        client.fetch_facts("busy_reader", 1)
    for _ in waits:
        free.append_fact("facts.busy.n", fresh(), b"")
    for one in waits:
        one.join()
    for page in pages:
        free.confirm_receipt("busy_reader", receipt(page))


def _fetch_often(client: BlockingGatewayClient) -> None:
    for _ in range(50):
        client.fetch_facts("busy_reader", 1)


def _drained(client: BlockingGatewayClient) -> None:
    while page := client.fetch_facts("busy_reader", 50):
        client.confirm_receipt("busy_reader", receipt(page))


def test_a_fetch_waits_no_longer_than_its_caller_does(zone: Zone) -> None:
    login = zone.papers.login("edge")
    with SyncHTTPTransport(**login.transport()) as transport:
        client = FactServiceClientSync(zone.gateway.url, http_client=SyncClient(transport), codec=proto_json_codec())
        request = FetchFactsRequest(consumer_name="edge_reader", limit=1)
        assert not client.fetch_facts(request).facts  # and the connection is there
        request.wait = Duration(seconds=19)
        assert not client.fetch_facts(request, timeout_ms=4_000).facts  # an error, had it waited for the facts


# -- operators ---------------------------------------------------------------------------------------------------------


def test_metrics_tell_counts_times_lag_and_frontier(zone: Zone) -> None:
    with zone.client("edge") as client:
        client.append_fact("facts.edge.m", fresh(), b"")
        client.confirm_receipt("edge_reader", receipt(client.fetch_facts("edge_reader", 50, wait=PATIENT)))
    eventually(lambda: _tells_all(zone, *zone.gateway.look("/metrics")), what="all metrics")
    assert zone.gateway.look("/nothing")[0] == 404


def _tells_all(zone: Zone, status: int, text: str) -> bool:
    """A gateway whose broker answers late leaves out what it has not heard."""
    assert status == 200
    for method in ("FetchFacts", "ConfirmReceipt", "AppendFact"):
        assert f'penstock_gateway_calls_total{{method="{method}",outcome="ok"}}' in text
        assert f'penstock_gateway_call_seconds_bucket{{le="+Inf",method="{method}"}}' in text
    last = zone.state()[0]
    assert f'penstock_gateway_frontier{{consumer="edge_reader",stream="FACTS"}} {last}.0\n' in text
    assert 'penstock_gateway_replication_lag_facts{consumer="edge_reader",stream="FACTS"} 0.0\n' in text
    assert 'penstock_gateway_replication_lag_seconds{consumer="edge_reader",stream="FACTS"} 0' in text
    return True


def test_it_is_healthy_without_a_broker_and_ready_only_with_one(tmp_path: Path) -> None:
    papers = Papers(tmp_path)
    with EmbeddedServer(data=tmp_path / "nats") as broker:
        asyncio.run(prepare(broker))
        with RunningGateway(write_platform(tmp_path, broker.url), *papers.flags()) as gateway:
            eventually(lambda: gateway.look("/readyz")[0] == 200, what="ready")
            broker.kill()
            eventually(lambda: gateway.look("/readyz")[0] == 503, what="not ready without a broker")
            assert gateway.look("/healthz")[0] == 200
            assert "penstock_gateway_ready 0" in gateway.look("/metrics")[1]  # within a scraper's patience
            with BlockingGatewayClient(gateway.url, papers.login("edge")) as client:
                with pytest.raises(Unavailable, match="broker did not answer"):
                    client.fetch_facts("edge_reader", 1)
                broker.start()
                eventually(lambda: gateway.look("/readyz")[0] == 200, what="ready again")
                client.fetch_facts("edge_reader", 1)


def test_it_ends_when_the_calls_under_way_have_ended(zone: Zone) -> None:
    file = write_platform(zone.folder, zone.broker.url)
    gateway = RunningGateway(file, *zone.papers.flags(), "--drain", "4")  # that long it says that it is not ready
    with gateway, BlockingGatewayClient(gateway.url, zone.papers.login(token=TOKENS["busy"])) as client:
        _drained(client)
        pages: list[Page] = []
        call = threading.Thread(target=lambda: pages.append(client.fetch_facts("busy_reader", 1, wait=20)))
        call.start()
        eventually(lambda: "running 1.0\n" in gateway.look("/metrics")[1], what="a call under way")
        gateway.ask_to_stop()
        eventually(lambda: gateway.look("/readyz")[0] == 503, what="not ready")
        with zone.client(token="busy") as other:
            other.append_fact("facts.busy.n", fresh(), b"at last")
        call.join(30)
        assert [len(page) for page in pages] == [1]
        assert gateway.process.wait(60) == 0
        client.close()
    with zone.client(token="busy") as other:
        assert not other.confirm_receipt("busy_reader", receipt(pages[0])).already
