"""TLS over blocking sockets, without an event loop's library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.drivers.errors import ConnectFailed, TlsFailed
from headrace_protocol.tls.contexts import client_context
from headrace_protocol.tls.reasons import is_of_another, why
from headrace_protocol.tls.settings import TlsError

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from headrace_protocol.tls.names import ServerNames
    from headrace_protocol.tls.settings import ClientTls


def connect_secured(
    open_socket: Callable[[], socket.socket], settings: ClientTls, address: str, names: ServerNames
) -> ssl.SSLSocket:
    """A connected socket with TLS, whose server is verified; waits for the handshake.

    open_socket: connects to ``address``; once more where a certificate may have another name.

    Raises TlsFailed, also for unusable files, and ConnectFailed (no handshake within the socket's
    time limit).
    """
    try:
        context = client_context(settings)
    except TlsError as error:
        raise TlsFailed(address, str(error)) from error
    allowed = names.of(settings, address)
    for name in allowed:
        sock = open_socket()
        try:
            secured = context.wrap_socket(sock, server_hostname=name)
        except TimeoutError as error:
            sock.close()
            raise ConnectFailed(address, "no TLS handshake in time") from error
        except OSError as error:
            sock.close()
            if not is_of_another(error) or name == allowed[-1]:
                raise TlsFailed(address, why(error, allowed)) from error
        except BaseException:
            sock.close()
            raise
        else:
            names.proved(address, name)
            return secured
    raise AssertionError("a server has a name")
