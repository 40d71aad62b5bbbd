"""TLS over blocking sockets, without an event loop's library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.drivers.errors import ConnectFailed, TlsFailed
from headrace_protocol.tls.contexts import client_context
from headrace_protocol.tls.reasons import why
from headrace_protocol.tls.settings import TlsError

if TYPE_CHECKING:
    import socket
    import ssl

    from headrace_protocol.tls.settings import ClientTls


def secure(sock: socket.socket, settings: ClientTls, address: str) -> ssl.SSLSocket:
    """A connected socket with TLS, whose server is verified; waits for the handshake.

    Raises TlsFailed, also for unusable files, and ConnectFailed (no handshake within the socket's
    time limit).
    """
    name = settings.name_of(address)
    try:
        return client_context(settings).wrap_socket(sock, server_hostname=name)
    except TimeoutError as error:
        sock.close()
        raise ConnectFailed(address, "no TLS handshake in time") from error
    except OSError as error:
        sock.close()
        raise TlsFailed(address, why(error, name)) from error
    except TlsError as error:
        sock.close()
        raise TlsFailed(address, str(error)) from error
    except BaseException:
        sock.close()
        raise
