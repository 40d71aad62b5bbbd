"""Proofs with which clients log in, or sign: a user's name and password, or a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace_protocol.errors import PortableError
from headrace_protocol.rights.signature import ACCESS_KEY, SIGNATURE, sign

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_protocol.frame import Buffer


class BadCredentials(PortableError):
    """A name, password or token that no log-in can carry; the text has neither of the last two."""


class Credentials(NamedTuple):
    """A user's name and password."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials({self.user!r}, '***')"

    @property
    def who(self) -> str:
        """The user in errors."""
        return f"as {self.user!r}"

    def signed(self, fields: Mapping[str, str], body: Buffer) -> dict[str, str]:
        """The fields of a request with name and signature, as Apache RocketMQ's servers expect.

        Empty values are left out: those servers read a binary header's as null, and would verify
        the signature of the word "null".
        """
        named = {name: value for name, value in fields.items() if value}
        named[ACCESS_KEY] = self.user
        return {**named, SIGNATURE: sign(self.password, named, body)}


class Token(NamedTuple):
    """A bearer token, such as a JWT of an OpenID provider, which names the user itself."""

    text: str

    def __repr__(self) -> str:
        return "Token('***')"

    @property
    def who(self) -> str:
        """The user in errors."""
        return "by a token"
