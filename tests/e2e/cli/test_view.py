"""`penstock view`: messages as they lie in a stream, in the ways people look at them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.binary_events import AVRO, avro_datum
from tests.support.commands import here
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.wire.blocking import connect, run


@pytest.fixture
def streams(nats_server: EmbeddedServer) -> Iterator[Streams]:
    with connect(nats_server.settings) as connection:
        streams = Streams(connection)
        streams.make("S", retention="workqueue")
        streams.publish("s.a", [json.dumps({"n": n, "who": {"id": f"p{n % 3}"}}).encode() for n in range(50)], X="1")
        streams.publish("s.b", [b"\xff\x1b[31mred"])
        yield streams


def view(server: EmbeddedServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return here("--servers", server.url, "view", "S", *arguments)


def test_the_last_messages_are_shown_and_nothing_is_left_behind(nats_server: EmbeddedServer, streams: Streams) -> None:
    shown = view(nats_server)
    lines = shown.stdout.splitlines()
    assert shown.returncode == 0
    assert len(lines) == 21
    assert lines[0].split() == ["seq", "stored", "subject", "data"]
    assert lines[1].split()[0] == "32"
    assert "\\xff" in lines[-1]
    assert "\x1b" not in shown.stdout
    assert streams.info().state.messages == 51
    assert streams.info().state.consumers == 0


def test_messages_are_chosen_by_subject_sequence_time_and_field(nats_server: EmbeddedServer, streams: Streams) -> None:
    def sequences(*arguments: str) -> list[int]:
        done = view(nats_server, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["sequence"] for line in done.stdout.splitlines()]

    assert sequences("--subject", "s.b") == [51]
    assert sequences("--first", "10", "--last", "12") == [10, 11, 12]
    assert sequences("--first", "10", "--limit", "2") == [10, 11]
    assert len(sequences("--since", "1h")) == 51
    assert sequences("--since", "2100-01-01T00:00:00Z") == []
    assert sequences("--json-path", "who.id=p2", "--limit", "2") == [45, 48]


def test_headers_do_not_choose_what_is_shown_of_a_message(nats_server: EmbeddedServer, streams: Streams) -> None:
    forged = {"Nats-Subject": "s.c", "Nats-Sequence": "7", "Nats-Time-Stamp": "then"}
    streams.publish("s.a", [b'{"a": "\\ud800\x7f", "b": 1e999}'], **forged)
    done = view(nats_server, "--json", "--first", "52")
    found = json.loads(done.stdout)
    assert (found["subject"], found["sequence"]) == ("s.a", 52)
    assert found["text"] == '{"a": "\\ud800\x7f", "b": 1e999}'
    assert "\x7f" not in done.stdout


def test_fields_are_columns_and_bodies_are_lines(nats_server: EmbeddedServer, streams: Streams) -> None:
    table = view(nats_server, "--last", "1", "--json-path", "who.id", "--json-path", "n").stdout.splitlines()
    assert table[0].split() == ["seq", "stored", "subject", "who.id", "n"]
    assert table[1].split()[-2:] == ["p0", "0"]
    one = json.loads(view(nats_server, "--json", "--last", "1").stdout)
    assert (one["subject"], one["json"], one["headers"]) == ("s.a", {"n": 0, "who": {"id": "p0"}}, {"X": ["1"]})
    assert "hex" in json.loads(view(nats_server, "--json", "--subject", "s.b").stdout)


def test_wrong_usage_is_told(nats_server: EmbeddedServer, streams: Streams) -> None:
    for arguments in (
        ["--since", "yesterday"],
        ["--since", "2026-01-01T00:00:00"],
        ["--raw", "--json"],
        ["--json-path", "..x"],
        ["--json-path", "=3"],
    ):
        done = view(nats_server, *arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (64, False), done.stderr
    assert here("--servers", nats_server.url, "view", "NOSUCH").returncode == 1
    assert "no messages in S match" in view(nats_server, "--subject", "s.nosuch").stderr


def test_follow_prints_what_comes(nats_server: EmbeddedServer, streams: Streams) -> None:
    command = [
        sys.executable,
        "-m",
        "penstock",
        "--servers",
        nats_server.url,
        "view",
        "S",
        "-f",
        "--raw",
        "--first",
        "51",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\xff\x1b[31mred\n"
        streams.publish("s.a", [b"new"])
        assert process.stdout.readline() == b"new\n"
        process.terminate()


def test_the_last_messages_are_those_that_are_there(nats_server: EmbeddedServer, streams: Streams) -> None:
    run(streams.api.purge_stream("S", subject="s.b"))
    streams.publish("s.c", [b"kept"])
    streams.publish("s.d", [b"gone"] * 300)
    run(streams.api.purge_stream("S", subject="s.d"))
    shown = view(nats_server, "--limit", "2", "--json")
    assert [json.loads(line)["sequence"] for line in shown.stdout.splitlines()] == [50, 52]


def test_avro_is_decoded_by_the_schema_of_the_platform_file(
    nats_server: EmbeddedServer, streams: Streams, tmp_path: Path
) -> None:
    (tmp_path / "usage.avsc").write_text(json.dumps(AVRO))
    file = tmp_path / "penstock.yaml"
    file.write_text(
        f"environments: {{dev: {{servers: ['{nats_server.url}']}}}}\nstreams: {{S: {{subjects: [s.>]}}}}\npipelines:\n"
        "  usage: {from: {stream: S, subjects: [s.avro]}, event: {format: avro, schema: usage.avsc},\n"
        "          to: [{format: console}]}"
    )
    streams.publish("s.avro", [avro_datum()])
    done = here("view", "S", "--file", str(file), "--json", "--json-path", "who.raw=00ff")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["json"]["price"] == "12.34"
    assert '{"id": "a"' in here("view", "S", "--file", str(file), "--subject", "s.avro").stdout
