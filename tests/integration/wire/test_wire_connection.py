"""The data plane's connections against real servers: logins, TLS, requests, and what happens when things break.

A contract: each test runs on the asyncio and on the blocking connection, unless it says why not.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NoReturn

import nkeys
import pytest
import trustme
import uvloop
from tests.support.connections import CONNECTION_HALVES, HALVES, AnyConnection, ConnectionHalf

from penstock import errors
from penstock.jetstream import JetStream
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing.polling import eventually
from penstock.wire import aio, blocking, frames

Serve = Callable[[str], int]


@pytest.fixture(params=HALVES)
def half(request: pytest.FixtureRequest) -> ConnectionHalf:
    """Which of the two connections is tested."""
    return CONNECTION_HALVES[request.param]


@pytest.fixture
async def connection(nats_server: EmbeddedServer, half: ConnectionHalf) -> AsyncIterator[AnyConnection]:
    async with await half.connect(nats_server.settings) as made:
        yield made


def works(half: ConnectionHalf, settings: Settings) -> None:
    """It logs in, and a round trip through the server works; in asyncio's own event loop, and in uvloop."""

    async def round_trip() -> None:
        async with await half.connect(settings) as connection:
            await connection.flush()
            with pytest.raises(errors.Unavailable, match="nobody answers"):
                await connection.request("nobody.there", b"")

    asyncio.run(round_trip())
    if half.name == "asyncio":
        uvloop.run(round_trip())


def refused(
    half: ConnectionHalf,
    settings: Settings,
    error: type[errors.PenstockError] = errors.AccessDenied,
    match: str = ".",
) -> None:
    async def connect() -> None:
        await half.connect(settings)

    with pytest.raises(error, match=match):
        asyncio.run(connect())


# -- logins ------------------------------------------------------------------------------------------------------------


def test_user_and_password_log_in_from_settings_or_url(serve: Serve, half: ConnectionHalf) -> None:
    port = serve('authorization { user: "ann", password: "s e:c@ret" }')
    works(half, Settings(servers=(f"nats://127.0.0.1:{port}",), user="ann", password="s e:c@ret"))
    works(half, Settings(servers=(f"nats://ann:s%20e%3Ac%40ret@127.0.0.1:{port}",)))
    refused(half, Settings(servers=(f"nats://ann:wrong@127.0.0.1:{port}",)), match="refused the login")
    refused(half, Settings(servers=(f"nats://127.0.0.1:{port}",)), match="refused the login")


def test_a_token_logs_in_from_settings_or_url(serve: Serve, half: ConnectionHalf) -> None:
    port = serve('authorization { token: "t0ken" }')
    works(half, Settings(servers=(f"nats://127.0.0.1:{port}",), token="t0ken"))
    works(half, Settings(servers=(f"nats://t0ken@127.0.0.1:{port}",)))
    refused(half, Settings(servers=(f"nats://127.0.0.1:{port}",), token="other"))


def new_key(prefix: int) -> nkeys.KeyPair:
    # Any 32 bytes make a key; these depend on the role only.
    return nkeys.from_seed(nkeys.encode_seed(hashlib.sha256(bytes([prefix])).digest(), prefix))


def test_an_nkey_logs_in_by_signing(serve: Serve, tmp_path: Path, half: ConnectionHalf) -> None:
    user = new_key(nkeys.PREFIX_BYTE_USER)
    port = serve(f'authorization {{ users: [ {{ nkey: "{user.public_key.decode()}" }} ] }}')
    creds = tmp_path / "user.creds"
    creds.write_text(f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n")
    works(half, Settings(servers=(f"nats://127.0.0.1:{port}",), credentials=str(creds)))
    refused(half, Settings(servers=(f"nats://127.0.0.1:{port}",)))


def jwt(signer: nkeys.KeyPair, subject: nkeys.KeyPair, name: str, claims: dict[str, object]) -> str:
    """A JWT as nats-server's operator mode wants it."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    body = {"jti": name, "iat": 1_700_000_000, "iss": signer.public_key.decode(), "name": name}
    body |= {"sub": subject.public_key.decode(), "nats": claims | {"version": 2}}
    text = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{text}.{base64.urlsafe_b64encode(signer.sign(text.encode())).rstrip(b'=').decode()}"


def test_a_credentials_file_logs_in_with_jwt_and_seed(serve: Serve, tmp_path: Path, half: ConnectionHalf) -> None:
    operator, account, user = (
        new_key(prefix) for prefix in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER)
    )
    unlimited = {"subs": -1, "data": -1, "payload": -1}
    limits = unlimited | {"conn": -1, "leaf": -1, "imports": -1, "exports": -1, "wildcards": True}
    account_jwt = jwt(operator, account, "A", {"type": "account", "limits": limits})
    port = serve(
        f"operator: {jwt(operator, operator, 'O', {'type': 'operator'})}\n"
        f"resolver: MEMORY\nresolver_preload: {{ {account.public_key.decode()}: {account_jwt} }}\n"
    )
    creds = tmp_path / "user.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt(account, user, 'U', {'type': 'user', **unlimited})}\n"
        f"------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    works(half, Settings(servers=(f"nats://127.0.0.1:{port}",), credentials=str(creds)))
    creds.write_text("nothing of use")
    refused(half, Settings(servers=(f"nats://127.0.0.1:{port}",), credentials=str(creds)), errors.ConfigError, "SEED")


# -- TLS ---------------------------------------------------------------------------------------------------------------


class Certificates:
    """A CA, a server certificate, and a client certificate, as files."""

    def __init__(self, home: Path) -> None:
        authority = trustme.CA()
        self.ca, self.cert, self.key = (str(home / name) for name in ("ca.pem", "client.pem", "client.key"))
        self.server_cert, self.server_key = str(home / "server.pem"), str(home / "server.key")
        authority.cert_pem.write_to_path(self.ca)
        for names, cert, key in (
            (("127.0.0.1", "localhost"), self.server_cert, self.server_key),
            (("client@example.org",), self.cert, self.key),
        ):
            issued = authority.issue_cert(*names)
            issued.cert_chain_pems[0].write_to_path(cert)
            issued.private_key_pem.write_to_path(key)

    def config(self, more: str = "") -> str:
        return f'tls {{ cert_file: "{self.server_cert}", key_file: "{self.server_key}", {more} }}'


def test_tls_is_used_and_the_server_is_verified(serve: Serve, tmp_path: Path, half: ConnectionHalf) -> None:
    certificates = Certificates(tmp_path)
    port = serve(certificates.config())
    works(half, Settings(servers=(f"tls://localhost:{port}",), tls_ca=certificates.ca))
    works(half, Settings(servers=(f"nats://127.0.0.1:{port}",), tls_ca=certificates.ca))
    refused(half, Settings(servers=(f"tls://localhost:{port}",)), errors.AccessDenied, "not trusted")


def test_a_client_certificate_is_presented(serve: Serve, tmp_path: Path, half: ConnectionHalf) -> None:
    certificates = Certificates(tmp_path)
    port = serve(certificates.config(f'ca_file: "{certificates.ca}", verify: true'))
    server = f"tls://localhost:{port}"
    works(
        half,
        Settings(servers=(server,), tls_ca=certificates.ca, tls_cert=certificates.cert, tls_key=certificates.key),
    )
    refused(half, Settings(servers=(server,), tls_ca=certificates.ca), errors.AccessDenied, "client certificate")


def test_tls_can_come_before_anything_else(serve: Serve, tmp_path: Path, half: ConnectionHalf) -> None:
    certificates = Certificates(tmp_path)
    port = serve(certificates.config("handshake_first: true"))
    works(half, Settings(servers=(f"tls://localhost:{port}",), tls_ca=certificates.ca, tls_first=True))


def test_a_plain_server_is_refused_when_tls_is_asked_for(
    nats_server: EmbeddedServer, tmp_path: Path, half: ConnectionHalf
) -> None:
    settings = Settings(servers=(nats_server.url,), tls_ca=Certificates(tmp_path).ca)
    refused(half, settings, match="does not offer TLS")


# -- servers that are not there, or are no servers ---------------------------------------------------------------------


def test_the_next_server_is_tried_and_the_error_names_all_without_secrets(
    nats_server: EmbeddedServer, half: ConnectionHalf
) -> None:
    works(half, Settings(servers=("nats://127.0.0.1:1", nats_server.url)))

    async def connect(settings: Settings) -> None:
        await half.connect(settings)

    with pytest.raises(errors.BrokerUnreachable) as caught:
        asyncio.run(connect(Settings(servers=("nats://ann:secret@127.0.0.1:1", "nats://127.0.0.1:2"))))
    assert "127.0.0.1:1" in str(caught.value)
    assert "127.0.0.1:2" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.fixture
def impostor() -> Iterator[Callable[[bytes], Settings]]:
    """A listener that greets every connection with the given bytes, and then is silent."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []
    greeting = bytearray()

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(connection)
            connection.sendall(greeting)

    thread = threading.Thread(target=answer)
    thread.start()

    def settings(data: bytes) -> Settings:
        greeting[:] = data
        # What says nothing is waited for in vain; what says something has the time that a busy machine takes for it.
        timeout = 10 if data else 0.5
        return Settings(servers=(f"nats://127.0.0.1:{listener.getsockname()[1]}",), timeout=timeout)

    yield settings
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in accepted:
        connection.close()


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (b"", "no answer to the login within 0.5 s"),
        (b"SSH-2.0-OpenSSH_9.6", "this is not the NATS protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "this is not the NATS protocol"),
        (b"PING\r\n", "greets with INFO"),
        (b"INFO {not json}\r\n", "no JSON"),
        (b"INFO " + b"[" * 100_000 + b"\r\n", "no JSON"),
        (b'INFO {"max_payload": "much"}\r\n', "invalid max_payload"),
        (b'INFO {"max_payload": 1e999}\r\n', "invalid max_payload"),
        (b'INFO {"connect_urls": 5}\r\n', "invalid connect_urls"),
        (b'INFO {"nonce": ["x"]}\r\n', "invalid nonce"),
        (b'INFO {"nonce": "\\ud800"}\r\n', "invalid nonce"),
        (b'INFO {"version": "2\\u001b[2J"}\r\n', "invalid version"),
        (b'INFO {"tls_required": true}\r\nPING\r\n', "before TLS began"),
        (b'INFO {"tls_required": true}\r\nMSG a 1 1\r\nx\r\nPONG\r\n', "before TLS began"),
        (b'INFO {"tls_required": true}\r\nP', "before TLS began"),
    ],
)
def test_what_is_no_nats_server_is_an_error_in_time(
    impostor: Callable[[bytes], Settings], greeting: bytes, reason: str, half: ConnectionHalf
) -> None:
    refused(half, impostor(greeting), errors.BrokerUnreachable, reason)


def test_a_name_server_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, half: ConnectionHalf
) -> None:
    """Beyond the timeout, that is; the end of the event loop does not wait for it, either."""
    silence, answered = threading.Event(), list[object]()

    def silent(*args: object, **named: object) -> NoReturn:
        silence.wait(60)
        answered.append(args)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    settings = Settings(servers=("nats://a.test:4222", "nats://b.test:4222"), timeout=0.4)
    try:
        refused(half, settings, errors.BrokerUnreachable, "no answer to the login within 0.4 s")
        assert answered == []
    finally:
        silence.set()


async def test_a_server_that_goes_away_is_connection_lost_and_can_be_reconnected(
    nats_server: EmbeddedServer, connection: AnyConnection
) -> None:
    opened = connection.opened
    nats_server.kill()
    with pytest.raises(errors.ConnectionLost):
        await connection.flush()
    assert not connection.connected
    with pytest.raises(errors.ConnectionLost, match=r"closed|reset"):
        await connection.publish("a", b"")
    with pytest.raises(errors.BrokerUnreachable):
        await connection.reconnect()
    nats_server.start()
    await connection.reconnect()
    await connection.flush()
    assert connection.opened == opened + 1


@pytest.mark.parametrize("call", ["receive", "wait"])
async def test_a_waiting_call_raises_when_the_server_goes_away(
    nats_server: EmbeddedServer, connection: AnyConnection, call: str
) -> None:
    await connection.subscribe("a")
    reply = connection.inbox()
    await connection.flush()
    waiting = asyncio.create_task(connection.receive(30) if call == "receive" else connection.wait(reply, 30))
    await asyncio.sleep(0)  # it begins to wait
    nats_server.kill()
    with pytest.raises(errors.ConnectionLost):
        await waiting
    with pytest.raises(errors.ConnectionLost):
        await connection.publish("a", b"")
    nats_server.start()
    await connection.reconnect()
    await connection.flush()


async def test_all_waiting_calls_raise_when_the_server_goes_away(nats_server: EmbeddedServer) -> None:
    """Asyncio only: one call at a time waits on a blocking connection."""
    connection = await aio.connect(nats_server.settings)
    await connection.subscribe("a")
    waiting = [
        asyncio.create_task(connection.receive(30)),
        asyncio.create_task(connection.wait(connection.inbox(), 30)),
    ]
    await connection.flush()
    nats_server.kill()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, errors.ConnectionLost)
    await connection.close()


async def test_an_answer_that_was_expected_on_an_earlier_connection_is_not_waited_for(
    connection: AnyConnection,
) -> None:
    reply = connection.inbox()
    await connection.reconnect()
    with pytest.raises(errors.ConnectionLost, match="earlier connection"):
        await connection.wait(reply, 30)


async def test_a_closed_connection_says_so_to_every_call(connection: AnyConnection) -> None:
    await connection.close()
    assert not connection.connected
    for call in (connection.flush(), connection.receive(), connection.publish("a", b""), connection.subscribe("a")):
        with pytest.raises(errors.ConnectionLost, match="it is closed"):
            await call
    with pytest.raises(errors.ConnectionLost, match="it is closed"):
        connection.inbox()


def test_pings_are_answered_while_waiting_and_by_poll(serve: Serve) -> None:
    """Blocking only: the event loop answers them at any time, and needs no `poll`."""
    port = serve('ping_interval: "200ms"\nping_max: 10\n')
    with blocking.connect(Settings(servers=(f"nats://127.0.0.1:{port}",))) as connection:
        # Twice as long as the server waits for an answer.
        for _ in range(22):
            with pytest.raises(errors.DeadlineExceeded):
                connection.receive(0.2)
            connection.poll()
        connection.flush()


def test_poll_notices_that_the_server_went_away(nats_server: EmbeddedServer) -> None:
    """Blocking only: the event loop notices by itself."""
    connection = blocking.connect(nats_server.settings)
    connection.poll()
    nats_server.kill()

    def lost() -> bool:
        try:
            connection.poll()
        except errors.ConnectionLost:
            return True
        return False

    eventually(lost)


# -- messages ----------------------------------------------------------------------------------------------------------


async def test_messages_and_requests_share_a_connection(nats_server: EmbeddedServer, half: ConnectionHalf) -> None:
    async with (
        await half.connect(nats_server.settings) as connection,
        await half.connect(nats_server.settings) as other,
    ):
        sid = await connection.subscribe("a.*")
        await connection.flush()
        await other.publish("a.1", b"one", {"X": ["1", "2"]}, reply="back")
        await other.publish("a.2", b"")
        await other.flush()
        info = json.loads((await connection.request("$JS.API.INFO", b"")).data)
        assert info["type"] == "io.nats.jetstream.api.v1.account_info_response"
        first, second = await connection.receive(), await connection.receive()
        assert (first.subject, first.sid, first.reply, first.data) == ("a.1", sid, "back", b"one")
        assert first.header_values() == {"X": ["1", "2"]}
        assert (second.subject, second.headers, second.data) == ("a.2", b"", b"")
        await connection.unsubscribe(sid)
        await connection.flush()
        await other.publish("a.3", b"")
        await other.flush()
        with pytest.raises(errors.DeadlineExceeded):
            await connection.receive(0.05)


async def test_a_subscription_ends_after_as_many_messages_as_were_asked_for(
    nats_server: EmbeddedServer, half: ConnectionHalf
) -> None:
    async with await half.connect(nats_server.settings, echo=True) as connection:
        sid = await connection.subscribe("a")
        await connection.unsubscribe(sid, after=2)
        for number in range(3):
            await connection.publish("a", b"%d" % number)
        await connection.flush()
        assert [(await connection.receive()).data for _ in range(2)] == [b"0", b"1"]
        with pytest.raises(errors.DeadlineExceeded):
            await connection.receive(0.05)


async def test_members_of_a_queue_share_its_messages(nats_server: EmbeddedServer, half: ConnectionHalf) -> None:
    async with (
        await half.connect(nats_server.settings) as connection,
        await half.connect(nats_server.settings) as other,
    ):
        await connection.subscribe("a", "workers")
        await connection.subscribe("a", "workers")
        await connection.flush()
        for number in range(10):
            await other.publish("a", b"%d" % number)
        await other.flush()
        found = [(await connection.receive()).data for _ in range(10)]
        assert sorted(found) == [b"%d" % number for number in range(10)]
        with pytest.raises(errors.DeadlineExceeded):
            await connection.receive(0.05)


@pytest.mark.parametrize("echo", [False, True])
async def test_own_messages_come_back_only_with_echo(
    nats_server: EmbeddedServer, half: ConnectionHalf, echo: bool
) -> None:
    async with await half.connect(nats_server.settings, echo=echo) as connection:
        await connection.subscribe("a")
        await connection.publish("a", b"mine")
        await connection.flush()
        if echo:
            assert (await connection.receive()).data == b"mine"
        else:
            with pytest.raises(errors.DeadlineExceeded):
                await connection.receive(0.05)


async def test_an_answer_that_is_forgotten_or_late_disturbs_nobody(
    nats_server: EmbeddedServer, half: ConnectionHalf
) -> None:
    async with (
        await half.connect(nats_server.settings) as connection,
        await half.connect(nats_server.settings) as other,
    ):
        forgotten, late = connection.inbox(), connection.inbox()
        connection.forget(forgotten)
        with pytest.raises(errors.DeadlineExceeded, match="an answer"):
            await connection.wait(late, 0.05, "an answer")
        connection.forget(late)
        for reply in (forgotten, late):
            await other.publish(reply, b"")
        await other.flush()
        await connection.flush()
        with pytest.raises(errors.DeadlineExceeded):
            await connection.receive(0.05)


async def test_answers_are_kept_until_they_are_asked_for(nats_server: EmbeddedServer, half: ConnectionHalf) -> None:
    async with (
        await half.connect(nats_server.settings) as connection,
        await half.connect(nats_server.settings) as other,
    ):
        first, second = connection.inbox(), connection.inbox()
        await connection.flush()
        for reply, data in ((second, b"2"), (first, b"1")):
            await other.publish(reply, data)
        await other.flush()
        await connection.flush()
        assert [(await connection.wait(reply)).data for reply in (first, second)] == [b"1", b"2"]


async def test_messages_go_to_handlers_and_to_receive(nats_server: EmbeddedServer) -> None:
    """Asyncio only: nobody could call a handler between two calls of blocking code."""
    async with await aio.connect(nats_server.settings, echo=True) as connection:
        seen: list[frames.Message] = []
        await connection.subscribe("handled", handler=seen.append)
        await connection.subscribe("received")
        await connection.publish("handled", b"1", {"K": "v"})
        await connection.publish("received", b"2")
        assert (await connection.receive()).data == b"2"
        assert [(m.data, m.header_values()) for m in seen] == [(b"1", {"K": ["v"]})]


def test_the_raw_stream_can_be_taken_over_and_given_back(nats_server: EmbeddedServer) -> None:
    """Blocking only: the Spark source reads whole pages off the socket; on asyncio `skim_with` does it."""
    with blocking.connect(nats_server.settings) as connection, blocking.connect(nats_server.settings) as other:
        connection.subscribe("a")
        connection.flush()
        for number in range(3):
            other.publish("a", b"%d" % number)
        other.flush()
        assert connection.receive().data == b"0"
        raw = bytearray(connection.take_buffered())
        buffer = memoryview(bytearray(1024))
        while raw.count(b"\r\n") < 4:
            raw += buffer[: connection.recv_into(buffer)]
        end = raw.index(b"2\r\n") - len(b"MSG a 1 1\r\n")
        assert bytes(raw[:end]) == b"MSG a 1 1\r\n1\r\n"
        connection.give_back(bytes(raw[end:]))
        assert connection.receive().data == b"2"


def test_the_jetstream_api_works_from_blocking_code(nats_server: EmbeddedServer) -> None:
    """Blocking only: `run` is what blocking code has instead of `await`."""
    with blocking.connect(nats_server.settings) as connection:
        jetstream = JetStream(connection.requester())
        blocking.run(jetstream.create_stream({"name": "S", "subjects": ["s"]}))
        assert blocking.run(jetstream.stream_info("S")).state.messages == 0

        async def in_a_notebook() -> int:
            return blocking.run(jetstream.stream_info("S")).state.last_seq

        assert asyncio.run(in_a_notebook()) == 0


async def test_the_jetstream_api_works_over_the_connection(connection: AnyConnection) -> None:
    jetstream = JetStream(connection.requester())
    with pytest.raises(errors.StreamNotFound):
        await jetstream.stream_info("S")
    await jetstream.create_stream({"name": "S", "subjects": ["s"]})
    assert (await jetstream.stream_info("S")).state.messages == 0


async def test_a_server_without_jetstream_says_so(serve: Serve, half: ConnectionHalf) -> None:
    settings = Settings(servers=(f"nats://127.0.0.1:{serve('')}",))
    async with await half.connect(settings) as connection:
        with pytest.raises(errors.JetStreamDisabled):
            await connection.request("$JS.API.INFO", b"")


async def test_a_forbidden_subject_is_access_denied_at_once_and_survived(serve: Serve, half: ConnectionHalf) -> None:
    permissions = 'permissions: { publish: { deny: "secret.>" } }'
    port = serve(f'authorization {{ users: [ {{ user: "a", password: "b", {permissions} }} ] }}')
    async with await half.connect(Settings(servers=(f"nats://a:b@127.0.0.1:{port}",))) as connection:
        with pytest.raises(errors.AccessDenied, match=r"secret\.x"):
            await connection.request("secret.x", b"")
        await connection.flush()


async def test_a_message_that_is_too_large_is_refused_before_the_server_hangs_up(
    serve: Serve, half: ConnectionHalf
) -> None:
    port = serve("max_payload: 1000")
    async with await half.connect(Settings(servers=(f"nats://127.0.0.1:{port}",))) as connection:
        with pytest.raises(errors.ConfigError, match="1001 bytes"):
            await connection.publish("a", b"x" * 1001)
        await connection.publish("a", b"x" * 1000)
        await connection.flush()


async def test_a_login_cancelled_at_any_moment_leaves_nothing_to_complain_about(nats_server: EmbeddedServer) -> None:
    """Asyncio only: a blocking login cannot be cancelled."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    gc.freeze()  # what was there before need not be looked through each time
    for turns in range(12):  # of the event loop, until the task is cancelled
        login = asyncio.create_task(aio.connect(nats_server.settings))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        login.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await login).close()
        await asyncio.sleep(0.005)  # what comes late comes now
        del login
        gc.collect()
    gc.unfreeze()
    assert complaints == []
