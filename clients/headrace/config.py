"""Nameserver addresses: from an argument, the environment or the user's config file."""

from __future__ import annotations

import inspect
import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from headrace.errors import ConfigurationError
from headrace.values import plain_int, plain_number, shown
from headrace_protocol.drivers.address import check_address
from headrace_protocol.drivers.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESERVER_VARIABLE = "HEADRACE_NAMESERVER"
NAMESERVER_DEFAULT = "127.0.0.1:9876"
_KNOWN_KEYS = {"nameserver", "context", "contexts"}


def check_limits(minimum: int = 1, **limits: float | None) -> None:
    """Raise ConfigurationError naming the first limit that is no number, or below ``minimum``."""
    for name, limit in limits.items():
        if limit is not None and not plain_number(limit, name, ConfigurationError) >= minimum:
            raise ConfigurationError(f"{name}={limit}: must be at least {minimum}")


def check_count(name: str, count: int | None) -> int | None:
    """The plain value of a number of things. Raises ConfigurationError for none of 1 or more."""
    if count is None:
        return None
    check_limits(**{name: count})
    return plain_int(count, name, ConfigurationError)


def check_callback(name: str, function: object) -> None:
    """Raise ConfigurationError for something that can't be called; None is no function at all."""
    if function is not None and not callable(function):
        raise ConfigurationError(f"{name}={shown(function)} is no function")


def check_plain_callback(name: str, function: object) -> None:
    """As ``check_callback``, also for an async function, which nothing would await."""
    check_callback(name, function)
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{name} is an async function: give a plain one")


def config_file() -> Path:
    """Path of the user's config file, whether or not it exists."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "headrace.toml"


@dataclass
class Settings:
    """The user's config file.

    nameserver: addresses to use if no context is in use. contexts: addresses by context.
    context: the one in use.
    """

    nameserver: str | None = None
    context: str | None = None
    contexts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Self:
        """Read the file; all defaults if there is none. Raises ConfigurationError."""
        path = config_file()
        if not path.exists():
            return cls()
        found = _read(path)
        nameserver, context = found.get("nameserver"), found.get("context")
        contexts = found.get("contexts", {})
        if not isinstance(contexts, dict):
            raise ConfigurationError(f"{path}: contexts is not a table of addresses by name")
        addresses = {
            name: ";".join(_addresses(value, f"{path}: context {name}"))
            for name, value in contexts.items()
        }
        return cls(
            None if nameserver is None else ";".join(_addresses(nameserver, str(path))),
            None if context is None else str(context),
            addresses,
        )

    def save(self) -> None:
        """Replace the file."""
        path = config_file()
        lines = [
            f"{name} = {_quoted(value)}\n"
            for name, value in (("nameserver", self.nameserver), ("context", self.context))
            if value is not None
        ]
        lines += ["\n[contexts]\n"] if self.contexts else []
        lines += [f"{_quoted(name)} = {_quoted(at)}\n" for name, at in self.contexts.items()]
        replace_file(path, "".join(lines).encode())


def _quoted(text: str) -> str:
    # A JSON string is one of TOML's too.
    return json.dumps(text)


def resolve_nameservers(argument: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Nameserver addresses, in the order to try them.

    argument: ``host:port``, several separated by ``;``, or a sequence of them. If None, the
    environment variable HEADRACE_NAMESERVER applies, then the context in use and ``nameserver``
    in ~/.config/headrace.toml, then port 9876 of this machine.

    Raises ConfigurationError saying where an invalid address was set.
    """
    if argument is not None:
        return _addresses(argument, "the nameserver argument")
    variable = os.environ.get(NAMESERVER_VARIABLE)
    if variable:
        return _addresses(variable, f"the environment variable {NAMESERVER_VARIABLE}")
    settings = Settings.load()
    if settings.context is None:
        return tuple((settings.nameserver or NAMESERVER_DEFAULT).split(";"))
    if settings.context not in settings.contexts:
        raise ConfigurationError(
            f"{config_file()} has no context {settings.context!r}; choose one with `headrace "
            "context use NAME`"
        )
    return tuple(settings.contexts[settings.context].split(";"))


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


def _addresses(value: object, source: str) -> tuple[str, ...]:
    parts = value.split(";") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ConfigurationError(f"{source}: {value!r} is neither a string nor a list of strings")
    addresses = tuple(part.strip() for part in parts if part.strip())
    if not addresses:
        raise ConfigurationError(f"{source} names no nameserver; write HOST:PORT[;HOST:PORT...]")
    try:
        for address in addresses:
            check_address(address)
    except ValueError as error:
        raise ConfigurationError(f"{source}: {error}") from error
    return addresses
