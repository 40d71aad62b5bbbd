"""Settings of access control, which both daemons have, and the secrets that they name.

Keys are Apache RocketMQ's. A secret is given in the file of settings, in a file of its own, or in
the environment; no log, answer, error or repr shows it. Source: docs/security.md "Users".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

import msgspec

from headrace_daemon.access.errors import AccessError
from headrace_protocol.drivers.files import NotPrivate, read_private
from headrace_protocol.errors import RequestError, reason_of
from headrace_protocol.rights.access import AccessSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_daemon.access.cipher import Cipher
    from headrace_protocol.rights.access import AnonymousAccess
    from headrace_protocol.rights.credentials import Credentials

AuthRequiresTls = Literal["admin", "none"]

_CODE_DIGITS_MAX: Final = 9


class Hidden(Protocol):
    """A text that is not shown, such as pydantic's SecretStr."""

    def get_secret_value(self) -> str:
        """The text."""


class Secret:
    """A text that is not shown."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def get_secret_value(self) -> str:
        """The text."""
        return self._value

    def __repr__(self) -> str:
        return "Secret('***')" if self._value else "Secret('')"

    def __str__(self) -> str:
        return "***" if self._value else ""


NO_SECRET: Final = Secret("")


class AccessOptions(NamedTuple):
    """The settings as both daemons hold them; see docs/configuration.md."""

    anonymous_access: AnonymousAccess
    authentication_enabled: bool
    authorization_enabled: bool
    authentication_whitelist: str
    authorization_whitelist: str
    init_authentication_user: Hidden
    init_authentication_user_file: str
    inner_client_authentication_credentials: Hidden
    inner_client_authentication_credentials_file: str
    auth_requires_tls: AuthRequiresTls
    auth_key_file: str
    auth_export_enable: bool
    auth_jwks_file: str
    auth_jwt_audience: str
    auth_jwt_issuer: str
    auth_jwt_user_claim: str

    @classmethod
    def of(cls, config: object) -> AccessOptions:
        """Those of a daemon's settings, which have them under the same names."""
        return cls(*(getattr(config, name) for name in cls._fields))


class TokenSettings(NamedTuple):
    """Requirements on the tokens that prove a user.

    file: the provider's public keys, a JWK set. audience, issuer: as tokens must have them; an
    empty issuer is any. user_claim: name of the claim with the user.
    """

    file: str
    audience: str
    issuer: str
    user_claim: str


class AccessConfig(NamedTuple):
    """The access control that the settings of a daemon ask for.

    initial: the Super user of the first start. inner: the user of daemons among themselves.
    cipher: of the passwords on disk; None to keep them in clear. exports: whether a Super user
    may read passwords over TLS. tokens: of clients; None to take none.
    """

    settings: AccessSettings
    initial: Credentials | None = None
    inner: Credentials | None = None
    cipher: Cipher | None = None
    exports: bool = False
    tokens: TokenSettings | None = None


class _SecretSetting(NamedTuple):
    """A setting with credentials as JSON; fields: names of the two texts in it."""

    key: str
    attribute: str
    fields: tuple[str, str]

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"HEADRACE_{self.attribute.upper()}"


_INITIAL: Final = _SecretSetting(
    "initAuthenticationUser", "init_authentication_user", ("username", "password")
)
_INNER: Final = _SecretSetting(
    "innerClientAuthenticationCredentials",
    "inner_client_authentication_credentials",
    ("accessKey", "secretKey"),
)


def check_options(options: AccessOptions) -> None:
    """Raise AccessError for settings that can't be used; reads no file."""
    if options.authorization_enabled and not options.authentication_enabled:
        raise AccessError(
            "authorizationEnabled=true: needs authenticationEnabled=true, since rights of a name "
            "that nobody has checked are rights of everybody"
        )
    _settings(options)
    _tokens(options)
    for row in (_INITIAL, _INNER):
        text, file = _inline(options, row), getattr(options, f"{row.attribute}_file")
        if text and file:
            raise AccessError(f"{row.key}File={file}: {row.key} is set, too: keep one of them")
        if text:
            _credentials(f"{row.key}=***", text, row)


def read_access(
    options: AccessOptions, environment: Mapping[str, str] = os.environ
) -> AccessConfig:
    """The access control of a daemon, with the secrets that its settings name.

    Raises AccessError.
    """
    check_options(options)
    return AccessConfig(
        _settings(options),
        _secret(options, _INITIAL, environment),
        _secret(options, _INNER, environment),
        _cipher(options.auth_key_file),
        options.auth_export_enable,
        _tokens(options),
    )


def _settings(options: AccessOptions) -> AccessSettings:
    return AccessSettings(
        options.authentication_enabled,
        options.authorization_enabled,
        _codes("authenticationWhitelist", options.authentication_whitelist),
        _codes("authorizationWhitelist", options.authorization_whitelist),
        options.auth_requires_tls == "admin",
        options.anonymous_access,
    )


def _tokens(options: AccessOptions) -> TokenSettings | None:
    file, audience = options.auth_jwks_file, options.auth_jwt_audience
    if file and not audience:
        raise AccessError(
            f"authJwksFile={file}: needs authJwtAudience, since without it a token for any other "
            "service of the provider opens this one"
        )
    if not file:
        for key, value in (
            ("authJwtAudience", audience),
            ("authJwtIssuer", options.auth_jwt_issuer),
        ):
            if value:
                raise AccessError(f"{key}={value}: takes effect only with authJwksFile")
        return None
    if not options.auth_jwt_user_claim:
        raise AccessError("authJwtUserClaim: is empty; name a claim, such as sub")
    return TokenSettings(file, audience, options.auth_jwt_issuer, options.auth_jwt_user_claim)


def _codes(key: str, text: str) -> frozenset[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) <= _CODE_DIGITS_MAX):
            raise AccessError(f"{key}={text}: {word!r} is no request code, such as 105")
    return frozenset(map(int, words))


def _inline(options: AccessOptions, row: _SecretSetting) -> str:
    hidden: Hidden = getattr(options, row.attribute)
    return hidden.get_secret_value()


def _secret(
    options: AccessOptions, row: _SecretSetting, environment: Mapping[str, str]
) -> Credentials | None:
    file = getattr(options, f"{row.attribute}_file")
    if file:
        place = f"{row.key}File={file}"
        text = _read(place, file).decode(errors="replace")
    elif text := _inline(options, row):
        place = f"{row.key}=***"
    else:
        place, text = row.variable, environment.get(row.variable, "")
    return _credentials(place, text, row) if text.strip() or file else None


def _read(place: str, file: str) -> bytes:
    try:
        return read_private(Path(file))
    except NotPrivate as error:
        raise AccessError(f"{place}: {error}") from None
    except OSError as error:
        raise AccessError(f"{place}: {reason_of(error)}") from None


def _credentials(place: str, text: str, row: _SecretSetting) -> Credentials:
    """The credentials of a JSON object; errors show nothing of it."""
    # Imported only where there is a secret.
    from headrace_protocol.rights.auth_requests import check_password, check_user_name
    from headrace_protocol.rights.credentials import Credentials

    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        name, password = (msgspec.json.decode(found[field], type=str) for field in row.fields)
        check_user_name(name)
        check_password(password)
    except RequestError as error:
        raise AccessError(f"{place}: {error.remark}") from None
    except (msgspec.DecodeError, KeyError):
        user, password = row.fields
        raise AccessError(
            f'{place}: expected a line of JSON, {{"{user}":"NAME","{password}":"..."}}'
        ) from None
    return Credentials(name, password)


def _cipher(file: str) -> Cipher | None:
    if not file:
        return None
    from headrace_daemon.access.cipher import Cipher

    return Cipher(_read(f"authKeyFile={file}", file), f"authKeyFile={file}")
