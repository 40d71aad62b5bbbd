"""A connected client, as the functions of requests see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.frame import Buffer


class Channel(Protocol):
    """A connected client, as services use it.

    address: "host:port" of the client. ip: its IP address, as rules compare it.
    user: name of the user that has logged in, who then makes all requests of the channel.
    signer: name of the user that has signed its last request, if any; for quotas, not for rights.
    proof: of the user that has logged in, a ``rights.proofs.Proof``; None for a certificate's.
    login: a log-in that waits for its second message; None without any.
    certificate: the one that this daemon has shown, DER; None without TLS.
    is_encrypted: whether nobody between can read the channel.
    host_bytes: the address as in records: 4 or 16 bytes of address, 4 of port, big-endian.
    is_slow: the client has many unread replies; long answers wait until it has read half of them.
    on_drained: called once when the client is no longer slow, or closed.
    is_greeted: whether ``greet`` was called.
    """

    address: str
    ip: str
    host_bytes: bytes
    user: str | None
    signer: str | None
    proof: Any
    login: Any
    certificate: bytes | None
    is_encrypted: bool
    is_greeted: bool
    is_slow: bool
    on_drained: Callable[[], None] | None

    @property
    def is_open(self) -> bool:
        """True while written bytes can reach the client."""

    def greet(self) -> None:
        """Note the client's first request."""

    def log_in(self, user: str, proof: Any = None) -> None:
        """Note that the client has proved to be a user."""

    def charge(self, added_bytes: int) -> None:
        """Account for memory kept for the client, e.g. a held request; negative to release it."""

    def write(self, *buffers: Buffer) -> None:
        """Queue bytes; they are sent at the end of the turn."""

    def when_lost(self, notify: Callable[[], None]) -> None:
        """Have ``notify`` called if the client is closed before it was sent all that is queued."""
