"""The book of pages without a server: who may confirm what, whatever the order of events."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.facts.pages import (
    CLAIM_SECONDS,
    MOST_REMEMBERED,
    REMEMBER_PAGES,
    REMEMBER_SECONDS,
    Book,
    Delivery,
    Span,
    deliveries_of,
    merged,
    runs,
    within,
)

ACK = "$JS.ACK.S.c"


def first_deliveries(sequences: Iterable[int], number: int = 1) -> list[Delivery]:
    return [Delivery(sequence, number + at, 1) for at, sequence in enumerate(sequences)]


def opened(book: Book, page: str, deliveries: list[Delivery], before: Iterable[str] = (), at: float = 0.0) -> Book:
    return book.admit(page, deliveries, before, ACK, at).book


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 3)), unique_by=lambda pair: pair[0]))
def test_runs_say_the_same_deliveries(pairs: list[tuple[int, int]]) -> None:
    made = [Delivery(sequence, number, attempt) for number, (sequence, attempt) in enumerate(sorted(pairs), 1)]
    assert list(deliveries_of(runs(made))) == made


def test_a_page_of_messages_in_a_row_is_one_run() -> None:
    assert runs(first_deliveries(range(1, 1001))) == ((1, 1, 1000, 1),)


def test_a_book_comes_back_as_it_was_written() -> None:
    book = opened(Book(made=7, server="N1"), "p1", first_deliveries([1, 5, 6]))
    book = opened(book.confirmed("p1", 3.5), "p2", first_deliveries([9], 4), at=4.25)
    assert Book.parse(book.encoded()) == book


def test_facts_that_are_delivered_again_make_the_page_stale_that_held_them() -> None:
    book = opened(Book(), "p1", first_deliveries([1, 2, 3]))
    admission = book.admit("p2", [Delivery(2, 4, 2)], ["p1"], ACK, 1.0)
    assert [one.sequence for one in admission.kept] == [2]
    assert admission.book.page("p1") is None
    assert "p1" in admission.book.stale


def test_a_confirmed_fact_that_the_server_delivers_again_is_not_handed_out() -> None:
    book = opened(Book(), "p1", first_deliveries([1, 2, 3])).confirmed("p1", 1.0)
    for attempt in (1, 2):
        admission = book.admit("p2", [Delivery(3, 3, attempt), Delivery(4, 4, 1)], [], ACK, 2.0)
        assert [one.sequence for one in admission.kept] == [4]
        assert [one.sequence for one in admission.confirmed] == [3]


def test_a_reader_that_was_overtaken_gets_only_what_nobody_else_holds() -> None:
    """Its messages were delivered again to another, who was first to write them into the book."""
    book = opened(Book(), "late", [Delivery(1, 3, 2), Delivery(2, 4, 2)])
    admission = book.admit("slow", first_deliveries([1, 2, 3]), [], ACK, 1.0)
    assert [one.sequence for one in admission.kept] == [3]
    assert admission.book.page("late") is not None


def test_a_later_delivery_takes_facts_from_a_page_that_was_opened_meanwhile() -> None:
    book = opened(Book(), "slow", first_deliveries([1, 2]))
    admission = book.admit("late", [Delivery(1, 3, 2)], [], ACK, 1.0)
    assert [one.sequence for one in admission.kept] == [1]
    assert "slow" in admission.book.stale


def test_first_deliveries_in_a_row_count_as_one_span_also_with_a_filter() -> None:
    page = opened(Book(), "p", first_deliveries([3, 7, 12])).page("p")
    assert page is not None
    assert page.spans() == ((3, 12),)


def test_facts_between_those_of_a_shared_page_are_not_taken_for_confirmed() -> None:
    book = opened(Book(), "p", [Delivery(1, 1, 1), Delivery(3, 3, 1)]).confirmed("p", 1.0)
    assert [book.was_confirmed(sequence) for sequence in (1, 2, 3)] == [True, False, True]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5))), st.integers(1, 70))
def test_merged_spans_hold_what_the_spans_hold(pairs: list[tuple[int, int]], sequence: int) -> None:
    spans = [Span(first, first + length) for first, length in pairs]
    found = merged(spans)
    assert within(found, sequence) == any(span.first <= sequence <= span.last for span in spans)
    assert all(one.last + 1 < other.first for one, other in pairwise(found))


def test_a_consumer_that_was_reset_starts_over() -> None:
    book = opened(Book(made=1, server="N1", delivered=10), "p1", first_deliveries([11], 11))
    book = opened(book, "p2", first_deliveries([12], 12)).confirmed("p1", 1.0)
    after = book.seen(1, "N1", delivered=0, floor=0, clustered=False, dedicated=False)
    assert (after.open, after.done) == ((), ())
    assert "p2" in after.stale


def test_a_server_that_was_killed_may_forget_deliveries_and_the_book_does_not() -> None:
    book = opened(Book(made=1, server="N1", delivered=10), "p1", first_deliveries([11], 11)).confirmed("p1", 1.0)
    after = book.seen(1, "N2", delivered=5, floor=5, clustered=False, dedicated=False)
    assert after.was_confirmed(11)
    assert after.delivered == 5


def test_a_dedicated_reader_resets_its_consumer_itself_and_its_book_goes_on() -> None:
    book = opened(Book(made=1, server="N1", delivered=10), "p1", first_deliveries([11], 11))
    book = opened(book.confirmed("p1", 1.0), "p2", first_deliveries([12, 13], 12), at=2.0)
    claimed = book.claimed("call", 3.0)
    assert (claimed.open, claimed.stale, claimed.claim) == ((), ("p2",), ("call", 3.0))
    after = claimed.seen(1, "N1", delivered=0, floor=11, clustered=False, dedicated=True)
    assert after.was_confirmed(11)
    assert [after.tries_of(sequence) for sequence in (12, 13, 14)] == [1, 1, 0]
    assert opened(after, "p3", first_deliveries([12])).claim is None
    late = opened(after, "p4", first_deliveries([12, 13])).seen(1, "N1", 0, floor=11, clustered=False, dedicated=True)
    assert late.page("p4"), "a reset of its own that comes late takes no page away"
    moved = opened(after, "p4", first_deliveries([12])).seen(1, "N1", 0, floor=4, clustered=False, dedicated=True)
    assert not moved.was_confirmed(11)


def test_instances_of_a_dedicated_reader_leave_a_page_and_a_claim_alone_for_their_time() -> None:
    assert Book().taken_until("me", 30) == 0
    assert opened(Book(), "p", first_deliveries([1]), at=100.0).taken_until("me", 30) == 130
    claimed = Book().claimed("other", 100.0)
    assert claimed.taken_until("me", 30) == 100 + CLAIM_SECONDS
    assert claimed.taken_until("other", 30) == 0
    assert Book.parse(claimed.encoded()) == claimed


def test_a_consumer_made_anew_under_the_same_name_starts_over() -> None:
    book = opened(Book(made=1, server="N1"), "p1", first_deliveries([1])).confirmed("p1", 1.0)
    assert not book.seen(2, "N1", delivered=5, floor=0, clustered=False, dedicated=False).was_confirmed(1)


def test_pages_are_remembered_for_a_while_and_not_for_ever() -> None:
    book = Book()
    for number in range(200):
        book = opened(book, f"p{number}", first_deliveries([number + 1], number + 1), at=float(number))
        book = book.confirmed(f"p{number}", float(number))
    assert len(book.done) == REMEMBER_PAGES
    assert book.is_done("p199")
    assert not book.is_done("p0")


def test_a_book_does_not_grow_without_end_however_fast_pages_are_confirmed() -> None:
    book = Book()
    for number in range(400):
        book = opened(book, f"p{number}", first_deliveries([number + 1], number + 1)).confirmed(f"p{number}", 0.0)
    assert len(book.done) == REMEMBER_PAGES + 1
    assert book.confirmed_spans() == [Span(1, 400)]


def test_a_book_with_holes_does_not_grow_without_end_either() -> None:
    book = Book()
    for number in range(1, 401):
        book = opened(book, f"p{number}", first_deliveries([number * 2], number)).confirmed(f"p{number}", number / 100)
    spans = book.confirmed_spans()
    assert len(spans) == MOST_REMEMBERED + REMEMBER_PAGES
    assert spans == [Span(n * 2, n * 2) for n in range(401 - len(spans), 401)], "the oldest are forgotten first"


def test_what_older_pages_held_is_remembered_for_seconds_without_their_ids() -> None:
    book = Book()
    for number in range(1, 1_001):
        book = opened(book, f"p{number}", first_deliveries([number], number)).confirmed(f"p{number}", number / 50)
    assert len(book.encoded()) < 4_000
    assert book.confirmed_spans()[0].first < 1_000 - 50 * REMEMBER_SECONDS
    assert book.confirmed_spans()[0].first > 1_000 - 50 * (REMEMBER_SECONDS + 3)
    assert book.all_confirmed(900, 950)
    assert not book.all_confirmed(999, 1_001)


@given(st.lists(st.tuples(st.sampled_from(["deliver", "confirm"]), st.integers(0, 3), st.integers(1, 8)), max_size=60))
def test_no_fact_is_ever_confirmed_by_two_pages_or_held_by_two(steps: list[tuple[str, int, int]]) -> None:
    book, number, attempts = Book(), 0, dict[int, int]()
    pages: dict[int, str] = {}
    confirmed_by: dict[int, str] = {}
    for at, (what, reader, sequence) in enumerate(steps):
        if what == "deliver":
            number += 1
            attempts[sequence] = attempts.get(sequence, 0) + 1
            pages[reader] = f"p{at}"
            before = [page.id for page in book.open]
            book = opened(book, pages[reader], [Delivery(sequence, number, attempts[sequence])], before)
        elif reader in pages and (page := book.page(pages[reader])):
            for one in page.deliveries():
                assert one.sequence not in confirmed_by, steps
                confirmed_by[one.sequence] = page.id
            book = book.confirmed(page.id, 0.0)
        held = [one.sequence for page in book.open for one in page.deliveries()]
        assert len(held) == len(set(held)), steps
