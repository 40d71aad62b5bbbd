"""Files of settings: ``key=value`` lines, as Apache's broker reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.config import BrokerConfig, ConfigError, validated
from headrace_broker.settings.apache_keys import (
    CLASSES,
    EXPECTED_VALUES,
    WITHOUT_EFFECT,
    has_no_effect,
)
from headrace_broker.settings.listing import KEYS, RELOADABLE
from headrace_broker.settings.setting_problems import unknown_key
from headrace_daemon.access.errors import AccessError
from headrace_protocol.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def load_config(path: Path) -> tuple[BrokerConfig, list[str]]:
    """Read a file of settings; touches nothing else.

    Returns the settings, and warnings about keys of the peer that this broker ignores.
    Raises ConfigError with file, line, key and the expected value.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: can't read settings: {reason_of(error)}"]) from error
    values, places, warnings = read_settings(text, str(path))
    config = validated(values, places)
    config.check_paths()
    try:
        config.access_config()
    except AccessError as error:
        place = places.get(str(error).partition("=")[0], str(path))
        raise ConfigError([f"{place}: {error}"]) from None
    return config, warnings


def read_settings(text: str, place: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Values by key, the place of each key, and warnings about keys without effect.

    Raises ConfigError with place, key and the expected value.
    """
    values, places = parse_properties(text, place)
    warnings, problems = [], []
    for key in list(values):
        if key in KEYS:
            continue
        value = values.pop(key)
        if has_no_effect(key, value):
            warnings.append(f"{places[key]}: {key} has no effect in this broker")
        else:
            problems.append(f"{places[key]}: {_not_ours(key, value)}")
    if problems:
        raise ConfigError(problems + _problems_of(values, places))
    return values, places, warnings


def parse_properties(text: str, place: str) -> tuple[dict[str, str], dict[str, str]]:
    """Values by key, and the place of each key as ``place:line``.

    Lines are ``key=value``; empty ones and those that begin with # or ! are skipped.
    Raises ConfigError for other lines, duplicate keys and continuation lines.
    """
    values: dict[str, str] = {}
    places: dict[str, str] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.strip()
        if not content or content[0] in "#!":
            continue
        here = f"{place}:{number}"
        key, equals, value = (part.strip() for part in content.partition("="))
        if not equals or not key:
            problems.append(f"{here}: expected key=value, found {content[:60]!r}")
        elif content.endswith("\\"):
            problems.append(f"{here}: {key} continues in the next line: write it in one line")
        elif key in values:
            problems.append(f"{here}: {key} was set at {places[key]}: keep one of them")
        else:
            values[key], places[key] = value, here
    if problems:
        raise ConfigError(problems)
    return values, places


def _problems_of(values: Mapping[str, str], places: Mapping[str, str]) -> list[str]:
    try:
        validated(values, places)
    except ConfigError as error:
        return error.problems
    return []


def is_key(key: str) -> bool:
    """True if a file may set ``key``."""
    return key in KEYS or key in WITHOUT_EFFECT or key in CLASSES


def not_reloadable(key: str) -> str:
    """The reason for which a running broker does not change ``key``."""
    if is_key(key):
        return (
            f"{key} can't change while the broker runs: set it in its file and restart the broker"
        )
    return unknown_key(key, RELOADABLE)


def _not_ours(key: str, value: str) -> str:
    if key in CLASSES:
        return (
            f"{key}={value} is not supported by this broker: expected Apache's "
            f"{' or '.join(CLASSES[key])}, or leave it out"
        )
    if key in EXPECTED_VALUES:
        expected = EXPECTED_VALUES[key]
        return (
            f"{key}={value} is not supported by this broker: expected {expected!r}, or leave it out"
        )
    return unknown_key(key, KEYS)
