"""Header of log-ins: both requests of one and both answers."""

from __future__ import annotations

from typing import Final

from headrace_protocol.headers import RequestHeader

# A name of 255 characters, each escaped, with nonce and channel binding.
SCRAM_CHARS_MAX: Final = 2048
# Over TCP, and over TLS.
PLAIN: Final = "SCRAM-SHA-256"
BOUND: Final = "SCRAM-SHA-256-PLUS"


class AuthSessionHeader(RequestHeader, kw_only=True, gc=False):
    """AUTH_SESSION (7680040).

    mechanism: of the first request; the second leaves it out. scram: a message of RFC 5802.
    """

    mechanism: str | None = None
    scram: str
