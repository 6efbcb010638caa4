"""What becomes of a message after its handler."""

from __future__ import annotations

from datetime import timedelta

import pytest

from penstock.consume.verdicts import GiveUp, Redeliver, Reject, Retries, RetryLater, after_failure, before_try
from penstock.errors import ConfigError

RETRIES = Retries(max_deliver=4, backoff=(2.0, 5.0))


@pytest.mark.parametrize(("attempt", "delay"), [(1, 2.0), (2, 5.0), (3, 5.0)])
def test_the_delay_follows_the_backoff(attempt: int, delay: float) -> None:
    assert after_failure(ValueError("x"), attempt, RETRIES) == Redeliver(delay)


def test_the_last_try_makes_a_dead_letter_with_the_reason() -> None:
    verdict = after_failure(ValueError("no such\nproject"), 4, RETRIES)
    assert verdict == GiveUp("gave up after 4 tries: ValueError: no such project")


def test_a_rejected_message_is_given_up_at_once() -> None:
    assert after_failure(Reject("no JSON"), 1, RETRIES) == GiveUp("rejected by the handler: no JSON")


def test_a_handler_may_say_when_to_try_again() -> None:
    assert after_failure(RetryLater("busy", after=60), 1, RETRIES) == Redeliver(60)
    assert after_failure(RetryLater("busy"), 1, RETRIES) == Redeliver(2.0)
    assert isinstance(after_failure(RetryLater("busy", after=60), 4, RETRIES), GiveUp)


def test_a_message_whose_worker_died_with_every_try_is_given_up_before_another_one() -> None:
    assert before_try(RETRIES.max_deliver, RETRIES) is None
    assert before_try(RETRIES.max_deliver + 1, RETRIES) is not None


def test_a_backoff_without_a_delay_is_refused() -> None:
    for backoff in ((), (0.0,), (1.0, -1.0)):
        with pytest.raises(ConfigError):
            Retries(backoff=backoff)


def test_the_type_of_the_error_may_decide_how_often_and_when() -> None:
    away = Retries(max_deliver=100, backoff=(1.0,))
    retries = Retries(max_deliver=2, backoff=(9.0,), by_exception=((ConnectionError, away), (ValueError, None)))
    assert after_failure(ConnectionResetError("x"), 99, retries) == Redeliver(1.0)
    assert after_failure(KeyError("x"), 1, retries) == Redeliver(9.0)
    assert isinstance(after_failure(KeyError("x"), 2, retries), GiveUp)
    assert after_failure(UnicodeError("no text"), 1, retries) == GiveUp("not tried again after UnicodeError: no text")
    assert before_try(100, retries) is None
    assert isinstance(before_try(101, retries), GiveUp)


@pytest.mark.parametrize("after", [90, 90.0, "90s", "1m30s", timedelta(seconds=90)])
def test_a_handler_says_when_it_wants_to_be_called_again(after: float | str | timedelta) -> None:
    assert after_failure(RetryLater("busy", after), 1, RETRIES) == Redeliver(90.0)


@pytest.mark.parametrize("after", [float("inf"), float("nan"), "soon"])
def test_a_time_that_cannot_be_waited_for_is_refused_where_it_is_said(after: float | str) -> None:
    with pytest.raises((ValueError, ConfigError)):
        RetryLater("busy", after)
