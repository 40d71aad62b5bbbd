"""Log-ins: the header of both requests of one and of both answers, and their failure."""

from __future__ import annotations

from typing import Final

from headrace_protocol.errors import PortableError
from headrace_protocol.headers import RequestHeader

# A name of 255 characters, each escaped, with nonce and channel binding.
SCRAM_CHARS_MAX: Final = 2048
# Over TCP, and over TLS.
PLAIN: Final = "SCRAM-SHA-256"
BOUND: Final = "SCRAM-SHA-256-PLUS"
# By a token, over either.
BEARER: Final = "OAUTHBEARER"

# Begins the reason for which a server rejects a token over TCP; clients look for it.
NEEDS_TLS: Final = "a token needs TLS"


class SessionFailed(PortableError):
    """A message that is malformed, out of order, or proves no user."""


class AuthSessionHeader(RequestHeader, kw_only=True, gc=False):
    """AUTH_SESSION (7680040).

    mechanism: of the first request; the second leaves it out. message: one of RFC 5802 or 7628.
    lifetime_ms: in the last answer of a log-in by a token, the time after which it ends.
    """

    mechanism: str | None = None
    message: str
    lifetime_ms: int | None = None
