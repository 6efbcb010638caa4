"""SIGKILL of the publisher and of the server at every step of a batch: all of it or nothing, and resolve knows."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.streams import make_stream

from penstock import errors
from penstock.jetstream.model import StreamState
from penstock.publish import Batch, BatchAck, BatchOutcomeUnknown, BatchRef, BatchRejected, BlockingPublisher
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.testing import eventually
from penstock.wire import blocking

MEMBERS = 4


def frames_of(data: bytes) -> list[bytes]:
    return re.split(rb"(?=HPUB )", data)[1:]


class StepwiseSends(blocking.SocketConnection):
    """Sends a batch frame by frame, and calls `step` before the first and after each, with half frames in between."""

    step: Callable[[str], None] = staticmethod(lambda name: None)

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        if not bytes(data).startswith(b"HPUB"):
            await super().send(data)
            return
        self.step("nothing sent")
        for number, frame in enumerate(frames_of(bytes(data)), 1):
            half = len(frame) // 2
            await super().send(frame[:half])
            self.step(f"half of {number} sent")
            await super().send(frame[half:])
            self.step(f"{number} sent")


class Stepwise(blocking.BlockingConnection):
    """A connection that calls `inner.step` while it sends a batch."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.inner: StepwiseSends = StepwiseSends(settings)


STEPS = [
    "nothing sent",
    *(step for number in range(1, MEMBERS + 1) for step in (f"half of {number} sent", f"{number} sent")),
    "acknowledged",
]
CAN_BE_STORED = {f"{MEMBERS} sent", "acknowledged"}
"""Before the last byte of the commit nothing can be stored."""


@pytest.fixture
def judge(nats_server: EmbeddedServer) -> Iterator[BlockingPublisher]:
    """A publisher that was not there when it happened."""
    with BlockingPublisher.connect(nats_server.settings) as made:
        yield made


def payloads(judge: BlockingPublisher, stream: str) -> list[bytes]:
    state = blocking.run(judge.jetstream.stream_info(stream)).state
    found = range(max(state.first_seq, 1), state.last_seq + 1)
    return [blocking.run(judge.jetstream.get_message(stream, sequence)).data for sequence in found]


def wait_until_read(judge: BlockingPublisher, stream: str, messages: int) -> None:
    """The server may read the last bytes of a dead publisher after it has heard from the judge, who would drop them."""

    def state() -> StreamState:
        return blocking.run(judge.jetstream.stream_info(stream)).state

    eventually(lambda: state().messages >= messages, what=f"{messages} messages in {stream!r}", state=state)


def all_or_none(judge: BlockingPublisher, ref: BatchRef, before: int = 0) -> BatchAck | None:
    """What resolve says, checked against what is in the stream."""
    said = judge.resolve(ref, settle=0.1)
    found = payloads(judge, ref.stream)[before:]
    assert found in ([], [b"%d" % number for number in range(ref.count)]), f"a part of a batch: {found}"
    assert (said is not None) == bool(found), f"resolve says {said}, the stream holds {found}"
    if said:
        assert list(said.sequences) == list(range(before + 1, before + ref.count + 1))
    return said


def test_the_check_notices_a_part_of_a_batch(nats_server: EmbeddedServer) -> None:
    """What the same crash does to messages that are published one by one."""
    with BlockingPublisher.connect(nats_server.settings) as judge:
        blocking.run(make_stream(judge.jetstream, allow_atomic=True))
        for number in range(MEMBERS - 1):
            judge.connection.request("s.a", b"%d" % number)
        with pytest.raises(AssertionError, match="a part of a batch"):
            all_or_none(judge, BatchRef("S", "id", MEMBERS, "s.a", 0))


# -- the publisher dies ------------------------------------------------------------------------------------------------

NURSERY = """
    import json, os, signal, sys
    from dataclasses import asdict
    from penstock.publish import Batch, BlockingPublisher
    from penstock.settings import Settings
    sys.path.insert(0, sys.argv[1])
    from test_atomic_kills import MEMBERS, Stepwise

    def publish(stream, last_step):
        connection = Stepwise(Settings(servers=(sys.argv[2],)))
        connection.reconnect()
        publisher = BlockingPublisher(connection)
        batch = Batch(stream)
        batch.extend("s." + stream, [b"%d" % number for number in range(MEMBERS)])
        flight = publisher.launch(batch)

        def step(name):
            if name == last_step:
                told = {"step": name, "pid": os.getpid(), "ref": asdict(flight.ref)}
                os.write(1, json.dumps(told).encode() + b"\\n")
                signal.pause()

        connection.inner.step = step
        publisher.finish(publisher.send_commit(flight))
        step("acknowledged")

    for number, last_step in enumerate(sys.argv[3:]):
        if os.fork() == 0:
            publish("S%d" % number, last_step)
            os._exit(1)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
"""
"""Starts one publisher a step, each in a process of its own; each says so when it has come to its step, and stops."""


@pytest.mark.kills
@pytest.mark.short
def test_a_publisher_killed_at_any_step_leaves_all_or_nothing(
    nats_server: EmbeddedServer, judge: BlockingPublisher
) -> None:
    for number in range(len(STEPS)):
        blocking.run(make_stream(judge.jetstream, f"S{number}", subjects=[f"s.S{number}"], allow_atomic=True))
    command = [sys.executable, "-c", textwrap.dedent(NURSERY), str(Path(__file__).parent), nats_server.url, *STEPS]
    outcomes = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE) as nursery:
        assert nursery.stdout
        for line in nursery.stdout:
            told = json.loads(line)
            os.kill(told["pid"], signal.SIGKILL)
            ref = BatchRef(**told["ref"])
            if told["step"] in CAN_BE_STORED:
                wait_until_read(judge, ref.stream, ref.count)
            outcomes[told["step"]] = all_or_none(judge, ref) is not None
    assert outcomes == {step: step in CAN_BE_STORED for step in STEPS}


# -- the server dies ---------------------------------------------------------------------------------------------------


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize("storage", ["file", "memory"])
def test_a_server_killed_at_any_step_leaves_all_or_nothing(
    nats_server: EmbeddedServer, judge: BlockingPublisher, storage: str
) -> None:
    outcomes = {}
    for number, last_step in enumerate(STEPS):
        name = f"S{number}"
        blocking.run(make_stream(judge.jetstream, name, subjects=[f"s.{name}"], allow_atomic=True, storage=storage))
        connection = Stepwise(nats_server.settings)
        connection.reconnect()
        outcomes[last_step] = killed_at(nats_server, BlockingPublisher(connection), judge, name, last_step)
        connection.close()
        judge.connection.reconnect()
    if storage == "file":
        assert outcomes["acknowledged"], outcomes
    never = [step for step in STEPS if step not in CAN_BE_STORED]
    assert not any(outcomes[step] for step in never), outcomes


def killed_at(
    server: EmbeddedServer, publisher: BlockingPublisher, judge: BlockingPublisher, stream: str, last_step: str
) -> bool:
    batch = Batch(stream)
    batch.extend(f"s.{stream}", [b"%d" % number for number in range(MEMBERS)])
    flight = publisher.launch(batch)

    def step(name: str) -> None:
        if name == last_step:
            server.kill()
            server.start()

    assert isinstance(publisher.connection, Stepwise)
    publisher.connection.inner.step = step
    with suppress(BatchOutcomeUnknown, errors.Unavailable):
        publisher.finish(publisher.send_commit(flight))
        step("acknowledged")
    judge.connection.reconnect()
    if not blocking.run(judge.jetstream.stream_names(f"s.{stream}")):
        return False  # a stream in memory does not survive its server
    return all_or_none(judge, flight.ref) is not None


@pytest.mark.kills
@pytest.mark.short
@pytest.mark.parametrize(
    "rounds", [12, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])], ids=["short", "soak"]
)
def test_a_server_killed_while_it_commits_leaves_all_or_nothing(
    nats_server: EmbeddedServer, judge: BlockingPublisher, rounds: int
) -> None:
    """A commit of 1,000 messages takes the server milliseconds: kill it somewhere inside."""
    seed = 20250610
    rng = random.Random(seed)
    blocking.run(make_stream(judge.jetstream, allow_atomic=True))
    stored, seen = 0, {"all": 0, "nothing": 0}
    for number in range(rounds):
        with BlockingPublisher.connect(nats_server.settings) as publisher:
            batch = Batch("S")
            batch.extend("s.a", [b"%d-%d" % (number, member) for member in range(1000)])
            flight = publisher.begin(batch)
            with suppress(errors.DeadlineExceeded, errors.ConnectionLost):
                publisher.connection.receive(rng.uniform(0, 0.03))  # nothing comes here: a pause of that length
            nats_server.kill()
            nats_server.start()
        judge.connection.reconnect()
        said = judge.resolve(flight.ref, settle=0)
        state = blocking.run(judge.jetstream.stream_info("S")).state
        where = f"round {number} with seed {seed}: resolve says {said}, the stream ends at {state.last_seq}"
        assert state.last_seq == stored + (1000 if said else 0), where
        if said:
            stored += 1000
            last = blocking.run(judge.jetstream.get_message("S", stored))
            assert last.data == b"%d-999" % number, where
        seen["all" if said else "nothing"] += 1
    print(f"{seen} of {rounds} rounds, seed {seed}")


# -- resolve -----------------------------------------------------------------------------------------------------------


def cut_off(nats_server: EmbeddedServer, batch: Batch, after_frames: int | None = None) -> BatchRef:
    """Send a batch, or only its first frames, and lose the connection without reading an answer."""
    publisher = BlockingPublisher.connect(nats_server.settings)
    flight = publisher.launch(batch)
    if after_frames is None:
        publisher.send_commit(flight)
    else:
        first, last = publisher.connection.inbox(), publisher.connection.inbox()
        publisher.connection.send(b"".join(frames_of(b"".join(batch.commit(first, last)))[:after_frames]))
        publisher.connection.flush()
    publisher.close()
    return flight.ref


def test_resolve_finds_a_batch_among_those_of_others_with_few_requests(
    nats_server: EmbeddedServer, judge: BlockingPublisher
) -> None:
    blocking.run(make_stream(judge.jetstream, allow_atomic=True))
    batch = Batch("S")
    batch.extend("s.mine", [b"x"] * 500)
    with BlockingPublisher.connect(nats_server.settings) as late:
        flight = late.launch(batch)
        for number in range(7):
            judge.publish_batch("S", "s.other", [b"%d" % number] * 777)
        late.send_commit(flight)
    for number in range(7):
        judge.publish_batch("S", "s.other", [b"%d" % number] * 777)
    wait_until_read(judge, "S", 14 * 777 + 500)
    before = judge.jetstream.requests
    found = judge.resolve(flight.ref)
    assert found
    assert found.count == 500
    message = blocking.run(judge.jetstream.get_message("S", found.sequence))
    assert message.subject == "s.mine"
    assert message.headers["Nats-Batch-Commit"] == ["1"]
    looked_at = judge.jetstream.requests - before
    assert looked_at <= 2 + 2 * 7 * 777 / 500 + 1, looked_at


def test_resolve_drops_a_batch_that_is_still_open(nats_server: EmbeddedServer, judge: BlockingPublisher) -> None:
    blocking.run(make_stream(judge.jetstream, allow_atomic=True))
    batch = Batch("S")
    batch.extend("s.a", [b"0", b"1", b"2"])
    ref = cut_off(nats_server, batch, after_frames=2)
    assert judge.resolve(ref, settle=0) is None
    # Whoever still had the rest could not commit it any more.
    reply = judge.connection.inbox()
    batch.sent = 2
    judge.connection.send(b"".join(batch.commit("", reply)))
    with pytest.raises(BatchRejected):
        batch.verdict(None, judge.connection.wait(reply), 0)
    assert payloads(judge, "S") == []


def test_resolve_does_not_guess_when_the_messages_were_removed(
    nats_server: EmbeddedServer, judge: BlockingPublisher
) -> None:
    blocking.run(make_stream(judge.jetstream, allow_atomic=True))
    batch = Batch("S")
    batch.extend("s.a", [b"0", b"1", b"2"])
    ref = cut_off(nats_server, batch)
    wait_until_read(judge, "S", 3)
    assert all_or_none(judge, ref) is not None
    for sequence in (1, 3):
        blocking.run(judge.jetstream.delete_message("S", sequence))
    found = judge.resolve(ref)
    assert found
    assert list(found.sequences) == [1, 2, 3]
    blocking.run(judge.jetstream.delete_message("S", 2))
    with pytest.raises(BatchOutcomeUnknown, match="removed from the stream"):
        judge.resolve(ref)


def test_resolve_agrees_with_a_full_scan_whatever_was_written_and_removed(
    nats_server: EmbeddedServer, judge: BlockingPublisher
) -> None:
    seed = 4
    rng = random.Random(seed)
    outcomes = set()
    for example in range(40):
        name = f"S{example}"
        blocking.run(make_stream(judge.jetstream, name, subjects=[f"s.{name}"], allow_atomic=True, storage="memory"))
        mine = Batch(name, "mine")
        mine.extend(f"s.{name}", [b""] * rng.randint(1, 5))
        others = [rng.randint(1, 6) for _ in range(rng.randint(0, 4))]
        position = rng.randint(0, len(others)) if rng.random() < 0.7 else None
        for index, size in enumerate([*others, 0]):
            if index == position:
                judge.finish(judge.begin(mine))
            if size:
                judge.publish_batch(name, f"s.{name}", [b""] * size)
        total = sum(others) + (len(mine) if position is not None else 0)
        for sequence in rng.sample(range(1, total + 1), rng.randint(0, total) if rng.random() < 0.6 else 0):
            blocking.run(judge.jetstream.delete_message(name, sequence))
        outcomes.add(compared(judge, mine.ref(0), seed, example))
    assert outcomes == {"stored", "not stored", "unknown"}


def compared(judge: BlockingPublisher, ref: BatchRef, seed: int, example: int) -> str:
    """Compare resolve with the truth read message by message."""
    state = blocking.run(judge.jetstream.stream_info(ref.stream)).state
    members, longest, gone = [], 0, 0
    for sequence in range(1, state.last_seq + 1):
        try:
            message = blocking.run(judge.jetstream.get_message(ref.stream, sequence))
        except errors.MessageNotFound:
            gone += 1
            longest = max(longest, gone)
            continue
        gone = 0
        if message.headers["Nats-Batch-Id"] == ["mine"]:
            members.append(message)
    where = f"seed {seed}, example {example}"
    try:
        said = judge.resolve(ref, settle=0)
    except BatchOutcomeUnknown:
        assert not members, where
        assert longest >= ref.count, where
        return "unknown"
    assert (said is not None) == bool(members), where
    if said is None:
        assert longest < ref.count, where
        return "not stored"
    number = int(members[0].headers["Nats-Batch-Sequence"][0])
    assert said.sequence_of(number - 1) == members[0].sequence, where
    return "stored"
