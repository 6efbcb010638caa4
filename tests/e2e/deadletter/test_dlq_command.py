"""`penstock dlq` as a person uses it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.integration.deadletter.stage import Stage, bury, events
from tests.support.commands import ended
from tests.support.pulls import Pull

from penstock.publish.plain import PlainPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async, letter_subject, stream_messages
from penstock.wire import aio

Dlq = Callable[..., str]


def on_stage(server: EmbeddedServer, act: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        async with await aio.connect(server.settings) as connection:
            await act(Stage(server.settings, connection))

    asyncio.run(run())


async def two_causes(stage: Stage) -> None:
    await stage.build()
    await stage.publish(events(3))
    await bury(stage, 2, error="order 1 has no price")
    await bury(stage, 1, error="unknown project")


@pytest.fixture
def dlq(nats_server: EmbeddedServer) -> Dlq:
    """Run `penstock dlq …` against three letters of two causes; stdout and stderr together."""
    on_stage(nats_server, two_causes)

    def run(*words: str, code: int = 0) -> str:
        printed = ended("--servers", nats_server.url, "dlq", *words, code=code)
        return printed.stdout + printed.stderr

    return run


def listed(dlq: Dlq, *words: str) -> dict[str, Any]:
    return dict(json.loads(dlq("ls", "--json", *words, code=2)))


def test_ls_groups_by_cause_and_chooses(dlq: Dlq) -> None:
    shown = dlq("ls", code=2)
    assert "ORDERS/billing" in shown
    assert "ValueError: order # has no price" in shown
    assert [group["count"] for group in listed(dlq)["groups"]] == [2, 1]
    assert listed(dlq, "--error", "unknown", "--letters")["letters"][0]["event_id"] == "e2"
    assert "no dead letters that match" in dlq("ls", "--consumer", "nobody")


def test_show_prints_everything_about_one_letter(dlq: Dlq) -> None:
    (letter,) = listed(dlq, "--error", "unknown", "--letters")["letters"]
    shown = dlq("show", letter["id"][:10])
    for fact in ("orders.placed", "ORDERS 3", "billing", "e2", "ValueError: unknown project", '"event_id": "e2"'):
        assert fact in shown
    told = json.loads(dlq("show", letter["id"], "--json"))
    assert (told["subject"], told["body"]) == ("orders.placed", '{"event_id": "e2", "poison": false}')
    assert "no dead letter 'zzz'" in dlq("show", "zzz", code=1)
    assert "give more of the id" in dlq("show", "", code=1)


def test_nothing_is_replayed_or_discarded_without_being_told_what(dlq: Dlq) -> None:
    assert "say which letters" in dlq("replay", code=64)
    assert "--all is all of them" in dlq("replay", "--all", "--error", "x", code=64)
    assert "Missing option '--reason'" in dlq("discard", "--all", code=64)
    assert "not JSON" in dlq("replay", "--all", "--edit", "{", code=64)
    assert "has no time zone" in dlq("ls", "--since", "2026-01-01T00:00:00", code=64)
    assert listed(dlq)["letters_total"] == 3


@pytest.mark.parametrize("words", [("",), (" ",), ("--consumer", ""), ("--error", "")])
def test_an_empty_word_does_not_stand_for_all_letters(dlq: Dlq, words: tuple[str, ...]) -> None:
    assert "is empty" in dlq("discard", *words, "--reason", "r", "--yes", code=64)
    assert "is empty" in dlq("replay", *words, code=64)
    assert listed(dlq)["letters_total"] == 3


def test_ids_of_no_letter_are_told_and_not_fine(dlq: Dlq) -> None:
    assert "no dead letters match" in dlq("replay", "nosuch", code=1)
    assert "no dead letters match" in dlq("discard", "nosuch", "--reason", "r", "--yes", code=1)
    assert "no dead letters match" in dlq("replay", "nosuch", "--dry-run", code=1)
    assert "there is no consumer 'nosuch'" in dlq("reconcile", "nosuch", code=1)


def test_a_dry_run_tells_of_an_edit_that_cannot_be_made(dlq: Dlq) -> None:
    shown = json.loads(dlq("replay", "--all", "--dry-run", "--edit", '{"event_id": "x"}', "--json", code=2))
    assert (shown["letters_total"], sum(shown["skipped"].values())) == (0, 3)


def test_a_dry_run_notices_that_nobody_would_take_the_letters(dlq: Dlq, nats_server: EmbeddedServer) -> None:
    async def other_subjects(stage: Stage) -> None:
        await stage.js.update_stream("ORDERS", {"subjects": ["elsewhere.>"]})

    async def gone(stage: Stage) -> None:
        await stage.js.delete_stream("ORDERS")

    for change, words in ((other_subjects, "'ORDERS' no longer takes its subject"), (gone, "'ORDERS' is gone")):
        on_stage(nats_server, change)
        shown = json.loads(dlq("replay", "--all", "--dry-run", "--json", code=2))
        ((why, count),) = shown["skipped"].items()
        assert (shown["letters_total"], count) == (0, 3)
        assert words in why
    tally = json.loads(dlq("replay", "--all", "--json", code=2))
    assert (tally["replayed"], len(tally["refused"])) == (0, 3)  # the dry run has told the truth


def test_with_json_errors_are_documents_too_and_times_are_rfc_3339(dlq: Dlq, nats_server: EmbeddedServer) -> None:
    told = listed(dlq, "--letters")
    for time in (told["groups"][0]["oldest"], told["letters"][0]["filed"]["time"], told["letters"][0]["last_failure"]):
        assert "T" in time
        assert datetime.fromisoformat(time).tzinfo
    failed = ended("--servers", nats_server.url, "dlq", "show", "zzz", "--json", code=1)
    assert "no dead letter 'zzz'" in json.loads(failed.stdout)["error"]


def test_a_dry_run_says_what_would_happen_and_changes_nothing(dlq: Dlq) -> None:
    assert "nothing was changed" in dlq("replay", "--all", "--dry-run")
    assert json.loads(dlq("replay", "--all", "--dry-run", "--json"))["letters_total"] == 3
    assert "nothing was changed" in dlq("discard", "--all", "--dry-run", "--reason", "r")
    assert listed(dlq)["letters_total"] == 3
    assert "nothing was done" in dlq("audit")


def test_replay_and_discard_leave_their_traces_in_the_audit(dlq: Dlq) -> None:
    replayed = json.loads(dlq("replay", "--error", "unknown", "--reason", "made it", "--actor", "ops", "--json"))
    assert (replayed["replayed"], replayed["skipped"]) == (1, {})
    assert "2 discarded" in dlq("discard", "--all", "--reason", "too old", "--yes")
    assert "no dead letters" in dlq("ls")
    records = json.loads(dlq("audit", "--json"))["records"]
    assert [(one["action"], one["reason"]) for one in records] == [
        ("replayed", "made it"),
        ("discarded", "too old"),
        ("discarded", "too old"),
    ]
    assert records[0]["actor"] == "ops"


def test_discarding_asks_first(dlq: Dlq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.confirm", _refuse)
    assert "interrupted" in dlq("discard", "--all", "--reason", "r", code=1)
    assert listed(dlq)["letters_total"] == 3


def test_a_letter_that_came_while_discarding_was_asked_about_stays(
    dlq: Dlq, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one_more(stage: Stage) -> None:
        await stage.publish([{"event_id": "late"}])
        await bury(stage, 1)

    def agree(*_: object, **__: object) -> None:
        thread = threading.Thread(target=on_stage, args=(nats_server, one_more))
        thread.start()
        thread.join()

    monkeypatch.setattr("click.confirm", agree)
    assert "3 discarded" in dlq("discard", "--all", "--reason", "r")
    assert [one["event_id"] for one in listed(dlq, "--letters")["letters"]] == ["late"]


def _refuse(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_capture_and_reconcile_find_nothing_where_workers_did_their_part(dlq: Dlq) -> None:
    assert "0 advisories" in dlq("capture", "--until-caught-up")
    (found,) = json.loads(dlq("reconcile", "--json"))["consumers"]
    assert (found["consumer"], found["marked"], found["stored"]) == ("billing", 0, 0)


# -- given up, and nobody has captured it ------------------------------------------------------------------------------


async def nakked_to_the_end(stage: Stage) -> None:
    """What a service of another client does: it never acknowledges, and stores no letters."""
    await stage.build(max_deliver=1)
    await stage.consumer("audit", max_deliver=1)
    await stage.publish(events(3))
    for _ in range(3):
        await stage.connection.request((await stage.fetch("billing")).reply, b"-NAK")

    async def three_are_told() -> bool:
        await Pull(stage.connection, "ORDERS", "billing", None, 1).fetch(0.2)  # the server gives up on a delivery
        return await stage.messages("DLQ_ADVISORIES") >= 3

    await eventually_async(three_are_told, 30, "the server to say that it gave up")


PLATFORM = """\
environments: {{dev: {{servers: ["{servers}"]}}}}
streams:
  ORDERS: {{subjects: [orders.>], duplicate_window: 2m}}
  DLQ: {{subjects: [dlq.>]}}
  OUT: {{subjects: [out.>]}}
consumers:
  billing: {{stream: ORDERS, filter: orders.>, ack_wait: 1s, max_deliver: 1, dlq: dlq.orders.placed}}
"""


def unfolded(shown: str) -> str:
    """What was printed, whatever the width of the terminal."""
    return " ".join(shown.split())


def test_what_was_given_up_and_not_captured_is_told_everywhere(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    on_stage(nats_server, nakked_to_the_end)
    servers = ("--servers", nats_server.url)
    words = "3 given up, not captured: run `penstock dlq capture`"
    shown = unfolded(ended(*servers, "dlq", "ls", code=2).stdout)
    assert words in shown
    assert "ORDERS/billing: gave up on 3 messages" in shown
    assert json.loads(ended(*servers, "dlq", "ls", "--json", code=2).stdout)["given_up"] == 3
    assert words in unfolded(ended(*servers, "dlq", "ls", "--consumer", "billing", code=2).stdout)
    ended(*servers, "dlq", "ls", "--consumer", "audit", code=0)

    assert words in unfolded(ended(*servers, "status", code=2).stdout)
    status = json.loads(ended(*servers, "status", "--json", code=2).stdout)
    assert (status["given_up"], status["dead_letters"]) == (3, 0)
    assert {c["name"]: c["given_up"] for c in status["consumers"]}["billing"] == 3

    file = tmp_path / "penstock.yaml"
    file.write_text(PLATFORM.format(servers=nats_server.url))
    found = json.loads(ended("verify", file, "--json", code=2).stdout)["findings"]
    assert ["gave up on 3 messages, not captured" in one["problem"] for one in found if "given-up" in one["check"]] == [
        True
    ]

    ended(*servers, "dlq", "capture", "--until-caught-up")
    status = json.loads(ended(*servers, "status", "--json").stdout)
    assert (status["given_up"], status["dead_letters"]) == (0, 3)
    assert {c["name"]: c["dead_letters"] for c in status["consumers"] if c["dlq"]} == {"billing": 3, "audit": 0}
    assert json.loads(ended(*servers, "dlq", "ls", "--json", code=2).stdout)["given_up"] == 0
    ended(*servers, "dlq", "replay", "--all")
    assert "no dead letters" in ended(*servers, "dlq", "ls").stdout


async def written_by_services(stage: Stage) -> None:
    """Letters without any header of ours: of one consumer, of two that read one subject, and of one with a wildcard."""
    await stage.build()
    for name, dlq, filter_ in [
        ("invoices", "dlq.orders.invoiced", "orders.invoiced"),
        ("mails", "dlq.orders.sent", "orders.sent"),
        ("metrics", "dlq.orders.sent", "orders.sent"),
    ]:
        config = {"durable_name": name, "ack_policy": "explicit", "filter_subject": filter_}
        await stage.js.create_consumer("ORDERS", {**config, "metadata": {"penstock.dlq": dlq}})
    async with PlainPublisher(stage.settings) as publisher:
        for subject in ("dlq.orders.invoiced", "dlq.orders.sent", "dlq.orders.placed", "dlq.who.knows"):
            await publisher.add(letter_subject(subject), subject.encode(), {"Trace": "t1"})
        await publisher.finish()


def test_letters_that_services_wrote_themselves_go_where_their_consumers_read(nats_server: EmbeddedServer) -> None:
    on_stage(nats_server, written_by_services)
    servers = ("--servers", nats_server.url)
    listed = json.loads(ended(*servers, "dlq", "ls", "--letters", "--json", code=2).stdout)
    assert {(one["stream"], one["reader"]) for one in listed["groups"]} >= {
        ("ORDERS", "invoices"),
        ("ORDERS", "billing"),
    }
    planned = ended(*servers, "dlq", "replay", "--all", "--dry-run", code=2)
    assert "its original subject is not known: name one with --to" in unfolded(planned.stdout + planned.stderr)
    ended(*servers, "dlq", "replay", "--consumer", "invoices", "--only-failed")
    done = json.loads(ended(*servers, "dlq", "replay", "--all", "--json", code=2).stdout)
    assert (done["replayed"], sum(done["skipped"].values())) == (1, 2)
    ended(*servers, "dlq", "replay", "--all", "--to", "dlq.again", code=64)
    ended(*servers, "dlq", "replay", "--all", "--to", "orders.*", code=64)
    for dry in ([], ["--dry-run"]):
        refused = ended(*servers, "dlq", "replay", "--all", "--to", "nosuch.subject", *dry, code=1)
        assert "no stream takes 'nosuch.subject'" in unfolded(refused.stderr)
    ended(*servers, "dlq", "replay", "--all", "--to", "orders.again")
    found = stream_messages(nats_server.settings, "ORDERS")
    assert [(one.subject, one.data.decode()) for one in found] == [
        ("orders.invoiced", "dlq.orders.invoiced"),
        ("orders.sent", "dlq.orders.sent"),
        ("orders.again", "dlq.orders.placed"),
        ("orders.again", "dlq.who.knows"),
    ]
    assert all(one.header_values()["Trace"] == ["t1"] for one in found)
    assert found[0].header_values()["Penstock-Dlq-Only"] == ["ORDERS/invoices"]
    assert "no dead letters" in ended(*servers, "dlq", "ls").stdout


async def letter_out_of_sight(stage: Stage) -> None:
    await two_causes(stage)
    config = {"durable_name": "inspector", "ack_policy": "explicit", "ack_wait": 200_000_000, "max_deliver": 1}
    await stage.js.create_consumer("DLQ", config)
    await Pull(stage.connection, "DLQ", "inspector", None, 2).fetch(5)

    async def is_given_up() -> bool:
        return (await stage.js.consumer_info("DLQ", "inspector")).ack_pending == 0

    await eventually_async(is_given_up, 30, "the letters to be out of the inspector's sight")


def test_ls_names_consumers_that_lose_sight_of_letters(nats_server: EmbeddedServer) -> None:
    on_stage(nats_server, letter_out_of_sight)
    done = ended("--servers", nats_server.url, "dlq", "ls", code=2)
    assert "DLQ/inspector does not deliver letters again" in unfolded(done.stderr)
    listed = json.loads(ended("--servers", nats_server.url, "dlq", "ls", "--json", code=2).stdout)
    assert (listed["overlooked"], listed["letters_total"]) == ({"DLQ/inspector": 2}, 3)
