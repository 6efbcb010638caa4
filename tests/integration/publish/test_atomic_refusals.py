"""What is refused of an atomic batch, by whom, and with which reason.

A contract: each test runs on the asyncio and on the blocking publisher, unless it says why not.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from tests.support.publishers import AnyPublisher, fill, stored

from penstock import errors, publish
from penstock.publish import BlockingPublisher, Publisher
from penstock.publish import batch as batch_module
from penstock.publish.loading import PartlyStored
from penstock.server.embedded import EmbeddedServer
from penstock.wire import headers

# -- refusals ----------------------------------------------------------------------------------------------------------


async def test_a_stream_that_does_not_allow_it_says_which_change_does(publisher: AnyPublisher) -> None:
    await publisher.jetstream.create_stream({"name": "PLAIN", "subjects": ["plain"]})
    with pytest.raises(publish.NotEnabled, match="allow_atomic: true"):
        await publisher.publish_batch("PLAIN", "plain", [b"x"])
    await publisher.jetstream.update_stream("PLAIN", {"allow_atomic": True})
    await publisher.publish_batch("PLAIN", "plain", [b"x"])
    # Taken back while the publisher still believes it: the server says the same.
    await publisher.jetstream.update_stream("PLAIN", {"allow_atomic": False})
    with pytest.raises(publish.NotEnabled, match="allow_atomic: true") as caught:
        await publisher.publish_batch("PLAIN", "plain", [b"x", b"y"])
    assert caught.value.err_code == 10174


async def test_a_missing_stream_and_a_foreign_subject_are_named(publisher: AnyPublisher) -> None:
    with pytest.raises(errors.StreamNotFound):
        await publisher.publish_batch("NONE", "s.a", [b"x"])
    publisher.no_responders_timeout = 0
    with pytest.raises(publish.NobodyListens, match=r"'other\.x'"):
        await publisher.publish_batch("S", "other.x", [b"x"])
    with pytest.raises(publish.Gap, match=r"not the stream's: other\.x;") as caught:
        await publisher.publish_batch("S", ["s.a", "other.x", "s.a"], [b"1", b"2", b"3"])
    assert caught.value.strangers == ("other.x",)
    await publisher.jetstream.create_stream({"name": "TWIN", "subjects": ["twin"], "allow_atomic": True})
    with pytest.raises(publish.Gap, match="not the stream's: twin;"):
        await publisher.publish_batch("S", "twin", [b"x"])
    assert await stored(publisher) == []
    assert await stored(publisher, "TWIN") == []


async def test_a_member_over_the_streams_size_limit_is_a_gap(publisher: AnyPublisher) -> None:
    await publisher.jetstream.update_stream("S", {"max_msg_size": 1000})
    with pytest.raises(publish.Gap, match="max_msg_size"):
        await publisher.publish_batch("S", "s.a", [b"1", b"x" * 2000, b"3"])


REFUSED: list[tuple[dict[str, Any], list[bytes], dict[str, str], str]] = [
    ({"max_msgs": 2, "discard": "new"}, [b"x"] * 3, {}, "maximum messages exceeded"),
    ({"max_bytes": 300, "discard": "new"}, [b"x" * 200] * 3, {}, "maximum bytes exceeded"),
    ({"max_msg_size": 200}, [b"x" * 1000], {}, "message size exceeds maximum"),
    ({}, [b"x"], {"Nats-TTL": "10s"}, "TTL is disabled"),
    ({"deny_purge": True}, [b"x"], {"Nats-Rollup": "sub"}, "rollup not permitted"),
    ({"sealed": True}, [b"x"], {}, "sealed stream"),
]
"""What a stream is like, a batch, a header of all its messages, and the reason for which the server refuses it."""


@pytest.mark.parametrize(("config", "payloads", "header", "reason"), REFUSED, ids=[row[3] for row in REFUSED])
async def test_a_final_refusal_is_a_rejection_with_the_servers_reason(
    publisher: AnyPublisher, config: dict[str, Any], payloads: list[bytes], header: dict[str, str], reason: str
) -> None:
    await publisher.jetstream.create_stream({"name": "NO", "subjects": ["no"], "allow_atomic": True})
    await publisher.jetstream.update_stream("NO", config)
    with pytest.raises(publish.BatchRejected, match=reason) as caught:
        await publisher.publish_batch("NO", "no", payloads, headers=[header] * len(payloads))
    assert isinstance(caught.value, publish.StreamFull) == ("exceeded" in reason)
    assert not caught.value.retryable
    assert await stored(publisher, "NO") == []


async def test_increments_of_counters_are_stored_as_a_batch(publisher: AnyPublisher) -> None:
    for name in ("HITS", "OTHER"):
        config = {"name": name, "subjects": [f"{name}.>"], "allow_atomic": True, "allow_msg_counter": True}
        await publisher.jetstream.create_stream(config)
    async with publisher.atomic("HITS") as batch:
        for number in (1, 2, 3):
            await batch.add("HITS.page", b"", headers={"Nats-Incr": f"+{number}"})
    assert await stored(publisher, "HITS") == [b'{"val":"1"}', b'{"val":"3"}', b'{"val":"6"}']
    with pytest.raises(publish.Gap, match=r"not the stream's: OTHER\.page;"):
        await publisher.publish_batch("HITS", "OTHER.page", [b""], headers=[{"Nats-Incr": "+1"}])
    assert await stored(publisher, "OTHER") == []


IN_ORDER: list[tuple[int, dict[str, str], int]] = [
    (10054, {}, 4000),
    (10200, {"Nats-Batch-Commit": "7"}, 0),
    (10177, {"Nats-Expected-Last-Msg-Id": "x"}, 0),
    (10168, {"Nats-Incr": "+1"}, 0),
    (10060, {"Nats-Expected-Stream": "OTHER"}, 0),
    (10166, {"Nats-TTL": "10s"}, 0),
    (10201, {"Nats-Msg-Id": "there"}, 0),
    (10071, {"Nats-Expected-Last-Sequence": "77"}, 0),
    (10111, {"Nats-Rollup": "sub"}, 0),
    (10077, {}, 0),
]
"""What is wrong with a message that commits, as docs/publishing.md lists it: the error, its headers, and its size."""


async def test_a_commit_is_checked_in_the_order_that_the_page_says(asyncio_publisher: Publisher) -> None:
    full = {"max_msgs": 1, "discard": "new", "max_msg_size": 3000, "allow_atomic": True}
    await asyncio_publisher.jetstream.create_stream({"name": "FULL", "subjects": ["full"], **full})
    await asyncio_publisher.publish_batch("FULL", "full", [b""], message_id="there")
    connection = asyncio_publisher.connection
    for number, (expected, own, size) in enumerate(IN_ORDER):
        _, next_own, next_size = IN_ORDER[min(number + 1, len(IN_ORDER) - 1)]
        values = {
            "Nats-Batch-Id": f"b{number}",
            "Nats-Batch-Sequence": "1",
            "Nats-Batch-Commit": "1",
            **next_own,
            **own,
        }
        block, data, reply = headers.encode(values), b"x" * max(size, next_size), connection.inbox("full")
        await connection.send(
            b"HPUB full %b %d %d\r\n%b%b\r\n" % (reply.encode(), len(block), len(block) + len(data), block, data)
        )
        answer = json.loads((await connection.wait(reply, what="the commit")).data)
        assert answer["error"]["err_code"] == expected, (own, next_own, answer)


async def test_a_publishers_name_begins_the_ids_of_its_batches(nats_server: EmbeddedServer, half: str) -> None:
    for name in ("", "a.b", "x" * 33, "ü"):
        with pytest.raises(errors.ConfigError, match="a publisher's name"):
            batch_module.checked_publisher(name)
    if half == "blocking":
        with BlockingPublisher.connect(nats_server.settings, name="billing") as blocking_one:
            ids = [blocking_one.atomic("S").batch_id, blocking_one.atomic("S", chunked=True).batch_id]
    else:
        async with await Publisher.connect(nats_server.settings, name="billing") as made:
            ids = [made.atomic("S").batch_id, made.atomic("S", chunked=True).batch_id]
    assert all(one.startswith("billing.") for one in ids)


async def test_headers_that_have_no_place_in_a_batch_are_refused_at_once(publisher: AnyPublisher) -> None:
    batch = publisher.atomic("S")
    with pytest.raises(publish.UnsupportedHeader, match="Nats-Expected-Last-Msg-Id"):
        await batch.add("s.a", b"", headers={"Nats-Expected-Last-Msg-Id": "x"})
    with pytest.raises(errors.ConfigError, match="written by the batch itself"):
        await batch.add("s.a", b"", headers={"nats-batch-id": "x"})
    with pytest.raises(errors.ConfigError, match="wildcard"):
        await batch.add("s.*", b"")
    with pytest.raises(errors.ConfigError, match="at least one message"):
        await batch.commit()


async def test_a_message_larger_than_the_server_takes_is_refused_before_anything_is_sent(
    publisher: AnyPublisher,
) -> None:
    limit = publisher.connection.info.max_payload
    with pytest.raises(errors.ConfigError, match=r"message 1 of the batch, for 's\.b'"):
        await publisher.publish_batch("S", ["s.a", "s.b"], [b"x", b"x" * limit])
    almost = [b"x" * (limit - 300)]
    assert (await publisher.publish_batch("S", "s.a", almost)).count == 1


def test_errors_survive_pickling() -> None:
    ref = publish.BatchRef("S", "id", 3, "s.a", 7)
    told = ("S", "id", 400, 10176, "incomplete")
    samples: list[errors.PenstockError] = [
        publish.BatchOutcomeUnknown(ref, "lost"),
        publish.NotEnabled(*told),
        publish.Gap(*told, ("x",)),
        publish.TimedOut(*told, 11.0),
        publish.DuplicateId(*told, ("a", "b")),
        PartlyStored(*told, ("a", "b"), 3),
        publish.WrongSequence(*told, (1,), 2),
        publish.NobodyListens("S", "x"),
        errors.ConnectionLost("nats://x", "why"),
    ]
    for error in samples:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert again.__dict__ == error.__dict__
        assert str(again) == str(error)


# -- wrong calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"subject": None}, "a subject is text"),
        ({"subject": "s.\ud800"}, "surrogate"),
        ({"headers": {"A": 1}}, "header 'A' must have a name and a value of text"),
        ({"headers": {"A": b"x"}}, "header 'A' must have a name and a value of text"),
        ({"headers": {"A": ["x", 1]}}, "header 'A' must have a name and a value of text"),
        ({"headers": {1: "x"}}, "1 is no name"),
        ({"headers": [("A", "x")]}, "is no name"),
        ({"headers": {"A": "\ud800"}}, "surrogate"),
        ({"message_id": 5}, "must have a name and a value of text"),
        ({"message_id": ""}, "the message id is empty"),
    ],
)
async def test_what_cannot_be_a_message_is_refused_with_a_reason(
    publisher: AnyPublisher, call: dict[str, Any], words: str
) -> None:
    batch = publisher.atomic("S")
    with pytest.raises(errors.ConfigError, match=words):
        await batch.add(**{"subject": "s.a", "data": b"", **call})


async def test_an_ended_batch_cannot_be_flushed(publisher: AnyPublisher) -> None:
    batch = publisher.atomic("S")
    await fill(batch, 3)
    await batch.abandon()
    with pytest.raises(errors.ConfigError, match="committed or dropped already"):
        await batch.flush()


async def test_a_closed_publisher_says_so_and_opens_nothing(publisher: AnyPublisher) -> None:
    await publisher.close()
    with pytest.raises(errors.ConfigError, match="publisher is closed"):
        await publisher.publish_batch("S", "s.a", [b"1"])
    assert not publisher.connection.connected
