"""Receipts without a server: what is accepted, and what is refused with which reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.facts import ForeignReceipt, ForgedReceipt
from penstock.facts.receipt import Receipt, key_id, verified

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
RECEIPT = Receipt("FACTS", "reader", 1_700_000_000_000_000, "AAAAAAAAAAAA", 3, 17)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)


@given(NAMES, NAMES, st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_receipt_comes_back_as_it_was_signed(stream: str, consumer: str, made: int, first: int, last: int) -> None:
    receipt = Receipt(stream, consumer, made, "AbCd-_012345", first, last)
    assert verified(receipt.signed(KEY), [KEY], stream, consumer) == receipt


def test_a_receipt_says_nothing_in_clear_and_fits_a_line() -> None:
    text = RECEIPT.signed(KEY)
    assert "FACTS" not in text
    assert len(text) < 120
    assert text.isascii()


def test_a_receipt_from_before_they_named_their_key_stays_valid() -> None:
    old = "pr1.AAAAAAAAAAAAAAYKJBgeQAAAAAAAAAAAAwAAAAAAAAARRkFDVFMAcmVhZGVy.almtUp6hdXR0D6W5euzAFg"
    assert verified(old, [OTHER_KEY, KEY], "FACTS", "reader") == RECEIPT
    with pytest.raises(ForgedReceipt, match="signature is wrong"):
        verified(old, [OTHER_KEY], "FACTS", "reader")


def test_a_receipt_names_its_key_and_is_accepted_while_that_key_is() -> None:
    text = RECEIPT.signed(KEY)
    assert text.split(".")[1] == key_id(KEY)
    assert verified(text, [OTHER_KEY, KEY], "FACTS", "reader") == RECEIPT
    with pytest.raises(ForgedReceipt, match=f"names key {key_id(KEY)}, and those of this installation are"):
        verified(text, [OTHER_KEY], "FACTS", "reader")


def test_a_receipt_of_another_installation_is_refused() -> None:
    with pytest.raises(ForgedReceipt, match="signature is wrong"):
        verified(RECEIPT.signed(OTHER_KEY), [KEY], "FACTS", "reader")


@pytest.mark.parametrize(("stream", "consumer"), [("FACTS", "other"), ("OTHER", "reader"), ("FACTS\0reader", "")])
def test_a_receipt_of_another_consumer_is_refused_and_says_whose_it_is(stream: str, consumer: str) -> None:
    with pytest.raises(ForeignReceipt, match="consumer 'reader' of stream 'FACTS'"):
        verified(RECEIPT.signed(KEY), [KEY], stream, consumer)


@given(st.data())
def test_a_receipt_that_was_changed_anywhere_is_refused(data: st.DataObject) -> None:
    text = RECEIPT.signed(KEY)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[at]))
    changed = text[:at] + other + text[at + 1 :]
    with pytest.raises(ForgedReceipt):
        verified(changed, [KEY], "FACTS", "reader")


@pytest.mark.parametrize("none", [None, ""])
def test_an_empty_page_is_not_confirmed_and_the_reason_says_so(none: str | None) -> None:
    with pytest.raises(ForgedReceipt, match="an empty page has none"):
        verified(none, [KEY], "FACTS", "reader")


def test_bits_that_base64_does_not_use_cannot_be_changed_either() -> None:
    text = RECEIPT.signed(KEY)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for letter in letters.replace(text[-1], ""):
        with pytest.raises(ForgedReceipt):
            verified(text[:-1] + letter, [KEY], "FACTS", "reader")


@given(st.text(max_size=300))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ForgedReceipt):
        verified(text, [KEY], "FACTS", "reader")
