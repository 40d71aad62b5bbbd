"""Blocking connections to daemons under attack: plain, or over TLS as a user."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import NamedTuple

from headrace_protocol.codes import RequestCode
from headrace_protocol.command import Command, header_fields
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import decode_header
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.rights.session import Login
from headrace_protocol.rights.session_headers import AuthSessionHeader
from tests.support.wires import request

SILENCE_S = 2.0


class Door(NamedTuple):
    """How a connection gets in.

    ca_file: of TLS; without one the connection is plain. user, password: of its log-in, if any.
    source: the address that it comes from, which is a host of its own for the daemons.
    """

    ca_file: str = ""
    user: str = ""
    password: str = ""
    source: str = "127.0.0.1"

    def connect(self, host: str, port: int, silence_s: float) -> socket.socket:
        """A connection over TLS if there is an authority. Raises OSError."""
        plain = socket.create_connection((host, port), silence_s, (self.source, 0))
        if not self.ca_file:
            return plain
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            return context.wrap_socket(plain, server_hostname=host)
        except OSError:
            plain.close()
            raise


OPEN = Door()


class Peer:
    """A blocking connection on which any bytes can be sent. Raises OSError without one."""

    def __init__(self, address: str, silence_s: float = SILENCE_S, door: Door = OPEN) -> None:
        host, _, port = address.rpartition(":")
        self.socket = door.connect(host, int(port), silence_s)
        self._reader = FrameReader()
        self._received: list[tuple[Command, bytes]] = []
        if door.user:
            self._log_in(Credentials(door.user, door.password))

    def _log_in(self, credentials: Credentials) -> None:
        certificate = None
        if isinstance(self.socket, ssl.SSLSocket):
            certificate = self.socket.getpeercert(binary_form=True)
        login = Login(credentials, certificate)
        answer = self._ask_scram(login.first(), login.mechanism)
        login.finish(self._ask_scram(login.second(answer)))

    def _ask_scram(self, message: str, mechanism: str | None = None) -> str:
        header = AuthSessionHeader(mechanism=mechanism, message=message)
        self.send(request(RequestCode.AUTH_SESSION, dict(header_fields(header) or {})))
        answer, _ = self.receive()
        if answer.code:
            self.close()
            raise ConnectionRefusedError(answer.remark)
        return answer.header(AuthSessionHeader).message

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> tuple[Command, bytes]:
        """The next frame. Raises OSError when there is none in time."""
        while not self._received:
            data = self.socket.recv(1 << 18)
            if not data:
                raise ConnectionResetError("closed")
            self._received += [
                (decode_header(kind, header), bytes(body))
                for kind, header, body in self._reader.feed(data)
            ]
        return self._received.pop(0)

    def drop(self) -> None:
        """Drop what has come, without a wait."""
        silence_s = self.socket.gettimeout()
        self.socket.setblocking(False)
        with suppress(BlockingIOError, ssl.SSLWantReadError):
            while self.socket.recv(1 << 20):
                pass
            return
        self.socket.settimeout(silence_s)

    def close(self) -> None:
        self.socket.close()
