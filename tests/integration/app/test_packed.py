"""Packs beside Spark: published row by row or as tables, handled, looked at, and replayed."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.commands import here
from tests.support.streams import make_stream

import penstock
from penstock.errors import ConfigError, Unavailable
from penstock.jetstream.model import StoredMessage
from penstock.packs import PackedRow, mark_of, rows_of
from penstock.publish.packed import PackedPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async

LONG = 3600.0
"""Seconds that no test waits for: rows go out because there are enough of them, or because somebody says so."""


async def stored(client: penstock.Client, stream: str = "S") -> list[StoredMessage]:
    return [one async for one in client.stream(stream).messages()]


def rows(message: StoredMessage) -> list[PackedRow]:
    return list(rows_of(message.subject, message.data, message.headers, message.time))


async def test_rows_go_out_when_there_are_enough_in_number_or_in_bytes_and_at_the_end(
    nats_server: EmbeddedServer,
) -> None:
    async with penstock.connect(nats_server.url) as client:
        await make_stream(client.jetstream, allow_direct=True)
        when = datetime(2026, 1, 2, tzinfo=UTC)
        async with client.packed(rows=3, max_bytes=1000, within=LONG) as packed:
            for n in range(4):
                await packed.add("s.a", b"%d" % n, headers={"Number": str(n)}, timestamp=when)
            assert (packed.stored, packed.packs) == (3, 1)
            await packed.add("s.large", bytes(1000))
            assert (packed.stored, packed.packs) == (4, 2)
        assert (packed.stored, packed.packs) == (5, 3)
        first, large, last = await stored(client)
        assert [one.data for one in rows(first)] == [b"0", b"1", b"2"]
        assert [one.data for one in rows(last)] == [b"3"]
        assert rows(first)[1] == PackedRow(b"1", "s.a", {"Number": ["1"]}, when)
        assert (large.subject, rows(large)[0].data) == ("s.large", bytes(1000))


async def test_rows_that_wait_for_others_go_out_in_time(nats_server: EmbeddedServer) -> None:
    async with penstock.connect(nats_server.url) as client:
        await make_stream(client.jetstream)
        async with client.packed(rows=1000, within=0.01) as packed:
            await packed.add("s.a", b"1")
            await packed.add("s.b", b"2")
            await eventually_async(lambda: packed.stored == 2, 30, "rows to be sent")
            assert packed.packs == 2


async def test_a_pack_that_is_larger_than_the_server_takes_becomes_several(nats_server: EmbeddedServer) -> None:
    async with penstock.connect(nats_server.url) as client:
        await make_stream(client.jetstream)
        body = bytes(client.max_payload // 3)
        async with client.packed(rows=8, max_bytes=10 * client.max_payload, within=LONG, codec="none") as packed:
            for _ in range(8):
                await packed.add("s.a", body)
        assert (packed.stored, packed.packs) == (8, 4)
        assert [len(rows(one)) for one in await stored(client)] == [2, 2, 2, 2]


async def test_columns_of_a_table_become_typed_packs(nats_server: EmbeddedServer) -> None:
    async with penstock.connect(nats_server.url) as client:
        await make_stream(client.jetstream)
        table = pa.table({"id": list(range(5)), "name": list("abcde")})
        async with client.packed(rows=2, within=LONG) as packed:
            await packed.add("s.a", b"before")
            await packed.add_table("s.a", table)
        found = await stored(client)
        assert [mark.kind for one in found if (mark := mark_of(one.headers))] == ["rows", "typed", "typed", "typed"]
        assert [json.loads(row.data) for one in found[1:] for row in rows(one)] == table.to_pylist()


async def test_what_no_pack_can_be_is_refused(nats_server: EmbeddedServer) -> None:
    async with penstock.connect(nats_server.url) as client:
        for wrong in ({"rows": 0}, {"within": 0}, {"codec": "gzip"}, {"max_bytes": 0}):
            with pytest.raises(ConfigError):
                client.packed(**wrong)
        packed = client.packed()
        for subject, data in (("s.*", b"1"), ("s.a", "text")):
            with pytest.raises(ConfigError):
                await packed.add(subject, data)  # type: ignore[arg-type]
        async with client.packed(within=0.01) as packed:
            await packed.add("nowhere.a", b"1")

            async def told() -> bool:
                with pytest.raises(Unavailable, match="no stream takes"):
                    await packed.add("nowhere.a", b"2")
                return True

            await eventually_async(lambda: packed._failed, 30, "it to fail")
            await told()
            await make_stream(client.jetstream, "N", subjects=["nowhere.>"])
        assert [one.data for message in await stored(client, "N") for one in rows(message)] == [b"1"]


async def test_rows_that_cannot_be_packed_are_told_at_the_next_call(nats_server: EmbeddedServer) -> None:
    async with penstock.connect(nats_server.url) as client:
        await make_stream(client.jetstream)
        async with client.packed(within=0.01) as packed:
            await packed.add("s.a", b"1", headers={"Number": [1]})  # type: ignore[list-item]
            await eventually_async(lambda: packed._failed, 30, "it to fail")
            with pytest.raises(ConfigError, match="cannot be packed"):
                await packed.add("s.a", b"2")


async def test_after_an_exception_rows_that_were_not_sent_are_dropped(nats_server: EmbeddedServer) -> None:
    async with penstock.connect(nats_server.url) as client:
        await make_stream(client.jetstream)

        async def fail() -> None:
            async with client.packed(rows=2, within=LONG) as packed:
                for n in range(3):
                    await packed.add("s.a", b"%d" % n)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert [one.data for message in await stored(client) for one in rows(message)] == [b"0", b"1"]


async def test_a_server_that_is_killed_meanwhile_has_each_row_once(nats_server: EmbeddedServer) -> None:
    count = 3000
    async with penstock.connect(nats_server.url, timeout=2.0) as client:
        await make_stream(client.jetstream, allow_direct=True)

        async def publish(packed: PackedPublisher) -> None:
            for n in range(count):
                await packed.add("s.a", b"%d" % n)
                await asyncio.sleep(0)

        async with client.packed(rows=50, within=0.01) as packed:

            def reached(goal: int) -> bool:
                return packed.stored >= goal

            publishing = asyncio.create_task(publish(packed))
            for goal in (500, 1500):
                await eventually_async(partial(reached, goal), 60, f"{goal} rows")
                await asyncio.to_thread(nats_server.kill)
                await asyncio.to_thread(nats_server.start)
            await publishing
        found = [int(one.data) for message in await stored(client) for one in rows(message)]
        assert found == list(range(count))


def test_code_that_blocks_packs_too(nats_server: EmbeddedServer) -> None:
    with penstock.connect_blocking(nats_server.url) as client:
        client.jetstream.create_stream({"name": "S", "subjects": ["s.>"]})
        with client.packed(rows=10) as packed:
            for n in range(25):
                packed.add("s.a", b"%d" % n)
        assert (packed.stored, packed.packs) == (25, 3)


async def test_a_handler_gets_the_rows_of_a_pack(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(f'environments: {{dev: {{servers: ["{nats_server.url}"]}}}}\nstreams: {{S: {{subjects: [s.>]}}}}\n')
    app = penstock.App(file)
    seen: list[list[Any]] = []

    @app.consumer("c", stream="S")
    async def handle(message: penstock.Message) -> None:
        seen.append([(row.subject, row.data) for row in message.rows()])

    async with penstock.connect(nats_server.url) as client:
        await make_stream(client.jetstream)
        await client.jetstream.create_consumer("S", {"durable_name": "c", "ack_policy": "explicit"})
        async with client.packed() as packed:
            await packed.add("s.a", b"1")
            await packed.add("s.a", b"2")
        await client.publish("s.b", b"plain")
        stop = asyncio.Event()
        serving = asyncio.create_task(app.serve(stop))
        await eventually_async(lambda: len(seen) == 2, 30, "both messages")
        stop.set()
        await serving
    assert seen == [[("s.a", b"1"), ("s.a", b"2")], [("s.b", b"plain")]]


def test_lines_are_packed_by_subject_and_viewed_row_by_row(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("".join(json.dumps({"n": n, "d": "ab"[n % 2]}) + "\n" for n in range(7)))
    with penstock.connect_blocking(nats_server.url) as client:
        client.jetstream.create_stream({"name": "S", "subjects": ["s.>"]})
    servers = ("--servers", nats_server.url)
    done = here(*servers, "publish", "s.{d}", "--file", lines, "--pack", "3", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["mode"], report["rows"], report["messages"]) == ("packed", 7, 3)
    assert "7 rows in 3 packs" in here(*servers, "publish", "s.{d}", "--file", lines, "--pack", "3").stderr

    viewed = here(*servers, "view", "S", "--last", "3", "--json").stdout.splitlines()
    found = [json.loads(line) for line in viewed]
    assert [(one["sequence"], one["row"], one["subject"], one["json"]["n"]) for one in found] == [
        (1, 0, "s.a", 0), (1, 1, "s.a", 2), (1, 2, "s.a", 4),
        (2, 0, "s.b", 1), (2, 1, "s.b", 3), (2, 2, "s.b", 5), (3, 0, "s.a", 6),
    ]  # fmt: skip
    assert "1.2" in here(*servers, "view", "S", "--json-path", "n=4").stdout
    as_it_lies = json.loads(here(*servers, "view", "S", "--packed", "--last", "1", "--json").stdout)
    assert as_it_lies["headers"]["Penstock-Pack-Rows"] == ["3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--atomic"], "--pack goes with neither --atomic nor --fast"),
        (["--message-id", "n"], "--message-id does not go with --pack"),
        (["--stream", "S"], "--stream goes with --atomic and --fast"),
    ],
)
def test_what_does_not_go_with_packs_is_wrong_usage(flags: list[str], words: str) -> None:
    done = here("publish", "s.a", "--pack", "3", *flags)
    assert done.returncode == 64
    assert words in done.stderr
