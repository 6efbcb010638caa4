"""`penstock fetch` and `penstock confirm` as a person or a script runs them."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.commands import here
from tests.support.streams import make_stream

from penstock.facts import Facts
from penstock.server.embedded import EmbeddedServer

Run = Callable[..., subprocess.CompletedProcess[str]]
ACK_WAIT = 600_000_000_000
"""Nanoseconds: longer than any number of processes takes, one after the other."""


@pytest.fixture
def run(nats_server: EmbeddedServer) -> Run:
    async def prepare() -> None:
        async with Facts(nats_server.settings) as facts:
            js = facts.link.jetstream
            await make_stream(js, "FACTS")
            config = {"durable_name": "reader", "ack_policy": "explicit", "ack_wait": ACK_WAIT}
            await js.create_consumer("FACTS", config)
            await facts.append_fact("facts.orders", "o-1", b'{"total": 3}')
            await facts.append_fact("facts.orders", "o-2", b"\xff\x00")

    asyncio.run(prepare())
    return partial(here, "--servers", nats_server.url)


def test_a_page_is_fetched_and_confirmed_by_hand(run: Run) -> None:
    page = json.loads(run("fetch", "reader", "--limit", "1", "--json").stdout)
    assert [(fact["sequence"], fact["id"], fact["data"]) for fact in page["facts"]] == [(1, "o-1", '{"total": 3}')]
    assert page["pending"] == 1
    shown = run("fetch", "reader")
    assert shown.returncode == 0
    assert "facts.orders" in shown.stdout
    assert "penstock confirm reader pr2." in shown.stdout
    done = json.loads(run("confirm", "reader", page["receipt"], "--json").stdout)
    assert (done["first"], done["last"], done["already"]) == (1, 1, False)
    assert "as before" in run("confirm", "reader", page["receipt"]).stdout
    empty = run("fetch", "reader").stdout
    assert "no facts for FACTS / reader now: 1 fact is handed out and not confirmed" in empty
    assert re.search(r"and comes again in (9m\d+s|10m)", empty)
    assert json.loads(run("fetch", "reader", "--json").stdout)["held"] == 1


def test_no_facts_are_none_when_all_are_confirmed(run: Run) -> None:
    page = json.loads(run("fetch", "reader", "--json").stdout)
    run("confirm", "reader", page["receipt"])
    assert run("fetch", "reader").stdout == "no facts for FACTS / reader\n"


def test_a_page_of_the_key_before_is_confirmed_after_a_rotation(run: Run) -> None:
    page = json.loads(run("fetch", "reader", "--limit", "1", "--json").stdout)
    rotated = json.loads(run("rotate-key", "--json").stdout)
    assert rotated["previous"] == page["receipt"].split(".")[1] != rotated["key"]
    assert run("confirm", "reader", page["receipt"]).returncode == 0
    assert json.loads(run("fetch", "reader", "--json").stdout)["receipt"].split(".")[1] == rotated["key"]


def test_bytes_that_are_no_text_come_in_base64(run: Run) -> None:
    page = json.loads(run("fetch", "reader", "--json").stdout)
    assert page["facts"][1]["data_base64"] == "/wA="


def test_a_forged_receipt_ends_with_one_line_that_says_why(run: Run) -> None:
    done = run("confirm", "reader", "pr1.AAAA.AAAA")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the receipt is refused for consumer 'reader': its signature is wrong")
    assert len(done.stderr.splitlines()) == 1
    machine = run("confirm", "reader", "pr1.AAAA.AAAA", "--json")
    assert machine.returncode == 1
    assert "its signature is wrong" in json.loads(machine.stdout)["error"]


def test_every_line_of_a_file_is_appended_once_and_conflicts_are_told(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    lines = [
        {"id": "o-1", "data": {"total": 3}},
        {"id": "o-2", "data_base64": "/wA="},
        {"id": "o-3", "data": "text", "subject": "facts.other", "headers": {"Zone": "east"}},
        {"id": "o-4", "data": 4},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    done = run("append", "facts.orders", "--lines", file)
    assert (done.returncode, done.stdout) == (1, "2 facts stored, 1 fact there before, 1 fact refused\n")
    assert done.stderr == "o-1 of facts.orders is stored with other content, as 1 of FACTS\n"
    again = run("append", "facts.orders", "--lines", file, "--json")
    outcomes = [(one["id"], one["sequence"], one["outcome"]) for one in map(json.loads, again.stdout.splitlines())]
    assert outcomes == [("o-1", 1, "conflict"), ("o-2", 2, "existed"), ("o-3", 3, "existed"), ("o-4", 4, "existed")]
    page = json.loads(run("fetch", "reader", "--json").stdout)
    assert [(one["subject"], one.get("data")) for one in page["facts"][2:]] == [
        ("facts.other", "text"),
        ("facts.orders", "4"),
    ]


def test_lines_come_from_standard_input_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"id": "o-9", "data": "nine"}\n'))
    assert run("append", "facts.orders", "--lines", "-").stdout == "1 fact stored\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "line 1 is no fact"),
        ("[]", "line 1 is no fact"),
        ('{"data": "x"}', "line 1 has no 'id'"),
        ('{"id": "o-9"}', "line 1 has no 'data'"),
        ('{"id": "", "data": "x"}', "line 1: the id of a fact has 1 to 512 bytes"),
        ('{"id": "o-9", "data_base64": "?"}', "line 1 is no fact"),
    ],
)
def test_a_line_that_is_no_fact_is_told_by_its_number(run: Run, tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text(f"{line}\n")
    done = run("append", "facts.orders", "--lines", file)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["--limit", "0"], 64), (["--wait", "soon"], 64), (["x"], 64)])
def test_wrong_usage_is_told(run: Run, arguments: list[str], code: int) -> None:
    assert run("fetch", "reader", *arguments).returncode == code


@pytest.mark.parametrize(
    "arguments",
    [
        ["fetch", "a.b"],
        ["fetch", "reader", "--stream", "FACTS.>"],
        ["confirm", "*", "pr2.AAAA.AAAA.AAAA"],
        ["append", "facts.*", "o-1", "--data", "x"],
        ["append", "facts.>", "o-1", "--data", "x"],
        ["append", "facts..x", "o-1", "--data", "x"],
        ["append", "$facts", "o-1", "--data", "x"],
        ["append", "dlq.facts", "o-1", "--data", "x"],
        ["append", "facts.x", "", "--data", "x"],
        ["append", "facts.x", "o-1", "--lines", "-"],
        ["append", "facts.x"],
        ["append", "facts.x", "o-1", "--data", "x", "--header", "Nats-Msg-Id=1"],
        ["append", "facts.x", "o-1", "--data", "x", "--stream", "a b"],
        ["replicate", "a.b", "--to-servers", "nats://127.0.0.1:9"],
        ["view", "FACTS.*"],
        ["consumer", "ls", "a.b"],
        ["consumer", "pause", "FACTS", "rea*", "--for", "1m"],
        ["sources", "ls", "a.b"],
        ["batches", "--stream", "a.b"],
        ["bridge", "b", "FA*", "COPY"],
    ],
    ids=" ".join,
)
def test_names_and_subjects_that_cannot_be_are_wrong_usage(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 64, done.stderr
    assert "Traceback" not in done.stderr


def test_a_consumer_that_is_not_there_is_told(run: Run) -> None:
    done = run("fetch", "nobody")
    assert done.returncode == 1
    assert "nobody" in done.stderr
    assert "nobody" in json.loads(run("fetch", "nobody", "--json").stdout)["error"]
