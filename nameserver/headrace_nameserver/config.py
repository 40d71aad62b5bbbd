"""Settings of a nameserver, and their configuration file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import msgspec

from headrace_daemon.folders import folder_problem
from headrace_daemon.serving.ports import equal_ports
from headrace_nameserver.routes import BROKER_TIMEOUT_MS, DEPARTED_HOURS
from headrace_protocol.access import AnonymousAccess, is_loopback, why_exposed
from headrace_protocol.errors import PortableError

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class NameServerConfig(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Settings of a nameserver.

    conf/generate.py copies these explanations into conf/nameserver.conf and docs/configuration.md.

    bind_address: Address to listen on; any address but loopback requires anonymousAccess.
    listen_port: Port to listen on; 0 picks a free port.
    monitor_port: Port for health checks and metrics over HTTP; 0 picks a free port, -1 disables
        them.
    anonymous_access: Access without authentication: deny serves only loopback; read serves anyone,
        but not administration; allow serves anyone everything.
    tls_config_file: File with the settings of TLS, Apache RocketMQ's tls.properties; if unset, no
        TLS. See docs/security.md "TLS".
    kv_config_path: File that keeps key-value settings across restarts, beside departedBrokers.json,
        which keeps the brokers that left; if unset, a restart loses both, and a warning says so.
    departed_broker_hours: How long a broker that left is remembered with its topics, so that
        clients can tell that they read only a part; `headrace broker forget` ends it.
    broker_timeout_ms: Silence in milliseconds after which a broker is dropped; a broker may
        request a timeout of its own.
    support_acting_master: Present a slave as the master of a broker that has no master, if the
        broker permits it.
    order_message_enable: Include the order settings of topics, from the namespace
        ORDER_TOPIC_CONFIG, in routes.
    register_from_own_address: Accept only brokers that register the IP address from which they
        connect; if unset, true unless bindAddress is loopback.
    """

    bind_address: str = "127.0.0.1"
    listen_port: Port = 9876
    monitor_port: Annotated[int, msgspec.Meta(ge=-1, le=65535)] = -1
    anonymous_access: AnonymousAccess = "deny"
    tls_config_file: str = ""
    kv_config_path: str | None = None
    departed_broker_hours: Annotated[int, msgspec.Meta(ge=0, le=8760)] = DEPARTED_HOURS
    broker_timeout_ms: Annotated[int, msgspec.Meta(ge=1)] = BROKER_TIMEOUT_MS
    support_acting_master: bool = False
    order_message_enable: bool = False
    register_from_own_address: bool | None = None

    def ports(self) -> dict[str, int]:
        """The ports to listen on by setting; 0 or less for those that are free to choose or off."""
        return {"listenPort": self.listen_port, "monitorPort": self.monitor_port}

    @property
    def departed_path(self) -> Path | None:
        """The file of departed brokers."""
        kept = self.kv_config_path
        return Path(kept).with_name("departedBrokers.json") if kept else None

    @property
    def checks_own_address(self) -> bool:
        """True if brokers must register the address that they connect from."""
        if self.register_from_own_address is None:
            return not is_loopback(self.bind_address)
        return self.register_from_own_address


class ConfigError(PortableError):
    """An unusable file; the text gives the location of the error and a remedy."""


def load_config(path: Path) -> NameServerConfig:
    """Read a file of ``key=value`` lines; lines that begin with # are comments.

    Raises ConfigError with file, line and key.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read settings: {error}") from error
    settings: dict[str, str] = {}
    locations: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            key, value = _read_line(text, f"{path}:{number}")
            settings[key], locations[key] = value, f"{path}:{number}"
    config = msgspec.convert(settings, NameServerConfig, strict=False)
    if reason := why_exposed(config.bind_address, config.anonymous_access):
        raise ConfigError(
            f"{locations['bindAddress']}: bindAddress={config.bind_address}: {reason}"
        )
    return config


def check_ports(config: NameServerConfig) -> None:
    """Raise ConfigError if two settings name one port, of which one may be an option."""
    if problem := equal_ports(config.ports()):
        raise ConfigError(problem)


def _read_line(text: str, location: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"{location}: expected key=value, found {text!r}")
    if key not in _KEYS:
        raise ConfigError(f"{location}: unknown key {key!r}; {_known(key)}")
    try:
        _check_path(msgspec.convert({key: value}, NameServerConfig, strict=False).kv_config_path)
    except (msgspec.ValidationError, ConfigError) as error:
        reason = str(error).partition(" - at")[0]
        raise ConfigError(f"{location}: {key} = {value!r}: {reason}") from error
    return key, value


def _check_path(path: str | None) -> None:
    """Raise ConfigError if no file can be created at ``path``; creates nothing."""
    if path and (reason := folder_problem(Path(path).parent)):
        raise ConfigError(reason)


def _known(key: str) -> str:
    close = difflib.get_close_matches(key, _KEYS, 1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(_KEYS)}"


_KEYS = NameServerConfig.__struct_encode_fields__
