"""Log-in of a connection by a bearer token, without input and output: OAUTHBEARER.

The first message is empty. Its answer tells whether the server takes tokens on this connection, so
that none is sent where it would be read on the way, or to a server of another kind.
Source: RFC 7628; docs/protocol.md "Log-in".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from headrace_protocol.rights.credentials import BadCredentials
from headrace_protocol.rights.session_headers import BEARER, SessionFailed

if TYPE_CHECKING:
    from headrace_protocol.rights.credentials import Token

# Those with the groups of a user have some 8,000.
TOKEN_CHARS_MAX: Final = 16 * 1024
# Share of a token's life after which clients log in again.
RENEWAL: Final = 0.8
_BEGIN: Final = "n,,\x01auth=Bearer "
_END: Final = "\x01\x01"
BEARER_CHARS_MAX: Final = len(_BEGIN) + TOKEN_CHARS_MAX + len(_END)
# RFC 6750, b64token.
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_MESSAGE: Final = re.compile(f"{re.escape(_BEGIN)}({_TOKEN.pattern}){_END}")


class TokenRejected(SessionFailed):
    """A token that proves no user; the text says why, and has nothing of the token."""


class TokenLogin:
    """The client's side of one log-in, with the methods of ``session.Login``."""

    mechanism: Final = BEARER

    def __init__(self, token: Token) -> None:
        """Raises BadCredentials."""
        text = token.text
        if len(text) > TOKEN_CHARS_MAX:
            raise BadCredentials(
                f"a token of {len(text)} characters: {TOKEN_CHARS_MAX} is the most"
            )
        if not _TOKEN.fullmatch(text):
            raise BadCredentials("the token has characters that no bearer token has")
        self._text = text

    def first(self) -> str:
        """The first message."""
        return ""

    def second(self, _answer: str) -> str:
        """The second message."""
        return f"{_BEGIN}{self._text}{_END}"

    def finish(self, _answer: str) -> None:
        """The server proves nothing: TLS does."""


def token_in(message: str) -> str:
    """The token of a second message. Raises TokenRejected."""
    found = _MESSAGE.fullmatch(message)
    if found is None:
        raise TokenRejected("no bearer token in the message")
    return found[1]
