"""Settings of a nameserver, and their configuration file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import msgspec

from headrace_daemon.access.errors import AccessError
from headrace_daemon.access.exposure import check_exposure
from headrace_daemon.access.settings import (
    NO_SECRET,
    AccessConfig,
    AccessOptions,
    AuthRequiresTls,
    Secret,
    read_access,
)
from headrace_daemon.audit.settings import (
    BYTES_MAX,
    BYTES_MAX_LEAST,
    FILES_MAX_MOST,
    AuditSettings,
    OnFailure,
    audit_problem,
    audit_settings,
)
from headrace_daemon.folders import folder_problem
from headrace_daemon.quotas.table import FILE as QUOTAS_FILE
from headrace_daemon.serving.ports import equal_ports
from headrace_nameserver.routes import BROKER_TIMEOUT_MS, DEPARTED_HOURS
from headrace_protocol.errors import PortableError, reason_of
from headrace_protocol.rights.access import AnonymousAccess, is_loopback

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class NameServerConfig(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Settings of a nameserver.

    conf/generate.py copies these explanations into conf/nameserver.conf and docs/configuration.md.

    bind_address: Address to listen on; any address but loopback requires authenticationEnabled,
        certificates of clients, or anonymousAccess.
    listen_port: Port to listen on; 0 picks a free port.
    monitor_port: Port for health checks and metrics over HTTP; 0 picks a free port, -1 disables
        them.
    anonymous_access: Access without a user: deny serves nobody, or without authenticationEnabled
        only this machine; read serves anyone, but not administration; allow serves anyone
        everything.
    authentication_enabled: Every request needs a user: by a log-in, a signature or a client's
        certificate. See docs/security.md "Users".
    authorization_enabled: Users may do only what their rules permit; needs authenticationEnabled.
    authentication_whitelist: Request codes, with commas, that need no user; without one they have
        the rights of anonymous.
    authorization_whitelist: Request codes, with commas, that every user may send without a rule.
    init_authentication_user: Super user that is made if there is no user of its name yet, as
        {"username":"NAME","password":"..."}; never shown. Also by the environment variable
        HEADRACE_INIT_AUTHENTICATION_USER.
    init_authentication_user_file: File with the text of initAuthenticationUser, which only this
        user may read.
    inner_client_authentication_credentials: User as which brokers log in here, as
        {"accessKey":"NAME","secretKey":"..."}; made like initAuthenticationUser, and never shown.
        Also by HEADRACE_INNER_CLIENT_AUTHENTICATION_CREDENTIALS.
    inner_client_authentication_credentials_file: File with the text of
        innerClientAuthenticationCredentials, which only this user may read.
    auth_requires_tls: With admin, log-ins by a token, signed requests of Super users, signed
        administration and signed registrations need TLS, since whoever reads one can use it again;
        none permits them without.
    auth_key_file: File with a key of 32 or more random characters, which encrypts the passwords on
        disk; if unset, users.json has those of users with signatures in clear.
    auth_export_enable: Let Super users read passwords over TLS, to copy users to another daemon.
    auth_jwks_file: File with the public keys of an OpenID provider, a JWK set: clients may then log
        in by its tokens; if unset, none. See docs/security.md "Tokens".
    auth_jwt_audience: Audience (aud) that tokens must have; needed with authJwksFile.
    auth_jwt_issuer: Issuer (iss) that tokens must have; if unset, any.
    auth_jwt_user_claim: Claim of a token that names the user.
    auth_users_path: File that keeps users and rules; if unset, users.json beside kvConfigPath.
    tls_config_file: File with the settings of TLS, Apache RocketMQ's tls.properties; if unset, no
        TLS. See docs/security.md "TLS".
    audit_log_path: File that records administration, denials, log-ins and the like, one line each;
        if unset, none. See docs/security.md "Audit log".
    audit_on_failure: While the audit log can't be written: drop and count its lines, or refuse
        administrative requests.
    audit_log_bytes_max: Size in bytes at which the audit log is rotated, as it is each day.
    audit_log_files_max: Maximum number of rotated audit logs; the oldest are deleted. 0 keeps all.
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
    authentication_enabled: bool = False
    authorization_enabled: bool = False
    authentication_whitelist: str = ""
    authorization_whitelist: str = ""
    init_authentication_user: Secret = NO_SECRET
    init_authentication_user_file: str = ""
    inner_client_authentication_credentials: Secret = NO_SECRET
    inner_client_authentication_credentials_file: str = ""
    auth_requires_tls: AuthRequiresTls = "admin"
    auth_key_file: str = ""
    auth_export_enable: bool = False
    auth_jwks_file: str = ""
    auth_jwt_audience: str = ""
    auth_jwt_issuer: str = ""
    auth_jwt_user_claim: str = "sub"
    auth_users_path: str | None = None
    tls_config_file: str = ""
    audit_log_path: str = ""
    audit_on_failure: OnFailure = "drop"
    audit_log_bytes_max: Annotated[int, msgspec.Meta(ge=BYTES_MAX_LEAST)] = BYTES_MAX
    audit_log_files_max: Annotated[int, msgspec.Meta(ge=0, le=FILES_MAX_MOST)] = 0
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
    def audit(self) -> AuditSettings | None:
        """The audit log; None without one."""
        return audit_settings(self)

    @property
    def departed_path(self) -> Path | None:
        """The file of departed brokers."""
        kept = self.kv_config_path
        return Path(kept).with_name("departedBrokers.json") if kept else None

    @property
    def quotas_path(self) -> Path | None:
        """The file of quotas."""
        kept = self.kv_config_path
        return Path(kept).with_name(QUOTAS_FILE) if kept else None

    def access_config(self) -> AccessConfig:
        """The access control, with secrets from their files. Raises AccessError."""
        return read_access(AccessOptions.of(self))

    @property
    def users_path(self) -> Path | None:
        """The file of users and rules."""
        if self.auth_users_path:
            return Path(self.auth_users_path)
        kept = self.kv_config_path
        return Path(kept).with_name("users.json") if kept else None

    @property
    def checks_own_address(self) -> bool:
        """True if brokers must register the address that they connect from."""
        if self.register_from_own_address is None:
            return not is_loopback(self.bind_address)
        return self.register_from_own_address


class ConfigError(PortableError):
    """An unusable file; the text gives the location of the error and a remedy.

    problems: its lines.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems = text.split("\n")


def load_config(path: Path) -> NameServerConfig:
    """Read a file of ``key=value`` lines; lines that begin with # are comments.

    Raises ConfigError with file, line and key.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read settings: {reason_of(error)}") from error
    settings: dict[str, str] = {}
    locations: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            key, value = _read_line(text, f"{path}:{number}")
            settings[key], locations[key] = value, f"{path}:{number}"
    config = _converted(settings)
    try:
        check_config(config)
    except ConfigError as error:
        location = locations.get(str(error).partition("=")[0], str(path))
        raise ConfigError(f"{location}: {error}") from None
    return config


def check_config(config: NameServerConfig) -> None:
    """Raise ConfigError for settings that do not fit together; the text begins with a key."""
    try:
        check_exposure(config.bind_address, AccessOptions.of(config), config.tls_config_file)
        config.access_config()
    except AccessError as error:
        raise ConfigError(str(error)) from None
    check_users_path(config)


def check_users_path(config: NameServerConfig) -> None:
    """Raise ConfigError if there is no place for the users."""
    if config.authentication_enabled and config.users_path is None:
        raise ConfigError(
            "authenticationEnabled=true: name a file that keeps the users, by authUsersPath or "
            "kvConfigPath"
        )


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
        _check_paths(_converted({key: value}))
    except (msgspec.ValidationError, ConfigError) as error:
        reason = str(error).partition(" - at")[0]
        raise ConfigError(f"{location}: {key} = {value!r}: {reason}") from error
    return key, value


def _converted(settings: dict[str, str]) -> NameServerConfig:
    return msgspec.convert(settings, NameServerConfig, strict=False, dec_hook=_secret)


def _secret(kind: type, value: object) -> object:
    """The hook of msgspec for types that it does not know."""
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise NotImplementedError(kind)


def _check_paths(config: NameServerConfig) -> None:
    """Raise ConfigError if no file can be where a setting has it; creates nothing."""
    for path in (config.kv_config_path, config.auth_users_path):
        if path and (reason := folder_problem(Path(path).parent)):
            raise ConfigError(reason)
    if reason := audit_problem(config.audit_log_path):
        raise ConfigError(reason)


def _known(key: str) -> str:
    close = difflib.get_close_matches(key, _KEYS, 1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(_KEYS)}"


_KEYS = NameServerConfig.__struct_encode_fields__
