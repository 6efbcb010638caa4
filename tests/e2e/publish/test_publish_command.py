"""`penstock publish`: a file or a pipe in, a report and an exit code out, against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.support.freezing import freeze
from tests.support.streams import make_stream

from penstock.cli.main import run
from penstock.jetstream import connect
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually, stream_data, stream_messages

PENSTOCK = [sys.executable, "-c", "from penstock.cli.main import run; run()"]
MODES: tuple[list[str], ...] = ([], ["--fast"], ["--atomic"])


def stores_more_than(server: EmbeddedServer, count: int) -> bool:
    return len(stream_data(server.settings, "ORDERS")) > count


@dataclass
class Ran:
    """How a command ended, and what it wrote."""

    code: int
    stdout: str
    stderr: str


Publish = Callable[..., Ran]


@pytest.fixture
def server(nats_server: EmbeddedServer) -> EmbeddedServer:
    async def streams() -> None:
        flags = {"allow_atomic": True, "allow_batched": True}
        async with connect(nats_server.settings) as broker:
            await make_stream(broker.jetstream, "ORDERS", **flags)
            await make_stream(broker.jetstream, "OTHER", **flags)
            await make_stream(broker.jetstream, "PLAIN")

    asyncio.run(streams())
    return nats_server


@pytest.fixture
def publish(server: EmbeddedServer, capfd: pytest.CaptureFixture[str]) -> Publish:
    """Run `penstock publish` to its end; in this process, since starting one takes longer than the work."""

    def call(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            run(["--servers", server.url, "publish", *arguments])
        captured = capfd.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def written(tmp_path: Path) -> Callable[[list[bytes]], str]:
    """A file of these lines."""

    def write(lines: list[bytes]) -> str:
        path = tmp_path / "lines.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return str(path)

    return write


Written = Callable[[list[bytes]], str]


def events(count: int, start: int = 1) -> list[bytes]:
    return [b'{"id":"e%d","region":"r%d","n":%d}' % (n, n % 3, n) for n in range(start, start + count)]


@pytest.mark.parametrize("mode", MODES)
def test_a_file_is_stored_in_order_with_subjects_headers_and_ids(
    server: EmbeddedServer, publish: Publish, written: Written, mode: list[str]
) -> None:
    options = ["--header", "Region=region", "--message-id", "id", "--json", *mode]
    done = publish("orders.{region}.placed", "--file", written(events(500)), *options)
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["stored"] == [{"stream": "ORDERS", "first": 1, "last": 500, "count": 500, "duplicates": 0}]
    found = stream_messages(server.settings, "ORDERS")
    assert [message.data for message in found] == events(500)
    assert found[4].subject == "orders.r2.placed"
    assert found[4].header_values()["Region"] == ["r2"]
    assert found[4].header_values()["Nats-Msg-Id"] == ["e5"]


def test_the_table_says_what_is_stored_where(publish: Publish, written: Written) -> None:
    lines = [b'{"to":"orders.a"}', b'{"to":"other.a"}', b"", b'{"to":"orders.b"}']
    done = publish("--subject-field", "to", "--file", written(lines))
    assert done.code == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert rows == [["ORDERS", "1", "2", "2"], ["OTHER", "1", "1", "1"]]


def test_publishing_again_with_ids_stores_nothing_twice(
    server: EmbeddedServer, publish: Publish, written: Written
) -> None:
    for duplicates in (0, 50):
        done = publish("orders.a", "--file", written(events(50)), "--message-id", "id", "--json")
        assert done.code == 0, done.stderr
        assert json.loads(done.stdout)["stored"][0]["duplicates"] == duplicates
    assert stream_data(server.settings, "ORDERS") == events(50)


def test_more_than_a_thousand_lines_go_in_chunks_that_are_atomic_by_themselves(
    server: EmbeddedServer, publish: Publish, written: Written
) -> None:
    done = publish("orders.a", "--file", written(events(2_500)), "--atomic")
    assert done.code == 0, done.stderr
    assert "3 batches: each is atomic by itself" in done.stderr
    assert stream_data(server.settings, "ORDERS") == events(2_500)


def test_an_atomic_load_that_was_cut_off_is_resumed_by_its_message_ids(
    server: EmbeddedServer, publish: Publish, written: Written
) -> None:
    lines = events(250)
    options = ["--atomic", "--batch-size", "50", "--message-id", "id", "--json"]
    assert publish("orders.{region}", "--file", written(lines[:100]), *options).code == 0
    for duplicates in (100, 250):
        done = publish("orders.{region}", "--file", written(lines), *options)
        assert done.code == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["messages"], report["stored"][0]["duplicates"]) == (250 - duplicates, duplicates)
        assert stream_data(server.settings, "ORDERS") == lines
    shown = publish("orders.{region}", "--file", written(lines), *options[:-1]).stdout
    assert shown.split()[-3:] == ["ORDERS", "0", "250"], "no sequences of what is not stored anew"


def test_an_atomic_batch_of_which_some_is_stored_is_refused_with_the_ids(
    server: EmbeddedServer, publish: Publish, written: Written
) -> None:
    assert publish("orders.a", "--file", written(events(2)), "--message-id", "id").code == 0
    done = publish("orders.a", "--file", written(events(5)), "--message-id", "id", "--atomic")
    assert done.code == 1
    assert "lines 1 to 5:" in done.stderr
    assert "2 of its 5 messages are stored already ('e1', 'e2')" in done.stderr
    twice = publish("orders.a", "--file", written(events(3, 10) * 2), "--message-id", "id", "--atomic")
    assert "message id 'e10' comes twice in it" in twice.stderr
    assert len(stream_data(server.settings, "ORDERS")) == 2


@pytest.mark.parametrize(
    ("mode", "stored"), [([], 699), (["--fast"], 699), (["--atomic"], 0), (["--atomic", "--batch-size", "100"], 600)]
)
def test_a_bad_line_is_reported_with_its_number_and_nothing_of_its_batch_is_stored(
    server: EmbeddedServer, publish: Publish, written: Written, mode: list[str], stored: int
) -> None:
    lines = events(900)
    lines[699] = b'{"id":"e700", oops'
    done = publish("orders.a", "--file", written(lines), *mode)
    assert done.code == 1
    assert "line 700: it is not JSON" in done.stderr
    assert "Traceback" not in done.stderr
    assert stream_data(server.settings, "ORDERS") == events(stored)


BAD = [
    (b'{"to":"orders..a"}', "is not a subject"),
    (b'{"to":"orders.*"}', "has a wildcard"),
    (b'{"to":"orders.a","h":{"A":"x\\r\\nNats-Msg-Id: forged"}}', "line break"),
    (b'{"to":"orders.a","h":{"A b":"x"}}', "header name 'A b'"),
    (b'{"to":"orders.a","h":{"A":"\\ud800"}}', "surrogate"),
    (b'{"to":"orders.\\ud800"}', "surrogate"),
    (b'{"to":"orders.a","x":' + b"[" * 20_000 + b"]" * 20_000 + b"}", "nested too deeply"),
    (b'{"to":"orders.a","x":"' + b"x" * 1_100_000 + b'"}', "this server takes 1048576"),
]
"""Lines of JSON that no message can be made of, and what is said about them."""


@pytest.mark.parametrize("mode", MODES)
def test_a_line_that_cannot_be_sent_is_a_bad_line_like_any_other(
    server: EmbeddedServer, publish: Publish, written: Written, mode: list[str]
) -> None:
    good = [b'{"to":"orders.a"}'] * 3
    before = 0
    for bad, words in BAD:
        file = written([*good, bad, *good])
        done = publish("--subject-field", "to", "--headers-field", "h", "--file", file, "--json", *mode)
        assert done.code == 1
        assert done.stderr.startswith("error: line 4: "), done.stderr
        assert words in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        stored = len(stream_data(server.settings, "ORDERS")) - before
        assert json.loads(done.stdout)["messages"] == stored == (0 if mode == ["--atomic"] else 3)
        before += stored


@pytest.mark.parametrize("mode", [[], ["--fast"]])
def test_lines_that_cannot_be_sent_are_skipped_like_others(
    server: EmbeddedServer, publish: Publish, written: Written, mode: list[str]
) -> None:
    good = b'{"to":"orders.a"}'
    file = written([line for bad, _ in BAD for line in (good, bad)])
    done = publish("--subject-field", "to", "--headers-field", "h", "--file", file, "--skip-bad", "--json", *mode)
    assert done.code == 2, done.stderr
    report = json.loads(done.stdout)
    assert sorted(bad["line"] for bad in report["bad_lines"]) == list(range(2, 2 * len(BAD) + 1, 2))
    assert report["messages"] == len(stream_data(server.settings, "ORDERS")) == len(BAD)


def test_the_first_of_several_refused_lines_is_named_in_a_fast_load(
    server: EmbeddedServer, publish: Publish, written: Written
) -> None:
    lines = [b'{"to":"orders.a"}', b'{"to":"other.b"}', b'{"to":"nowhere.c"}', b'{"to":"orders.d"}']
    for stored in range(1, 6):  # which answer comes first is a matter of luck
        done = publish("--subject-field", "to", "--file", written(lines), "--fast", "--json")
        assert done.code == 1
        assert "line 2: message 2: stream 'OTHER' takes subject 'other.b'" in done.stderr
        assert len(stream_data(server.settings, "ORDERS")) == stored


def test_bad_lines_can_be_skipped_and_are_still_reported(publish: Publish, written: Written) -> None:
    lines = events(20)
    lines[3], lines[7] = b"oops", b"[]"
    done = publish("orders.a", "--file", written(lines), "--fast", "--skip-bad", "--json")
    assert done.code == 2, done.stderr
    report = json.loads(done.stdout)
    assert (report["messages"], report["skipped"]) == (18, 2)
    assert [bad["line"] for bad in report["bad_lines"]] == [4, 8]


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_message_is_reported_with_its_line_and_what_is_stored(
    server: EmbeddedServer, publish: Publish, written: Written, mode: list[str]
) -> None:
    lines = [b'{"to":"orders.a"}'] * 5 + [b"", b'{"to":"nowhere"}'] + [b'{"to":"orders.a"}'] * 5
    done = publish("--subject-field", "to", "--file", written(lines), "--json", *mode)
    assert done.code == 1
    assert "line 7:" in done.stderr or "lines 1 to 12:" in done.stderr
    assert "server error 0" not in done.stderr
    report = json.loads(done.stdout)
    stored = len(stream_data(server.settings, "ORDERS"))
    assert report["messages"] == stored
    assert {"plain": stored >= 5, "fast": stored == 5, "atomic": stored == 0}[report["mode"]]


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_input_stores_nothing_and_is_fine(publish: Publish, written: Written, mode: list[str]) -> None:
    done = publish("orders.a", "--file", written([]), *mode)
    assert done.code == 0, done.stderr
    assert "nothing stored" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file", "-"], "say where messages go"),
        (["dlq.orders", "--file", "-"], "belongs to dead letters"),
        (["orders.a", "--file", "-", "--batch-size", "5"], "goes with --atomic"),
        (["orders.a", "--file", "-", "--stream", "ORDERS"], "goes with --atomic and --fast"),
        (["orders.a", "--file", "-", "--atomic", "--skip-bad"], "does not go with --atomic"),
        (["orders.a", "--file", "-", "--atomic", "--fast"], "do not go together"),
        (["orders.a", "--file", "-", "--header", "nope"], "NAME=FIELD"),
        (["orders.{a", "--file", "-"], "a brace that names no field"),
        (["orders.{}", "--file", "-"], "a brace that names no field"),
        (["orders..a", "--file", "-"], "is not a subject"),
        (["orders.*", "--file", "-"], "has a wildcard"),
    ],
)
def test_wrong_usage_exits_64_and_says_what_would_be_right(
    capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["publish", *arguments])
    assert ended.value.code == 64
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(("mode", "words"), [("--fast", "allow_batched: true"), ("--atomic", "allow_atomic: true")])
def test_a_stream_that_does_not_allow_it_is_named_with_the_change_that_helps(
    publish: Publish, written: Written, mode: str, words: str
) -> None:
    done = publish("plain.a", "--file", written([b"{}"]), mode)
    assert done.code == 1
    assert words in done.stderr


def test_a_missing_file_and_a_missing_stream_are_one_line_each(publish: Publish, written: Written) -> None:
    missing = publish("orders.a", "--file", "/nowhere/f.jsonl")
    assert (missing.code, missing.stdout) == (1, "")
    assert "No such file" in missing.stderr
    nowhere = publish("nowhere.a", "--file", written([b"{}"]), "--fast")
    assert nowhere.code == 1
    assert "no stream takes subject 'nowhere.a'" in nowhere.stderr


@pytest.mark.parametrize("mode", [[], ["--fast"]])
def test_lines_of_a_pipe_that_pauses_are_stored_while_it_pauses(server: EmbeddedServer, mode: list[str]) -> None:
    command = [*PENSTOCK, "--servers", server.url, "publish", "orders.a", "--file", "-", *mode]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin
    child.stdin.write(b"\n".join(events(3)) + b"\n")
    child.stdin.flush()
    eventually(lambda: stream_data(server.settings, "ORDERS") == events(3), 60, "the first lines to be stored")
    child.stdin.write(b"\n".join(events(3, start=4)))
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert stream_data(server.settings, "ORDERS") == events(6)


@pytest.mark.parametrize("mode", MODES)
def test_a_load_that_ends_at_its_first_line_leaves_no_words_of_the_reading_thread(
    server: EmbeddedServer, mode: list[str]
) -> None:
    command = [*PENSTOCK, "--servers", server.url, "publish", "orders.a", "--file", "-", *mode]
    for _ in range(3):  # the thread's last block and the end of the loop race
        done = subprocess.run(command, input=b"oops\n" + b"{}\n" * 200_000, capture_output=True, timeout=120)
        assert done.returncode == 1
        assert done.stderr.startswith(b"nothing is stored\nerror: line 1: it is not JSON"), done.stderr
        assert done.stderr.count(b"\n") == 2, done.stderr


@pytest.mark.kills
@pytest.mark.short
def test_a_killed_server_during_an_atomic_load_leaves_whole_batches_and_loses_no_line(server: EmbeddedServer) -> None:
    command = [*PENSTOCK, "--servers", server.url, "publish", "orders.a", "--file", "-", "--atomic"]
    child = subprocess.Popen(
        [*command, "--batch-size", "100", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin
    for start in range(1, 20_000, 5_000):
        child.stdin.write(b"\n".join(events(5_000, start=start)) + b"\n")
        child.stdin.flush()
        eventually(partial(stores_more_than, server, start), 60, "lines to be stored")
        server.kill()
        server.start()
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert json.loads(output)["messages"] == 20_000
    assert stream_data(server.settings, "ORDERS") == events(20_000)


@pytest.mark.parametrize("mode", ["plain", "atomic", "fast"])
def test_an_interrupted_load_says_what_is_stored(server: EmbeddedServer, mode: str) -> None:
    flags = [] if mode == "plain" else [f"--{mode}"]
    command = [*PENSTOCK, "--servers", server.url, "publish", "orders.a", "--file", "-", "--json", *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin
        child.stdin.write(b"\n".join(events(5_000)) + b"\n")
        child.stdin.flush()
        eventually(lambda: len(stream_data(server.settings, "ORDERS")) > 2_000, 60, "lines to be stored")
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=120)
    assert child.returncode == 1
    assert errors.decode().splitlines()[-1] == "error: interrupted"
    told = json.loads(output)
    assert "interrupted" in told["error"]
    stored = len(stream_data(server.settings, "ORDERS"))
    in_doubt = sum(lines["last_line"] - lines["first_line"] + 1 for lines in told["in_doubt"])
    assert 0 < told["messages"] <= stored <= told["messages"] + in_doubt


@pytest.mark.kills
@pytest.mark.short
def test_a_killed_server_during_a_fast_load_loses_no_line(server: EmbeddedServer) -> None:
    command = [*PENSTOCK, "--servers", server.url, "publish", "orders.a", "--file", "-", "--fast", "--message-id", "id"]
    read, write = os.pipe()
    child = subprocess.Popen([*command, "--json"], stdin=read, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        pipe.write(b"\n".join(events(5_000)) + b"\n")
        pipe.flush()
        eventually(lambda: len(stream_data(server.settings, "ORDERS")) > 1_000, 60, "lines to be stored")
        server.kill()
        server.start()
        pipe.write(b"\n".join(events(5_000, start=5_001)) + b"\n")
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert json.loads(output)["messages"] == 10_000
    assert stream_data(server.settings, "ORDERS") == events(10_000)


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("ending", ["kill", "Ctrl-C"])
def test_a_slow_load_that_is_cut_off_tells_what_is_stored_and_what_is_in_doubt(
    server: EmbeddedServer, ending: str
) -> None:
    command = [*PENSTOCK, "--servers", server.url, "publish", "orders.a", "--file", "-", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin
        for number in range(1, 13):
            child.stdin.write(events(1, start=number)[0] + b"\n")
            child.stdin.flush()
            eventually(partial(stores_more_than, server, number - 1), 60, "the line to be stored")
        if ending == "Ctrl-C":
            child.send_signal(signal.SIGINT)
        else:
            server.kill()
            child.stdin.write(b"\n".join(events(1_000, start=13)) + b"\n")
        output, errors = child.communicate(timeout=120)
        assert child.returncode == 1
    told = json.loads(output)
    known = told["messages"]
    assert known in (11, 12), (told, errors)  # the end may come before the answer to the twelfth line
    assert told["stored"] == [{"stream": "ORDERS", "first": 1, "last": known, "count": known, "duplicates": 0}]
    in_doubt = {line for doubt in told["in_doubt"] for line in range(doubt["first_line"], doubt["last_line"] + 1)}
    assert min(in_doubt, default=13) == known + 1


def test_plain_lines_are_in_doubt_when_the_server_does_not_answer_in_time(server: EmbeddedServer) -> None:
    command = [*PENSTOCK, "--servers", server.url, "--timeout", "2", "publish", "orders.a", "--file", "-", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin
        child.stdin.write(events(1)[0] + b"\n")
        child.stdin.flush()
        eventually(partial(stores_more_than, server, 0), 60, "the line to be stored")
        freeze(server.pid)
        try:
            output, errors = child.communicate(b"\n".join(events(5, start=2)), timeout=120)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert child.returncode == 1, errors
    told = json.loads(output)
    assert (told["messages"], told["in_doubt"]) == (1, [{"first_line": 2, "last_line": 6}])
