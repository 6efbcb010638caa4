"""`penstock consumer ls --unused`, `prune` and `restore` against a real server."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import pytest
from tests.support.commands import here
from tests.support.streams import make_stream

from penstock.facts import Facts
from penstock.server.embedded import EmbeddedServer


class Account:
    """A stream with ten messages; `worker` has acknowledged four, and `declared` belongs to a platform."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        asyncio.run(self._prepare())

    async def _prepare(self) -> None:
        async with Facts(self.server.settings) as facts:
            js = facts.link.jetstream
            await make_stream(js)
            for number in range(10):
                await facts.append_fact("s.n", str(number), b"")
            owned = {"penstock.platform": "p", "penstock.owner": "team", "penstock.purpose": "copies"}
            await js.create_consumer("S", {"durable_name": "worker", "ack_policy": "explicit"})
            await js.create_consumer("S", {"durable_name": "late", "ack_policy": "explicit", "deliver_policy": "new"})
            await js.create_consumer("S", {"durable_name": "declared", "ack_policy": "explicit", "metadata": owned})
            page = await facts.fetch_facts("worker", 4)
            await facts.confirm_receipt("worker", page.receipt or "")
            await facts.fetch_facts("worker", 2)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return here("--servers", self.server.url, "consumer", *arguments)

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def names(self) -> set[str]:
        return set(asyncio.run(self._names()))

    async def _names(self) -> list[str]:
        async with Facts(self.server.settings) as facts:
            return await facts.link.jetstream.consumer_names("S")


@pytest.fixture
def account(nats_server: EmbeddedServer) -> Account:
    return Account(nats_server)


def test_what_nobody_reads_is_listed_with_owner_and_purpose(account: Account) -> None:
    assert account.json("ls", "--unused", "7d") == []
    found = {one["name"]: one for one in account.json("ls", "--unused", "1ms")}
    assert found.keys() == {"worker", "late", "declared"}
    assert (found["declared"]["owner"], found["declared"]["purpose"]) == ("team", "copies")
    assert "team" in account.run("ls", "--unused", "1ms").stdout


def test_a_pruned_consumer_comes_back_where_it_was(account: Account) -> None:
    (removed,) = account.json("prune", "S", "worker", "--unused", "1ms", "--yes")
    assert (removed["name"], removed["ack_floor"], removed["unread"]) == ("worker", 4, 6)
    assert account.names() == {"late", "declared"}
    assert [one["name"] for one in account.json("restore")] == ["worker"]
    back = account.json("restore", "S", "worker")
    assert (back["ack_floor"], back["pending"]) == (4, 6)
    assert account.json("restore") == []
    assert asyncio.run(fetched(account.server)) == [5, 6, 7, 8, 9, 10]


async def fetched(server: EmbeddedServer) -> list[int]:
    async with Facts(server.settings) as facts:
        return [fact.sequence for fact in (await facts.fetch_facts("worker", 10)).facts]


def test_a_consumer_that_started_with_new_messages_comes_back_too(account: Account) -> None:
    account.json("prune", "S", "late", "--unused", "1ms", "--yes")
    assert account.json("restore", "S", "late")["pending"] == 0


def test_declared_consumers_stay_unless_asked_for(account: Account) -> None:
    done = account.run("prune", "--unused", "1ms", "--yes")
    assert done.returncode == 0
    assert "1 consumer stay" in done.stderr
    assert account.names() == {"declared"}
    account.json("prune", "--unused", "1ms", "--yes", "--declared")
    assert account.names() == set()


def test_a_name_that_cannot_be_pruned_is_told_and_the_others_are_not_talked_about(account: Account) -> None:
    done = account.run("prune", "S", "nosuch", "--unused", "0s", "--yes")
    assert (done.returncode, "S has no consumer 'nosuch'" in done.stderr) == (2, True), done
    assert "stay" not in done.stderr
    assert account.names() == {"worker", "late", "declared"}


def test_pruning_asks_and_without_a_terminal_wants_yes(account: Account) -> None:
    assert account.run("prune", "--unused", "1ms").returncode == 64
    assert account.run("prune", "--yes").returncode == 64
    assert account.run("restore", "S").returncode == 64
    assert account.run("restore", "S", "worker").returncode == 1
    assert account.names() == {"worker", "late", "declared"}


def test_after_a_restart_of_the_server_a_second_look_can_tell(account: Account) -> None:
    account.server.stop()
    account.server.start()
    first = {one["name"] for one in account.json("ls", "--unused", "1ms")}
    assert "worker" not in first
    assert "worker" in {one["name"] for one in account.json("ls", "--unused", "1ms")}
