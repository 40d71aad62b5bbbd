"""One connection's TLS without input and output: bytes in, bytes out."""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.tls.reasons import reason_of

if TYPE_CHECKING:
    from headrace_protocol.frame import Buffer

# A record that an earlier read began, with its overhead.
RECORD_BYTES_MAX: Final = 16 * 1024 + 2048


class TlsSession:
    """The server's side of a connection.

    is_ready: whether the handshake is done. is_ended: whether the peer has closed its side.
    """

    __slots__ = ("_in", "_object", "_out", "is_ended", "is_ready")

    def __init__(self, context: ssl.SSLContext) -> None:
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
        return count

    def encrypt(self, data: Buffer) -> None:
        """Add plaintext; ``pending`` returns it as records."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._object.write(rest) :]

    @property
    def has_pending(self) -> bool:
        """True if TLS itself has something for the peer, or records are left."""
        return bool(self._out.pending)

    def pending(self) -> bytes:
        """Bytes for the peer: handshake, records, alerts."""
        return self._out.read()

    def end(self) -> bytes:
        """Bytes that close the connection, so that the peer knows that nothing was cut off."""
        with suppress(ssl.SSLError, ValueError):
            self._object.unwrap()
        return self._out.read()

    def certificate(self) -> dict[str, object] | None:
        """The client's verified certificate, as ``ssl`` shows it; None without one."""
        return self._object.getpeercert() or None  # type: ignore[return-value]
