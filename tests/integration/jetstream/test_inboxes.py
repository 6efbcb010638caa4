"""Under an inbox prefix of its own a user hears its own answers, and may hear no others; nkeys log in everywhere."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import nkeys
import pytest
from tests.integration.conftest import Serve

from penstock.errors import AccessDenied, BadSetting
from penstock.facts import Facts
from penstock.jetstream import connect
from penstock.jetstream.api import JetStream
from penstock.publish.plain import PlainPublisher
from penstock.settings import Settings
from penstock.wire import aio, blocking


@pytest.fixture
def seed() -> nkeys.KeyPair:
    return nkeys.from_seed(nkeys.encode_seed(hashlib.sha256(b"user").digest(), nkeys.PREFIX_BYTE_USER))


def test_all_answers_come_below_the_prefix(serve: Serve, tmp_path: Path) -> None:
    allowed = 'publish: { allow: [">"] }, subscribe: { allow: ["_INBOX_ann.>"] }'
    user = f"{{ user: ann, password: p, permissions: {{ {allowed} }} }}"
    port = serve(f'jetstream {{ store_dir: "{tmp_path / "data"}" }}\nauthorization {{ users: [ {user} ] }}')
    mine = Settings(servers=(f"nats://ann:p@127.0.0.1:{port}",), inbox_prefix="_INBOX_ann", timeout=5)
    theirs = Settings(servers=mine.servers, user="ann", password="p", timeout=2)

    async def used(settings: Settings) -> list[int]:
        async with connect(settings) as broker:
            if "S" not in await broker.jetstream.stream_names():
                await broker.jetstream.create_stream({"name": "S", "subjects": ["s.>"], "allow_direct": True})
                await broker.jetstream.create_consumer("S", {"durable_name": "reader", "ack_policy": "explicit"})
        async with PlainPublisher(settings) as publisher:
            await publisher.add("s.a", b"x")
            await publisher.finish()
        async with Facts(settings) as facts:
            page = await facts.fetch_facts("reader", 5, wait=5)
            assert page.receipt
            await facts.confirm_receipt("reader", page.receipt)
        return [fact.sequence for fact in page.facts]

    assert asyncio.run(used(mine)) == [1]
    with blocking.connect(mine) as connection:
        assert blocking.run(JetStream(connection.requester()).stream_info("S")).state.messages == 1
    with pytest.raises(AccessDenied):
        asyncio.run(used(theirs))


@pytest.mark.timeout(60)
async def test_without_the_right_prefix_every_request_is_refused_at_once(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And what nobody waits for, such as an acknowledgement, is logged."""
    allowed = 'publish: { allow: ["$JS.API.>"] }, subscribe: { deny: ["_INBOX.>"] }'
    user = f"{{ user: ann, password: p, permissions: {{ {allowed} }} }}"
    port = serve(f'jetstream {{ store_dir: "{tmp_path / "data"}" }}\nauthorization {{ users: [ {user} ] }}')
    settings = Settings(servers=(f"nats://ann:p@127.0.0.1:{port}",), timeout=50)
    async with await aio.connect(settings) as connection:
        for _ in range(2):
            with pytest.raises(AccessDenied, match="_INBOX"):
                await JetStream(connection.requester()).stream_names()
        for number in range(3):
            await connection.publish(f"$JS.ACK.S.reader.1.{number}", b"+ACK")
        await connection.flush()
    told = [record.getMessage() for record in caplog.records if "$JS.ACK.S.reader" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("form", ["creds", "bare"])
def test_an_nkey_without_a_jwt_logs_in_everywhere(serve: Serve, tmp_path: Path, seed: nkeys.KeyPair, form: str) -> None:
    port = serve(f'jetstream {{ store_dir: "{tmp_path / "data"}" }}\n'
                 f'authorization {{ users: [ {{ nkey: "{seed.public_key.decode()}" }} ] }}')  # fmt: skip
    file, text = tmp_path / "user.nk", seed.seed.decode()
    wrapped = f"-----BEGIN USER NKEY SEED-----\n{text}\n------END USER NKEY SEED------\n"
    file.write_text(wrapped if form == "creds" else f"{text}\n")
    settings = Settings(servers=(f"nats://127.0.0.1:{port}",), credentials=str(file))

    async def used() -> int:
        async with connect(settings) as broker:
            return (await broker.jetstream.account_info()).api_level

    assert asyncio.run(used()) > 0
    with blocking.connect(settings) as connection:
        assert blocking.run(JetStream(connection.requester()).stream_names()) == []


@pytest.mark.parametrize("prefix", ["", "a.", ".a", "a b", "*", "a.>", "$JS"])
def test_a_prefix_that_is_none_is_refused(prefix: str) -> None:
    with pytest.raises(BadSetting, match="inbox_prefix"):
        Settings(inbox_prefix=prefix)
