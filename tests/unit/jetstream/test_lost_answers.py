"""What is sent again when the answer to a request was lost, without a server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.errors import ConnectionLost, DeadlineExceeded, OutcomeUnknown, PenstockError, Unavailable
from penstock.jetstream.api import JetStream

LOST = [ConnectionLost("nats://here", "reset by peer"), DeadlineExceeded("a request", 0.1)]
STREAM = {"config": {"name": "S"}, "state": {"messages": 0, "bytes": 0, "first_seq": 1, "last_seq": 0}}


class Server:
    """Does what it is asked; its first answer gets lost."""

    def __init__(self, lost: PenstockError, answer: dict[str, Any]) -> None:
        self.asked: list[str] = []
        self._lost = lost
        self._answer = answer

    async def __call__(self, subject: str, payload: bytes, timeout: float) -> bytes:
        self.asked.append(subject)
        if len(self.asked) == 1:
            raise self._lost
        return json.dumps(self._answer).encode()


@pytest.mark.parametrize("lost", LOST, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    "decide",
    [
        lambda js: js.delete_stream("S"),
        lambda js: js.purge_stream("S"),
        lambda js: js.delete_message("S", 1),
        lambda js: js.delete_consumer("S", "c"),
    ],
    ids=["delete_stream", "purge_stream", "delete_message", "delete_consumer"],
)
async def test_what_must_not_be_done_twice_is_asked_for_once(
    lost: PenstockError, decide: Callable[[JetStream], Awaitable[Any]]
) -> None:
    server = Server(lost, {"success": True, "purged": 1})
    with pytest.raises(OutcomeUnknown):
        await decide(JetStream(server))
    assert len(server.asked) == 1


@pytest.mark.parametrize("lost", LOST, ids=lambda one: type(one).__name__)
async def test_what_may_be_repeated_is_asked_for_again(lost: PenstockError) -> None:
    server = Server(lost, STREAM)
    assert (await JetStream(server).stream_info("S")).name == "S"
    assert len(server.asked) == 2


async def test_a_listing_from_which_servers_left_something_out_is_an_error() -> None:
    async def incomplete(subject: str, payload: bytes, timeout: float) -> bytes:
        return json.dumps({"streams": [], "total": 1, "missing": ["S"]}).encode()

    with pytest.raises(Unavailable, match="no answer about S"):
        await JetStream(incomplete).streams()
