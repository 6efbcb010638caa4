"""Consumers that a stream reads through, paused and reset while messages flow: by hand, and by `penstock consumer`."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result
from tests.support.dying import Dead, dying
from tests.support.streams import make_stream

from penstock.cli.main import penstock
from penstock.errors import ApiError
from penstock.jetstream.api import JetStream
from penstock.jetstream.model import ConsumerInfo, ConsumerReset
from penstock.publish import BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.sourcing import modes, resets
from penstock.testing import eventually, stream_data
from penstock.wire import blocking

SEED = 20261116
READ_THROUGH = {"name": "reader", "deliver_subject": "to.copy"}
WAYS = ("empty", "back", "forward")


class Moved(NamedTuple):
    """One reset: which sequences it may have skipped."""

    way: str
    skipped: range


class Pair:
    """ORIGIN and COPY, which reads it through the durable `reader`."""

    def __init__(self, server: EmbeddedServer, retention: str, kind: str, **start: int) -> None:
        self.server = server
        self.publisher = BlockingPublisher.connect(server.settings)
        self.js: JetStream = self.publisher.jetstream
        blocking.run(make_stream(self.js, "ORIGIN", subjects=["o.>"], retention=retention, allow_atomic=True))
        source = {"name": "ORIGIN"}
        consumer = modes.managed_consumer("COPY", {**source, **start}, "reader", "to.copy")
        blocking.run(self.js.create_consumer("ORIGIN", consumer))
        bound = {**source, "consumer": READ_THROUGH}
        blocking.run(make_stream(self.js, "COPY", **_as(kind, bound)))
        eventually(lambda: self.consumer().push_bound, 20, "COPY to listen")

    def publish(self, first: int, count: int) -> None:
        data = [b"%d" % number for number in range(first, first + count)]
        self.publisher.publish_batch("ORIGIN", "o.x", data)

    def consumer(self) -> ConsumerInfo:
        return blocking.run(self.js.consumer_info("ORIGIN", "reader"))

    def held(self) -> int:
        return blocking.run(self.js.stream_info("ORIGIN")).state.messages

    def copied(self) -> list[int]:
        return [int(one) for one in stream_data(self.server.settings, "COPY")]

    def wait_for_last(self, number: int) -> None:
        """Until the copy ends with `number`."""
        eventually(lambda: self.copied()[-1:] == [number], 30, f"{number} to be copied", self.consumer)

    def settled(self) -> bool:
        """Everything is delivered, and the origin knows that it is stored."""
        return not self.consumer().unprocessed

    def reset_carefully(self, target: int | None) -> ConsumerReset:
        return blocking.run(resets.reset(self.js, self.consumer(), target))

    def target(self, way: str, chance: random.Random) -> int | None:
        """Where to reset to now."""
        floor = self.consumer().ack_floor_stream_seq
        last = blocking.run(self.js.stream_info("ORIGIN")).state.last_seq
        if way == "back":
            return max(1, floor - chance.randint(0, 500))
        return min(last, floor + chance.randint(2, 400)) if way == "forward" else None


def _as(kind: str, source: object) -> dict[str, object]:
    return {"mirror": source} if kind == "mirror" else {"sources": [source]}


@contextmanager
def pair(server: EmbeddedServer, retention: str, kind: str, **start: int) -> Iterator[Pair]:
    made = Pair(server, retention, kind, **start)
    try:
        yield made
    finally:
        for name in blocking.run(made.js.stream_names()):
            blocking.run(made.js.delete_stream(name))
        made.publisher.close()


class Load(threading.Thread):
    """Publishes numbers in small batches until it is told to stop."""

    def __init__(self, made: Pair) -> None:
        super().__init__(daemon=True)
        self._settings = made.server.settings
        self._ended = threading.Event()
        self.published = 0

    def run(self) -> None:
        with BlockingPublisher.connect(self._settings) as publisher:
            while not self._ended.wait(0.01):
                data = [b"%d" % number for number in range(self.published, self.published + 50)]
                publisher.publish_batch("ORIGIN", "o.x", data)
                self.published += 50

    def wait_for(self, count: int) -> None:
        """Until more than `count` messages are published."""
        eventually(lambda: self.published > count, 30, "messages to flow")

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.published


def under_load(made: Pair, ways: list[str], chance: random.Random, *, carefully: bool) -> tuple[list[Moved], int]:
    """Reset again and again while messages flow: by the bare request, or as `penstock consumer reset` does."""
    load, moved = Load(made), []
    load.start()
    for way in ways:
        seen = load.published
        load.wait_for(seen + 200)
        before, target = made.consumer(), made.target(way, chance)
        if carefully:
            done = made.reset_carefully(target)
        else:
            done = blocking.run(made.js.reset_consumer("ORIGIN", "reader", target))
        moved.append(Moved(way, range(before.ack_floor_stream_seq + 1, done.reset_seq)))
    return moved, load.end()


def check(made: Pair, moved: list[Moved], count: int) -> None:
    """In order, none twice, and none missing but what was skipped."""
    got = made.copied()
    assert got == sorted(set(got)), "repeated or out of order"
    skipped = {seq - 1 for one in moved if one.way == "forward" for seq in one.skipped}  # message n has sequence n + 1
    assert set(range(count)) - set(got) <= skipped, f"lost beyond what was skipped; seed {SEED}"
    assert got[-1] == count - 1


def reset_under_load(server: EmbeddedServer, retention: str, kind: str, ways: list[str], *, carefully: bool) -> None:
    chance = random.Random(SEED)
    with pair(server, retention, kind) as made:
        moved, count = under_load(made, ways, chance, carefully=carefully)
        eventually(lambda: made.copied()[-1:] == [count - 1], 30, "the last message to be copied", made.consumer)
        check(made, moved, count)
        eventually(made.settled, 30, "the origin to know that all is stored", made.consumer)
        if retention != "limits":  # the server moves the ack floor first, and deletes message by message after that
            skipped = sum(len(one.skipped) for one in moved if one.way == "forward")
            eventually(lambda: made.held() <= skipped, 30, f"the origin to hold at most {skipped} messages", made.held)
        assert made.consumer().config["max_ack_pending"] == modes.MAX_ACK_PENDING


@pytest.mark.parametrize("kind", ["source", "mirror"])
def test_careful_resets_under_load_skip_as_told_repeat_nothing_and_do_not_stop_it(tmp_path: Path, kind: str) -> None:
    def one(retention: str) -> None:
        ways = random.Random(SEED + len(retention)).sample(WAYS, 3)
        with EmbeddedServer(tmp_path / retention) as server:
            reset_under_load(server, retention, kind, ways, carefully=True)

    with ThreadPoolExecutor(3) as threads:  # each waits most of the time
        list(threads.map(one, ("limits", "workqueue", "interest")))


@pytest.mark.kills
@pytest.mark.parametrize("step", [3, pytest.param(60, marks=pytest.mark.short)])
def test_a_reset_killed_after_any_of_its_requests_loses_nothing_and_the_next_one_sets_all_right(
    shared_server: EmbeddedServer, step: int
) -> None:
    requests, survived = 2, False
    while not survived:
        with pair(shared_server, "workqueue", "source") as made:
            load = Load(made)
            load.start()
            try:
                load.wait_for(300)
                survived = lived(made, requests)
                blocking.run(made.js.resume_consumer("ORIGIN", "reader"))  # it would by itself, after a minute
                made.reset_carefully(None)
            finally:
                count = load.end()
            made.wait_for_last(count - 1)
            assert made.copied() == list(range(count)), f"killed after {requests} requests"
            eventually(made.settled, 30, "the origin to know that all is stored", made.consumer)
            config = made.consumer().config
            assert config["max_ack_pending"] == modes.MAX_ACK_PENDING
            assert resets.WIDTH not in config["metadata"]
        requests += step


def lived(made: Pair, left: int) -> bool:
    """A careful reset by a process that ends after so many requests."""
    with blocking.connect(made.server.settings) as connection:
        api = JetStream(dying(connection.requester(), left))
        try:
            blocking.run(resets.reset(api, made.consumer(), None))
        except Dead:
            return False
    return True


def test_a_mirror_bears_bare_resets_under_load(shared_server: EmbeddedServer) -> None:
    reset_under_load(shared_server, "limits", "mirror", ["empty", "back", "forward"], carefully=False)


def run(made: Pair, *arguments: str) -> Result:
    done = CliRunner().invoke(penstock, ["--servers", made.server.url, "consumer", *arguments])
    assert done.exit_code in (0, None), done.output
    return done


def paused(made: Pair, count: int) -> None:
    """That many messages that COPY has not, and cannot get."""
    blocking.run(made.js.pause_consumer("ORIGIN", "reader", timedelta(hours=1)))
    made.publish(0, count)


def test_a_pause_says_that_copying_stops_and_a_resume_that_it_goes_on(shared_server: EmbeddedServer) -> None:
    with pair(shared_server, "workqueue", "source") as made:
        told = run(made, "pause", "ORIGIN", "reader", "--for", "1h").output
        assert "stream COPY copies nothing from ORIGIN until then; messages wait in ORIGIN\n" in told
        made.publish(0, 30)
        told = run(made, "resume", "ORIGIN", "reader").output
        assert "stream COPY goes on copying behind sequence 0: 30 messages to go" in told
        eventually(lambda: made.copied() == list(range(30)), 20)


def test_a_reset_forward_says_how_many_are_skipped_and_removes_them_when_asked(shared_server: EmbeddedServer) -> None:
    with pair(shared_server, "workqueue", "source") as made:
        paused(made, 30)
        told = run(made, "reset", "ORIGIN", "reader", "--to", "21", "--yes").output
        assert "skips 20 messages that are not acknowledged; a WorkQueue stream keeps them" in told
        assert "stream COPY will not have the skipped messages" in told
        assert "--remove-skipped removes them from the origin" in told
        assert made.held() == 30
        told = run(made, "reset", "ORIGIN", "reader", "--to", "26", "--remove-skipped", "--yes").output
        assert "removed 25 messages that were skipped" in told
        run(made, "resume", "ORIGIN", "reader")
        eventually(lambda: made.copied() == [25, 26, 27, 28, 29], 20)
        eventually(lambda: made.held() == 0, 20, "the origin to be acknowledged")


def test_skipped_messages_of_an_interest_stream_go_by_themselves(shared_server: EmbeddedServer) -> None:
    with pair(shared_server, "interest", "source") as made:
        paused(made, 30)
        told = run(made, "reset", "ORIGIN", "reader", "--to", "21", "--yes").output
        assert "skips 20 messages that are not acknowledged; an Interest stream deletes those" in told
        assert made.held() == 10
        done = CliRunner().invoke(
            penstock,
            [
                "--servers",
                shared_server.url,
                "consumer",
                "reset",
                "ORIGIN",
                "reader",
                "--to",
                "25",
                "--remove-skipped",
                "--yes",
            ],
        )
        assert done.exit_code != 0


def test_a_reset_back_says_that_nothing_is_copied_twice(shared_server: EmbeddedServer) -> None:
    with pair(shared_server, "limits", "source") as made:
        made.publish(0, 30)
        eventually(made.settled, 20, "the origin to know that all is stored", made.consumer)
        told = run(made, "reset", "ORIGIN", "reader", "--to-start", "--yes").output
        assert "what stream COPY has already is passed over: going back copies nothing twice" in told
        made.publish(30, 5)
        eventually(lambda: made.copied()[-1:] == [34], 20)
        assert made.copied() == list(range(35))


def test_a_reset_that_the_server_refuses_leaves_everything_as_it_was(shared_server: EmbeddedServer) -> None:
    with pair(shared_server, "limits", "source", opt_start_seq=6) as made:
        made.publish(0, 30)
        eventually(made.settled, 20, "the origin to know that all is stored", made.consumer)
        with pytest.raises(ApiError):
            made.reset_carefully(2)
        assert made.consumer().config["max_ack_pending"] == modes.MAX_ACK_PENDING
        made.publish(30, 20)
        eventually(made.settled, 20, "messages to flow again", made.consumer)
        assert made.copied() == list(range(5, 50))
