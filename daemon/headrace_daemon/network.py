"""Networks on which daemons listen and clients connect: TCP, or the memory of one process.

Both sides take the network as an argument, so a broker in a test, a simulation or another program
needs no socket.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import trio
from anyio import BrokenResourceError, ClosedResourceError, EndOfStream
from anyio.abc import ByteStream

from headrace_daemon.serving import ports
from headrace_daemon.serving.ports import listen
from headrace_daemon.serving.socket_loop import serve_sockets
from headrace_daemon.serving.stream_transport import serve_stream
from headrace_protocol.drivers.aio import connect_tcp
from headrace_protocol.tls.names import ServerNames

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_daemon.serving.certificates import Certificates
    from headrace_daemon.serving.server import RemotingServer
    from headrace_protocol.drivers.aio import Connect
    from headrace_protocol.tls.settings import TlsFile

_PAIR_ATTEMPTS = 16


@dataclass
class Listener:
    """An address taken by this process.

    host, port: the address for clients.
    sockets: the bound sockets; none in memory.
    fast_port: another port of the same server; 0: none.
    """

    host: str
    port: int
    sockets: list[socket.socket]
    fast_port: int = 0

    @property
    def address(self) -> str:
        """The address as ``host:port``, as in routes."""
        return _address(self.host, self.port)

    @property
    def addresses(self) -> list[str]:
        """All addresses of the server."""
        return [_address(self.host, port) for port in (self.port, self.fast_port) if port]

    def add(self, other: Listener) -> None:
        """Serve the port of ``other`` as well."""
        self.sockets += other.sockets
        self.fast_port = other.port

    def close(self) -> None:
        """Release the address; for a listener that was never served."""
        for bound in self.sockets:
            bound.close()


class Network(Protocol):
    """A way for processes, or parts of one, to reach each other by ``host:port``.

    names: of the servers that are connected to, which connections with TLS look for.
    """

    names: ServerNames

    def listen(self, host: str, port: int) -> Listener:
        """Take an address; port 0 lets the network choose a port.

        Raises OSError with the address and a remedy.
        """

    async def serve(
        self,
        listener: Listener,
        server: RemotingServer,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled."""

    async def connect(self, address: str) -> ByteStream:
        """Open a stream to ``host:port``. Raises OSError."""


class TcpNetwork:
    """The machine's own network.

    tls: certificate of the ports, and of the connections that are opened; None: without TLS.

    Raises TlsError.
    """

    def __init__(self, tls: TlsFile | None = None) -> None:
        self.certificates: Certificates | None = None
        self.names = ServerNames()
        self._connect: Connect = connect_tcp
        if tls is not None and tls.server is not None:
            from headrace_daemon.serving.certificates import Certificates

            self.certificates = Certificates(tls.server)
        if tls is not None and tls.client is not None:
            from headrace_protocol.tls.connect import tls_connector

            self._connect = tls_connector(tls.client, self.names)

    def listen(self, host: str, port: int) -> Listener:
        """See Network."""
        bound = listen(host, port)
        bound_host, bound_port = bound.getsockname()[:2]
        return Listener(_advertised(bound_host), bound_port, [bound])

    async def serve(
        self,
        listener: Listener,
        server: RemotingServer,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See Network."""
        security = None
        if self.certificates is not None:
            from headrace_daemon.serving.tls_transport import Security

            security = Security(self.certificates)
            server.certificates = self.certificates
            self.certificates.on_read = server.on_certificate
        await serve_sockets(server, listener.sockets, security, task_status=task_status)

    async def connect(self, address: str) -> ByteStream:
        """See Network."""
        return await self._connect(address)


def tcp_network(tls_config_file: str, warnings: list[str]) -> TcpNetwork:
    """The network of a daemon; tls_config_file: its setting.

    Adds a warning for settings without effect. Raises TlsError.
    """
    if not tls_config_file:
        return TcpNetwork()
    from headrace_protocol.tls.settings import read_tls_file

    tls = read_tls_file(Path(tls_config_file))
    if tls.ignored:
        warnings.append(
            f"{tls_config_file}: {', '.join(tls.ignored)}: without effect, since certificates are "
            "always verified, and TLS is 1.2 or newer"
        )
    return TcpNetwork(tls)


class MemoryNetwork:
    """Addresses that exist only in this object; for trio."""

    def __init__(self) -> None:
        self.names = ServerNames()
        self._listeners: set[str] = set()
        self._servers: dict[str, tuple[RemotingServer, trio.Nursery]] = {}
        self._last_port = 0

    def listen(self, host: str, port: int) -> Listener:
        """See Network."""
        listener = Listener(_advertised(host), port or self._free_port(host), [])
        if listener.address in self._listeners:
            raise OSError(f"another server of this process has the address {listener.address}")
        self._listeners.add(listener.address)
        return listener

    async def serve(
        self,
        listener: Listener,
        server: RemotingServer,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See Network."""
        async with trio.open_nursery() as nursery:
            addresses = listener.addresses
            self._servers.update(dict.fromkeys(addresses, (server, nursery)))
            try:
                await serve_sockets(server, [], task_status=task_status)
            finally:
                for address in addresses:
                    del self._servers[address]
                self._listeners.difference_update(addresses)
                nursery.cancel_scope.cancel()

    async def connect(self, address: str) -> ByteStream:
        """See Network."""
        # It loads pytest if that is installed, which would slow a daemon's start.
        from trio.testing import memory_stream_pair

        await trio.lowlevel.checkpoint()
        try:
            server, nursery = self._servers[address]
        except KeyError:
            raise ConnectionRefusedError(
                f"no server listens on {address} in this process"
            ) from None
        ours, theirs = memory_stream_pair()
        nursery.start_soon(serve_stream, server, theirs, "127.0.0.1", self._next_port())
        return MemoryByteStream(ours)

    def _free_port(self, host: str) -> int:
        while f"{_advertised(host)}:{(port := self._next_port())}" in self._listeners:
            pass
        return port

    def _next_port(self) -> int:
        self._last_port = self._last_port % 0xFFFF + 1
        return self._last_port


class MemoryByteStream(ByteStream):
    """A trio stream with anyio's interface."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def send(self, item: bytes) -> None:
        """Send all of ``item``."""
        with _anyio_errors():
            await self._stream.send_all(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive some bytes. Raises EndOfStream."""
        with _anyio_errors():
            data = await self._stream.receive_some(max_bytes)
        if not data:
            raise EndOfStream
        return bytes(data)

    async def send_eof(self) -> None:
        """Close the stream: the protocol has no half-closed connections."""
        await self.aclose()

    async def aclose(self) -> None:
        """Close both directions."""
        await self._stream.aclose()


@contextmanager
def _anyio_errors() -> Iterator[None]:
    try:
        yield
    except trio.ClosedResourceError as error:
        raise ClosedResourceError from error
    except trio.BrokenResourceError as error:
        raise BrokenResourceError from error


def listen_with_fast(network: Network, host: str, port: int, fast_port: int) -> Listener:
    """Take an address, and for the same server the port of Apache RocketMQ's "VIP channel".

    port: 0 lets the network choose, and choose again while the fast port is taken.
    fast_port: -1 takes the port below ``port`` by two, where old Java clients send and
    dashboards ask; 0 takes none.
    Raises OSError with the address and a remedy.
    """
    for attempts_left in reversed(range(_PAIR_ATTEMPTS)):
        listener = network.listen(host, port)
        wanted = ports.fast_port(listener.port, fast_port)
        if wanted <= 0:
            break
        try:
            listener.add(network.listen(host, wanted))
            break
        except OSError as error:
            listener.close()
            if port or fast_port > 0 or not attempts_left:
                raise OSError(error.errno, f"{error.strerror}, or set fastListenPort") from error
    return listener


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _advertised(host: str) -> str:
    """The address at which clients reach a server that listens on ``host``."""
    if host not in {"0.0.0.0", "::", ""}:  # noqa: S104 - compared, not bound
        return host
    # No packet is sent: connecting a datagram socket selects the outgoing interface.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
