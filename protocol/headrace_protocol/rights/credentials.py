"""Name and password of a user."""

from __future__ import annotations

from typing import NamedTuple

from headrace_protocol.errors import PortableError


class BadCredentials(PortableError):
    """A name or password that no log-in can carry; the text never has the password."""


class Credentials(NamedTuple):
    """A user's name and password, with which clients log in or sign."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials({self.user!r}, '***')"
