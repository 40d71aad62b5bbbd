"""Texts about settings that can't be used."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

# By the type of pydantic's error; its context fills in the limit.
_EXPECTED = {
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a number of fewer digits",
    "int_from_float": "expected a whole number",
    "bool_parsing": "expected true or false",
    "less_than_equal": "expected at most {le}",
    "greater_than_equal": "expected at least {ge}",
    "literal_error": "expected {expected}",
}


def problem_of(error: Any, places: Mapping[str, str]) -> tuple[str, str]:
    """The place of a value, and the reason why it is invalid."""
    reason = str(error["msg"]).removeprefix("Value error, ")
    if error["loc"]:
        key = error["loc"][0]
        expected = _EXPECTED.get(error["type"], reason).format(**error.get("ctx", {}))
        reason = f"{key}={error['input']}: {expected}"
    else:
        key = reason.partition("=")[0]
    return places.get(key, key), reason


def unknown_key(key: str, known: Collection[str]) -> str:
    """Names the nearest of the known keys."""
    nearest = difflib.get_close_matches(key, known, 1)
    hint = f"did you mean {nearest[0]}?" if nearest else "see conf/broker.conf for all keys"
    return f"unknown key {key}: {hint}"
