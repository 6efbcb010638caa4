"""The book of a consumer's pages: which reader holds which facts, and which pages are confirmed. Pure.

The server accepts an acknowledgement of any delivery of a message, not only of the latest. So a late reader would
confirm facts that another reader holds by then. And a server that is killed forgets acknowledgements and deliveries of
its last tenth of a second, and redelivers those, even as if for the first time. The book decides instead: one record
per consumer, each change made only on top of the last revision, so that "redelivered" and "confirmed" always have an
order.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

VERSION = 1
REMEMBER_SECONDS = 10.0
"""How long a confirmed page is remembered beside those after it: much longer than a server waits to write to disk."""
MOST_AGAIN = 20_000
"""Maximum number of sequences whose acknowledgement is sent again."""
REMEMBER_PAGES = 32
"""This many confirmed, and as many stale, pages are remembered whatever their age."""
MOST_REMEMBERED = 256
"""Maximum number of spans that are remembered without their pages: every change writes the whole book."""
SUMMARY_SECONDS = 1.0
"""Pages that were confirmed within such a time, and are older than the last ones, are remembered as one."""
SUMMARY = ""
"""The id of what is remembered of several pages: only which facts they held."""
CLAIM_SECONDS = 2.0
"""Seconds that other instances of a dedicated reader wait for the one that resets the consumer for its next page."""


class Delivery(NamedTuple):
    """One delivery of one message to one reader."""

    sequence: int
    """The stream sequence."""
    number: int
    """The consumer sequence: counts deliveries."""
    attempt: int
    """How often the message was delivered, including this delivery."""


class AnyDelivery(Protocol):
    """A `Delivery`, or the delivered message itself."""

    @property
    def sequence(self) -> int: ...

    @property
    def number(self) -> int: ...

    @property
    def attempt(self) -> int: ...


D = TypeVar("D", bound=AnyDelivery)


class SequenceRun(NamedTuple):
    """Deliveries of which each counts sequence and number on by one."""

    sequence: int
    number: int
    length: int
    attempt: int


class Span(NamedTuple):
    """Sequences in a row."""

    first: int
    last: int


def runs(deliveries: Iterable[AnyDelivery]) -> tuple[SequenceRun, ...]:
    """Compress deliveries into runs."""
    found: list[SequenceRun] = []
    first = start = count = tried = 0
    for one in deliveries:
        sequence, number, attempt = one.sequence, one.number, one.attempt
        if count and sequence == first + count and number == start + count and attempt == tried:
            count += 1
            continue
        if count:
            found.append(SequenceRun(first, start, count, tried))
        first, start, count, tried = sequence, number, 1, attempt
    if count:
        found.append(SequenceRun(first, start, count, tried))
    return tuple(found)


def runs_above(made: Iterable[SequenceRun], floor: int) -> list[SequenceRun]:
    """The part of the runs whose sequences are above `floor`."""
    found = []
    for sequence, number, count, attempt in made:
        if (below := min(max(floor - sequence + 1, 0), count)) < count:
            found.append(SequenceRun(sequence + below, number + below, count - below, attempt))
    return found


def deliveries_of(made: Iterable[SequenceRun]) -> Iterator[Delivery]:
    """Expand the runs of `runs` into deliveries."""
    for sequence, number, count, attempt in made:
        for step in range(count):
            yield Delivery(sequence + step, number + step, attempt)


@dataclass(frozen=True, slots=True)
class OpenPage:
    """A page that a reader holds and has not confirmed."""

    id: str
    at: float
    """When it was handed out, in seconds since 1970."""
    runs: tuple[SequenceRun, ...]

    def deliveries(self) -> Iterator[Delivery]:
        return deliveries_of(self.runs)

    @property
    def last(self) -> int:
        return max(sequence + count - 1 for sequence, _, count, _ in self.runs)

    def attempt_of(self, sequence: int) -> int | None:
        """Which delivery of a message the page holds; None when it does not hold it."""
        return next((attempt for first, _, count, attempt in self.runs if 0 <= sequence - first < count), None)

    def spans(self) -> tuple[Span, ...]:
        """Its sequences. First deliveries in a row leave nothing out that the consumer reads: they are one span."""
        first, number, _, _ = self.runs[0]
        expected = number
        for _, start, count, attempt in self.runs:
            if start != expected or attempt != 1:
                return tuple(Span(sequence, sequence + count - 1) for sequence, _, count, _ in self.runs)
            expected = start + count
        return (Span(first, self.last),)


@dataclass(frozen=True, slots=True)
class DonePage:
    """A page that was confirmed a short while ago, or a summary of several of them."""

    id: str
    at: float
    spans: tuple[Span, ...]


class FetchClaim(NamedTuple):
    """An instance of a dedicated reader that is about to reset the consumer and to pull its next page."""

    id: str
    at: float
    """Server time of the claim, in seconds since 1970."""


class LostPages(NamedTuple):
    """How many pages, which began with the lowest fact that was not confirmed, ended with `last` and were lost."""

    last: int
    times: int


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same sequences in order; spans that touch become one."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.first <= found[-1].last + 1:
            found[-1] = Span(found[-1].first, max(found[-1].last, span.last))
        else:
            found.append(span)
    return found


def within(spans: Sequence[Span], sequence: int) -> bool:
    """Whether one of the spans, which are in order, holds the sequence."""
    at = bisect_right(spans, sequence, key=lambda span: span.first) - 1
    return at >= 0 and sequence <= spans[at].last


class PageAdmission(NamedTuple, Generic[D]):
    """The decision about a page's deliveries."""

    book: Book
    kept: list[D]
    """Deliveries for the reader."""
    confirmed: list[D]
    """Deliveries confirmed before, whatever the server says: they are acknowledged again."""


@dataclass(frozen=True, slots=True)
class Book:
    """The pages of one consumer."""

    made: int = 0
    """Creation time of the consumer, in microseconds."""
    server: str = ""
    """The id of the server that answered last; it changes with a restart."""
    delivered: int = 0
    """The highest number of a delivery seen."""
    ack: str = ""
    """The prefix of acknowledgement subjects."""
    open: tuple[OpenPage, ...] = ()
    done: tuple[DonePage, ...] = ()
    stale: tuple[str, ...] = field(default=())
    """Pages that can no longer be confirmed."""
    claim: FetchClaim | None = None
    """Of a dedicated reader: the instance that is resetting the consumer."""
    tries: tuple[LostPages, ...] = ()
    """Of a dedicated reader: pages that were handed out and not confirmed. A reset makes the server forget that."""

    # -- as bytes --------------------------------------------------------------------------------------------------

    def encoded(self) -> bytes:
        value = {
            "version": VERSION,
            "made": self.made,
            "server": self.server,
            "delivered": self.delivered,
            "ack": self.ack,
            "open": [(page.id, page.at, page.runs) for page in self.open],
            "done": [(page.id, page.at, page.spans) for page in self.done],
            "stale": self.stale,
            "claim": self.claim,
            "tries": self.tries,
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        value = json.loads(raw)
        return cls(
            made=value["made"],
            server=value["server"],
            delivered=value["delivered"],
            ack=value["ack"],
            open=tuple(OpenPage(id, at, tuple(SequenceRun(*run) for run in made)) for id, at, made in value["open"]),
            done=tuple(DonePage(id, at, tuple(Span(*span) for span in spans)) for id, at, spans in value["done"]),
            stale=tuple(value["stale"]),
            claim=FetchClaim(*value["claim"]) if value.get("claim") else None,
            tries=tuple(LostPages(*one) for one in value.get("tries", ())),
        )

    # -- queries ---------------------------------------------------------------------------------------------------

    def page(self, page_id: str) -> OpenPage | None:
        return next((page for page in self.open if page.id == page_id), None)

    def is_done(self, page_id: str) -> bool:
        return any(page.id == page_id for page in self.done)

    def all_confirmed(self, first: int, last: int) -> bool:
        """Whether pages that are done cover all sequences from `first` to `last`."""
        return any(span.first <= first and last <= span.last for span in self.confirmed_spans())

    def was_confirmed(self, sequence: int) -> bool:
        return within(self.confirmed_spans(), sequence)

    def confirmed_spans(self) -> list[Span]:
        """What the pages that are done cover, in order, with as few spans as that takes."""
        return merged(span for page in self.done for span in page.spans)

    def runs_of(self, page_id: str) -> tuple[SequenceRun, ...]:
        """What to acknowledge for a page that is done; nothing when it is not known any more.

        Which deliveries they were is not remembered: the server looks at the sequence only.
        """
        spans = next((page.spans for page in self.done if page.id == page_id), ())
        if sum(span.last - span.first + 1 for span in spans) > MOST_AGAIN:
            return ()  # a span with much in between that the consumer does not read
        return tuple(SequenceRun(first, 1, last - first + 1, 1) for first, last in spans)

    def taken_until(self, call: str, ack_wait: float) -> float:
        """Until when, in server time, a dedicated reader has to leave the consumer alone; 0 for "not at all".

        That is while an instance holds a page, or claims the consumer for its next one: any but that of `call`.
        """
        pages = [page.at + ack_wait for page in self.open]
        claims = [self.claim.at + min(ack_wait, CLAIM_SECONDS)] if self.claim and self.claim.id != call else []
        return max([*pages, *claims], default=0.0)

    def tries_of(self, sequence: int) -> int:
        """How many pages of a dedicated reader held a fact and were lost."""
        return sum(one.times for one in self.tries if sequence <= one.last)

    # -- changes ---------------------------------------------------------------------------------------------------

    def seen(self, made: int, server: str, delivered: int, floor: int, clustered: bool, dedicated: bool) -> Book:
        """The book next to the consumer as it is now.

        A consumer that was recreated, or reset, starts over: its open pages become stale. Delivery numbers that
        decrease are a reset too, unless the server was restarted: a killed single server has forgotten the last of
        them. `floor` is the sequence up to which everything is acknowledged.

        A dedicated reader resets its consumer itself, to the ack floor. So there it is a foreign reset only if the
        consumer is also before what was confirmed last.
        """
        went_back = not dedicated or floor < max((span.last for page in self.done for span in page.spans), default=0)
        went_down = delivered < self.delivered and went_back
        if made != self.made or (went_down and (clustered or server == self.server)):
            stale = self._stale(*(page.id for page in self.open))
            return Book(made, server, delivered, self.ack, stale=stale)
        gone = [page.id for page in self.open if page.last <= floor]
        kept = tuple(page for page in self.open if page.last > floor)
        tries = tuple(one for one in self.tries if one.last > floor)
        return replace(self, server=server, delivered=delivered, open=kept, stale=self._stale(*gone), tries=tries)

    def claimed(self, call: str, at: float) -> Book:
        """The book while `call` resets the consumer of a dedicated reader: all open pages are stale."""
        tries = Counter({one.last: one.times for one in self.tries})
        tries.update(page.last for page in self.open)
        most = [LostPages(*pair) for pair in sorted(tries.items())[-REMEMBER_PAGES:]]
        stale = self._stale(*(page.id for page in self.open))
        return replace(self, delivered=0, open=(), stale=stale, claim=FetchClaim(call, at), tries=tuple(most))

    def admit(
        self, page_id: str, deliveries: Sequence[D], before: Iterable[str], ack: str, at: float
    ) -> PageAdmission[D]:
        """Hand out deliveries, in the order of their sequences, as a page.

        Facts of a page of `before` (open before these deliveries were requested) were redelivered by the server, since
        they were not confirmed in time: that page is stale now. A page that was opened meanwhile loses its facts only
        to a later delivery.
        """
        earlier, stale, kept, confirmed = set(before), set[str](), list[D](), list[D]()
        done = self.confirmed_spans()
        known = max([0, *(span.last for span in done[-1:]), *(page.last for page in self.open)])
        unknown = bisect_right(deliveries, known, key=_sequence)
        for one in deliveries[:unknown]:
            if within(done, one.sequence):
                confirmed.append(one)
                continue
            holders = [page for page in self.open if page.attempt_of(one.sequence) is not None]
            beaten = {page.id for page in holders if page.id in earlier or _later(one, page)}
            stale |= beaten
            if len(beaten) == len(holders):
                kept.append(one)
        kept += deliveries[unknown:]  # above all that the book knows, as in most pages
        rest = tuple(page for page in self.open if page.id not in stale)
        opened = (OpenPage(page_id, at, runs(kept)),) if kept else ()
        highest = max(self.delivered, max(map(_number, deliveries), default=0))
        told = self._stale(*sorted(stale))
        book = replace(self, delivered=highest, ack=ack, open=rest + opened, stale=told, claim=None)
        return PageAdmission(book, kept, confirmed)

    def confirmed(self, page_id: str, at: float) -> Book:
        """The book with an open page confirmed."""
        page = self.page(page_id)
        assert page is not None, "only an open page can be confirmed"
        done = _summarized((*self.done, DonePage(page_id, at, page.spans())))
        return replace(self, open=tuple(one for one in self.open if one.id != page_id), done=done)

    def _stale(self, *pages: str) -> tuple[str, ...]:
        return (*self.stale, *pages)[-REMEMBER_PAGES:]


def _summarized(done: tuple[DonePage, ...]) -> tuple[DonePage, ...]:
    """The last pages as they are; of older ones only which facts they held, and only for some seconds."""
    oldest = max(page.at for page in done) - REMEMBER_SECONDS
    summaries: list[DonePage] = []
    for page in done[:-REMEMBER_PAGES]:
        last = summaries[-1] if summaries else None
        if last and page.id != SUMMARY and page.at < last.at + SUMMARY_SECONDS:
            summaries[-1] = DonePage(SUMMARY, last.at, tuple(merged(last.spans + page.spans)))
        elif page.at + SUMMARY_SECONDS >= oldest:
            summaries.append(DonePage(SUMMARY, page.at, page.spans))
    excess = sum(len(page.spans) for page in summaries) - MOST_REMEMBERED
    while excess > 0:
        first = summaries.pop(0)
        if excess < len(first.spans):
            summaries.insert(0, replace(first, spans=first.spans[excess:]))
        excess -= len(first.spans)
    return (*summaries, *done[-REMEMBER_PAGES:])


def _sequence(one: AnyDelivery) -> int:
    return one.sequence


def _number(one: AnyDelivery) -> int:
    return one.number


def _later(delivery: AnyDelivery, page: OpenPage) -> bool:
    held = page.attempt_of(delivery.sequence)
    return held is not None and delivery.attempt > held
