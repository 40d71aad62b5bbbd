"""Nameservers and TLS: from arguments, the environment or the user's config file."""

from __future__ import annotations

import inspect
import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict

from headrace.errors import ConfigurationError
from headrace.values import plain_int, plain_number, shown
from headrace_protocol.drivers.address import check_address
from headrace_protocol.drivers.files import replace_file
from headrace_protocol.tls.settings import ClientTls

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NAMESERVER_VARIABLE = "HEADRACE_NAMESERVER"
NAMESERVER_DEFAULT = "127.0.0.1:9876"
TLS_VARIABLE = "HEADRACE_TLS"
TLS_KEYS = ("ca_file", "cert_file", "key_file", "key_password", "server_name")
_SUFFIXES = {
    "ca_file": "CA",
    "cert_file": "CERT",
    "key_file": "KEY",
    "key_password": "KEY_PASSWORD",
    "server_name": "SERVER_NAME",
}
_WORDS = {"": None, "1": True, "true": True, "0": False, "false": False}
_KNOWN_KEYS = {"nameserver", "tls", "context", "contexts"}
_CONTEXT_KEYS = {"nameserver", "tls"}


class TlsOptions(TypedDict, total=False):
    """Arguments of a client. tls: whether to connect with TLS; any of the others means so.

    ca_file: authorities of the servers' certificates, PEM; those of the system if left out.
    cert_file, key_file, key_password: the certificate that the client shows, if any.
    server_name: the name that certificates must have, in place of the host of each address.
    """

    tls: bool | None
    ca_file: str | os.PathLike[str] | None
    cert_file: str | os.PathLike[str] | None
    key_file: str | os.PathLike[str] | None
    key_password: str | None
    server_name: str | None


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
class Cluster:
    """A cluster of the config file: a context, or the one without a name.

    nameserver: its addresses; None for the default. tls: how to connect; None without TLS.
    """

    nameserver: str | None = None
    tls: ClientTls | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments with which a client connects to it, whatever the environment says."""
        tls = {"tls": False} if self.tls is None else {"tls": True, **self.tls._asdict()}
        return {"nameserver": self.nameserver, **tls}


@dataclass
class Settings:
    """The user's config file.

    cluster: the one to use if no context is in use. context: the one in use.
    """

    cluster: Cluster = field(default_factory=Cluster)
    context: str | None = None
    contexts: dict[str, Cluster] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Self:
        """Read the file; all defaults if there is none. Raises ConfigurationError."""
        path = config_file()
        if not path.exists():
            return cls()
        found = _read(path)
        context, contexts = found.get("context"), found.get("contexts", {})
        if not isinstance(contexts, dict):
            raise ConfigurationError(f"{path}: contexts is not a table of clusters by name")
        return cls(
            _cluster(found, str(path)),
            None if context is None else str(context),
            {name: _context(value, f"{path}: context {name}") for name, value in contexts.items()},
        )

    @property
    def used(self) -> Cluster:
        """The cluster in use. Raises ConfigurationError."""
        if self.context is None:
            return self.cluster
        if self.context not in self.contexts:
            raise ConfigurationError(
                f"{config_file()} has no context {self.context!r}; choose one with `headrace "
                "context use NAME`"
            )
        return self.contexts[self.context]

    def save(self) -> None:
        """Replace the file."""
        lines = [] if self.context is None else [f"context = {_quoted(self.context)}\n"]
        lines += _lines(self.cluster, "tls")
        for name, cluster in self.contexts.items():
            table = f"contexts.{_quoted(name)}"
            lines += [f"\n[{table}]\n", *_lines(cluster, f"{table}.tls")]
        replace_file(config_file(), "".join(lines).encode())


def _context(value: object, source: str) -> Cluster:
    """A context: its addresses, or a table."""
    if not isinstance(value, dict):
        return Cluster(";".join(_addresses(value, source)))
    _check_keys(value, _CONTEXT_KEYS, source)
    return _cluster(value, source)


def _cluster(found: dict[str, object], source: str) -> Cluster:
    nameserver = found.get("nameserver")
    addresses = None if nameserver is None else ";".join(_addresses(nameserver, source))
    return Cluster(addresses, _tls(found.get("tls"), f"{source}: tls"))


def _tls(value: object, source: str) -> ClientTls | None:
    """TLS of a cluster: true, or a table of files and names."""
    if value is None or value is False:
        return None
    if value is True:
        return ClientTls()
    if not isinstance(value, dict):
        raise ConfigurationError(f"{source} is neither true nor a table of {', '.join(TLS_KEYS)}")
    _check_keys(value, TLS_KEYS, source)
    for key, text in value.items():
        if not isinstance(text, str):
            raise ConfigurationError(f"{source}: {key} = {text!r} is no text")
    return ClientTls(**value)


def _check_keys(found: dict[str, object], known: Iterable[str], source: str) -> None:
    if unknown := found.keys() - set(known):
        raise ConfigurationError(
            f"{source}: unknown key {min(unknown)!r}; known keys: {', '.join(sorted(known))}"
        )


def _lines(cluster: Cluster, table: str) -> list[str]:
    """A cluster in TOML; its TLS comes last, as a table."""
    lines = [f"nameserver = {_quoted(cluster.nameserver)}\n"] if cluster.nameserver else []
    if cluster.tls is not None:
        lines.append(f"\n[{table}]\n")
        values = cluster.tls._asdict().items()
        lines += [f"{key} = {_quoted(value)}\n" for key, value in values if value is not None]
    return lines


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
    return tuple((Settings.load().used.nameserver or NAMESERVER_DEFAULT).split(";"))


def resolve_tls(options: TlsOptions, nameserver: object = None) -> ClientTls | None:
    """TLS of a client's connections; None for none.

    options: of the client. Without any, the environment variables HEADRACE_TLS... apply, then the
    context in use, unless ``nameserver`` or HEADRACE_NAMESERVER chooses other servers, then the
    table ``tls`` of ~/.config/headrace.toml.

    Raises ConfigurationError.
    """
    values: dict[str, str] = {}
    for key, value in options.items():
        if key != "tls" and value is not None:
            values[key] = str(value)
    is_wanted = options.get("tls")
    if is_wanted is None and not values:
        return _environment_tls(is_chosen=bool(nameserver))
    if is_wanted is False:
        if values:
            raise ConfigurationError(f"tls=False, but {min(values)} is given: leave out one")
        return None
    return ClientTls(**values)


def with_password(tls: ClientTls | None) -> ClientTls | None:
    """With the password of the key that this process's environment has, if any."""
    if tls is None or tls.key_password is not None:
        return tls
    return tls._replace(key_password=os.environ.get(f"{TLS_VARIABLE}_KEY_PASSWORD"))


def _environment_tls(*, is_chosen: bool) -> ClientTls | None:
    """TLS of the environment, else of the file. is_chosen: an argument names the servers."""
    word = os.environ.get(TLS_VARIABLE, "").lower()
    if word not in _WORDS:
        raise ConfigurationError(f"{TLS_VARIABLE}={word}: expected 1 or 0")
    found = {key: os.environ.get(f"{TLS_VARIABLE}_{end}") for key, end in _SUFFIXES.items()}
    values = {key: value for key, value in found.items() if value}
    is_wanted = _WORDS[word]
    if is_wanted or (is_wanted is None and values):
        return ClientTls(**values)
    if is_wanted is False:
        return None
    settings = Settings.load()
    is_chosen = is_chosen or bool(os.environ.get(NAMESERVER_VARIABLE))
    return settings.cluster.tls if is_chosen else settings.used.tls


def _read(path: Path) -> dict[str, object]:
    try:
        settings: dict[str, object] = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    _check_keys(settings, _KNOWN_KEYS, str(path))
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
