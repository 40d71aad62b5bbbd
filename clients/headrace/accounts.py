"""The user as whom clients connect; its password or token may be elsewhere until it is needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import ConfigurationError
from headrace_protocol.drivers.files import NotPrivate, read_private
from headrace_protocol.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.rights.credentials import Credentials, Token

USER_VARIABLE = "HEADRACE_USER"
PASSWORD_VARIABLE = "HEADRACE_PASSWORD"  # noqa: S105 - a name
PASSWORD_FILE_VARIABLE = "HEADRACE_PASSWORD_FILE"  # noqa: S105 - a name
TOKEN_FILE_VARIABLE = "HEADRACE_TOKEN_FILE"  # noqa: S105 - a name


class Account(NamedTuple):
    """A user by name and password, or by a token, which names it.

    password: itself, or in a file of mode 0600; neither for that of the environment.
    token_file: of mode 0600. token: itself, or a function that returns it.
    """

    user: str = ""
    password: str | None = None
    password_file: str | None = None
    token_file: str | None = None
    token: str | Callable[[], str] | None = None

    def __repr__(self) -> str:
        return f"Account({self.shown!r})"

    @property
    def shown(self) -> str:
        """The user, or where its token is."""
        return self.user or f"of the token in {self.token_file or 'memory'}"

    @property
    def is_renewable(self) -> bool:
        """True for a user whose next token may be another one."""
        return self.token_file is not None or callable(self.token)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for a client, with the password as this process finds it."""
        return self.credentials()._asdict() if self.user else {"token_file": self.token_file}

    def find(self) -> Credentials | Token:
        """Name and password, or the token, as this process finds it now.

        Takes a function's time. Raises ConfigurationError.
        """
        return self.credentials() if self.user else self._token()

    def credentials(self) -> Credentials:
        """Name and password as this process finds it. Raises ConfigurationError."""
        from headrace_protocol.rights.credentials import Credentials

        return Credentials(self.user, self._password())

    def _token(self) -> Token:
        from headrace_protocol.rights.credentials import Token

        if self.token_file is not None:
            return Token(_read(self.token_file, "token").strip())
        found = self._called() if callable(self.token) else self.token
        if not isinstance(found, str):
            raise ConfigurationError(f"token: a {type(found).__name__}, where a text belongs")
        return Token(found)

    def _called(self) -> object:
        assert callable(self.token)
        try:
            return self.token()
        except Exception as error:
            raise ConfigurationError(f"the function token raised {error!r}") from error

    def _password(self) -> str:
        if self.password is not None:
            return self.password
        if self.password_file is not None:
            return _read(self.password_file)
        if password := os.environ.get(PASSWORD_VARIABLE):
            return password
        if path := os.environ.get(PASSWORD_FILE_VARIABLE):
            return _read(path)
        raise ConfigurationError(
            f"user {self.user!r} has no password: set {PASSWORD_FILE_VARIABLE} or "
            f"{PASSWORD_VARIABLE}, or the argument password"
        )


def _read(path: str, what: str = "password") -> str:
    """The secret in a file, without the end of its line. Raises ConfigurationError."""
    try:
        text = read_private(Path(path)).decode()
    except (OSError, NotPrivate, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what} file {path}: {reason_of(error)}") from None
    secret = text.rstrip("\r\n")
    if not secret:
        raise ConfigurationError(f"{what} file {path}: is empty")
    return secret
