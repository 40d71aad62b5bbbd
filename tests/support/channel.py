"""A client, as a service sees it, without a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace_protocol.command import Command
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import decode_header
from headrace_protocol.rights.proofs import Proof


class MemoryChannel:
    """A client's end of a connection: keeps what is written to it."""

    address = "127.0.0.1:1"
    ip = "127.0.0.1"
    host_bytes = b"\x7f\x00\x00\x01\x00\x00\x00\x01"

    def __init__(self) -> None:
        self.is_greeted = False
        self.user: str | None = None
        self.signer: str | None = None
        self.proof: Proof | None = None
        self.login: Any = None
        self.certificate: bytes | None = None
        self.is_encrypted = False
        self.is_open = True
        self.is_slow = False
        self.on_drained: Callable[[], None] | None = None
        self.charged_bytes = 0
        self.written = bytearray()

    def greet(self) -> None:
        self.is_greeted = True

    def log_in(self, user: str, proof: Proof | None = None) -> None:
        self.user, self.proof = user, proof

    def charge(self, added_bytes: int) -> None:
        self.charged_bytes += added_bytes

    def write(self, *buffers: bytes | bytearray | memoryview) -> None:
        for buffer in buffers:
            self.written += buffer

    def when_lost(self, notify: Callable[[], None]) -> None:
        if not self.is_open:
            notify()

    def take_sent_bytes(self) -> int:
        return 0

    def replies(self) -> list[tuple[Command, bytes]]:
        """The frames written since the last time."""
        data, self.written = self.written, bytearray()
        return [
            (decode_header(serialize_type, header), bytes(body))
            for serialize_type, header, body in FrameReader().feed(data)
        ]


class LeavingChannel(MemoryChannel):
    """A client that closes its connection while it is answered."""

    def write(self, *_buffers: bytes | bytearray | memoryview) -> None:
        self.is_open = False
