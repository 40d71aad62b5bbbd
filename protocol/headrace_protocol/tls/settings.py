"""Settings of TLS, and Apache RocketMQ's file of them.

Source: org.apache.rocketmq.remoting.netty.TlsSystemConfig; docs/security.md "TLS".
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from headrace_protocol.drivers.address import split_address
from headrace_protocol.errors import PortableError, reason_of

if TYPE_CHECKING:
    from pathlib import Path


Value = TypeVar("Value")


class TlsError(PortableError):
    """Unusable settings or files of TLS; the text names the file and a remedy."""


class TlsMode(Enum):
    """Connections that a port of a daemon accepts."""

    DISABLED = "disabled"
    PERMISSIVE = "permissive"
    ENFORCING = "enforcing"


class ClientAuth(Enum):
    """Certificates that clients must show. One that is shown is always verified."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRE = "require"


class ServerTls(NamedTuple):
    """The server's side.

    cert_file: the chain, PEM. key_file: PKCS#8, PEM. trust_file: authorities of clients.
    """

    mode: TlsMode
    cert_file: str
    key_file: str
    key_password: str | None
    client_auth: ClientAuth
    trust_file: str | None


class ClientTls(NamedTuple):
    """The client's side; the server's certificate is always verified.

    ca_file: authorities of servers; None for those of the system. cert_file, key_file: the
    certificate to show, if any. server_name: the name that certificates must have; None for the
    host of each address.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: str | None = None
    server_name: str | None = None

    def name_of(self, address: str) -> str:
        """The name that the certificate of ``host:port`` must have. Raises ValueError."""
        return self.server_name or split_address(address)[0]

    def __repr__(self) -> str:
        masked = self._asdict() | {"key_password": self.key_password and "***"}
        return f"ClientTls({', '.join(f'{key}={value!r}' for key, value in masked.items())})"


class TlsFile(NamedTuple):
    """Contents of a file. server: None without a certificate. client: None if disabled.

    ignored: keys that have no effect here.
    """

    server: ServerTls | None
    client: ClientTls | None
    ignored: tuple[str, ...]


_MODE: Final = "tls.server.mode"
_ENABLE: Final = "tls.enable"
_AUTH: Final = "tls.server.need.client.auth"
_TEST_MODE: Final = "tls.test.mode.enable"
# Verification is always on; Apache's own list of ciphers and protocols names those of Java.
_IGNORED: Final = frozenset(
    ("tls.server.authClient", "tls.client.authServer", "tls.ciphers", "tls.protocols", _TEST_MODE)
)
_SERVER: Final = ("certPath", "keyPath", "keyPassword", "trustCertPath")
_CLIENT: Final = ("trustCertPath", "certPath", "keyPath", "keyPassword")
_KNOWN: Final = (
    _IGNORED
    | {_MODE, _ENABLE, _AUTH, "tls.config.file"}
    | {f"tls.server.{name}" for name in _SERVER}
    | {f"tls.client.{name}" for name in _CLIENT}
)
_TRUE_FALSE: Final = {"true": True, "false": False}


def read_tls_file(path: Path) -> TlsFile:
    """The settings of a file with lines ``key=value``. Raises TlsError."""
    values = _read(path)
    if values.get(_TEST_MODE) == "true":
        raise TlsError(
            f"{path}: {_TEST_MODE}=true: certificates that nobody can verify are not made here; "
            "remove the line and make some with `headrace cert issue`"
        )
    server = _server(path, values)
    is_enforcing = server is not None and server.mode is TlsMode.ENFORCING
    client = None
    if _word(path, values, _ENABLE, _TRUE_FALSE, default=is_enforcing):
        client = ClientTls(*(values.get(f"tls.client.{name}") for name in _CLIENT))
    return TlsFile(server, client, tuple(sorted(_IGNORED & values.keys())))


def _server(path: Path, values: dict[str, str]) -> ServerTls | None:
    cert_file, key_file, password, trust_file = (values.get(f"tls.server.{n}") for n in _SERVER)
    default = TlsMode.ENFORCING if cert_file else TlsMode.DISABLED
    mode = _word(path, values, _MODE, {each.value: each for each in TlsMode}, default)
    auth_words = {each.value: each for each in ClientAuth}
    auth = _word(path, values, _AUTH, auth_words, ClientAuth.NONE)
    if mode is TlsMode.DISABLED:
        return None
    for name, value in (("certPath", cert_file), ("keyPath", key_file)):
        if value is None:
            raise TlsError(f"{path}: {_MODE}={mode.value} needs tls.server.{name}")
    if auth is not ClientAuth.NONE and trust_file is None:
        raise TlsError(
            f"{path}: {_AUTH}={auth.value} needs tls.server.trustCertPath, the authority of the "
            "clients' certificates"
        )
    assert cert_file is not None
    assert key_file is not None
    return ServerTls(mode, cert_file, key_file, password, auth, trust_file)


def _word(
    path: Path, values: dict[str, str], key: str, words: dict[str, Value], default: Value
) -> Value:
    word = values.get(key)
    if word is None:
        return default
    if word.lower() not in words:
        raise TlsError(f"{path}: {key}={word}: expected {', '.join(words)}")
    return words[word.lower()]


def _read(path: Path) -> dict[str, str]:
    """The settings that are not empty, by key."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TlsError(f"{path}: cannot read the settings of TLS: {reason_of(error)}") from error
    values = {}
    for number, line in enumerate(lines, 1):
        key, equals, value = (part.strip() for part in line.partition("="))
        if not key or key.startswith(("#", "!")):
            continue
        if not equals or key not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            raise TlsError(f"{path}:{number}: {key!r} is no setting of TLS; known: {known}")
        if value:
            values[key] = value
    return values
