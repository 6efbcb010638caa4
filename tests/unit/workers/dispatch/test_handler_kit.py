"""A handler tested without a broker."""

from __future__ import annotations

import asyncio

import pytest

from penstock.consume.messages import Message, MessageContext
from penstock.consume.verdicts import Reject, Retries
from penstock.testing import Given, run_handler


async def handle(message: Message, context: MessageContext) -> None:
    body = message.json()
    if body["n"] < 0:
        raise Reject("negative")
    if body.get("fails", 0) >= context.delivery_count:
        raise ValueError("not yet")
    await asyncio.sleep(0)


async def test_messages_of_a_partition_are_handled_in_order() -> None:
    given = [(f"dc.t{n % 2}.done", b'{"n": %d}' % n) for n in range(10)]
    run = await run_handler(handle, given, pattern="dc.{tool}.done")
    assert len(run.done) == 10
    for tool in ("t0", "t1"):
        mine = [message.sequence for message, context in run.tries if context.partition_id == tool]
        assert mine == sorted(mine)


async def test_failed_tries_tell_their_delays_and_do_not_wait() -> None:
    retries = Retries(max_deliver=3, backoff=(60.0, 300.0))
    run = await run_handler(handle, [("a", b'{"n": 1, "fails": 2}'), ("a", b'{"n": 2}')], retries=retries)
    assert [delay for _, delay in run.retried] == [60.0, 300.0]
    assert [message.json()["n"] for message in run.done] == [1, 2]
    assert [context.delivery_count for _, context in run.tries] == [1, 2, 3, 1]


async def test_what_is_given_up_comes_with_its_reason() -> None:
    retries = Retries(max_deliver=2, backoff=(1.0,))
    given = [Given("a", b'{"n": 1, "fails": 9}'), Given("a", b'{"n": -1}', {"Trace": "x"}), Given("a", b"no JSON")]
    run = await run_handler(handle, given, retries=retries)
    assert run.done == []
    reasons = [dead.reason for dead in run.dead]
    assert reasons[0] == "gave up after 2 tries: ValueError: not yet"
    assert reasons[1] == "rejected by the handler: negative"
    assert reasons[2].startswith("gave up after 2 tries: JSONDecodeError")
    assert run.dead[1].message.headers == {"Trace": ["x"]}


async def test_a_plain_function_can_be_tested_too() -> None:
    seen = []
    run = await run_handler(lambda message, context: seen.append(message.data), [("a", b"1"), ("b", b"2")])
    assert seen == [b"1", b"2"]
    assert len(run.done) == 2


async def test_a_handler_that_hangs_is_cut_off() -> None:
    async def hang(message: Message, context: MessageContext) -> None:
        await asyncio.Event().wait()

    run = await run_handler(hang, [("a", b"")], handler_timeout=0.01, retries=Retries(max_deliver=1, backoff=(1.0,)))
    assert run.dead[0].reason == "gave up after 1 try: HandlerTimeout: the handler took longer than 0.01 s"


async def test_a_subject_outside_the_pattern_is_said_so() -> None:
    with pytest.raises(ValueError, match="not of the pattern"):
        await run_handler(handle, [("other", b"{}")], pattern="dc.{tool}.done")
