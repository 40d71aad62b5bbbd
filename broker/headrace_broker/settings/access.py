"""Settings of users, rules and secrets: a part of the table in ``config.py``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, SecretStr
from pydantic.alias_generators import to_camel

from headrace_broker.settings.setting import setting
from headrace_daemon.access.settings import (
    AccessConfig,
    AccessOptions,
    AuthRequiresTls,
    read_access,
)


class AccessFields(BaseModel):
    """The settings of access control; ``headrace_daemon.access.settings`` reads them."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    authentication_enabled: bool = setting(
        False,
        "Every request needs a user: by a log-in, a signature or a client's certificate. See"
        ' docs/security.md "Users".',
    )
    authorization_enabled: bool = setting(
        False, "Users may do only what their rules permit; needs authenticationEnabled."
    )
    authentication_whitelist: str = setting(
        "",
        "Request codes, with commas, that need no user; without one they have the rights of"
        " anonymous.",
    )
    authorization_whitelist: str = setting(
        "", "Request codes, with commas, that every user may send without a rule."
    )
    init_authentication_user: SecretStr = setting(
        SecretStr(""),
        "Super user that is made if there is no user of its name yet, as"
        ' {"username":"NAME","password":"..."}; never shown. Also by the environment variable'
        " HEADRACE_INIT_AUTHENTICATION_USER.",
    )
    init_authentication_user_file: str = setting(
        "", "File with the text of initAuthenticationUser, which only this user may read."
    )
    inner_client_authentication_credentials: SecretStr = setting(
        SecretStr(""),
        "User as which brokers log in at nameservers and other brokers, as"
        ' {"accessKey":"NAME","secretKey":"..."}; made like initAuthenticationUser, and never'
        " shown. Also by HEADRACE_INNER_CLIENT_AUTHENTICATION_CREDENTIALS.",
    )
    inner_client_authentication_credentials_file: str = setting(
        "",
        "File with the text of innerClientAuthenticationCredentials, which only this user may"
        " read.",
    )
    auth_requires_tls: AuthRequiresTls = setting(
        "admin",
        "With admin, log-ins by a token, signed requests of Super users, and signed administration"
        " need TLS, since whoever reads one can use it again; none permits them without.",
    )
    auth_key_file: str = setting(
        "",
        "File with a key of 32 or more random characters, which encrypts the passwords on disk; if"
        " empty, users.json has those of users with signatures in clear.",
    )
    auth_export_enable: bool = setting(
        False, "Let Super users read passwords over TLS, to copy users to another broker."
    )
    auth_jwks_file: str = setting(
        "",
        "File with the public keys of an OpenID provider, a JWK set: clients may then log in by its"
        ' tokens. If empty, none. See docs/security.md "Tokens".',
    )
    auth_jwt_audience: str = setting(
        "", "Audience (aud) that tokens must have; needed with authJwksFile."
    )
    auth_jwt_issuer: str = setting("", "Issuer (iss) that tokens must have; if empty, any.")
    auth_jwt_user_claim: str = setting("sub", "Claim of a token that names the user.")

    def access_config(self) -> AccessConfig:
        """The access control, with secrets from their files. Raises AccessError."""
        return read_access(AccessOptions.of(self))
