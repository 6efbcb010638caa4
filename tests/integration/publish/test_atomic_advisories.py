"""Abandoned batches: watched, counted, handed to a callback, and kept for `status`; and mirrors and sources of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.support.commands import ended, here
from tests.support.streams import make_stream

from penstock.jetstream.model import StoredMessage
from penstock.observe.collecting import collect
from penstock.publish import Abandonment, Abandonments, Gap, Publisher, TooLarge, advisories
from penstock.server.embedded import EmbeddedServer
from penstock.testing.polling import eventually_async


@pytest.fixture
def publisher(asyncio_publisher: Publisher) -> Publisher:
    """What is told of a batch does not depend on who sent it."""
    return asyncio_publisher


async def abandon(publisher: Publisher, stream: str = "S") -> str:
    """A batch that its publisher drops half-way."""
    batch = publisher.atomic(stream)
    for _ in range(3):
        await batch.add(f"{stream.lower()}.a", b"")
    await batch.flush()
    await batch.abandon()
    return batch.batch_id


async def too_large(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.publish.batch.MAX_MESSAGES", 1001)
    monkeypatch.setattr("penstock.publish.batch._SEQUENCE_LINES", [b"%d\r\n" % n for n in range(1004)])
    with pytest.raises(TooLarge):
        await publisher.publish_batch("S", "s.a", [b""] * 1001)


async def test_abandoned_batches_are_counted_by_stream_and_reason_and_handed_on(
    nats_server: EmbeddedServer, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_stream(publisher.jetstream, "T", allow_atomic=True)
    seen: list[Abandonment] = []
    async with Abandonments(nats_server.settings, seen.append) as watch:
        first = await abandon(publisher)
        await eventually_async(lambda: seen, what="the first advisory: each stream tells its own when it likes")
        await abandon(publisher, "T")
        await abandon(publisher, "T")
        await too_large(publisher, monkeypatch)
        with pytest.raises(Gap):
            await publisher.publish_batch("S", ["s.a", "elsewhere", "s.a"], [b"", b"", b""])
        await eventually_async(lambda: watch.statistics().total >= 5, state=watch.statistics)
    counted = watch.statistics()
    assert counted.counts == {"S": {"incomplete": 2, "large": 1}, "T": {"incomplete": 2}}
    assert counted.interruptions == 0
    assert (seen[0].stream, seen[0].batch_id, seen[0].reason) == ("S", first, "incomplete")
    assert seen[0].time
    assert (await publisher.jetstream.stream_info("S")).state.messages == 0


async def test_a_watch_survives_its_server_and_says_that_it_was_away(
    nats_server: EmbeddedServer, publisher: Publisher
) -> None:
    async with Abandonments(nats_server.settings) as watch:
        await abandon(publisher)
        await eventually_async(lambda: watch.statistics().total == 1, state=watch.statistics)
        nats_server.kill()
        nats_server.start()
        await eventually_async(lambda: not publisher.connection.connected, what="the loss to be noticed")

        async def counted_again() -> bool:
            await abandon(publisher)
            return watch.statistics().total > 1

        await publisher.publish_batch("S", "s.a", [b""])
        await eventually_async(counted_again, state=watch.statistics)
    assert watch.statistics().interruptions >= 1


async def test_kept_advisories_are_counted_by_status_also_when_nobody_listened(
    nats_server: EmbeddedServer, publisher: Publisher
) -> None:
    async with Abandonments(nats_server.settings) as watch:
        await abandon(publisher)
        await eventually_async(lambda: watch.statistics().total == 1, what="the advisory that nobody keeps")
    assert (await collect(publisher.jetstream)).abandoned_batches is None
    await publisher.jetstream.create_stream(advisories.keeper())
    assert (await collect(publisher.jetstream)).abandoned_batches == {}
    await abandon(publisher)
    await abandon(publisher)

    async def counted() -> bool:
        return (await collect(publisher.jetstream)).abandoned_batches == {"S": 2}

    await eventually_async(counted)


@pytest.mark.parametrize("subject", ["$JS.EVENT.ADVISORY.>", "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.>"])
async def test_any_stream_that_takes_the_subject_keeps_them(publisher: Publisher, subject: str) -> None:
    await make_stream(publisher.jetstream, "EVENTS", subjects=[subject])
    await abandon(publisher)

    async def counted() -> bool:
        return (await collect(publisher.jetstream)).abandoned_batches == {"S": 1}

    await eventually_async(counted)


PLATFORM = """\
environments: {{dev: {{servers: ["{servers}"]}}}}
streams:
  S: {{subjects: [s.>], allow_atomic: true, max_age: 1d}}
"""


def test_a_platform_with_an_atomic_stream_keeps_them_and_the_command_lists_them(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    servers = ("--servers", nats_server.url)
    assert "no stream keeps what the server says" in ended(*servers, "batches", code=2).stderr
    file = tmp_path / "penstock.yaml"
    file.write_text(PLATFORM.format(servers=nats_server.url))
    ended("apply", file)
    ended("plan", file)
    assert "no abandoned batches" in ended(*servers, "batches").stdout
    dropped: list[str] = []

    async def drop(name: str | None) -> None:
        async with await Publisher.connect(nats_server.settings, name=name) as publisher:
            dropped.append(await abandon(publisher))

            async def counted() -> bool:
                return (await collect(publisher.jetstream)).abandoned_batches == {"S": len(dropped)}

            await eventually_async(counted)

    asyncio.run(drop("billing"))
    asyncio.run(drop(None))
    found = json.loads(ended(*servers, "batches", "--json").stdout)["batches"]
    assert [(one["stream"], one["batch_id"], one["reason"], one["publisher"]) for one in found] == [
        ("S", dropped[0], "incomplete", "billing"),
        ("S", dropped[1], "incomplete", None),
    ]
    assert all(one["time"] for one in found)
    shown = ended(*servers, "batches", "--stream", "S").stdout
    assert all(one in shown for one in (*dropped, "not told"))
    assert "stream 'T': stream not found" in ended(*servers, "batches", "--stream", "T", code=1).stderr
    assert ended(*servers, "batches", "--stream", advisories.KEEPER).stdout == "no abandoned batches\n"


async def test_the_stream_that_keeps_them_can_be_had_without_a_platform(
    nats_server: EmbeddedServer, publisher: Publisher
) -> None:
    assert (
        "abandoned batches are not kept"
        in (await asyncio.to_thread(here, "--servers", nats_server.url, "status")).stdout
    )
    for _ in range(2):
        done = await asyncio.to_thread(here, "--servers", nats_server.url, "batches", "--keep")
        assert done.returncode == 0, done.stderr
    assert (await collect(publisher.jetstream)).abandoned_batches == {}
    assert (
        "0 atomic batches abandoned" in (await asyncio.to_thread(here, "--servers", nats_server.url, "status")).stdout
    )


# -- mirrors and sources -----------------------------------------------------------------------------------------------


async def copied(publisher: Publisher, stream: str, count: int) -> list[StoredMessage]:
    async def last() -> bool:
        return (await publisher.jetstream.stream_info(stream)).state.last_seq >= count

    await eventually_async(last)
    return [await publisher.jetstream.get_message(stream, sequence) for sequence in range(1, count + 1)]


def batch_headers(messages: list[StoredMessage]) -> list[str]:
    return [name for m in messages for name in m.headers if name.startswith(("Nats-Batch", "Nats-Expected"))]


async def test_a_mirror_ignores_the_headers_and_copies_what_is_committed(publisher: Publisher) -> None:
    """In the origin's order and sequences; this server also takes the headers off."""
    await make_stream(publisher.jetstream, "M", mirror={"name": "S"})
    await publisher.publish_batch("S", "s.a", [b"1", b"2", b"3"], headers=[{"Own": "x"}, None, None])
    await abandon(publisher)
    await publisher.publish_batch("S", "s.b", [b"4"])
    messages = await copied(publisher, "M", 4)
    assert [message.data for message in messages] == [b"1", b"2", b"3", b"4"]
    assert messages[0].headers["Own"] == ["x"]
    assert batch_headers(messages) == []
    assert batch_headers([await publisher.jetstream.get_message("S", 1)])


async def test_a_source_copies_committed_batches_without_their_headers(publisher: Publisher) -> None:
    """The document says that sources process the headers; this server takes them off, and copies what is committed."""
    await make_stream(publisher.jetstream, "AGG", sources=[{"name": "S"}], allow_atomic=True, subjects=["agg.>"])
    open_batch = publisher.atomic("S")
    await open_batch.add("s.open", b"")
    await open_batch.add("s.open", b"")
    await open_batch.flush()
    await publisher.publish_batch("S", ["s.a", "s.b", "s.c"], [b"1", b"2", b"3"], headers=[{"Own": "x"}, None, None])
    messages = await copied(publisher, "AGG", 3)
    assert [(message.subject, message.data) for message in messages] == [("s.a", b"1"), ("s.b", b"2"), ("s.c", b"3")]
    assert batch_headers(messages) == []
    assert messages[0].headers["Own"] == ["x"]
    assert (await publisher.publish_batch("AGG", "agg.own", [b"4", b"5"])).sequence == 5
    await open_batch.commit()
    assert [message.data for message in (await copied(publisher, "AGG", 7))[5:]] == [b"", b""]
