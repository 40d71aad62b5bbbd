"""Connections of clients with TLS, for trio and asyncio."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import anyio
from anyio.streams.tls import TLSStream

from headrace_protocol.drivers.aio import connect_tcp
from headrace_protocol.drivers.errors import TlsFailed
from headrace_protocol.tls.contexts import client_context
from headrace_protocol.tls.names import ServerNames
from headrace_protocol.tls.reasons import is_of_another, why

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from headrace_protocol.drivers.aio import Connect
    from headrace_protocol.tls.settings import ClientTls


def tls_connector(settings: ClientTls, names: ServerNames | None = None) -> Connect:
    """Connects to ``host:port`` with TLS and verifies the server. Raises TlsError.

    names: of servers, as the client learns them.

    The function that it returns raises TlsFailed, OSError, ValueError.
    """
    context = client_context(settings)
    known = names or ServerNames()

    async def connect(address: str) -> ByteStream:
        allowed = known.of(settings, address)
        for name in allowed:
            try:
                stream = await _secured(await connect_tcp(address), name, context)
            except (ssl.SSLError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
                if not is_of_another(error) or name == allowed[-1]:
                    raise TlsFailed(address, why(error, allowed)) from error
            else:
                known.proved(address, name)
                return stream
        raise AssertionError("a server has a name")

    return connect


async def _secured(stream: ByteStream, name: str, context: ssl.SSLContext) -> ByteStream:
    try:
        return await TLSStream.wrap(
            stream,
            server_side=False,
            hostname=name,
            ssl_context=context,
            standard_compatible=False,
        )
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise
