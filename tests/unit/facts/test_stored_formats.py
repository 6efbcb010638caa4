"""The book of a named reader is read as it was written by earlier versions: samples of its bytes."""

from __future__ import annotations

import json

from penstock.facts.pages import Book, DonePage, FetchClaim, LostPages, OpenPage, SequenceRun, Span

BOOK = (
    b'{"version":1,"made":1763287200000000,"server":"NSERVER","delivered":9,"ack":"$JS.ACK.S.reader",'
    b'"open":[["p2",1763287205.5,[[4,4,3,1],[9,7,1,2]]]],"done":[["p1",1763287201.0,[[1,3]]]],"stale":["p0"],'
    b'"claim":["c1",1763287206.0],"tries":[[6,2]]}'
)


def test_a_book() -> None:
    found = Book.parse(BOOK)
    assert found == Book(
        made=1763287200000000,
        server="NSERVER",
        delivered=9,
        ack="$JS.ACK.S.reader",
        open=(OpenPage("p2", 1763287205.5, (SequenceRun(4, 4, 3, 1), SequenceRun(9, 7, 1, 2))),),
        done=(DonePage("p1", 1763287201.0, (Span(1, 3),)),),
        stale=("p0",),
        claim=FetchClaim("c1", 1763287206.0),
        tries=(LostPages(6, 2),),
    )
    assert found.encoded() == BOOK


def test_a_book_of_a_version_that_knew_no_dedicated_readers() -> None:
    old = {name: value for name, value in json.loads(BOOK).items() if name not in ("claim", "tries")}
    found = Book.parse(json.dumps(old).encode())
    assert (found.claim, found.tries, found.is_done("p1")) == (None, (), True)
