"""Lines of JSON become messages, or bad lines with a number and a reason."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.publish.lines import BadLine, LineFormat

EVENT = b'{"region":"eu","id":7,"ok":true,"payload":{"project":"p1","tags":["a","b"]},"text":"hi","a.b":"dotted"}'


def test_the_whole_line_is_the_data_and_the_subject_takes_fields() -> None:
    message = LineFormat(subject="orders.{region}.{payload.project}.{id}").message(3, EVENT)
    assert message == (3, "orders.eu.p1.7", EVENT, None, None)


@pytest.mark.parametrize(
    ("field", "data"),
    [("text", b"hi"), ("payload", b'{"project":"p1","tags":["a","b"]}'), ("id", b"7"), ("ok", b"true")],
)
def test_a_data_field_is_published_as_it_is_or_as_json(field: str, data: bytes) -> None:
    assert LineFormat(subject="s", data_field=field).message(1, EVENT).data == data


def test_headers_come_from_fields_and_from_an_object() -> None:
    line = b'{"trace":"t","none":null,"meta":{"Kind":"order","Tag":["a","b"]}}'
    shape = LineFormat(
        subject="s",
        headers={"Trace": "trace", "None": "none", "Gone": "gone"},
        headers_field="meta",
        message_id="trace",
    )
    message = shape.message(1, line)
    assert message.headers == {"Kind": "order", "Tag": ["a", "b"], "Trace": "t"}
    assert message.message_id == "t"


def test_a_subject_field_holds_the_whole_subject_and_a_key_may_contain_dots() -> None:
    assert LineFormat(subject_field="to").message(1, b'{"to":"a.b.c"}').subject == "a.b.c"
    assert LineFormat(subject="s.{a.b}").message(1, EVENT).subject == "s.dotted"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"region":"\xff"}', "not UTF-8"),
        (b"{}", "no field 'region'"),
        (b'{"region":null}', "no field 'region'"),
        (b'{"region":{"a":1}}', "must be a single value"),
        (b'{"region":"a b"}', "no single token"),
        (b'{"region":"a.b"}', "no single token"),
        (b'{"region":">"}', "no single token"),
        (b'{"region":""}', "no single token"),
    ],
)
def test_a_bad_line_says_its_number_and_what_is_wrong(line: bytes, reason: str) -> None:
    with pytest.raises(BadLine, match=f"line 42: .*{reason}"):
        LineFormat(subject="orders.{region}").message(42, line)


def test_headers_that_are_no_strings_make_a_bad_line() -> None:
    with pytest.raises(BadLine, match="object of header names"):
        LineFormat(subject="s", headers_field="meta").message(1, b'{"meta":{"Kind":{"x":1}}}')


def test_raw_lines_are_taken_as_they_are() -> None:
    assert LineFormat(subject="s", raw=True).message(1, b"no json").data == b"no json"
    with pytest.raises(ConfigError, match="raw lines have no fields"):
        LineFormat(subject="s.{a}", raw=True)


def test_dead_letter_subjects_are_refused() -> None:
    with pytest.raises(ConfigError, match="belongs to dead letters"):
        LineFormat(subject="dlq.orders")
    with pytest.raises(ConfigError, match="belongs to dead letters"):
        LineFormat(subject="dlq_audit.letters.x")
    with pytest.raises(BadLine, match="belongs to dead letters"):
        LineFormat(subject_field="to").message(1, b'{"to":"dlq.orders"}')
    with pytest.raises(BadLine, match="belongs to dead letters"):
        LineFormat(subject="{a}.orders").message(1, b'{"a":"dlq"}')
    assert LineFormat(subject="dlqs.orders").message(1, b"{}").subject == "dlqs.orders"


def test_a_subject_or_a_field_for_it_must_be_given_and_only_one() -> None:
    with pytest.raises(ConfigError, match="say where messages go"):
        LineFormat()
    with pytest.raises(ConfigError, match="say where messages go"):
        LineFormat(subject="s", subject_field="f")
