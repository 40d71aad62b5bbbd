"""Connections of clients with TLS, for trio and asyncio."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import anyio
from anyio.streams.tls import TLSStream

from headrace_protocol.drivers.aio import connect_tcp
from headrace_protocol.drivers.errors import TlsFailed
from headrace_protocol.tls.contexts import client_context
from headrace_protocol.tls.reasons import why

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from headrace_protocol.drivers.aio import Connect
    from headrace_protocol.tls.settings import ClientTls


def tls_connector(settings: ClientTls) -> Connect:
    """Connects to ``host:port`` with TLS and verifies the server. Raises TlsError.

    The function that it returns raises TlsFailed, OSError, ValueError.
    """
    context = client_context(settings)

    async def connect(address: str) -> ByteStream:
        stream, name = await connect_tcp(address), settings.name_of(address)
        try:
            return await TLSStream.wrap(
                stream,
                server_side=False,
                hostname=name,
                ssl_context=context,
                standard_compatible=False,
            )
        except (ssl.SSLError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            await anyio.aclose_forcefully(stream)
            raise TlsFailed(address, why(error, name)) from error
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise

    return connect
