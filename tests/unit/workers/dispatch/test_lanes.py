"""Order within a partition, whatever comes in whatever order."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.consume.messages import Message
from penstock.workers.dispatch.lanes import Arrival, Finished, Lane, relieve

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def message(sequence: int, count: int = 1) -> Message:
    return Message("s", b"%d" % sequence, sequence, count, f"reply.{sequence}.{count}", NOW)


@given(st.permutations(range(1, 12)))
def test_messages_leave_in_the_order_of_the_stream(order: list[int]) -> None:
    lane, finished = Lane("p"), Finished()
    for sequence in order:
        assert lane.offer(message(sequence), finished) is Arrival.NEW
    left = []
    while found := lane.next():
        left.append(found.sequence)
        lane.finish(found.sequence)
    assert left == sorted(order)
    assert lane.done(0) == 11


def test_nothing_passes_a_message_that_waits_for_its_next_try() -> None:
    lane, finished = Lane("p"), Finished()
    for sequence in (1, 2, 3):
        lane.offer(message(sequence), finished)
    lane.waits = True
    assert lane.next() is None
    assert lane.done(0) == 0
    assert lane.done(cursor=3) == 0
    assert lane.offer(message(1, 2), finished) is Arrival.SAME
    assert lane.next() is None
    lane.waits = False
    assert lane.next() == message(1, 2)


def test_a_lane_that_has_nothing_left_is_done_up_to_the_last_that_came() -> None:
    lane, finished = Lane("p"), Finished()
    lane.offer(message(4), finished)
    assert lane.done(cursor=9) == 3
    lane.finish(4)
    assert lane.done(cursor=9) == 9
    assert lane.needs_from(cursor=9) == 9
    lane = Lane("q")
    lane.limit = 0
    assert lane.done(cursor=9) == 0, "what the consumer passed over is not done"
    assert lane.needs_from(cursor=9) is None
    lane.begin_reading(done=2, until=20)
    assert lane.done(cursor=30) == 2
    assert lane.needs_from(cursor=30) == 20
    lane.read(message(7)._replace(reply=""), finished)
    assert lane.done(cursor=30) == 6
    lane.finish(7)
    assert lane.done(cursor=30) == 7
    lane.end_reading()
    assert lane.done(cursor=10) == 20
    assert lane.done(cursor=30) == 30


def test_a_message_that_is_done_is_only_acknowledged_again() -> None:
    lane, finished = Lane("p"), Finished()
    lane.offer(message(1), finished)
    lane.finish(1)
    finished.add(1)
    assert lane.offer(message(1, 2), finished) is Arrival.DONE
    assert Lane("q", floor=7).offer(message(7), finished) is Arrival.DONE


def test_a_late_message_below_what_was_done_is_not_taken_for_done() -> None:
    lane, finished = Lane("p"), Finished()
    lane.offer(message(9), finished)
    lane.finish(9)
    finished.add(9)
    assert lane.offer(message(5, 2), finished) is Arrival.NEW
    assert lane.next() == message(5, 2)


def test_the_newest_delivery_is_the_one_to_acknowledge() -> None:
    lane, finished = Lane("p"), Finished()
    lane.offer(message(1), finished)
    assert lane.offer(message(1, 2), finished) is Arrival.SAME
    assert lane.finish(1) == "reply.1.2"


def test_what_was_put_aside_comes_back_from_below_and_is_no_try() -> None:
    lane, finished = Lane("p"), Finished()
    for sequence in range(1, 11):
        lane.offer(message(sequence), finished)
    lane.took(10.0)
    assert relieve([lane], 4, now=0.0) == 6
    assert lane.holding == 4
    assert lane.wanted_back(4) == []
    for sequence in (1, 2, 3):
        lane.finish(sequence)
    assert lane.wanted_back(4) == [5, 6, 7]
    assert lane.bring_back(message(5)._replace(reply=""))
    assert lane.items[5] == message(5), "it is acknowledged where it was delivered"
    assert not lane.bring_back(message(5))
    assert lane.attempt(5) == 1


def test_what_was_put_aside_comes_back_although_later_messages_take_its_room() -> None:
    """They cannot be handled before it: without it the lane would stand still for good."""
    lane, finished = Lane("p"), Finished()
    for sequence in range(1, 9):
        lane.offer(message(sequence), finished)
    assert lane.park(4) == 4
    for sequence in range(9, 13):
        lane.offer(message(sequence), finished)
    for sequence in range(1, 5):
        lane.finish(sequence)
    assert lane.holding == 4
    assert lane.wanted_back(4) == [5, 6, 7, 8]


def test_a_quick_lane_puts_nothing_aside() -> None:
    lane, finished = Lane("p"), Finished()
    for sequence in range(1, 101):
        lane.offer(message(sequence), finished)
    lane.took(0.0001)
    assert relieve([lane], 4, now=0.0) == 0


def test_a_handler_that_does_not_end_makes_its_lane_slow() -> None:
    lane, finished = Lane("p"), Finished()
    for sequence in range(1, 11):
        lane.offer(message(sequence), finished)
    lane.started = 5.0
    assert relieve([lane], 4, now=5.5) == 0
    assert relieve([lane], 4, now=6.5) == 6


def test_advancing_lets_go_of_what_is_done_elsewhere() -> None:
    lane, finished = Lane("p"), Finished()
    for sequence in (3, 5, 8):
        lane.offer(message(sequence), finished)
    assert sorted(lane.advance(5)) == ["reply.3.1", "reply.5.1"]
    assert lane.done(0) == 7
    lane.finish(8)
    assert lane.done(0) == 8


class AnyLane(RuleBasedStateMachine):
    """A server that delivers, redelivers and loses, and handlers that fail: order and completeness hold."""

    def __init__(self) -> None:
        super().__init__()
        self.lane, self.finished = Lane("p"), Finished()
        self.stored = 0
        self.handled: list[int] = []
        self.server: dict[int, int] = {}
        """What the server has out: deliveries of each sequence."""

    def _deliver(self, sequence: int) -> None:
        self.server[sequence] = self.server.get(sequence, 0) + 1
        if self.lane.offer(message(sequence, self.server[sequence]), self.finished) is Arrival.DONE:
            del self.server[sequence]

    @rule()
    def publish(self) -> None:
        self.stored += 1
        self._deliver(self.stored)

    @precondition(lambda self: self.server)
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        self._deliver(data.draw(st.sampled_from(sorted(self.server))))

    @rule()
    def handle(self) -> None:
        if found := self.lane.next():
            self.handled.append(found.sequence)
            self.lane.finish(found.sequence)
            self.finished.add(found.sequence)
            del self.server[found.sequence]

    @rule()
    def fail(self) -> None:
        if found := self.lane.next():
            self.lane.tries[found.sequence] = self.lane.attempt(found.sequence)
            self.lane.waits = True

    @rule()
    def try_again(self) -> None:
        self.lane.waits = False

    @rule(keep=st.integers(1, 3))
    def park(self, keep: int) -> None:
        self.lane.park(keep)

    @rule()
    def ask_back(self) -> None:
        for sequence in self.lane.wanted_back(4):
            self.lane.bring_back(message(sequence))
        assert not self.lane.order or self.lane.items[self.lane.order[0]], "it stands still"

    @invariant()
    def handled_once_and_in_order(self) -> None:
        assert self.handled == sorted(set(self.handled))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.handled) | set(self.lane.items) == set(range(1, self.stored + 1))

    @invariant()
    def everything_up_to_the_position_is_done(self) -> None:
        assert set(range(1, self.lane.done(0) + 1)) <= set(self.handled)

    @invariant()
    def the_count_is_right(self) -> None:
        assert self.lane.holding == sum(m is not None for m in self.lane.items.values())


AnyLane.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyLane = AnyLane.TestCase
