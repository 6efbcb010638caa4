"""A delivered fact says the same as one that is made of its parts, and parses them only when asked."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime

import pytest

from penstock.facts.fact import DIGEST_HEADER, EXPECT_NONE, ID_HEADER, Fact, digest, key_of, parts_of, received_facts
from penstock.facts.pages import SequenceRun, deliveries_of, runs_above
from penstock.facts.pull import Delivered, delivered
from penstock.wire import headers as header_block
from penstock.wire.frames import Message

REPLY = "$JS.ACK.FACTS.reader.2.17.30.1763287205123456789.4"
STORED_AT = datetime(2025, 11, 16, 10, 0, 5, 123456, UTC)


def message(
    fact_id: str, own: dict[str, str] | None = None, subject: str = "facts.orders", reply: str = REPLY
) -> Message:
    named = {**(own or {}), ID_HEADER: fact_id, DIGEST_HEADER: digest(b"{}", own), EXPECT_NONE: "0"}
    return Message(f"{subject}.{key_of(fact_id)}", 1, reply, header_block.encode(named), b"{}")


def fact(one: Message) -> Fact:
    return received_facts("FACTS", [delivered(one)])[0]


@pytest.mark.parametrize("fact_id", ["o-17", "order 17", "Bestellung für 3 €"])
@pytest.mark.parametrize("own", [{}, {"Trace": "t-1"}])
@pytest.mark.parametrize("reply", [REPLY, REPLY.replace("$JS.ACK.", "$JS.ACK.hub.hash.") + ".token"])
def test_a_delivered_fact_equals_one_made_of_its_parts(fact_id: str, own: dict[str, str], reply: str) -> None:
    headers = {name: [value] for name, value in own.items()}
    expected = Fact("FACTS", 17, "facts.orders", fact_id, b"{}", headers, STORED_AT, 2)
    found = fact(message(fact_id, own, reply=reply))
    assert found == expected
    assert repr(found) == repr(expected)
    assert fact(message(fact_id, own, reply=reply)).parts() == found.parts() == expected.parts()
    assert pickle.loads(pickle.dumps(fact(message(fact_id, own, reply=reply)))) == expected


def test_a_dedicated_readers_fact_has_the_attempts_that_the_book_counts() -> None:
    assert [one.attempt for one in received_facts("FACTS", [delivered(message("o-17"))], [5])] == [5]


def test_a_fact_without_parts_says_what_it_has_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = fact(message("o-17")).nonsense  # type: ignore[attr-defined]


def test_a_message_that_was_published_by_other_means_has_no_id_and_keeps_its_subject() -> None:
    assert parts_of("facts.orders.x", b"", 0)[:3] == ("facts.orders.x", None, {})
    own = header_block.encode({ID_HEADER: "o-17"})
    assert parts_of("facts.orders.x", own, 0)[:3] == ("facts.orders.x", "o-17", {})


def test_a_delivery_is_read_from_its_reply_subject() -> None:
    found = delivered(message("o-17"))
    assert isinstance(found, Delivered)
    assert (found.delivery(), found.ack().pending) == ((17, 30, 2), 4)


@pytest.mark.parametrize("floor", range(12))
def test_runs_above_a_floor_hold_what_is_above_it(floor: int) -> None:
    made = [SequenceRun(1, 5, 3, 1), SequenceRun(6, 8, 1, 2), SequenceRun(8, 9, 3, 1)]
    assert [*deliveries_of(runs_above(made, floor))] == [one for one in deliveries_of(made) if one.sequence > floor]
