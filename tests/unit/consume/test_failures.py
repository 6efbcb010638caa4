"""What is said about failed tries: why, and not too often."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pytest

from penstock.consume.failures import EVERY, KINDS, FailureLog
from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import GiveUp, Reject, Retries
from penstock.testing import run_handler


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Story:
    """Failures that come one after the other."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.consume.failures")
        self._caplog = caplog
        self.clock = Clock()
        self.log = FailureLog(Retries(max_deliver=3), self.clock)
        self.sequence = 0

    def fail(self, error: Exception, times: int = 1) -> None:
        for _ in range(times):
            self.sequence += 1
            now = datetime.now(UTC)
            message = Message("orders.eu", b"", self.sequence, 1, "", now)
            self.log.again(message, MessageContext("orders.eu", "eu", "w", now, 1, 1), error, 2.0)

    def told(self, level: int = logging.WARNING) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.levelno == level]


@pytest.fixture
def story(caplog: pytest.LogCaptureFixture) -> Story:
    return Story(caplog)


def test_the_first_failure_is_a_warning_with_all_that_one_needs(story: Story) -> None:
    story.fail(ValueError("no price\nin order 7"))
    assert story.told() == [
        "orders.eu #1: try 1 of 3 failed, again in 2 s: ValueError: no price in order 7",
    ]


def test_failures_of_one_kind_are_one_warning_and_their_number_comes_with_the_next(story: Story) -> None:
    for order in range(100):
        story.fail(ValueError(f"no price in order {order}"))
    assert len(story.told()) == 1
    assert len(story.told(logging.INFO)) == 99, "they are not lost to whoever wants to see all"
    story.clock.now += EVERY
    story.fail(ValueError("no price in order 100"))
    assert story.told()[1:] == [
        "orders.eu #101: try 1 of 3 failed, again in 2 s: ValueError: no price in order 100 "
        "(and 99 more like it since the last line)"
    ]


def test_failures_of_another_kind_are_told_at_once(story: Story) -> None:
    story.fail(ValueError("no price"), 5)
    story.fail(KeyError("price"))
    story.fail(ValueError("no amount"))
    assert [line.partition("2 s: ")[2] for line in story.told()] == [
        "ValueError: no price",
        "KeyError: 'price'",
        "ValueError: no amount",
    ]


def test_errors_that_are_all_different_do_not_flood_either(story: Story) -> None:
    names = [f"{a}{b}" for a in "ghijklmnop" for b in "ghijklmnop"]
    for name in names:
        story.fail(ValueError(name))
    assert len(story.told()) == KINDS
    story.log.close()
    assert story.told()[-1] == f"further tries that failed: {len(names) - KINDS}, with errors of many kinds"


def test_what_was_withheld_is_told_when_the_failures_end(story: Story) -> None:
    story.fail(ValueError("no"), 4)
    story.clock.now += EVERY
    story.fail(KeyError("k"))
    assert story.told()[1] == "further tries that failed: 3, with ValueError: no"
    story.fail(KeyError("k"))
    story.log.close()
    assert story.told()[-1] == "further tries that failed: 1, with KeyError: 'k'"


def test_a_message_that_is_given_up_is_told_beside_its_tries(story: Story) -> None:
    story.fail(ValueError("no"))
    message = Message("orders.eu", b"", 1, 3, "", datetime.now(UTC))
    story.log.buried(message, GiveUp("gave up after 3 tries: ValueError: no"), ValueError("no"))
    assert story.told()[-1] == "orders.eu #1: kept as a dead letter: gave up after 3 tries: ValueError: no"


class Unprintable(Exception):
    """As broken as an error can be."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


async def test_a_handler_whose_error_cannot_be_printed_fails_its_message_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(message: Message, context: MessageContext) -> None:
        if message.data == b"1":
            raise Unprintable
        if message.data == b"2":
            raise Reject("never")

    given = [("s", b"1"), ("s", b"2"), ("s", b"3")]
    run = await run_handler(handler, given, retries=Retries(max_deliver=2, backoff=(60.0,)))
    assert [message.data for message in run.done] == [b"3"]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        "s #1: try 1 of 2 failed, again in 60 s: Unprintable",
        "s #1: kept as a dead letter: gave up after 2 tries: Unprintable",
        "s #2: kept as a dead letter: rejected by the handler: never",
    ]
