"""Nameservers, TLS and user: from arguments, the environment or the user's config file."""

from __future__ import annotations

import inspect
import json
import math
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict

from headrace.accounts import TOKEN_FILE_VARIABLE, USER_VARIABLE, Account
from headrace.errors import ConfigurationError, InvalidMessage
from headrace.names import check_topic
from headrace.values import plain_flag, plain_int, plain_number, shown
from headrace_protocol.drivers.address import check_address
from headrace_protocol.drivers.files import NotPrivate, read_private, replace_file
from headrace_protocol.system_topics import TRACE_TOPIC
from headrace_protocol.tls.settings import ClientTls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NAMESERVER_VARIABLE = "HEADRACE_NAMESERVER"
NAMESERVER_DEFAULT = "127.0.0.1:9876"
TLS_VARIABLE = "HEADRACE_TLS"
TRACE_VARIABLE = "HEADRACE_TRACE"
TLS_KEYS = ("ca_file", "cert_file", "key_file", "key_password", "server_name")
_SUFFIXES = {
    "ca_file": "CA",
    "cert_file": "CERT",
    "key_file": "KEY",
    "key_password": "KEY_PASSWORD",
    "server_name": "SERVER_NAME",
}
_WORDS = {"": None, "1": True, "true": True, "0": False, "false": False}
ACCOUNT_KEYS = ("user", "password", "password_file", "token_file")
_CONTEXT_KEYS = {"nameserver", "tls", "auth"}
_KNOWN_KEYS = _CONTEXT_KEYS | {"context", "contexts"}


class ConnectOptions(TypedDict, total=False):
    """Arguments of a client. tls: whether to connect with TLS; any of the others means so.

    ca_file: authorities of the servers' certificates, PEM; those of the system if left out.
    cert_file, key_file, key_password: the certificate that the client shows, if any.
    server_name: the name that certificates must have, in place of the host of each address.
    user: as whom the client logs in; "" for nobody, whatever the environment says.
    password: the user's; that of HEADRACE_PASSWORD_FILE or HEADRACE_PASSWORD if left out.
    token: in place of user and password, a token of an OpenID provider that names the user; or a
        function that returns one, called in a thread for each log-in.
    token_file: file with the token, of mode 0600, read for each log-in.
    trace: whether a Producer or Consumer writes RocketMQ's message trace; HEADRACE_TRACE if left
        out. No other client does. trace_topic: where to.
    """

    tls: bool | None
    ca_file: str | os.PathLike[str] | None
    cert_file: str | os.PathLike[str] | None
    key_file: str | os.PathLike[str] | None
    key_password: str | None
    server_name: str | None
    user: str | None
    password: str | None
    token: str | Callable[[], str] | None
    token_file: str | os.PathLike[str] | None
    trace: bool | None
    trace_topic: str | None


def check_limits(minimum: float = 1, **limits: float | None) -> None:
    """Raise ConfigurationError naming the first limit that is no number, or below ``minimum``."""
    for name, limit in limits.items():
        if limit is not None and not plain_number(limit, name, ConfigurationError) >= minimum:
            raise ConfigurationError(f"{name}={limit}: must be at least {minimum}")


def check_time(minimum: float = 0, **times: float) -> None:
    """Raise ConfigurationError naming the first time that is no finite number >= ``minimum``."""
    for name, seconds in times.items():
        if not minimum <= plain_number(seconds, name, ConfigurationError) < math.inf:
            raise ConfigurationError(
                f"{name}={shown(seconds)}: must be a number of seconds, at least {minimum}"
            )


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
    account: as whom; None for nobody.
    """

    nameserver: str | None = None
    tls: ClientTls | None = None
    account: Account | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments with which a client connects to it, whatever the environment says.

        Raises ConfigurationError.
        """
        tls = {"tls": False} if self.tls is None else {"tls": True, **self.tls._asdict()}
        user = {"user": ""} if self.account is None else self.account.arguments()
        return {"nameserver": self.nameserver, **tls, **user}


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
        lines += _lines(self.cluster, "")
        for name, cluster in self.contexts.items():
            table = f"contexts.{_quoted(name)}"
            lines += [f"\n[{table}]\n", *_lines(cluster, f"{table}.")]
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
    tls = _tls(found.get("tls"), f"{source}: tls")
    return Cluster(addresses, tls, _account(found.get("auth"), f"{source}: auth"))


def _account(value: object, source: str) -> Account | None:
    """The user of a cluster."""
    if value is None:
        return None
    if not isinstance(value, dict) or ("user" in value) == ("token_file" in value):
        raise ConfigurationError(f"{source} is no table with either a user or a token_file")
    texts = _texts(value, ACCOUNT_KEYS, source)
    if "password" in value:
        try:
            read_private(config_file())
        except (OSError, NotPrivate) as error:
            raise ConfigurationError(f"{source}: {error}") from None
    return Account(**texts)


def _tls(value: object, source: str) -> ClientTls | None:
    """TLS of a cluster: true, or a table of files and names."""
    if value is None or value is False:
        return None
    if value is True:
        return ClientTls()
    if not isinstance(value, dict):
        raise ConfigurationError(f"{source} is neither true nor a table of {', '.join(TLS_KEYS)}")
    return ClientTls(**_texts(value, TLS_KEYS, source))


def _texts(found: dict[str, object], known: Iterable[str], source: str) -> dict[str, str]:
    """The values of a table. Raises ConfigurationError for another key, and what is no text."""
    _check_keys(found, known, source)
    texts = {key: value for key, value in found.items() if isinstance(value, str)}
    for key in found.keys() - texts.keys():
        raise ConfigurationError(f"{source}: {key} = {found[key]!r} is no text")
    return texts


def _check_keys(found: dict[str, object], known: Iterable[str], source: str) -> None:
    if unknown := found.keys() - set(known):
        raise ConfigurationError(
            f"{source}: unknown key {min(unknown)!r}; known keys: {', '.join(sorted(known))}"
        )


def _lines(cluster: Cluster, prefix: str) -> list[str]:
    """A cluster in TOML; TLS and user come last, as tables."""
    lines = [f"nameserver = {_quoted(cluster.nameserver)}\n"] if cluster.nameserver else []
    for name, table in (("tls", cluster.tls), ("auth", cluster.account)):
        if table is not None:
            lines.append(f"\n[{prefix}{name}]\n")
            values = table._asdict().items()
            lines += [f"{key} = {_quoted(value)}\n" for key, value in values if value]
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


def resolve_tls(options: ConnectOptions, nameserver: object = None) -> ClientTls | None:
    """TLS of a client's connections; None for none.

    options: of the client. Without any, the environment variables HEADRACE_TLS... apply, then the
    context in use, unless ``nameserver`` or HEADRACE_NAMESERVER chooses other servers, then the
    table ``tls`` of ~/.config/headrace.toml.

    Raises ConfigurationError.
    """
    values: dict[str, str] = {}
    for key in TLS_KEYS:
        if (value := options.get(key)) is not None:
            values[key] = str(value)
    is_wanted = options.get("tls")
    if is_wanted is None and not values:
        return _environment_tls(nameserver)
    if is_wanted is False:
        if values:
            raise ConfigurationError(f"tls=False, but {min(values)} is given: leave out one")
        return None
    return ClientTls(**values)


def resolve_trace(options: ConnectOptions) -> str | None:
    """The topic of a client's trace; None without a trace. Raises ConfigurationError."""
    trace, topic = options.get("trace"), options.get("trace_topic")
    if topic is not None:
        try:
            check_topic(topic)
        except InvalidMessage as error:
            raise ConfigurationError(f"trace_topic: {error}") from None
    if trace is None:
        trace = _switch(TRACE_VARIABLE) or topic is not None
    elif not plain_flag(trace, "trace") and topic is not None:
        raise ConfigurationError("trace=False, but trace_topic is given: leave out one")
    return (topic or TRACE_TOPIC) if trace else None


def _switch(variable: str) -> bool | None:
    """The value of a switch in the environment; None if it is not set."""
    word = os.environ.get(variable, "").lower()
    if word not in _WORDS:
        raise ConfigurationError(f"{variable}={word}: expected 1 or 0")
    return _WORDS[word]


def resolve_account(options: ConnectOptions, nameserver: object = None) -> Account | None:
    """The user of a client's connections; None for nobody.

    options, nameserver: as of ``resolve_tls``, in place of which HEADRACE_USER applies, or
    HEADRACE_TOKEN_FILE, then the context in use, and the table ``auth`` of
    ~/.config/headrace.toml. Raises ConfigurationError.
    """
    user, password = options.get("user"), options.get("password")
    token, file = options.get("token"), options.get("token_file")
    ways = [each for each in (user, token, file) if each is not None]
    if not ways and password is None:
        return _environment_account() or _used(nameserver).account
    if len(ways) != 1 or (password is not None and user is None):
        raise ConfigurationError(
            "give a user with the password, or else one of token and token_file, which name the "
            "user themselves"
        )
    if user == "":
        return None
    return Account(user or "", password, None, None if file is None else os.fspath(file), token)


def _environment_account() -> Account | None:
    """The user of the environment. Raises ConfigurationError."""
    user, file = os.environ.get(USER_VARIABLE), os.environ.get(TOKEN_FILE_VARIABLE)
    if user and file:
        raise ConfigurationError(
            f"{USER_VARIABLE} and {TOKEN_FILE_VARIABLE} are set: a token names its user; unset one"
        )
    if file:
        return Account(token_file=file)
    return Account(user) if user else None


def _used(nameserver: object) -> Cluster:
    """The cluster of the file; not the context if other servers are chosen."""
    settings = Settings.load()
    is_chosen = bool(nameserver) or bool(os.environ.get(NAMESERVER_VARIABLE))
    return settings.cluster if is_chosen else settings.used


def with_password(tls: ClientTls | None) -> ClientTls | None:
    """With the password of the key that this process's environment has, if any."""
    if tls is None or tls.key_password is not None:
        return tls
    return tls._replace(key_password=os.environ.get(f"{TLS_VARIABLE}_KEY_PASSWORD"))


def _environment_tls(nameserver: object) -> ClientTls | None:
    """TLS of the environment, else of the file."""
    is_wanted = _switch(TLS_VARIABLE)
    found = {key: os.environ.get(f"{TLS_VARIABLE}_{end}") for key, end in _SUFFIXES.items()}
    values = {key: value for key, value in found.items() if value}
    if is_wanted or (is_wanted is None and values):
        return ClientTls(**values)
    if is_wanted is False:
        return None
    return _used(nameserver).tls


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
