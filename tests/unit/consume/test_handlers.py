"""Handlers found by name, and what must not come of those that cannot work."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.consume import handlers
from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import Retries
from penstock.errors import ConfigError
from penstock.settings import Settings
from penstock.testing import eventually_async, run_handler
from penstock.workers.group.worker_group import WorkerGroup
from penstock.workers.options import GroupOptions, WorkerOptions
from penstock.workers.partitions import Listed

MODULE = """
async def fine(message, context): ...
def one(message): ...
def lazy(message, context):
    yield 1
async def lazy_too(message, context):
    yield 1
class Made:
    async def __call__(self, message, context): ...
made = Made()
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "some_handlers.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "some_handlers", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["fine", "made"])
def test_a_handler_is_found_by_its_name(here: Path, name: str) -> None:
    assert callable(handlers.load(f"some_handlers:{name}"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "has no function"),
        ("number", "has no function"),
        ("one", "cannot be called with a message and a context"),
        ("Made", "cannot be called with a message and a context"),
        ("lazy", "has a yield in it"),
        ("lazy_too", "has a yield in it"),
    ],
)
def test_what_cannot_handle_a_message_is_refused_before_it_gets_one(here: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        handlers.load(f"some_handlers:{name}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise RuntimeError('no database')", r"RuntimeError: no database \(.*broken_handlers.py, line 1\)"),
        ("def x(:", r"SyntaxError: .*broken_handlers.py, line 1"),
        ("import broken", "needs 'broken', which is not installed"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_with_its_place(here: Path, text: str, says: str) -> None:
    (here / "broken_handlers.py").write_text(text)
    with pytest.raises(ConfigError, match=says):
        handlers.load("broken_handlers:x")


async def test_a_handler_that_exits_fails_its_message_and_ends_nothing() -> None:
    async def handler(message: Message, context: MessageContext) -> None:
        if message.data == b"1":
            sys.exit(3)

    run = await run_handler(handler, [("s", b"1"), ("s", b"2")], retries=Retries(max_deliver=2))
    assert [message.data for message in run.done] == [b"2"]
    assert [dead.reason for dead in run.dead] == ["gave up after 2 tries: SystemExit: 3"]


class WithLock:
    """Something that no other process can have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, message: Message, context: MessageContext) -> None: ...


def nested() -> handlers.Handler:
    def inner(message: Message, context: MessageContext) -> None: ...

    return inner


@pytest.mark.parametrize("handler", [lambda message, context: None, nested(), WithLock(), WithLock().__call__])
def test_a_handler_that_no_other_process_can_run_is_refused_before_it_gets_a_message(handler: handlers.Handler) -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent to other processes .* as a function of a module"):
        handlers.HandlerRunner(handler, processes=1)
    options = GroupOptions(group="g", stream="S", source=lambda *_: Listed(()))
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        WorkerGroup(Settings(), options, handler, worker=WorkerOptions(processes=1))
    WorkerGroup(Settings(), options, handler)  # without processes it may be anything


def write_process(message: Message, context: MessageContext) -> None:
    """Runs in a process of a pool."""
    Path(message.data.decode()).write_text(str(os.getpid()))
    time.sleep(0.5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_to_all_processes_does_not_fail_what_the_handlers_are_at(tmp_path: Path, number: int) -> None:
    runner = handlers.HandlerRunner(write_process, processes=1)
    path = tmp_path / "process"
    message = Message("s", str(path).encode(), 1, 1, "", datetime.now(UTC))
    running = asyncio.ensure_future(runner.call(message, MessageContext("s", "p", "w", message.received_at, 1, 1)))
    await eventually_async(lambda: path.exists() and path.read_text() != "", 30)
    os.kill(int(path.read_text()), number)
    await running
    runner.close()


def test_a_handler_that_goes_on_although_it_is_cancelled_holds_up_no_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handlers, "CANCEL_SECONDS", 0.05)

    async def stubborn() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def main() -> None:
        running = [asyncio.create_task(stubborn()), asyncio.create_task(asyncio.sleep(60))]
        await asyncio.sleep(0)
        await handlers.cancel(running)
        assert [task.done() for task in running] == [False, True]

    asyncio.run(main())
    assert "a handler was cancelled and goes on" in caplog.text
