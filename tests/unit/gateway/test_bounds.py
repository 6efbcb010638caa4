"""Bounds on what callers send, and on how many connections they hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.gateway.bounds import MAX_JSON_DEPTH, json_depth
from penstock.web.listener import Places, origin_of, places_within_descriptors


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        (b"[" * 65, True),
        (b"[" * 64 + b"]" * 64, False),
        (b'{"a": "' + b"[" * 1_000 + b'"}', False),
        (b'{"a": "\\"' + b"[" * 1_000 + b'"}', False),
        (b'{"a": "\\\\"' + b"[" * 1_000, True),
        (b'"' + b"[" * 1_000, True),  # a string without an end: as deep as it can be read
        (b"[]" * 1_000, False),
        (b"]" * 1_000 + b"[" * 1_065, True),
    ],
)
def test_depth_counts_brackets_outside_of_strings(text: bytes, deep: bool) -> None:
    assert (json_depth(text) > MAX_JSON_DEPTH) is deep


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=200))
def test_depth_of_any_document_is_what_its_values_have(value: object) -> None:
    def depth(one: object) -> int:
        if isinstance(one, dict):
            return 1 + max(map(depth, one.values()), default=0)
        return 1 + max(map(depth, one), default=0) if isinstance(one, list) else 0

    wrapped: object = value
    for _ in range(MAX_JSON_DEPTH):
        wrapped = [wrapped]
    assert (json_depth(json.dumps(wrapped).encode()) > MAX_JSON_DEPTH) is (depth(value) > 0)


def test_places_are_counted_in_all_and_by_address() -> None:
    places = Places(total=3, per_address=2)
    assert [places.take(one) for one in ("a", "a", "a", "b", "c")] == [True, True, False, True, False]
    places.free("a")
    assert places.take("c")
    for one in ("a", "b", "c"):
        places.free(one)
    assert not places.taken


def test_an_ipv6_network_is_one_address() -> None:
    assert origin_of("2001:db8::1") == origin_of("2001:db8::2:3") != origin_of("2001:db8:0:1::1")
    assert origin_of("::ffff:10.0.0.1") == origin_of("10.0.0.1")
    assert origin_of("fe80::1%eth0") == origin_of("fe80::2")


def test_few_descriptors_lower_both_limits_in_proportion() -> None:
    assert places_within_descriptors(512, 128, 4_096) == Places(512, 128)
    assert places_within_descriptors(512, 128, 256) == Places(160, 40)
    with pytest.raises(ConfigError, match="ulimit"):
        places_within_descriptors(512, 128, 100)
