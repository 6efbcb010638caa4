"""The data plane's connections against real servers: logins, TLS, requests, and what happens when things break."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import nkeys
import pytest
import trustme
import uvloop

from penstock import errors
from penstock.broker import JetStream
from penstock.broker.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing.polling import eventually
from penstock.wire import aio, blocking, frames

Serve = Callable[[str], int]


def works(settings: Settings) -> None:
    """Both transports log in, and a round trip through the server works; in asyncio's own event loop, and in uvloop."""
    with blocking.connect(settings) as connection:
        connection.flush()
        with pytest.raises(errors.Unavailable, match="nobody answers"):
            connection.request("nobody.there", b"")

    async def asynchronous() -> None:
        async with await aio.connect(settings) as connection:
            await connection.flush()
            with pytest.raises(errors.Unavailable, match="nobody answers"):
                await connection.request("nobody.there", b"")

    asyncio.run(asynchronous())
    uvloop.run(asynchronous())


def refused(settings: Settings, error: type[errors.PenstockError] = errors.AccessDenied, match: str = ".") -> None:
    with pytest.raises(error, match=match):
        blocking.connect(settings)
    with pytest.raises(error, match=match):
        asyncio.run(aio.connect(settings))


# -- logins ------------------------------------------------------------------------------------------------------------


def test_user_and_password_log_in_from_settings_or_url(serve: Serve) -> None:
    port = serve('authorization { user: "ann", password: "s e:c@ret" }')
    works(Settings(servers=(f"nats://127.0.0.1:{port}",), user="ann", password="s e:c@ret"))
    works(Settings(servers=(f"nats://ann:s%20e%3Ac%40ret@127.0.0.1:{port}",)))
    refused(Settings(servers=(f"nats://ann:wrong@127.0.0.1:{port}",)), match="refused the login")
    refused(Settings(servers=(f"nats://127.0.0.1:{port}",)), match="refused the login")


def test_a_token_logs_in_from_settings_or_url(serve: Serve) -> None:
    port = serve('authorization { token: "t0ken" }')
    works(Settings(servers=(f"nats://127.0.0.1:{port}",), token="t0ken"))
    works(Settings(servers=(f"nats://t0ken@127.0.0.1:{port}",)))
    refused(Settings(servers=(f"nats://127.0.0.1:{port}",), token="other"))


def new_key(prefix: int) -> nkeys.KeyPair:
    # Any 32 bytes make a key; these depend on the role only.
    return nkeys.from_seed(nkeys.encode_seed(hashlib.sha256(bytes([prefix])).digest(), prefix))


def test_an_nkey_logs_in_by_signing(serve: Serve, tmp_path: Path) -> None:
    user = new_key(nkeys.PREFIX_BYTE_USER)
    port = serve(f'authorization {{ users: [ {{ nkey: "{user.public_key.decode()}" }} ] }}')
    creds = tmp_path / "user.creds"
    creds.write_text(f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n")
    works(Settings(servers=(f"nats://127.0.0.1:{port}",), credentials=str(creds)))
    refused(Settings(servers=(f"nats://127.0.0.1:{port}",)))


def jwt(signer: nkeys.KeyPair, subject: nkeys.KeyPair, name: str, claims: dict[str, object]) -> str:
    """A JWT as nats-server's operator mode wants it."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    body = {"jti": name, "iat": 1_700_000_000, "iss": signer.public_key.decode(), "name": name}
    body |= {"sub": subject.public_key.decode(), "nats": claims | {"version": 2}}
    text = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{text}.{base64.urlsafe_b64encode(signer.sign(text.encode())).rstrip(b'=').decode()}"


def test_a_credentials_file_logs_in_with_jwt_and_seed(serve: Serve, tmp_path: Path) -> None:
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
    works(Settings(servers=(f"nats://127.0.0.1:{port}",), credentials=str(creds)))
    creds.write_text("nothing of use")
    refused(Settings(servers=(f"nats://127.0.0.1:{port}",), credentials=str(creds)), errors.ConfigError, "SEED")


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


def test_tls_is_used_and_the_server_is_verified(serve: Serve, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    port = serve(certificates.config())
    works(Settings(servers=(f"tls://localhost:{port}",), tls_ca=certificates.ca))
    works(Settings(servers=(f"nats://127.0.0.1:{port}",), tls_ca=certificates.ca))
    refused(Settings(servers=(f"tls://localhost:{port}",)), errors.BrokerUnreachable, "certificate verify failed")


def test_a_client_certificate_is_presented(serve: Serve, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    port = serve(certificates.config(f'ca_file: "{certificates.ca}", verify: true'))
    server = f"tls://localhost:{port}"
    works(
        Settings(servers=(server,), tls_ca=certificates.ca, tls_cert=certificates.cert, tls_key=certificates.key),
    )
    refused(Settings(servers=(server,), tls_ca=certificates.ca), errors.BrokerUnreachable)


def test_tls_can_come_before_anything_else(serve: Serve, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    port = serve(certificates.config("handshake_first: true"))
    works(Settings(servers=(f"tls://localhost:{port}",), tls_ca=certificates.ca, tls_first=True))


def test_a_plain_server_is_refused_when_tls_is_asked_for(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    settings = Settings(servers=(nats_server.url,), tls_ca=Certificates(tmp_path).ca)
    refused(settings, match="does not offer TLS")


# -- servers that are not there, or are no servers ---------------------------------------------------------------------


def test_the_next_server_is_tried_and_the_error_names_all_without_secrets(nats_server: EmbeddedServer) -> None:
    works(Settings(servers=("nats://127.0.0.1:1", nats_server.url)))
    with pytest.raises(errors.BrokerUnreachable) as caught:
        blocking.connect(Settings(servers=("nats://ann:secret@127.0.0.1:1", "nats://127.0.0.1:2")))
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
        (b"SSH-2.0-OpenSSH_9.6", "no NATS server speaks like this"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no NATS server speaks like this"),
        (b"PING\r\n", "greets with INFO"),
        (b"INFO {not json}\r\n", "no JSON"),
    ],
)
def test_what_is_no_nats_server_is_an_error_in_time(
    impostor: Callable[[bytes], Settings], greeting: bytes, reason: str
) -> None:
    refused(impostor(greeting), errors.BrokerUnreachable, reason)


def test_a_server_that_goes_away_is_connection_lost_and_can_be_reconnected(nats_server: EmbeddedServer) -> None:
    connection = blocking.connect(nats_server.settings)
    nats_server.kill()
    with pytest.raises(errors.ConnectionLost):
        connection.flush()
    assert not connection.connected
    with pytest.raises(errors.ConnectionLost, match="closed"):
        connection.publish("a", b"")
    with pytest.raises(errors.BrokerUnreachable):
        connection.reconnect()
    nats_server.start()
    connection.reconnect()
    connection.flush()
    connection.close()


async def test_waiting_calls_raise_when_the_server_goes_away(nats_server: EmbeddedServer) -> None:
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
    with pytest.raises(errors.ConnectionLost):
        await connection.publish("a", b"")
    nats_server.start()
    await connection.reconnect()
    await connection.flush()
    await connection.close()


def test_pings_are_answered_while_waiting_and_by_poll(serve: Serve) -> None:
    port = serve('ping_interval: "200ms"\nping_max: 10\n')
    with blocking.connect(Settings(servers=(f"nats://127.0.0.1:{port}",))) as connection:
        # Twice as long as the server waits for an answer.
        for _ in range(22):
            with pytest.raises(errors.DeadlineExceeded):
                connection.receive(0.2)
            connection.poll()
        connection.flush()


def test_poll_notices_that_the_server_went_away(nats_server: EmbeddedServer) -> None:
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


def test_messages_and_requests_share_a_blocking_connection(nats_server: EmbeddedServer) -> None:
    with blocking.connect(nats_server.settings) as connection, blocking.connect(nats_server.settings) as other:
        sid = connection.subscribe("a.*")
        connection.flush()
        other.publish("a.1", b"one", {"X": ["1", "2"]}, reply="back")
        other.publish("a.2", b"")
        other.flush()
        info = json.loads(connection.request("$JS.API.INFO", b"").data)
        assert info["type"] == "io.nats.jetstream.api.v1.account_info_response"
        first, second = connection.receive(), connection.receive()
        assert (first.subject, first.sid, first.reply, first.data) == ("a.1", sid, "back", b"one")
        assert first.header_values() == {"X": ["1", "2"]}
        assert (second.subject, second.headers, second.data) == ("a.2", b"", b"")
        connection.unsubscribe(sid)
        connection.flush()
        other.publish("a.3", b"")
        other.flush()
        with pytest.raises(errors.DeadlineExceeded):
            connection.receive(0.05)


async def test_messages_go_to_handlers_and_to_receive(nats_server: EmbeddedServer) -> None:
    async with await aio.connect(nats_server.settings, echo=True) as connection:
        seen: list[frames.Message] = []
        await connection.subscribe("handled", handler=seen.append)
        await connection.subscribe("received")
        await connection.publish("handled", b"1", {"K": "v"})
        await connection.publish("received", b"2")
        assert (await connection.receive()).data == b"2"
        assert [(m.data, m.header_values()) for m in seen] == [(b"1", {"K": ["v"]})]


def test_the_raw_stream_can_be_taken_over_and_given_back(nats_server: EmbeddedServer) -> None:
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
    with blocking.connect(nats_server.settings) as connection:
        jetstream = JetStream(connection.requester())
        blocking.run(jetstream.create_stream({"name": "S", "subjects": ["s"]}))
        assert blocking.run(jetstream.stream_info("S")).state.messages == 0

        async def in_a_notebook() -> int:
            return blocking.run(jetstream.stream_info("S")).state.last_seq

        assert asyncio.run(in_a_notebook()) == 0


async def test_the_jetstream_api_works_over_the_asyncio_connection(nats_server: EmbeddedServer) -> None:
    async with await aio.connect(nats_server.settings) as connection:
        jetstream = JetStream(connection.requester())
        with pytest.raises(errors.StreamNotFound):
            await jetstream.stream_info("S")


def test_a_server_without_jetstream_says_so(serve: Serve) -> None:
    settings = Settings(servers=(f"nats://127.0.0.1:{serve('')}",))
    with blocking.connect(settings) as connection, pytest.raises(errors.JetStreamDisabled):
        connection.request("$JS.API.INFO", b"")


def test_a_forbidden_subject_is_access_denied_at_once_and_survived(serve: Serve) -> None:
    permissions = 'permissions: { publish: { deny: "secret.>" } }'
    port = serve(f'authorization {{ users: [ {{ user: "a", password: "b", {permissions} }} ] }}')
    settings = Settings(servers=(f"nats://a:b@127.0.0.1:{port}",))
    with blocking.connect(settings) as connection:
        with pytest.raises(errors.AccessDenied, match=r"secret\.x"):
            connection.request("secret.x", b"")
        connection.flush()

    async def asynchronous() -> None:
        async with await aio.connect(settings) as connection:
            with pytest.raises(errors.AccessDenied, match=r"secret\.x"):
                await connection.request("secret.x", b"")
            await connection.flush()

    asyncio.run(asynchronous())


def test_a_message_that_is_too_large_is_refused_before_the_server_hangs_up(serve: Serve) -> None:
    port = serve("max_payload: 1000")
    with blocking.connect(Settings(servers=(f"nats://127.0.0.1:{port}",))) as connection:
        with pytest.raises(errors.ConfigError, match="1001 bytes"):
            connection.publish("a", b"x" * 1001)
        connection.publish("a", b"x" * 1000)
        connection.flush()


async def test_a_login_cancelled_at_any_moment_leaves_nothing_to_complain_about(nats_server: EmbeddedServer) -> None:
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
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
    assert complaints == []
