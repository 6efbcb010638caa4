"""Durations, sizes and times as people write them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import units
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", timedelta(seconds=30)),
        ("5m", timedelta(minutes=5)),
        ("7d", timedelta(days=7)),
        ("1h30m", timedelta(minutes=90)),
        ("1h 30m", timedelta(minutes=90)),
        ("250ms", timedelta(milliseconds=250)),
        ("2w", timedelta(weeks=2)),
        ("1.5s", timedelta(milliseconds=1500)),
        ("10us", timedelta(microseconds=10)),
        ("0", timedelta()),
        (0, timedelta()),
    ],
)
def test_durations_are_read_as_people_write_them(text: str | int, expected: timedelta) -> None:
    assert units.parse_duration(text) == expected


@pytest.mark.parametrize("text", ["30", 30, 1.5, "7x", "", "s", "-5s", "30 seconds", "1h-5m", "5M"])
def test_a_duration_without_a_known_unit_is_refused_and_the_units_are_named(text: str | int | float) -> None:
    with pytest.raises(ConfigError, match=r"w, d, h, m, s, ms, us"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64MiB", 64 * 1024**2),
        ("1GB", 10**9),
        ("512KiB", 512 * 1024),
        ("10kB", 10_000),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("4096", 4096),
        (4096, 4096),
        ("64mib", 64 * 1024**2),
        ("7B", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, expected: int) -> None:
    assert units.parse_size(text) == expected


@pytest.mark.parametrize("text", ["64M", "10k", "1G", "64 megs", "", "-1MiB", "1.5", "1.5B"])
def test_a_size_whose_unit_is_unknown_or_could_mean_two_things_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kB, MB, GB, TB, KiB, MiB"):
        units.parse_size(text)


@given(st.timedeltas(min_value=timedelta(), max_value=timedelta(days=4000)))
def test_a_formatted_duration_reads_back_as_itself(duration: timedelta) -> None:
    assert units.parse_duration(units.format_duration(duration)) == duration


@given(st.integers(min_value=0, max_value=10**16))
def test_a_formatted_size_reads_back_as_itself(size: int) -> None:
    assert units.parse_size(units.format_size(size)) == size


def test_formatting_chooses_the_units_a_person_would() -> None:
    assert units.format_duration(timedelta(days=7)) == "7d"
    assert units.format_duration(timedelta(days=30)) == "30d"
    assert units.format_duration(timedelta(seconds=45)) == "45s"
    assert units.format_duration(timedelta(minutes=90)) == "1h30m"
    assert units.format_size(64 * 1024**2) == "64MiB"
    assert units.format_size(64_000_000) == "64MB"
    assert units.format_size(10**9) == "1GB"


@given(st.timedeltas(min_value=timedelta(), max_value=timedelta(days=4000)))
def test_nanoseconds_go_there_and_back(duration: timedelta) -> None:
    assert units.from_nanoseconds(units.nanoseconds(duration)) == duration


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (135_673, "132 KiB"), (6_700_000, "6.4 MiB"), (5 << 40, "5.0 TiB")],
)
def test_a_size_is_shown_with_three_digits(size: int, shown: str) -> None:
    assert units.approximate_size(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (0.4, "0s"), (59, "59s"), (61, "1m1s"), (3600, "1h0m"), (90_061, "1d1h"), (864_000, "10d0h")],
)
def test_a_duration_is_shown_by_its_two_largest_units(seconds: float, shown: str) -> None:
    assert units.approximate_duration(timedelta(seconds=seconds)) == shown


@pytest.mark.parametrize("parse", [units.parse_moment, units.parse_since])
def test_a_time_says_its_zone(parse: Callable[[str], datetime]) -> None:
    assert parse("2026-01-31T12:00:00+02:00") == datetime(2026, 1, 31, 10, tzinfo=UTC)
    assert parse("2026-01-31T12:00:00Z").tzinfo is UTC
    for text in ("2026-01-31T12:00:00", "2026-01-31"):
        with pytest.raises(ConfigError, match="has no time zone"):
            parse(text)
    with pytest.raises(ConfigError, match="'yesterday' is not a time: write RFC 3339"):
        parse("yesterday")


def test_a_duration_is_a_time_ago_only_where_that_makes_sense() -> None:
    before = datetime.now(UTC)
    found = units.parse_since("15m")
    assert before <= found + timedelta(minutes=15) <= datetime.now(UTC)
    with pytest.raises(ConfigError, match="is not a time"):
        units.parse_moment("15m")
