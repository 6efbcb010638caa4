"""How often a worker looks at what no event tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from penstock.workers.dispatch.dispatcher import Dispatcher
from penstock.workers.options import ConsumerOptions, WorkerOptions
from penstock.workers.pull.consumer import WorkerConsumer
from penstock.workers.pull.puller import MANY, REST, TICK, Upkeep
from penstock.workers.pull.session import Session


def upkeep(**state: Any) -> tuple[Upkeep, SimpleNamespace]:
    dispatcher = SimpleNamespace(**{"held": 0, "some_parked": False, "handled": 0, **state})
    consumer = SimpleNamespace(options=ConsumerOptions(stream="S", worker_id="1"))
    return Upkeep(
        cast(Dispatcher, dispatcher), cast(WorkerConsumer, consumer), WorkerOptions(), lambda lane, sequences: None
    ), dispatcher


def session() -> Session:
    return cast(Session, SimpleNamespace())


def test_a_worker_that_has_nothing_to_look_after_rests() -> None:
    made, dispatcher = upkeep()
    assert made.pause(session()) == REST
    dispatcher.handled = MANY
    assert made.pause(session()) == REST, "a few messages between two looks are no reason"


def test_whatever_waits_here_is_looked_at_soon() -> None:
    assert upkeep(held=1)[0].pause(session()) == TICK
    assert upkeep(some_parked=True)[0].pause(session()) == TICK
    assert upkeep()[0].pause(None) == TICK, "it begins to pull"


def test_batches_follow_handlers_quickly_while_much_is_handled() -> None:
    made, dispatcher = upkeep(handled=MANY + 1)
    assert made.pause(session()) == TICK
    assert made.pause(session()) == REST, "nothing was handled since"
    dispatcher.handled += MANY + 1
    assert made.pause(session()) == TICK
