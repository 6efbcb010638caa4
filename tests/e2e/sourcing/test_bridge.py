"""The bridge between two clusters: everything once and in order, through kills of the bridge and of both servers."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from tests.support.commands import here as in_this_process
from tests.support.streams import make_stream

from penstock.errors import ConfigError, OutcomeUnknown, Unavailable
from penstock.jetstream.model import Json
from penstock.jetstream.reader import read_range
from penstock.jetstream.rows import Range
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.server.ports import free_ports
from penstock.sourcing.bridge import Bridge, BridgeConfig, Fenced
from penstock.sourcing.copies import mark_of
from penstock.sourcing.leftovers import LeftBehind
from penstock.sourcing.mapping import Mapping
from penstock.sourcing.receiver import Receiver
from penstock.testing import eventually, issue_certificates, stream_messages
from penstock.wire import blocking
from penstock.wire.frames import Message

SEED = 20261115


class Site:
    """A server with one stream, and a publisher to it."""

    def __init__(self, server: EmbeddedServer, stream: str, **config: object) -> None:
        self.server = server
        self.stream = stream
        self.publisher = BlockingPublisher.connect(server.settings)
        wanted: Json = {"subjects": ["o.>", "eu.>"], "allow_atomic": True, **config}
        blocking.run(make_stream(self.publisher.jetstream, stream, **wanted))

    def publish(self, first: int, count: int, subject: str = "o.x") -> None:
        data = [b"%d" % n for n in range(first, first + count)]
        for start in range(0, count, 1000):
            self.publisher.publish_batch(self.stream, subject, data[start : start + 1000])

    def held(self) -> int:
        return blocking.run(self.publisher.jetstream.stream_info(self.stream)).state.messages

    def messages(self) -> list[Message]:
        return stream_messages(self.server.settings, self.stream)


@contextmanager
def sites(tmp_path: Path, origin_retention: str = "limits", **destination: object) -> Iterator[tuple[Site, Site]]:
    with EmbeddedServer(tmp_path / "a") as a, EmbeddedServer(tmp_path / "b") as b:
        here, there = Site(a, "O", retention=origin_retention), Site(b, "D", **destination)
        try:
            yield here, there
        finally:
            here.publisher.close()
            there.publisher.close()


def bridge(here: Site, there: Site, name: str = "b", **config: object) -> Bridge:
    made = BridgeConfig(name=name, origin="O", destination="D", **config)  # type: ignore[arg-type]
    return Bridge(made, here.server.settings, there.server.settings)


def told(here: EmbeddedServer, there: EmbeddedServer, *more: str) -> list[str]:
    base = ["bridge", "b", "O", "D", "--report-every", "0"]
    return [*base, "--from-servers", here.url, "--to-servers", there.url, *more]


def command(here: EmbeddedServer, there: EmbeddedServer, *more: str) -> list[str]:
    return [sys.executable, "-m", "penstock", *told(here, there, *more)]


def test_content_order_headers_and_origin_arrive_and_a_second_run_adds_nothing(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        here.publish(0, 1500)
        here.publisher.connection.publish("o.y", b"with", {"A": ["1", "2"], "Nats-Expected-Stream": "O"})
        eventually(lambda: here.held() == 1501)
        assert bridge(here, there).run(until_caught_up=True).stored == 1501
        assert bridge(here, there).run(until_caught_up=True).stored == 0
        copies = there.messages()
        assert [m.data for m in copies] == [m.data for m in here.messages()]
        assert [m.subject for m in copies] == ["o.x"] * 1500 + ["o.y"]
        marks = [mark_of(m.header_values()) for m in copies]
        assert [(mark.bridge, mark.stream, mark.sequence) for mark in marks if mark] == [
            ("b", "O", n) for n in range(1, 1502)
        ]
        last = copies[-1].header_values()
        assert last["A"] == ["1", "2"]
        assert "Nats-Expected-Stream" not in last or last["Nats-Expected-Stream"] == ["D"]


@pytest.mark.parametrize("mappings", [(), (Mapping("o.>", "eu.>"),)], ids=["as they are", "mapped"])
def test_subjects_that_only_the_server_takes_are_carried(tmp_path: Path, mappings: tuple[Mapping, ...]) -> None:
    stored = [b"o.a\x1bb", b"o.\x01", b"o.a\x0bb", b"o.a\x0cb", b"o.\x00", b"o.\x7f", b"o.\xff"]
    with sites(tmp_path) as (here, there):
        for subject in stored:  # as another client would: Penstock itself does not publish there
            here.publisher.connection.send(b"PUB %b 1\r\nx\r\n" % subject)
        eventually(lambda: here.held() == len(stored))
        assert bridge(here, there, mappings=mappings).run(until_caught_up=True).stored == len(stored)
        copies = [m.subject.encode("utf-8", "surrogateescape") for m in there.messages()]
        assert copies == ([b"eu" + subject[1:] for subject in stored] if mappings else stored)


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_an_origin_that_deletes_what_was_taken_is_emptied_only_into_the_destination(
    tmp_path: Path, retention: str
) -> None:
    with sites(tmp_path, retention) as (here, there):
        bridge(here, there).run(until_caught_up=True)  # makes the consumer, so that an interest stream keeps anything
        here.publish(0, 2000)
        bridge(here, there).run(until_caught_up=True)
        assert [m.data for m in there.messages()] == [b"%d" % n for n in range(2000)]
        eventually(lambda: here.held() == 0, what="the origin to have taken the last answer", state=here.held)


def test_a_lag_that_is_not_known_yet_is_not_taken_for_none(tmp_path: Path) -> None:
    """The first heartbeat comes before the first message: a paused consumer keeps it so for a while."""
    with sites(tmp_path) as (here, there):
        bridge(here, there).run(until_caught_up=True)
        here.publish(0, 10)
        jetstream = here.publisher.jetstream
        blocking.run(jetstream.pause_consumer("O", "b", timedelta(minutes=1)))
        carrier, done = bridge(here, there), threading.Event()

        def run() -> None:
            carrier.run(until_caught_up=True)
            done.set()

        threading.Thread(target=run, daemon=True).start()
        eventually(lambda: carrier.statistics().lag == 10 or done.is_set(), 30, "the server to say how many wait")
        assert not done.is_set()
        blocking.run(jetstream.resume_consumer("O", "b"))
        eventually(done.is_set, 30, "the bridge to end")
        assert (carrier.statistics().stored, carrier.statistics().lag) == (10, 0)


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_a_killed_bridge_that_starts_again_ends_only_when_all_is_there(tmp_path: Path, retention: str) -> None:
    with sites(tmp_path, retention) as (here, there):
        here.publish(0, 30_000)
        process = subprocess.Popen(command(here.server, there.server, "--rate", "6000"))
        eventually(partial(stores, there.server, 2000), 60, "the first copies")
        process.kill()
        process.wait()
        done = in_this_process(*told(here.server, there.server, "--until-caught-up"))
        assert (done.returncode, there.held()) == (0, 30_000), done.stdout
        if retention == "workqueue":
            assert here.held() == 0


def test_what_a_work_queue_holds_behind_the_consumer_is_told_and_not_taken_for_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sourcing.bridge.STUCK_FOR", 0.5)
    with sites(tmp_path, "workqueue") as (here, there):
        bridge(here, there).run(until_caught_up=True)
        here.publish(0, 10)
        blocking.run(here.publisher.jetstream.reset_consumer("O", "b", 6))  # passes over five of them
        with pytest.raises(LeftBehind, match="consumer 'b' has passed over"):
            bridge(here, there).run(until_caught_up=True)
        assert (there.held(), here.held()) == (5, 5)


def test_copied_messages_that_a_work_queue_holds_behind_the_consumer_are_acknowledged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill of the origin's server: it forgets deletions, while the consumer is past the messages."""
    monkeypatch.setattr("penstock.sourcing.bridge.STUCK_FOR", 0.5)
    with sites(tmp_path, "workqueue") as (here, there):
        bridge(here, there).run(until_caught_up=True)
        here.publish(0, 10)
        carrier = bridge(here, there)
        with monkeypatch.context() as patched:
            patched.setattr(Receiver, "_answer", lambda self: None)  # nothing is acknowledged
            carrier.run(lambda: carrier.statistics().stored == 10)
        here.publish(10, 2)
        blocking.run(here.publisher.jetstream.reset_consumer("O", "b", 12))  # passes over all copies, and one more
        with pytest.raises(LeftBehind, match="consumer 'b' has passed over"):
            bridge(here, there).run(until_caught_up=True)
        assert (there.held(), here.held()) == (11, 11)
        blocking.run(here.publisher.jetstream.delete_message("O", 11))
        assert bridge(here, there).run(until_caught_up=True).stored == 0
        assert (there.held(), here.held()) == (11, 0)


def test_filter_mapping_and_rate_are_kept(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        here.publish(0, 5, "o.x.one")
        here.publish(5, 5, "o.y.two")
        here.publish(10, 5, "o.x.three")
        mappings = (Mapping.parse("o.*.>=eu.{{wildcard(1)}}.of.>"),)
        bridge(here, there, subjects=("o.x.>",), mappings=mappings, rate=1000).run(until_caught_up=True)
        assert [(m.subject, m.data) for m in there.messages()] == [
            *(("eu.x.of.one", b"%d" % n) for n in range(5)),
            *(("eu.x.of.three", b"%d" % n) for n in range(10, 15)),
        ]
        with pytest.raises(ConfigError, match="give the bridge another name, or the same filter"):
            bridge(here, there).run(until_caught_up=True)


def test_a_message_id_that_the_origin_had_twice_does_not_stop_the_bridge(tmp_path: Path) -> None:
    with sites(tmp_path, duplicate_window=120_000_000_000) as (here, there):
        window = {"duplicate_window": 100_000_000}
        blocking.run(here.publisher.jetstream.update_stream("O", window))
        for number in range(2):
            before = here.held()
            # the origin forgets an id after its window: then it takes it again

            def published(number: int = number, before: int = before) -> bool:
                here.publisher.connection.publish("o.x", b"%d" % number, {"Nats-Msg-Id": "same"})
                here.publisher.connection.flush()
                return here.held() > before

            eventually(published)
        bridge(here, there).run(until_caught_up=True)
        assert [m.data for m in there.messages()] == [m.data for m in here.messages()]


def test_a_second_instance_takes_over_and_the_first_one_stops_without_writing(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        ends: dict[str, str] = {}
        stop = threading.Event()

        def run(name: str) -> None:
            try:
                bridge(here, there).run(stop.is_set)
                ends[name] = "stopped"
            except Fenced as exc:
                ends[name] = str(exc)

        threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "second")]
        here.publish(0, 3000)
        threads[0].start()
        eventually(lambda: there.held() > 0, 60)
        threads[1].start()

        def fenced() -> bool:
            here.publish(100_000, 10)
            return bool(ends)

        eventually(fenced, 120, "one instance to be fenced off", lambda: (ends, there.held()))
        assert "another instance of bridge 'b'" in next(iter(ends.values()))
        eventually(lambda: there.held() == here.held(), 60)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert sorted(end == "stopped" for end in ends.values()) == [False, True]
        assert [m.data for m in there.messages()] == [m.data for m in here.messages()]


def test_an_instance_that_was_taken_over_does_not_take_over_again(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        first, second = bridge(here, there), bridge(here, there)
        here.publish(0, 10)
        assert first.run(until_caught_up=True).stored == 10
        here.publish(10, 10)
        assert second.run(until_caught_up=True).stored == 10
        here.publish(20, 10)
        with pytest.raises(Fenced, match="another instance of bridge 'b'"):
            first.run(until_caught_up=True)
        assert there.held() == 20
        assert second.run(until_caught_up=True).stored == 20
        assert [m.data for m in there.messages()] == [b"%d" % n for n in range(30)]


def test_a_bridge_stores_nothing_behind_what_somebody_else_has_written_meanwhile(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        here.publish(0, 10)

        def interfere() -> bool:
            """Called between chunks: write to the destination once, and end a bridge that goes on all the same."""
            if there.held() == 10:
                there.publish(100, 1)
                here.publish(10, 10)
            return there.held() > 11

        with pytest.raises(Fenced, match="another publisher"):
            bridge(here, there).run(interfere)
        assert [m.data for m in there.messages()] == [*(b"%d" % n for n in range(10)), b"100"]


@pytest.mark.parametrize("instances", ["the same", "another"])
def test_what_the_origin_delivers_again_is_not_stored_again(tmp_path: Path, instances: str) -> None:
    """As after a crash between storing a batch and telling the origin: the destination says where to go on."""
    with sites(tmp_path) as (here, there):
        here.publish(0, 10)
        first = bridge(here, there)
        first.run(until_caught_up=True)
        blocking.run(here.publisher.jetstream.reset_consumer("O", "b", 1))
        here.publish(10, 10)
        (first if instances == "the same" else bridge(here, there)).run(until_caught_up=True)
        assert [m.data for m in there.messages()] == [b"%d" % n for n in range(20)]


def test_a_destination_with_another_writer_is_refused(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        there.publish(0, 1)
        here.publish(0, 1)
        with pytest.raises(Fenced, match="must be the only writer"):
            bridge(here, there).run(until_caught_up=True)


@pytest.mark.parametrize(
    ("config", "words"), [({"allow_atomic": False}, "allow_atomic"), ({"retention": "workqueue"}, "limits stream")]
)
def test_a_destination_that_cannot_be_written_safely_is_refused(tmp_path: Path, config: Json, words: str) -> None:
    with sites(tmp_path, **config) as (here, there), pytest.raises(ConfigError, match=words):
        bridge(here, there).run(until_caught_up=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--map", "bad"], "'bad' is no mapping: write FROM=TO"),
        (["--map", "o.>=eu.>.x"], "mapping"),
        (["--subject", "o. x"], "'o. x' cannot be a filter"),
        (["--deliver-subject", "a..b"], "'a..b' cannot be where bridge 'b' receives"),
        (["--deliver-subject", "a.*"], "'a.*' cannot be where bridge 'b' receives: it has wildcards"),
        (["--metrics-port", "99999"], "99999 is not in the range"),
    ],
)
def test_flags_that_cannot_be_right_are_wrong_usage_before_a_server_is_asked(flags: list[str], words: str) -> None:
    nowhere = ["--from-servers", "nats://127.0.0.1:9", "--to-servers", "nats://127.0.0.1:9"]
    done = in_this_process("bridge", "b", "O", "D", *nowhere, *flags)
    assert (done.returncode, words in done.stderr) == (64, True), done
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--map", "o.>=elsewhere.>"], "captures d.>, and nothing of 'elsewhere.>'"),
        ([], "captures d.>, and nothing of 'o.>'"),
        (["--map", "o.>=d.>", "--subject", "other.>"], "no subject of stream 'O' (o.>, eu.>) passes 'other.>'"),
    ],
)
def test_a_dry_run_says_what_would_never_arrive(tmp_path: Path, flags: list[str], words: str) -> None:
    with sites(tmp_path, subjects=["d.>"]) as (here, there):
        done = in_this_process(*told(here.server, there.server, "--dry-run", *flags))
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr


def test_a_dry_run_says_that_the_consumer_reads_something_else(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        here.publish(0, 1)
        bridge(here, there).run(until_caught_up=True)
        flags = ["--dry-run", "--subject", "o.a"]
        done = in_this_process(*told(here.server, there.server, *flags))
        assert (done.returncode, "filters on everything" in done.stderr) == (1, True), done.stderr


def test_a_filter_that_nothing_can_pass_is_refused_and_leaves_no_consumer(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        with pytest.raises(ConfigError, match=r"passes 'other\.>'"):
            bridge(here, there, subjects=("other.>",)).run(until_caught_up=True)
        assert blocking.run(here.publisher.jetstream.consumers("O")) == []


def test_a_work_queue_that_somebody_else_reads_is_refused_before_the_destination_is_made(tmp_path: Path) -> None:
    with sites(tmp_path, "workqueue") as (here, there):
        blocking.run(there.publisher.jetstream.delete_stream("D"))
        reader = {"durable_name": "reader", "ack_policy": "explicit", "filter_subject": "o.>"}
        blocking.run(here.publisher.jetstream.create_consumer("O", reader))
        given = told(here.server, there.server, "--create")
        done = in_this_process(*given)
        assert (done.returncode, "'reader' reads o.>" in done.stderr) == (1, True), done.stderr
        assert blocking.run(there.publisher.jetstream.stream_names()) == []

        done = in_this_process(*given, "--subject", "eu.>", "--until-caught-up")
        assert done.returncode == 0, done.stderr


def test_a_missing_destination_says_how_to_make_it(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        blocking.run(there.publisher.jetstream.delete_stream("D"))
        with pytest.raises(ConfigError, match=r"the destination has no stream 'D'.*--create"):
            bridge(here, there).run(until_caught_up=True)


def test_each_side_has_its_own_tls_and_login_and_a_dry_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sourcing.bridge.FIRST_WITHIN", 1.0)  # for the one that is refused
    certificates = issue_certificates(tmp_path / "tls")
    tls = certificates.server_tls(verify=True)
    with EmbeddedServer(tmp_path / "a", tls=tls) as a, EmbeddedServer(tmp_path / "b") as b:
        here = Site(a, "O")
        here.publish(0, 100)
        here.publisher.close()
        flags = ["--from-tls-ca", certificates.ca, "--from-tls-cert", certificates.client_cert]
        flags += ["--from-tls-key", certificates.client_key, "--create", "--map", "o.>=far.o.>", "--json"]
        dry = in_this_process(*told(a, b, *flags, "--dry-run"))
        assert dry.returncode == 0, dry.stderr
        assert json.loads(dry.stdout)["origin_last_sequence"] == 100
        with BlockingPublisher.connect(b.settings) as publisher:
            assert blocking.run(publisher.jetstream.stream_names()) == []
        done = subprocess.run(command(a, b, *flags, "--until-caught-up"), capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["stored"] == 100, done.stderr
        assert {m.subject for m in stream_messages(b.settings, "D")} == {"far.o.x"}
        refused = in_this_process(*told(a, b, "--until-caught-up"))
        assert refused.returncode == 1
        assert "Traceback" not in refused.stderr


def test_metrics_are_served_while_it_runs(tmp_path: Path) -> None:
    with sites(tmp_path) as (here, there):
        here.publish(0, 10)
        port = free_ports(1, "127.0.0.1")[0]
        process = subprocess.Popen(command(here.server, there.server, "--metrics-port", str(port)))
        try:

            def scraped() -> bool:
                with suppress(OSError):
                    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
                    return 'penstock_bridge_stored_total{bridge="b"} 10.0\n' in text
                return False

            eventually(scraped, 60)
        finally:
            process.terminate()
            assert process.wait(60) == 0


# -- kills -------------------------------------------------------------------------------------------------------------


class Digest:
    """Subjects and data of a stream, in order, as one number; how many there are, and the first that is out of line."""

    def __init__(self, server: EmbeddedServer, stream: str) -> None:
        digest, self.count = hashlib.sha256(), 0
        self.wrong: list[tuple[int, bytes]] = []
        with BlockingPublisher.connect(server.settings) as publisher:
            state = blocking.run(publisher.jetstream.stream_info(stream)).state
        for batch in read_range(server.settings, Range(stream=stream, first=1, last=state.last_seq)):
            for subject, data in zip(batch["subject"].to_pylist(), batch["data"].to_pylist(), strict=True):
                if data != b"%d" % self.count and len(self.wrong) < 5:
                    self.wrong.append((self.count, data))
                digest.update(b"%s %d %s" % (subject.encode(), len(data), data))
                self.count += 1
        self.value = digest.hexdigest()


def test_the_digest_tells_a_lost_a_repeated_and_a_swapped_message(nats_server: EmbeddedServer) -> None:
    digests = set()
    for name, data in {"A": [0, 1, 2], "B": [0, 2], "C": [0, 1, 1, 2], "D": [0, 2, 1]}.items():
        site = Site(nats_server, name, subjects=[f"{name}.>"])
        site.publisher.publish_batch(name, f"{name}.x", [b"%d" % n for n in data])
        digest = Digest(nats_server, name)
        digests.add(tuple(digest.wrong))
        assert bool(digest.wrong) == (name != "A")
        site.publisher.close()
    assert len(digests) == 4


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_nothing_is_lost_or_repeated_through_kills_of_the_bridge_and_of_both_servers(
    tmp_path: Path, retention: str
) -> None:
    through_kills(tmp_path, retention, count=12_000, kills=4)


@pytest.mark.soak
def test_a_million_messages_arrive_once_through_twenty_kills(tmp_path: Path) -> None:
    through_kills(tmp_path, "limits", count=1_000_000, kills=20)


def through_kills(tmp_path: Path, retention: str, count: int, kills: int) -> None:
    chance = random.Random(SEED)
    with EmbeddedServer(tmp_path / "a") as a, EmbeddedServer(tmp_path / "b") as b:
        Site(a, "O", retention=retention).publisher.close()
        Site(b, "D").publisher.close()
        subprocess.run(command(a, b, "--until-caught-up"), check=True, timeout=60)  # makes the consumer
        publishing = threading.Thread(target=publish_all, args=(a, count))
        publishing.start()
        process = subprocess.Popen(command(a, b))
        try:
            for step in range(kills):
                reached = (step + 1) * count // (kills + 2)
                eventually(partial(stores, b, reached), 300, f"{reached} copies")
                victim = ("bridge", "origin", "destination")[step % 3] if step < 3 else chance.choice(VICTIMS)
                process = struck(victim, a, b, process)
            publishing.join(300)
            eventually(lambda: stored(b) >= count, 300, "all copies", lambda: (stored(b), process.poll()))
        finally:
            process.kill()
            process.wait()
        got = Digest(b, "D")
        assert (got.count, got.wrong) == (count, []), f"seed {SEED}"
        if retention == "limits":
            assert got.value == Digest(a, "O").value


SEEDS = [pytest.param(seed, marks=[pytest.mark.short] if seed == 12 else []) for seed in range(30)]


@pytest.mark.kills
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_and_run_until_it_has_caught_up_everything_is_there_once(tmp_path: Path, seed: int) -> None:
    """Exit code 0 is the promise: what it stands for is looked at without waiting."""
    print(f"seed {seed}")
    chance, count = random.Random(seed), 20_000
    retention = ("workqueue", "limits", "interest")[seed % 3]
    with EmbeddedServer(tmp_path / "a") as a, EmbeddedServer(tmp_path / "b") as b:
        Site(a, "O", retention=retention).publisher.close()
        Site(b, "D").publisher.close()
        subprocess.run(command(a, b, "--until-caught-up"), check=True, timeout=60)  # makes the consumer
        publishing = threading.Thread(target=publish_all, args=(a, count))
        publishing.start()
        for reached in sorted(chance.randrange(count // 2) for _ in range(chance.randint(2, 4))):
            struck_meanwhile(chance, a, b, reached)
        publishing.join(300)
        codes = [1]
        while codes[-1] and len(codes) < 20:
            codes.append(subprocess.run(command(a, b, "--until-caught-up"), timeout=120).returncode)
        assert codes[-1] == 0, f"seed {seed}: {codes}"
        with BlockingPublisher.connect(a.settings) as publisher:
            left = blocking.run(publisher.jetstream.stream_info("O")).state.messages
        got = Digest(b, "D")
        assert (got.count, got.wrong) == (count, []), f"seed {seed}"
        if retention == "limits":
            assert got.value == Digest(a, "O").value, f"seed {seed}"
        else:
            assert left == 0, f"seed {seed}"


def struck_meanwhile(chance: random.Random, a: EmbeddedServer, b: EmbeddedServer, reached: int) -> None:
    """Run the bridge until so much is stored, then kill it or a server; it may have ended by itself before."""
    process = subprocess.Popen([*command(a, b, "--until-caught-up"), "--rate", "6000"])
    eventually(lambda: stored(b) >= reached or process.poll() is not None, 300, f"{reached} copies")
    time.sleep(chance.uniform(0, 0.1))  # anywhere within a batch
    victim = chance.choice(VICTIMS)
    for server in {"origin": (a,), "destination": (b,)}.get(victim, ()):
        server.kill()
        server.start()
    process.kill()
    process.wait()


VICTIMS = ("bridge", "origin", "destination")


def struck(
    victim: str, a: EmbeddedServer, b: EmbeddedServer, process: subprocess.Popen[bytes]
) -> subprocess.Popen[bytes]:
    """SIGKILL one of the three, and start it again."""
    if victim == "bridge":
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return subprocess.Popen(command(a, b))
    server = a if victim == "origin" else b
    server.kill()
    server.start()
    return process


def stores(server: EmbeddedServer, count: int) -> bool:
    return stored(server) >= count


def stored(server: EmbeddedServer) -> int:
    """How far the destination is; 0 while nobody answers."""
    with suppress(Unavailable), BlockingPublisher.connect(server.settings) as publisher:
        return blocking.run(publisher.jetstream.stream_info("D")).state.last_seq
    return 0


def publish_all(server: EmbeddedServer, count: int) -> None:
    """Numbers in batches, each exactly once although the server is killed in between."""
    publisher: BlockingPublisher | None = None
    batches = [range(start, min(start + 500, count)) for start in range(0, count, 500)]
    while batches:
        data = [b"%d" % n for n in batches[0]]
        with suppress(Unavailable, OutcomeUnknown):
            publisher = publisher or BlockingPublisher.connect(server.settings)
            last = blocking.run(publisher.jetstream.stream_info("O")).state.last_seq
            if last >= batches[0].stop:
                batches.pop(0)
                continue
            with publisher.atomic("O") as batch:
                for index, one in enumerate(data):
                    batch.add("o.x", one, expected_last_sequence=last if index == 0 else None)
            batches.pop(0)
            continue
        if publisher:
            publisher.close()
            publisher = None
    if publisher:
        publisher.close()
