"""The user as whom clients connect; the password may be elsewhere until it is needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.errors import ConfigurationError
from headrace_protocol.drivers.files import NotPrivate, read_private

if TYPE_CHECKING:
    from headrace_protocol.rights.credentials import Credentials

USER_VARIABLE = "HEADRACE_USER"
PASSWORD_VARIABLE = "HEADRACE_PASSWORD"  # noqa: S105 - a name
PASSWORD_FILE_VARIABLE = "HEADRACE_PASSWORD_FILE"  # noqa: S105 - a name


class Account(NamedTuple):
    """A user. password: itself, or in a file of mode 0600; neither for that of the environment."""

    user: str
    password: str | None = None
    password_file: str | None = None

    def __repr__(self) -> str:
        return f"Account({self.user!r})"

    def credentials(self) -> Credentials:
        """Name and password as this process finds it. Raises ConfigurationError."""
        from headrace_protocol.rights.credentials import Credentials

        return Credentials(self.user, self._password())

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


def _read(path: str) -> str:
    """The password in a file, without the end of its line. Raises ConfigurationError."""
    try:
        text = read_private(Path(path)).decode()
    except (OSError, NotPrivate, UnicodeDecodeError) as error:
        raise ConfigurationError(f"password file {path}: {error}") from None
    password = text.rstrip("\r\n")
    if not password:
        raise ConfigurationError(f"password file {path}: is empty")
    return password
