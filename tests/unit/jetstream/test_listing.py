"""Streams that are listed again and again are parsed where they differ, and are what a whole parse would find."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.jetstream.listing import StreamMemory
from penstock.jetstream.model import StreamInfo


def stream(name: str, last: int = 0, ts: str = "2026-11-18T10:00:00Z", **config: Any) -> dict[str, Any]:
    state = {"messages": last, "bytes": 9, "first_seq": 1, "last_seq": last, "consumer_count": 0}
    return {"config": {"name": name, **config}, "created": "2026-11-18T09:00:00Z", "state": state, "ts": ts}


def page(*streams: dict[str, Any], **more: Any) -> bytes:
    answer = {"type": "stream_list_response", "total": len(streams), "offset": 0, "limit": 256, "streams": streams}
    return json.dumps({**answer, **more}, separators=(",", ":")).encode()


def listed(memory: StreamMemory, data: bytes) -> list[StreamInfo]:
    answer = memory.page(data)
    assert {**answer, "streams": 0} == {**json.loads(data), "streams": 0}
    found = memory.streams(answer["streams"])
    assert found == [StreamInfo.parse(item) for item in json.loads(data)["streams"]]
    return found


def test_what_has_not_changed_is_the_same_object_and_the_rest_is_new() -> None:
    memory = StreamMemory()
    first = listed(memory, page(stream("A"), stream("B"), stream("C")))
    answer = memory.page(page(stream("A", ts="later"), stream("B", last=7, ts="later"), stream("D", ts="later")))
    again = memory.streams(answer["streams"])
    assert again[0] is first[0]
    assert [(one.name, one.state.last_seq) for one in again] == [("A", 0), ("B", 7), ("D", 0)]
    third = memory.streams(memory.page(page(stream("C", ts="later")))["streams"])
    assert third[0] is not first[2], "it was away in between"


def test_a_listing_that_was_not_completed_is_forgotten() -> None:
    memory = StreamMemory()
    first = listed(memory, page(stream("A")))
    memory.begin()
    memory.page(page(stream("GONE"), missing=["A"]))
    memory.begin()
    assert memory.streams(memory.page(page(stream("A", ts="later")))["streams"])[0] is first[0]
    memory.begin()
    assert memory.page(page(stream("GONE", ts="later")))["streams"][0]["ts"] == "later"


@pytest.mark.parametrize("text", ['{"config":', ',"ts":"x"}', '"},{"config":{"name":"X"', "ü\u2028\\", '"ts":"'])
def test_texts_that_look_like_the_answer_itself_are_texts(text: str) -> None:
    memory = StreamMemory()
    odd = stream("A", description=text, metadata={text: text})
    for _ in range(3):
        listed(memory, page(odd, stream("B"), stream("C", description=text)))


@pytest.mark.parametrize(
    "data",
    [
        page(),
        page(stream("A"), missing=["B", "C"]),
        json.dumps(json.loads(page(stream("A"), stream("B")))).encode(),  # with spaces
        page({"created": "2026-11-18T09:00:00Z", **stream("A")}, stream("B")),  # another order
        page({key: value for key, value in stream("A").items() if key != "ts"}, stream("B")),  # of an older server
        page({**stream("A"), "later": 1}, stream("B")),
        page({**stream("A"), "later": "x"}, stream("B")),
        b'{"type":"x","error":{"code":503,"err_code":10008,"description":"busy"}}',
    ],
)
def test_pages_that_are_written_in_another_way_are_read_as_they_are(data: bytes) -> None:
    memory = StreamMemory()
    for _ in range(3):
        answer = memory.page(data)
        assert answer == json.loads(data)
        memory.streams(answer.get("streams", []))
