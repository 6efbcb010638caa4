"""How often a worker looks at what no event tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from penstock.workers.dispatch.dispatcher import Dispatcher
from penstock.workers.options import ConsumerOptions, WorkerOptions
from penstock.workers.pull.consumer import WorkerConsumer
from penstock.workers.pull.puller import BUSY_MESSAGES, IDLE_LOOK_INTERVAL, LOOK_INTERVAL, Upkeep
from penstock.workers.pull.session import PullSession


def upkeep(**state: Any) -> tuple[Upkeep, SimpleNamespace]:
    dispatcher = SimpleNamespace(**{"held": 0, "some_parked": False, "handled": 0, **state})
    consumer = SimpleNamespace(options=ConsumerOptions(stream="S", worker_id="1"))
    return Upkeep(
        cast(Dispatcher, dispatcher), cast(WorkerConsumer, consumer), WorkerOptions(), lambda lane, sequences: None
    ), dispatcher


def session() -> PullSession:
    return cast(PullSession, SimpleNamespace())


def test_a_worker_that_has_nothing_to_look_after_rests() -> None:
    made, dispatcher = upkeep()
    assert made.pause(session()) == IDLE_LOOK_INTERVAL
    dispatcher.handled = BUSY_MESSAGES
    assert made.pause(session()) == IDLE_LOOK_INTERVAL, "a few messages between two looks are no reason"


def test_whatever_waits_here_is_looked_at_soon() -> None:
    assert upkeep(held=1)[0].pause(session()) == LOOK_INTERVAL
    assert upkeep(some_parked=True)[0].pause(session()) == LOOK_INTERVAL
    assert upkeep()[0].pause(None) == LOOK_INTERVAL, "it begins to pull"


def test_batches_follow_handlers_quickly_while_much_is_handled() -> None:
    made, dispatcher = upkeep(handled=BUSY_MESSAGES + 1)
    assert made.pause(session()) == LOOK_INTERVAL
    assert made.pause(session()) == IDLE_LOOK_INTERVAL, "nothing was handled since"
    dispatcher.handled += BUSY_MESSAGES + 1
    assert made.pause(session()) == LOOK_INTERVAL
