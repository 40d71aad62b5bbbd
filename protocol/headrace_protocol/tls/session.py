"""One connection's TLS without input and output: bytes in, bytes out."""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.tls.identity import user_of
from headrace_protocol.tls.reasons import reason_of

if TYPE_CHECKING:
    from headrace_protocol.frame import Buffer

# A record that an earlier read began, with its overhead.
RECORD_BYTES_MAX: Final = 16 * 1024 + 2048
# A handshake, with a chain of certificates; a client may request updates of keys and read nothing.
_PENDING_BYTES_MAX: Final = 256 * 1024


class TlsSession:
    """The server's side of a connection.

    is_ready: True once the handshake is done. is_ended: True once the peer has closed its side.
    """

    __slots__ = ("_in", "_object", "_out", "_pending_bytes_max", "is_ended", "is_ready")

    def __init__(
        self, context: ssl.SSLContext, pending_bytes_max: int = _PENDING_BYTES_MAX
    ) -> None:
        """pending_bytes_max: of TLS itself, for a peer that reads nothing."""
        self._pending_bytes_max = pending_bytes_max
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._in, self._out, server_side=True)
        self.is_ready = self.is_ended = False

    def decrypt(self, data: Buffer, room: memoryview) -> int:
        """Take received bytes; the bytes of plaintext that were written into ``room``.

        room: at least ``RECORD_BYTES_MAX`` longer than ``data``. Raises RemoteProtocolError;
        ``pending`` may have an alert for the peer all the same.
        """
        self._in.write(data)
        count = 0
        try:
            if not self.is_ready:
                self._object.do_handshake()
                self.is_ready = True
            while read := self._object.read(len(room) - count, room[count:]):
                count += read  # type: ignore[operator]
            self.is_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise RemoteProtocolError(f"TLS: {reason_of(error)}") from error
        if self._out.pending > self._pending_bytes_max:
            raise RemoteProtocolError(
                f"TLS: {self._out.pending} bytes of handshakes and keys that the peer has not read"
            )
        return count

    @property
    def user(self) -> str | None:
        """The user that the client's verified certificate names, if it has shown one."""
        certificate = self._object.getpeercert()
        return user_of(certificate) if certificate else None

    def encrypt(self, data: Buffer) -> None:
        """Add plaintext; ``pending`` returns it as records."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._object.write(rest) :]

    @property
    def has_pending(self) -> bool:
        """True if ``pending`` has bytes."""
        return bool(self._out.pending)

    def pending(self) -> bytes:
        """Bytes for the peer: handshake, records, alerts."""
        return self._out.read()

    def end(self) -> bytes:
        """Bytes that close the connection, so that the peer knows that nothing was cut off."""
        with suppress(ssl.SSLError, ValueError):
            self._object.unwrap()
        return self._out.read()
