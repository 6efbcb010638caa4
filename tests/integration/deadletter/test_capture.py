"""Capturing dead letters on a real server: once, whoever comes, and however late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.streams import make_stream

from penstock.deadletter import streams
from penstock.deadletter.capture import NobodyKeepsLetters, capture
from penstock.deadletter.letters import BY_ADVISORY, DeadLetter, Failure, read
from penstock.jetstream.api import JetStream
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.wire import aio

DLQ = "dlq.orders.placed"
NOW = datetime.now(UTC)


@pytest.fixture
async def connection(nats_server: EmbeddedServer) -> AsyncIterator[aio.Connection]:
    async with await aio.connect(nats_server.settings) as connection:
        js = JetStream(connection.requester())
        await make_stream(js, "DLQ", duplicate_window=100_000_000)
        await js.create_stream(streams.audit_config())
        yield connection


def letter(**changed: object) -> DeadLetter:
    made = DeadLetter(
        subject="orders.placed",
        stream="ORDERS",
        sequence=7,
        stored=NOW,
        consumer="billing",
        body=b"{}",
        failure=Failure("ValueError", "no price"),
        last_failure=NOW,
    )
    return replace(made, **changed)  # type: ignore[arg-type]  # the tests change what they name


async def kept(connection: aio.Connection) -> int:
    return (await JetStream(connection.requester()).stream_info("DLQ")).state.messages


async def settle(connection: aio.Connection, one: DeadLetter) -> None:
    """What replay and discard do at their end."""
    js = JetStream(connection.requester())
    await connection.request(streams.settled_subject(one.id), b"{}")
    await js.purge_stream("DLQ", subject=f"{DLQ}.{one.id}")


async def test_a_captured_letter_lies_below_the_consumers_subject_with_all_that_is_known(
    connection: aio.Connection,
) -> None:
    done = await capture(connection, letter(), DLQ)
    stored = await JetStream(connection.requester()).get_message("DLQ", last_of=f"{DLQ}.>")
    assert done.new
    assert read(stored).letter == letter()


async def test_worker_and_advisory_at_the_same_time_store_one_letter(connection: aio.Connection) -> None:
    both = [letter(), letter(captured_by=BY_ADVISORY)] * 10
    done = await asyncio.gather(*(capture(connection, one, DLQ) for one in both))
    assert sum(one.new for one in done) == 1
    assert await kept(connection) == 1


async def test_a_capture_after_the_duplicate_window_stores_nothing(connection: aio.Connection) -> None:
    await capture(connection, letter(), DLQ)
    await asyncio.sleep(0.3)  # three times the stream's window
    assert not (await capture(connection, letter(), DLQ)).new
    assert await kept(connection) == 1


async def test_a_late_capture_of_a_letter_that_was_settled_meanwhile_stores_nothing(connection: aio.Connection) -> None:
    await capture(connection, letter(), DLQ)
    await settle(connection, letter())
    assert not (await capture(connection, letter(captured_by=BY_ADVISORY), DLQ)).new
    assert await kept(connection) == 0


async def test_a_failure_after_the_letter_was_settled_is_a_new_letter(connection: aio.Connection) -> None:
    await capture(connection, letter(), DLQ)
    await settle(connection, letter())
    later = datetime.now(UTC) + timedelta(seconds=1)
    assert (await capture(connection, letter(last_failure=later), DLQ)).new
    assert await kept(connection) == 1


async def test_without_a_stream_for_letters_the_error_says_what_to_declare(connection: aio.Connection) -> None:
    with pytest.raises(NobodyKeepsLetters, match="dead letters on 'elsewhere"):
        await capture(connection, letter(), "elsewhere.orders", patience=0.2)


async def test_a_stack_that_does_not_fit_is_left_out_and_the_body_kept(connection: aio.Connection) -> None:
    body = b"x" * (connection.info.max_payload - 3_000)
    big = letter(body=body, failure=Failure("E", "m", "stack " * 1_000))
    await capture(connection, big, DLQ)
    stored = read(await JetStream(connection.requester()).get_message("DLQ", last_of=f"{DLQ}.>"))
    assert (stored.letter.body, stored.letter.failure.stack) == (body, "")


async def test_a_capture_outlives_a_restart_of_the_server(nats_server: EmbeddedServer) -> None:
    async with await aio.connect(nats_server.settings) as connection:
        await make_stream(JetStream(connection.requester()), "DLQ")
        await capture(connection, letter(), DLQ)
        nats_server.kill()
        nats_server.start()
        await eventually_async(lambda: not connection.connected, what="the loss to be noticed")
        await connection.reconnect()
        assert not (await capture(connection, letter(), DLQ)).new
        assert await kept(connection) == 1
