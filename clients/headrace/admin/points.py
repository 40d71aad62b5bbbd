"""Points in a queue, and in time, as options give them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Literal

from headrace.errors import ConfigurationError

# Either end of a queue, a queue offset or a point in time.
Point = Literal["earliest", "latest"] | int | datetime

_TIME_HELP = "a time (2026-11-21T06:00) or an age (90s, 15m, 2h, 1d)"
HELP = f"earliest, latest, a queue offset, {_TIME_HELP}"

_AGE = re.compile(r"(\d+)(s|m|h|d)")
_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_point(text: str) -> Point:
    """Parse a point in a queue; a time without a zone is local. Raises ConfigurationError."""
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.isascii() and text.isdigit():
        return int(text)
    return _time(text, f"not a position in a queue: write {HELP}")


def parse_time(text: str) -> int:
    """Parse a time or an age to ms since 1970; without a zone it is local.

    Raises ConfigurationError.
    """
    return _milliseconds(_time(text, f"not a time: write {_TIME_HELP}"))


def parse_duration(text: str) -> timedelta:
    """Parse a duration. Raises ConfigurationError."""
    match = _DURATION.fullmatch(text)
    try:
        if match:
            return timedelta(**{_UNITS[match[2]]: int(match[1])})
    except OverflowError:
        pass
    raise ConfigurationError(f"{text!r} is not a duration: write 500ms, 90s, 15m, 2h or 1d")


def parse_moment(text: str) -> datetime:
    """Parse a time that may be in the future; without a zone it is local.

    Raises ConfigurationError.
    """
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{text!r} is not a time: write 2026-11-21T06:00") from None


def parse_later(text: str) -> int:
    """Parse a time, or a duration from now, to ms since 1970. Raises ConfigurationError."""
    if _DURATION.fullmatch(text):
        return _milliseconds(datetime.now(UTC) + parse_duration(text))
    return _milliseconds(parse_moment(text))


def _time(text: str, problem: str) -> datetime:
    """Parse a time or an age. Raises ConfigurationError that ``text`` is ``problem``."""
    age = _AGE.fullmatch(text)
    try:
        if age:
            return datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):  # OverflowError outside the years 1 to 9999
        raise ConfigurationError(f"{text!r} is {problem}") from None


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)
