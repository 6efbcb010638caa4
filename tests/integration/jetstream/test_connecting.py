"""Every way a connection can fail, against real servers: the right error, soon, with words one can act on."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.freezing import freeze
from tests.support.streams import make_stream

from penstock import errors
from penstock.jetstream import connect, connection
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import Certificates, eventually_async, issue_certificates

TIMEOUT = 15.0  # seconds; nothing here takes nearly as long, unless the machine is busy
SILENCE = 2.0  # seconds; the timeout where nobody answers

ACCOUNTS = """
accounts {
  WITHOUT { users: [ { user: without, password: p } ] }
  WITH { jetstream: enabled, users: [
    { user: with, password: p }
    { user: limited, password: p, permissions: { publish: { allow: ["$JS.API.INFO"] } } }
    { user: deaf, password: p, permissions: { subscribe: { deny: ["_INBOX.>"] } } }
  ] }
}
"""


@pytest.fixture(autouse=True)
async def _nothing_leaks(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> AsyncIterator[None]:
    """asyncio may not report anything behind the caller's back."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(str(context)))
    caplog.set_level(logging.WARNING)
    yield
    await asyncio.sleep(0)  # lets what was cancelled end
    gc.collect()  # a task whose error nobody looked at complains when it is collected
    assert complaints == []
    assert caplog.records == []
    assert capfd.readouterr().err == ""


@contextmanager
def fails(kind: type[errors.PenstockError], *words: str) -> Iterator[None]:
    """The block must raise exactly this error, within any timeout here and some slack, and say these words."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert time.monotonic() - began < TIMEOUT + 10, "it hung"
    for word in words:
        assert word in str(caught.value)


async def use(settings: Settings, timeout: float = TIMEOUT) -> None:
    async with connect(replace(settings, timeout=timeout)) as broker:
        await broker.jetstream.account_info()


async def test_no_server_there() -> None:
    with fails(errors.BrokerUnreachable, "127.0.0.1:1 ", "penstock server", "PENSTOCK_SERVERS"):
        await use(Settings(servers=("nats://127.0.0.1:1",)), SILENCE)


async def test_no_such_host() -> None:
    with fails(errors.BrokerUnreachable, "nowhere.invalid"):
        await use(Settings(servers=("nats://nowhere.invalid:4222",)), SILENCE)


@pytest.mark.parametrize("url", ["nats://", "nats://host:port", "nats://host:99999", "nats://host:0"])
async def test_not_a_url(url: str) -> None:
    with pytest.raises(errors.ConfigError, match="is not a server URL such as"):
        Settings(servers=(url,))


async def test_a_server_that_says_nothing() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with fails(errors.BrokerUnreachable, "no answer to the login within 2 s"):
            await use(Settings(servers=(f"nats://127.0.0.1:{port}",)), SILENCE)


async def test_the_second_server_is_tried_when_the_first_is_down(nats_server: EmbeddedServer) -> None:
    await use(Settings(servers=("nats://127.0.0.1:1", nats_server.url)))


async def test_a_server_that_comes_up_a_moment_later_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE", TIMEOUT)  # the moment is long on a busy machine
    with EmbeddedServer(data=tmp_path) as server:
        server.stop()
        using = asyncio.create_task(use(server.settings))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.start)
        await using


@pytest.mark.parametrize("wrong", [{"password": "x"}, {"user": "x"}, {"user": None, "password": None}], ids=str)
async def test_wrong_user_or_password(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with EmbeddedServer(data=tmp_path, user="u", password="p") as server:
        settings = replace(server.settings, **wrong)
        with fails(errors.AccessDenied, server.url, "authorization violation", "PENSTOCK_PASSWORD"):
            await use(settings)


async def test_wrong_token(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path, token="t") as server, fails(errors.AccessDenied, "PENSTOCK_TOKEN"):
        await use(replace(server.settings, token="x"))


async def test_a_credentials_file_that_is_none(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    (tmp_path / "x.creds").write_text("not a credentials file")
    with fails(errors.ConfigError, "x.creds"):
        await use(replace(nats_server.settings, credentials=str(tmp_path / "x.creds")))


async def test_tls_server_that_is_not_trusted(tmp_path: Path, tls_certificates: Certificates) -> None:
    other = issue_certificates(tmp_path / "other")
    with EmbeddedServer(data=tmp_path / "nats", tls=tls_certificates.server_tls()) as server:
        for settings in (
            replace(server.settings, tls_ca=other.ca),
            Settings(servers=(server.url,)),
            Settings(servers=(server.url.replace("tls://", "nats://"),)),
        ):
            with fails(errors.AccessDenied, "not trusted", "--tls-ca"):
                await use(settings)


async def test_plain_server_where_tls_was_asked_for(
    nats_server: EmbeddedServer, tls_certificates: Certificates
) -> None:
    for settings in (
        replace(nats_server.settings, tls_ca=tls_certificates.ca),
        Settings(servers=(nats_server.url.replace("nats://", "tls://"),)),
    ):
        with fails(errors.AccessDenied, "does not offer TLS"):
            await use(settings)


async def test_a_client_certificate_that_is_missing_or_of_another_ca(
    tmp_path: Path, tls_certificates: Certificates
) -> None:
    other = issue_certificates(tmp_path / "other")
    with EmbeddedServer(data=tmp_path / "nats", tls=tls_certificates.server_tls(verify=True)) as server:
        await use(server.settings)
        for cert, key in ((None, None), (other.client_cert, other.client_key)):
            with fails(errors.AccessDenied, "client certificate", "--tls-cert"):
                await use(replace(server.settings, tls_cert=cert, tls_key=key))


async def test_a_server_without_jetstream(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path, jetstream=False) as server, fails(errors.JetStreamDisabled, "-js"):
        await use(server.settings)


async def test_an_account_without_jetstream_and_users_without_permission(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path, extra=ACCOUNTS) as server:
        await use(replace(server.settings, user="with", password="p"))
        with fails(errors.JetStreamDisabled, "not enabled for account"):
            await use(replace(server.settings, user="without", password="p"))
        with fails(errors.AccessDenied, "Permissions Violation", "_INBOX"):
            await use(replace(server.settings, user="deaf", password="p"))
        async with connect(replace(server.settings, user="limited", password="p", timeout=TIMEOUT)) as broker:
            with fails(errors.AccessDenied, "$JS.API.STREAM.INFO.S", "Permissions Violation"):
                await broker.jetstream.stream_info("S")


async def test_a_domain_that_nobody_has(nats_server: EmbeddedServer) -> None:
    with fails(errors.JetStreamDisabled, "domain 'nowhere'"):
        await use(replace(nats_server.settings, domain="nowhere"))


async def test_a_read_outlives_a_restart_of_the_server(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path) as server:
        async with connect(replace(server.settings, timeout=TIMEOUT)) as broker:
            await make_stream(broker.jetstream, subjects=["s"])
            server.kill()
            reading = asyncio.create_task(broker.jetstream.stream_info("S"))
            await asyncio.to_thread(server.start)
            assert (await reading).name == "S"


async def test_nothing_is_sent_after_the_caller_was_told_that_the_server_is_gone(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path) as server:
        async with connect(replace(server.settings, timeout=SILENCE)) as broker:
            await make_stream(broker.jetstream, subjects=["s"])
            server.kill()
            await eventually_async(lambda: not broker.connection.connected, what="the loss to be noticed")
            with fails(errors.BrokerUnreachable, server.url.removeprefix("nats://")):
                await broker.jetstream.delete_stream("S")
            await asyncio.to_thread(server.start)
            assert (await broker.jetstream.stream_info("S")).name == "S"


async def test_a_lost_answer_to_what_must_not_be_repeated_is_an_unknown_outcome(nats_server: EmbeddedServer) -> None:
    async with connect(replace(nats_server.settings, timeout=SILENCE)) as broker:
        await make_stream(broker.jetstream, subjects=["s"])
        freeze(nats_server.pid)
        try:
            with fails(errors.OutcomeUnknown, "delete stream 'S'"):
                await broker.jetstream.delete_stream("S")
            with fails(errors.DeadlineExceeded, "stream 'S'", "within 2 s"):
                await broker.jetstream.stream_info("S")
        finally:
            os.kill(nats_server.pid, signal.SIGCONT)


async def test_a_connection_that_breaks_under_a_delete_is_an_unknown_outcome_at_once(
    nats_server: EmbeddedServer,
) -> None:
    async with connect(replace(nats_server.settings, timeout=TIMEOUT)) as broker:
        await make_stream(broker.jetstream, subjects=["s"])
        freeze(nats_server.pid)
        deleting = asyncio.create_task(broker.jetstream.delete_stream("S"))
        before = broker.jetstream.requests
        await eventually_async(lambda: broker.jetstream.requests > before, what="the request to be sent")
        nats_server.kill()
        with fails(errors.OutcomeUnknown, "was lost"):
            await deleting


async def test_connecting_again_takes_no_longer_than_the_request_may(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    with EmbeddedServer(data=tmp_path) as server:
        async with connect(replace(server.settings, timeout=TIMEOUT)) as broker:
            server.kill()
            await eventually_async(lambda: not broker.connection.connected, what="the loss to be noticed")
            async with await asyncio.start_server(silent, "127.0.0.1", server.port):
                with fails(errors.BrokerUnreachable, "no connection within 0.2 s"):
                    await broker.request("s", b"", 0.2)
