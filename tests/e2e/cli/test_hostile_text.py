"""Control characters of subjects, ids, bodies and errors are shown by every command, and reach no terminal."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.integration.deadletter.stage import Stage, bury
from tests.support.commands import here

from penstock.printable import ACTED_ON
from penstock.server.embedded import EmbeddedServer
from penstock.testing import eventually_async
from penstock.wire import aio

ESC = "\x1b[2J"
SUBJECT = f"orders.a{ESC}"
MARKUP = "[red]x:bomb:"
"""The name of a consumer, which nobody may take for styles."""
ODD_HEADS = [b"garbage", b"NATS/1.0", b"NATS/1.0\n503 \x1b\n\n", b"NATS/1.0\r\n\x7f: \xff\x1b[2J\r\n\r\n"]
"""What a server stores as headers."""


@pytest.fixture
def served(nats_server: EmbeddedServer) -> EmbeddedServer:
    """A server with messages that hold escape sequences wherever a publisher may write, one of them a dead letter."""

    async def prepare() -> None:
        async with await aio.connect(nats_server.settings) as connection:
            stage = Stage(nats_server.settings, connection)

            async def everything_is_stored() -> bool:
                return (await stage.js.stream_info("ORDERS")).state.messages == 2 + len(ODD_HEADS)

            await stage.build()
            head = f"NATS/1.0\r\nX-Note: n\x9b{ESC}\r\n\r\n".encode()
            body = f'{{"event_id": "e{ESC}"}}'.encode()
            sizes = f"{len(head)} {len(head) + len(body)}".encode()
            for _ in range(2):  # as another client would: Penstock itself does not publish there
                await connection.send(b"HPUB %b %b\r\n%b%b\r\n" % (SUBJECT.encode(), sizes, head, body))
            for head in ODD_HEADS:
                await connection.send(b"HPUB orders.odd %d %d\r\n%b\r\n" % (len(head), len(head), head))
            await stage.consumer(MARKUP)
            await eventually_async(everything_is_stored, what="the messages to be stored: nobody acknowledges them")
            await bury(stage, 1, error=f"no price {ESC}\x07")

    asyncio.run(prepare())
    return nats_server


@pytest.mark.parametrize(
    "words",
    [("status",), ("dlq", "ls", "--letters"), ("dlq", "show", "ID"), ("fetch", "billing"), ("consumer", "ls", "ORDERS"),
     ("consumer", "show", "ORDERS", f"x{ESC}"), ("view", "ORDERS"), ("view", "ORDERS", "--json"),
     ("consumer", "pause", "ORDERS", MARKUP, "--for", "1h"), ("consumer", "resume", "ORDERS", MARKUP),
     ("consumer", "show", "ORDERS", MARKUP), ("consumer", "reset", "ORDERS", MARKUP, "--to-start", "--yes"),
     ("publish", SUBJECT, "--file", __file__),
     ("dlq", "show", f"zz{ESC}"), (f"no{ESC}",),
     ("--servers", f"nats://h{ESC}:1:1", "status")],
)  # fmt: skip
def test_no_command_prints_a_control_character(served: EmbeddedServer, words: tuple[str, ...]) -> None:
    if "ID" in words:
        letters = json.loads(here("--servers", served.url, "dlq", "ls", "--letters", "--json").stdout)["letters"]
        words = (*words[:-1], letters[0]["id"])
    done = here("--servers", served.url, *words)
    shown = done.stdout + done.stderr
    assert not ACTED_ON.search(shown), shown
    assert "Traceback" not in shown
    if words[0] in ("dlq", "fetch", "publish") or ESC in words[-1]:
        assert "\\x1b" in shown
    if MARKUP in words:
        assert done.returncode == 0, shown
        assert MARKUP in shown
    if "--json" in words:
        assert len([json.loads(line) for line in done.stdout.splitlines()]) == 2 + len(ODD_HEADS)
