"""What becomes of a message after its handler."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.workers.verdicts import DeadLetter, Redeliver, Reject, Retries, RetryLater, after_failure, before_try

RETRIES = Retries(max_deliver=4, backoff=(2.0, 5.0))


@pytest.mark.parametrize(("attempt", "delay"), [(1, 2.0), (2, 5.0), (3, 5.0)])
def test_the_delay_follows_the_backoff(attempt: int, delay: float) -> None:
    assert after_failure(ValueError("x"), attempt, RETRIES) == Redeliver(delay)


def test_the_last_try_makes_a_dead_letter_with_the_reason() -> None:
    verdict = after_failure(ValueError("no such\nproject"), 4, RETRIES)
    assert verdict == DeadLetter("gave up after 4 tries: ValueError: no such project")


def test_a_rejected_message_is_given_up_at_once() -> None:
    assert after_failure(Reject("no JSON"), 1, RETRIES) == DeadLetter("rejected by the handler: no JSON")


def test_a_handler_may_say_when_to_try_again() -> None:
    assert after_failure(RetryLater("busy", after=60), 1, RETRIES) == Redeliver(60)
    assert after_failure(RetryLater("busy"), 1, RETRIES) == Redeliver(2.0)
    assert isinstance(after_failure(RetryLater("busy", after=60), 4, RETRIES), DeadLetter)


def test_a_message_whose_tries_never_end_is_given_up_before_another_one() -> None:
    assert before_try(54, RETRIES) is None
    assert before_try(55, RETRIES) is not None


def test_a_backoff_without_a_delay_is_refused() -> None:
    for backoff in ((), (0.0,), (1.0, -1.0)):
        with pytest.raises(ConfigError):
            Retries(backoff=backoff)
