"""Points in a queue, as people write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from headrace.admin.points import parse_point, parse_time
from headrace.errors import ConfigurationError
from headrace.values import now_ms


def test_ends_and_offsets() -> None:
    assert parse_point("earliest") == "earliest"
    assert parse_point("latest") == "latest"
    for text in ("first", "last"):
        with pytest.raises(ConfigurationError, match="write earliest, latest"):
            parse_point(text)
    assert parse_point("0") == 0
    assert parse_point("17") == 17


def test_times_have_zones_or_are_local() -> None:
    assert parse_point("2026-11-21T06:00:00Z") == datetime(2026, 11, 21, 6, tzinfo=UTC)
    assert parse_point("2026-11-21") == datetime(2026, 11, 21).astimezone()
    assert parse_time("1970-01-01T02:00:01+02:00") == 1000


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("90s", timedelta(seconds=90)),
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("1d", timedelta(days=1)),
    ],
)
def test_ages_count_from_now(text: str, age: timedelta) -> None:
    before_ms = now_ms()
    age_ms = age / timedelta(milliseconds=1)
    assert before_ms - age_ms <= parse_time(text) <= now_ms() - age_ms


@pytest.mark.parametrize("text", ["", "soon", "-5", "3w", "2026-13-01", "¹", "9999999d"])
def test_anything_else_names_what_can_be_written(text: str) -> None:
    with pytest.raises(ConfigurationError, match="earliest, latest, a queue offset, a time"):
        parse_point(text)


@pytest.mark.parametrize("text", ["", "soon", "5", "latest", "99999999999d", "0001-01-01T00:00+14"])
def test_where_only_a_time_will_do_nothing_else_is_offered(text: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"'{re.escape(text)}' is not a time: write a time"
    ):
        parse_time(text)
