"""Named readers: fetch a page, confirm its receipt. Progress lives on the server, in the durable consumer.

A fetch, in order, and what a crash after each step leaves behind:

1. pull messages (crash: the server delivers them again after the ack wait);
2. write the page into the consumer's book, on top of the last state of it (crash: as before; the page is stale as soon
   as its facts are delivered again);
3. hand out the page with its receipt (crash of the reader: as before).

A confirmation, in order:

1. check the receipt, and move its page from open to done in the book (crash: the page **is** confirmed; whatever the
   server delivers of it again is acknowledged and not handed out);
2. acknowledge every message of exactly that page, in one write, until the server has taken all of them (crash: what
   it has not taken is delivered again, and acknowledged then).

A dedicated reader gets facts in stream order, so it must not see redeliveries in the order in which their ack waits
ended. While its page is open, a fetch returns nothing. When anything else is outstanding:

1. write a claim into the book, which makes all open pages stale (crash: others wait for two seconds);
2. reset the consumer to its ack floor: the server delivers all that is not confirmed, in order (crash: as before);
3. pull, and ask the server whether anything is outstanding beside it: then another instance pulled too, and what came
   is dropped (crash: the next fetch finds messages outstanding and no page, and begins here again);
4. open the page on top of exactly the book of step 1, or of the read: if another process wrote, it is dropped.
"""

from __future__ import annotations

import asyncio
import base64
import random
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from penstock.errors import (
    ConfigError,
    ConsumerNotFound,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    ServerBusy,
    Unavailable,
)
from penstock.facts.ahead import Ahead
from penstock.facts.errors import ForgedReceipt, StaleReceipt
from penstock.facts.fact import Fact, received_facts
from penstock.facts.pages import Book, Delivery, OpenPage, PageAdmission, SequenceRun, deliveries_of, runs_above
from penstock.facts.pull import Delivered, PagePuller, Want, acknowledge, acknowledge_in_order, give_back
from penstock.facts.receipt import ID_BYTES, Receipt, key_id, verified
from penstock.facts.store import FactStore, Kept
from penstock.jetstream import features, metadata
from penstock.jetstream.connection import Broker, WrongRevision
from penstock.jetstream.model import ConsumerInfo, parse_time, seconds
from penstock.retry import Backoff

MOST_FACTS = 5_000
"""Facts of one page."""
PAGE_BYTES = 8 * 1024 * 1024
MOST_BOOK_BYTES = 512 * 1024
"""A book must fit into one message, with room to spare."""
ACKS_WITHIN = 1.0  # seconds; a server that lost its last deliveries does not answer for them
DEDICATED = "dedicated"
EXPLICIT, ALL = "explicit", "all"
"""Policies of acknowledgement: of one message each, or of one and all before it."""
DEDICATED_LOOKS = 0.5  # seconds between two looks of a reader that has to wait for its own page
FIRST_PAUSE = 0.05  # seconds, at most, before the first try after a refusal
CONFLICT_PAUSE = 0.005  # seconds, at most, before the next try when another reader was first
DEFAULT_ACK_WAIT = 30 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Page:
    """Facts in the order of the stream, and the receipt that confirms them. Without facts there is no receipt."""

    stream: str
    consumer: str
    facts: tuple[Fact, ...]
    receipt: str | None
    pending: int
    """Facts that were waiting behind this page when it was fetched, also those that are to be delivered again.

    Of an empty page it counts also what lies in pages that others hold: 0 means that all is confirmed.
    """
    retry_after: timedelta | None = None
    """Of an empty page: when facts that are held unconfirmed come again; None when there are none."""
    held: int = 0
    """Of an empty page: facts that were handed out and are not confirmed."""

    def __bool__(self) -> bool:
        return bool(self.facts)

    def __len__(self) -> int:
        return len(self.facts)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The page of a receipt is confirmed; `already` when it was before."""

    stream: str
    consumer: str
    first: int
    last: int
    already: bool


class PageReader:
    """Fetches and confirms for any number of consumers, over one link."""

    def __init__(self, link: Broker) -> None:
        self._link = link
        self._store = FactStore(link)
        self._puller = PagePuller(link)
        self._ahead = Ahead(self._puller, partial(give_back, link))
        self._books: dict[tuple[str, str], Kept] = {}
        """Books as last read. A write on top of an older revision is refused, which costs one more attempt."""
        self._streams: dict[str, str] = {}
        self._dedicated: set[tuple[str, str]] = set()
        """Consumers whose book is read at each fetch: another instance may hold the only page."""

    async def stream_of(self, consumer: str, stream: str | None = None) -> str:
        """The stream of a consumer; found by the consumer's name where only one stream has it."""
        if stream:
            return stream
        if consumer not in self._streams:
            js = self._link.jetstream
            found = [name for name in await js.stream_names() if consumer in await js.consumer_names(name)]
            if not found:
                raise ConsumerNotFound(f"consumer {consumer!r}", 404, 10014, "no stream has a consumer of that name")
            if len(found) > 1:
                raise ConfigError(f"streams {', '.join(found)} each have a consumer {consumer!r}: say which one")
            self._streams[consumer] = found[0]
        return self._streams[consumer]

    # -- fetch -------------------------------------------------------------------------------------------------------

    async def fetch(
        self, consumer: str, limit: int, stream: str | None, wait: float, max_bytes: int = PAGE_BYTES
    ) -> Page:
        """Fetch a page of at most `limit` facts, waiting up to `wait` seconds for some; otherwise an empty one."""
        if not 1 <= limit <= MOST_FACTS:
            raise ConfigError(f"a page has 1 to {MOST_FACTS} facts, not {limit}")
        name = await self.stream_of(consumer, stream)
        deadline, patience, call = time.monotonic() + wait, self._patience(), _new_id()
        self._ahead.fetching((name, consumer))
        while True:
            look = await self._look(name, consumer)
            left = max(deadline - time.monotonic(), 0)
            if due := _taken_for(_usable(look), look, call):
                if not left:
                    return _empty(look)
                await asyncio.sleep(min(left, due, DEDICATED_LOOKS))
                continue
            # In slices: a late delivery must not expire before it is in the book.
            want = Want(_allowed(limit, look.info), max_bytes, min(left, min(_ack_waits(look.info)) / 2))
            if look.dedicated:
                page = await self._next_page(look, want, call, patience)
            else:
                page = await self._page(look, want, patience)
            if page is not None and (page.facts or time.monotonic() >= deadline):
                self._ahead.fetched((name, consumer), want, len(page), page.pending)
                return page

    async def _page(self, look: ConsumerLook, want: Want, patience: Patience) -> Page | None:
        """One attempt: pull, write the book, return the page. None when nothing that arrived could be returned."""
        info, began, before = look.info, time.monotonic(), tuple(page.id for page in look.book.open)
        if ahead := await self._ahead.taken(info, want, (await self._link.ready()).opened):
            began, before, found = ahead[0].began, ahead[0].before, ahead[1]
        else:
            found = await self._puller.pull(info.stream, info.name, want)
        if not found:
            return _empty(await self._look(info.stream, info.name, fresh=True))
        opened = await self._open(look, found, before, began + min(_ack_waits(info)), patience)
        if opened is None:
            return None
        return await self._handed_out(look, found, opened, await self._behind(info, found))

    async def _handed_out(self, look: ConsumerLook, found: Sequence[Delivered], opened: OpenPage, pending: int) -> Page:
        if sum(run.length for run in opened.runs) != len(found):
            wanted = set(opened.deliveries())
            found = [one for one in found if one.delivery() in wanted]
        tries = look.book.tries_of
        attempts = [tries(one.sequence) + 1 for one in found] if look.dedicated else None
        facts = received_facts(look.info.stream, found, attempts)
        return Page(look.info.stream, look.info.name, facts, await self._receipt(look.info, opened), pending)

    async def _next_page(self, look: ConsumerLook, want: Want, call: str, patience: Patience) -> Page | None:
        """One attempt for a dedicated reader: the facts after the last one confirmed, in order.

        None when nothing that arrived could be returned, or when another instance pulled too.
        """
        info, began = look.info, time.monotonic()
        if look.book.open or info.ack_pending:
            claimed = await self._begin_anew(look, call, patience)
            if claimed is None:
                return None
            look = claimed
        found = await self._puller.pull(info.stream, info.name, want)
        if not found:
            return _empty(await self._look(info.stream, info.name))
        now = await self._link.jetstream.consumer_info(info.stream, info.name)
        if not _is_all_outstanding(found, now):
            await asyncio.sleep(random.uniform(0, CONFLICT_PAUSE))
            return None
        opened = await self._open_next(look, found, began + min(_ack_waits(info)), patience)
        return await self._handed_out(look, found, opened, now.pending) if opened else None

    async def _begin_anew(self, look: ConsumerLook, call: str, patience: Patience) -> ConsumerLook | None:
        """Reset the consumer so that all unconfirmed facts are delivered in order; None when it must be retried."""
        js, at = self._link.jetstream, (look.info.stream, look.info.name)
        await js.require(features.CONSUMER_RESET)
        book = look.book.claimed(call, look.now)
        if not await self._write(look, book, patience):
            return None
        try:
            await js.reset_consumer(*at)
        except OutcomeUnknown as exc:
            await patience.after(exc)
            return None
        return look._replace(book=book, revision=self._books[at].revision)

    async def _open_next(
        self, look: ConsumerLook, found: Sequence[Delivered], expires: float, patience: Patience
    ) -> OpenPage | None:
        """Write the only open page of a dedicated reader; None when another process wrote since the book was read."""
        page_id, deliveries, ack = _new_id(), _latest(found), found[0].ack().consumer_prefix
        made = look.book.admit(page_id, deliveries, (), ack, look.now)
        await acknowledge(self._link, ack, _again(look.info, made), ACKS_WITHIN)
        if not made.kept:
            return None
        await self._check_size(look.info, made.book, found)
        while time.monotonic() < expires:
            if await self._write(look, made.book, patience):
                return made.book.page(page_id)
            now = await self._look(look.info.stream, look.info.name, fresh=True)
            if (mine := now.book.page(page_id)) is not None:
                return mine  # it was stored; only the answer was lost
            if now.revision != look.revision:
                return None
        return None

    async def _behind(self, info: ConsumerInfo, found: Sequence[Delivered]) -> int:
        """Return how many facts wait after a page that was just opened.

        The last delivery says how many were never delivered. Facts that are delivered again come first, so only behind
        a page that ends with one may there be more of them: in flight, and in no open page.
        """
        last = max(found, key=_number)
        if last.attempt == 1:
            return last.ack().pending
        look = await self._look(info.stream, info.name)
        held = sum(1 for page in look.book.open for one in page.deliveries() if one.sequence > look.floor)
        return look.info.pending + max(look.info.ack_pending - held, 0)

    async def _open(
        self, look: ConsumerLook, found: Sequence[Delivered], before: Sequence[str], expires: float, patience: Patience
    ) -> OpenPage | None:
        """Write the page into the book; None when all of it was confirmed before, or another reader holds it.

        `before` are the pages that were open when it was requested.
        """
        page_id = _new_id()
        deliveries, ack = _latest(found), found[0].ack().consumer_prefix
        server = look.book.server
        # A server that was restarted meanwhile may have forgotten these deliveries, and then counts them again.
        while time.monotonic() < expires and (look.book.server == server or look.info.leader is not None):
            if (mine := look.book.page(page_id)) is not None:
                return mine  # an earlier attempt was stored; only its answer was lost
            made = look.book.admit(page_id, deliveries, before, ack, look.now)
            await acknowledge(self._link, ack, made.confirmed, ACKS_WITHIN)
            if not made.kept:
                return None
            await self._check_size(look.info, made.book, found)
            if await self._write(look, made.book, patience):
                return made.book.page(page_id)
            look = await self._look(look.info.stream, look.info.name, fresh=True)
        return None

    async def _check_size(self, info: ConsumerInfo, book: Book, found: Sequence[Delivered]) -> None:
        if len(book.encoded()) > MOST_BOOK_BYTES:
            await give_back(self._link, found)
            raise ConfigError(
                f"consumer {info.name!r} has too many unconfirmed pages: confirm them, or fetch smaller ones"
            )

    async def _receipt(self, info: ConsumerInfo, page: OpenPage) -> str:
        first = min(run[0] for run in page.runs)
        receipt = Receipt(info.stream, info.name, _made(info), page.id, first, page.last)
        return receipt.signed((await self._store.signing_keys()).current)

    # -- confirm -----------------------------------------------------------------------------------------------------

    async def confirm(self, consumer: str, receipt: str | None, stream: str | None) -> Confirmation:
        """Confirm exactly the page of the receipt. Raises `ReceiptRefused`; then nothing was confirmed."""
        name = await self.stream_of(consumer, stream)
        checked = await self._checked(receipt, name, consumer)
        look = await self._look(name, consumer)
        if checked.made != _made(look.info):
            raise StaleReceipt(consumer, "the consumer was deleted and recreated since")
        already, look, runs = await self._close(look, checked)
        if not already and not look.dedicated:
            await self._pull_ahead(look, checked.page)
        await self._acknowledge(look.info, look.book.ack, runs)
        self._ahead.confirmed((name, consumer))
        return Confirmation(name, consumer, checked.first, checked.last, already)

    async def _pull_ahead(self, look: ConsumerLook, confirmed: str) -> None:
        """Let the next page come while this one is being acknowledged, for a reader that goes on without a pause."""
        before = tuple(page.id for page in look.book.open if page.id != confirmed)
        at, connection = (look.info.stream, look.info.name), (await self._link.ready()).opened
        self._ahead.begin(at, look.info, connection, before, min(_ack_waits(look.info)))

    async def close(self) -> None:
        """Give back what was pulled ahead."""
        await self._ahead.close()

    async def _checked(self, receipt: str | None, stream: str, consumer: str) -> Receipt:
        """Return the receipt after checking its signature. Before it is refused, the keys are read again."""
        try:
            return verified(receipt, (await self._store.signing_keys()).accepted, stream, consumer)
        except ForgedReceipt:
            return verified(receipt, (await self._store.signing_keys(fresh=True)).accepted, stream, consumer)

    async def rotate_signing_key(self) -> tuple[str, str | None]:
        """Sign with a new key from now on; returns the ids of the new key and of the one before, which stays valid."""
        keys = await self._store.rotate_signing_key()
        return key_id(keys.current), key_id(keys.previous) if keys.previous else None

    async def _close(self, look: ConsumerLook, receipt: Receipt) -> tuple[bool, ConsumerLook, Sequence[SequenceRun]]:
        """Move the page from open to done; says whether it was done before this call, and what to acknowledge."""
        mine: OpenPage | None = None
        patience = self._patience()
        while True:
            if look.book.page(receipt.page) is None:
                look = await self._look(receipt.stream, receipt.consumer, fresh=True)
            if (page := look.book.page(receipt.page)) is None:
                _refuse_unless_done(look, receipt)
                return mine is None, look, mine.runs if mine else look.book.runs_of(receipt.page)
            mine = page
            if await self._write(look, look.book.confirmed(receipt.page, look.now), patience):
                return False, look, mine.runs
            look = await self._look(receipt.stream, receipt.consumer, fresh=True)

    async def _acknowledge(self, info: ConsumerInfo, ack: str, runs: Sequence[SequenceRun]) -> None:
        """Acknowledge a page that is done. Deliveries that the server does not know were lost by it: they are
        redelivered, and then the book says that they are done.

        All go out in one write. The answer to the last stands for all where nothing on the way can lose some of them;
        else the consumer is asked, and what it does not have is acknowledged again, with an answer for each.
        """
        deadline = time.monotonic() + self._link.settings.timeout
        if not (above := runs_above(runs, info.ack_floor_stream_seq)):
            return
        if info.config.get("ack_policy") == ALL:
            above = [_last(above)]
        if await acknowledge_in_order(self._link, ack, above, ACKS_WITHIN) and await self._is_local(info):
            return
        left: list[Delivery] = list(deliveries_of(above))
        while left := await self._unacknowledged(info, left):
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"the page is confirmed, but {len(left)} acknowledgements are unanswered; confirm it again"
                )
            left = await acknowledge(self._link, ack, left, ACKS_WITHIN)

    async def _unacknowledged(self, info: ConsumerInfo, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """The deliveries that the server may still wait for."""
        now = await self._link.jetstream.consumer_info(info.stream, info.name)
        return [one for one in deliveries if now.ack_floor_stream_seq < one.sequence <= now.delivered_stream_seq]

    async def _is_local(self, info: ConsumerInfo) -> bool:
        """Whether the consumer is on the server that we are connected to: no other server can lose what we send."""
        connection = await self._link.ready()
        return info.leader is None and not self._link.settings.domain and connection.info.jetstream

    # -- the book ----------------------------------------------------------------------------------------------------

    async def forget(self, stream: str, consumer: str) -> None:
        """Reset the book: the consumer starts over, as after a reset."""
        self._books.pop((stream, consumer), None)
        await self._store.forget(stream, consumer)

    async def _look(self, stream: str, consumer: str, fresh: bool = False) -> ConsumerLook:
        """Read the consumer and its book. The book is the older of the two, whatever other processes do meanwhile."""
        at = (stream, consumer)
        kept = None if fresh else self._books.get(at)
        if kept is None:
            await self._store.signing_keys(fresh)  # creates the bucket at its first use
        if kept is None or at in self._dedicated:
            kept = self._books[at] = await self._store.book(*at)
        asked_at = time.monotonic()
        info, server = await self._asked(stream, consumer)
        dedicated = (info.config.get("metadata") or {}).get(metadata.READER) == DEDICATED
        (self._dedicated.add if dedicated else self._dedicated.discard)(at)
        floor, delivered = info.ack_floor_stream_seq, info.delivered_consumer_seq
        book = kept.book.seen(_made(info), server, delivered, floor, info.leader is not None, dedicated)
        return ConsumerLook(info, book, kept.revision, dedicated, asked_at)

    async def _asked(self, stream: str, consumer: str) -> tuple[ConsumerInfo, str]:
        """The consumer, and the id of the server that told us about it."""
        while True:
            server = (await self._link.ready()).info.server_id
            try:
                info = await self._link.jetstream.consumer_info(stream, consumer)
            except NotFound:
                self._streams.pop(consumer, None)  # it may be in another stream by now
                raise
            if (await self._link.ready()).info.server_id == server:
                return info, server

    async def _write(self, look: ConsumerLook, book: Book, patience: Patience) -> bool:
        """Replace the book that was read; False when it has changed since, or when the answer was lost.

        Raises the server's error when it has refused for as long as the call may take, as when its store is full.
        """
        at = (look.info.stream, look.info.name)
        try:
            self._books[at] = await self._store.write(*at, book, look.revision)
        except WrongRevision:
            self._books.pop(at, None)
            await asyncio.sleep(random.uniform(0, CONFLICT_PAUSE))
            return False
        except (ServerBusy, Unavailable) as exc:
            self._books.pop(at, None)
            await patience.after(exc)
            return False
        return True

    def _patience(self) -> Patience:
        return Patience(self._link.settings.timeout)


class Patience:
    """Limits the retries of one call while the server refuses to write: `within` seconds after the first refusal."""

    def __init__(self, within: float) -> None:
        self._within = within
        self._until: float | None = None
        self._delays = Backoff(first=FIRST_PAUSE).delays()

    async def after(self, error: PenstockError) -> None:
        """Wait a little longer each time; raises `error` when the retries have taken too long."""
        now, pause = time.monotonic(), next(self._delays)
        if self._until is None:
            self._until = now + self._within
        if now + pause >= self._until:
            raise error
        await asyncio.sleep(pause)


class ConsumerLook(NamedTuple):
    """A consumer and its book, read together."""

    info: ConsumerInfo
    book: Book
    revision: int
    dedicated: bool
    at: float
    """When the server was asked, on the monotonic clock."""

    @property
    def floor(self) -> int:
        return self.info.ack_floor_stream_seq

    @property
    def now(self) -> float:
        """The server's time, in seconds since 1970: instances need not agree on a clock of their own."""
        told = parse_time(self.info.raw.get("ts", ""))
        return told.timestamp() + time.monotonic() - self.at if told else time.time()


def _refuse_unless_done(look: ConsumerLook, receipt: Receipt) -> None:
    """Raise unless the page is done, or so old that it is not known any more and all of its facts are acknowledged."""
    if look.book.is_done(receipt.page):
        return
    if receipt.page in look.book.stale:
        raise StaleReceipt(receipt.consumer, "its facts were not confirmed in time and were delivered again, or reset")
    if receipt.last > look.info.ack_floor_stream_seq and not look.book.all_confirmed(receipt.first, receipt.last):
        raise StaleReceipt(
            receipt.consumer,
            "its page is not known any more: its facts were delivered again, or the consumer was reset",
        )


def _again(info: ConsumerInfo, made: PageAdmission[Delivered]) -> list[Delivered]:
    """What to acknowledge of the facts that were confirmed before.

    Where an acknowledgement stands for all before it, the last one that has no fact of the page before it.
    """
    if info.config.get("ack_policy") != ALL:
        return made.confirmed
    first = min((one.sequence for one in made.kept), default=None)
    return [one for one in made.confirmed if first is None or one.sequence < first][-1:]


def _last(runs: Sequence[SequenceRun]) -> SequenceRun:
    """The delivery with the highest sequence."""
    sequence, number, count, attempt = max(runs, key=lambda run: run.sequence + run.length)
    return SequenceRun(sequence + count - 1, number + count - 1, 1, attempt)


def _latest(found: Sequence[Delivered]) -> Sequence[Delivered]:
    """One delivery a message, by sequence: the last, where the same pull brought it twice."""
    if len({one.sequence for one in found}) == len(found):
        return found
    return sorted({one.sequence: one for one in sorted(found, key=_number)}.values(), key=_sequence)


def _sequence(one: Delivered) -> int:
    return one.sequence


def _number(one: Delivered) -> int:
    return one.number


def _empty(look: ConsumerLook) -> Page:
    """A page without facts, which says how many are held and when they come again."""
    info = look.info
    in_pages = sum(1 for page in look.book.open for one in page.deliveries() if one.sequence > look.floor)
    held = max(info.ack_pending, in_pages)
    after = timedelta(seconds=max(_held_until(look) - look.now, 0)) if held else None
    return Page(info.stream, info.name, (), None, info.unprocessed, after, held)


def _held_until(look: ConsumerLook) -> float:
    """Server time at which the first of the facts that are held unconfirmed come again, as far as that is known."""
    if look.book.open:
        return min(page.at for page in look.book.open) + min(_ack_waits(look.info))
    last = look.info.last_delivered
    return (last.timestamp() if last else look.now) + min(_ack_waits(look.info))


def _new_id() -> str:
    return base64.urlsafe_b64encode(secrets.token_bytes(ID_BYTES)).decode()


def _usable(look: ConsumerLook) -> ConsumerInfo:
    """A consumer that pages can be fetched from: pull, and acknowledged one by one, or by one reader in order."""
    info, policy = look.info, look.info.config.get("ack_policy")
    if info.config.get("deliver_subject"):
        raise ConfigError(f"consumer {info.name!r} of {info.stream!r} is a push consumer: facts are fetched by pull")
    if policy != EXPLICIT and not (policy == ALL and look.dedicated):
        raise ConfigError(
            f"consumer {info.name!r} of {info.stream!r} has ack_policy {policy!r}: a page is confirmed fact by fact, "
            "so that nobody confirms another's; make it explicit, or `all` for a dedicated reader"
        )
    return info


def _allowed(limit: int, info: ConsumerInfo) -> int:
    return min(limit, info.config.get("max_batch") or limit)


def _ack_waits(info: ConsumerInfo) -> list[float]:
    """Seconds after which the server delivers again; several where that depends on how often it did."""
    return [seconds(one) for one in info.config.get("backoff") or [info.config.get("ack_wait", DEFAULT_ACK_WAIT)]]


def _taken_for(info: ConsumerInfo, look: ConsumerLook, call: str) -> float:
    """Seconds that a dedicated reader has to wait: while a page is open, what lies behind would be out of order."""
    if not look.dedicated:
        return 0.0
    return max(look.book.taken_until(call, min(_ack_waits(info))) - look.now, 0.0)


def _is_all_outstanding(found: Sequence[Delivered], now: ConsumerInfo) -> bool:
    """Whether a pull brought all that the server counts as delivered and not acknowledged.

    Fewer than came may be left where the stream's limits removed some, unless the consumer was reset since.
    """
    mine = len({one.sequence for one in found})
    last = max(map(_number, found))
    return now.ack_pending == mine or (now.ack_pending < mine and now.delivered_consumer_seq == last)


def _made(info: ConsumerInfo) -> int:
    return int(info.created.timestamp() * 1_000_000) if info.created else 0
