"""Nameserver addresses: from an argument, the environment or the user's config file."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigurationError
from headrace_protocol.drivers.address import split_address

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESERVER_VARIABLE = "HEADRACE_NAMESERVER"
NAMESERVER_DEFAULT = "127.0.0.1:9876"
_KNOWN_KEYS = {"nameserver"}


def check_limits(minimum: int = 1, **limits: float | None) -> None:
    """Raise ConfigurationError naming the first limit below ``minimum``."""
    for name, limit in limits.items():
        if limit is not None and limit < minimum:
            raise ConfigurationError(f"{name}={limit}: must be at least {minimum}")


def config_file() -> Path:
    """Path of the user's config file, whether or not it exists."""
    return Path.home() / ".config" / "headrace.toml"


def resolve_nameservers(argument: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Nameserver addresses, in the order to try them.

    argument: ``host:port``, several separated by ``;``, or a sequence of them. If None, the
    environment variable HEADRACE_NAMESERVER applies, then ``nameserver`` in
    ~/.config/headrace.toml, then port 9876 of this machine.

    Raises ConfigurationError saying where an invalid address was set.
    """
    if argument is not None:
        return _addresses(argument, "the nameserver argument")
    variable = os.environ.get(NAMESERVER_VARIABLE)
    if variable:
        return _addresses(variable, f"the environment variable {NAMESERVER_VARIABLE}")
    path = config_file()
    if path.exists():
        configured = _read(path).get("nameserver")
        if configured is not None:
            return _addresses(configured, str(path))
    return (NAMESERVER_DEFAULT,)


def _read(path: Path) -> dict[str, object]:
    try:
        settings: dict[str, object] = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    unknown = settings.keys() - _KNOWN_KEYS
    if unknown:
        raise ConfigurationError(
            f"{path}: unknown key {min(unknown)!r}; known keys: {', '.join(sorted(_KNOWN_KEYS))}"
        )
    return settings


def _addresses(value: object, place: str) -> tuple[str, ...]:
    parts = value.split(";") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ConfigurationError(f"{place}: {value!r} is neither a string nor a list of strings")
    addresses = tuple(part.strip() for part in parts if part.strip())
    if not addresses:
        raise ConfigurationError(f"{place} names no nameserver; write HOST:PORT[;HOST:PORT...]")
    try:
        for address in addresses:
            split_address(address)
    except ValueError as error:
        raise ConfigurationError(f"{place}: {error}") from error
    return addresses
