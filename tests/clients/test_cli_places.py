"""Places in a queue, as people write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from headrace.admin.places import milliseconds, parse_place, parse_time
from headrace.errors import ConfigurationError


def test_ends_and_offsets() -> None:
    assert parse_place("earliest") == "earliest"
    assert parse_place("latest") == "latest"
    for text in ("first", "last"):
        with pytest.raises(ConfigurationError, match="write earliest, latest"):
            parse_place(text)
    assert parse_place("0") == 0
    assert parse_place("17") == 17


def test_times_have_zones_or_are_local() -> None:
    assert parse_place("2026-11-21T06:00:00Z") == datetime(2026, 11, 21, 6, tzinfo=UTC)
    assert parse_time("2026-11-21T06:00:00+02:00") == datetime(2026, 11, 21, 4, tzinfo=UTC)
    local = datetime(2026, 11, 21).astimezone()
    assert parse_time("2026-11-21") == local
    assert milliseconds(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)) == 1000


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
    before = datetime.now(UTC)
    assert before - age <= parse_time(text) <= datetime.now(UTC) - age


@pytest.mark.parametrize("text", ["", "soon", "-5", "3w", "2026-13-01", "¹", "9999999d"])
def test_anything_else_names_what_can_be_written(text: str) -> None:
    with pytest.raises(ConfigurationError, match="earliest, latest, a queue offset, a time"):
        parse_place(text)


@pytest.mark.parametrize("text", ["", "soon", "5", "latest", "99999999999d", "0001-01-01T00:00+14"])
def test_where_only_a_time_will_do_nothing_else_is_offered(text: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"'{re.escape(text)}' is not a time: write a time"
    ):
        parse_time(text)
