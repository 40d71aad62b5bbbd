"""A connection's TLS without sockets: damaged, cut and repeated bytes."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.tls.contexts import client_context, server_context
from headrace_protocol.tls.session import RECORD_BYTES_MAX, TlsSession
from tests.support.certificates import Authority, Raw

ROOM_BYTES = 1 << 16
# Of the first record: RFC 8446, 5.1, has it ignored.
LEGACY_VERSION = (1, 2)


class Pair(Raw):
    """A client and the server's session, and what passed from the one to the other."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        super().__init__(client)
        self.session = TlsSession(server)
        self.room = memoryview(bytearray(ROOM_BYTES + RECORD_BYTES_MAX))

    def take(self, data: bytes) -> bytes:
        """The server's plaintext; its answer goes to the client."""
        count = self.session.decrypt(data, self.room)
        self.incoming.write(self.session.pending())
        return bytes(self.room[:count])

    def greet(self) -> None:
        """Finish the handshake, if both sides let it."""
        for _ in range(4):
            self.take(self.step())


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = Authority.new(Path(tmp_path_factory.mktemp("ca")))
    return server_context(authority.server()), client_context(authority.client())


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


def test_plaintext_passes_both_ways(contexts: Contexts) -> None:
    pair = Pair(*contexts)
    pair.greet()
    pair.tls.write(b"x" * 16_000)
    pair.tls.write(b"y" * 10)
    assert pair.take(pair.outgoing.read()) == b"x" * 16_000 + b"y" * 10
    pair.session.encrypt(b"z" * 100_000)
    pair.incoming.write(pair.session.pending())
    got = b""
    while len(got) < 100_000:
        got += pair.tls.read(ROOM_BYTES)
    assert got == b"z" * 100_000


def test_a_changed_byte_of_a_hello_ends_the_connection(contexts: Contexts) -> None:
    for place in range(len(Pair(*contexts).step())):
        if place in LEGACY_VERSION:
            continue
        pair = Pair(*contexts)
        hello = bytearray(pair.step())
        hello[place] ^= 1 << place % 8
        with suppress(RemoteProtocolError, ssl.SSLError):
            pair.take(bytes(hello))
            pair.greet()
        assert not pair.session.is_ready, place


def test_a_changed_byte_of_a_record_ends_the_connection(contexts: Contexts) -> None:
    size = 0
    place = 0
    while place <= size:
        pair = Pair(*contexts)
        pair.greet()
        pair.tls.write(b"one message")
        record = bytearray(pair.outgoing.read())
        record[place] ^= 1 << place % 8
        with suppress(RemoteProtocolError):
            assert pair.take(bytes(record)) == b"", place
        size, place = len(record) - 1, place + 1


@pytest.mark.parametrize("cut", range(1, 6))
def test_records_that_come_in_pieces(contexts: Contexts, cut: int) -> None:
    pair = Pair(*contexts)
    pair.greet()
    pair.tls.write(b"a message in pieces")
    data = pair.outgoing.read()
    got = b"".join(pair.take(data[at : at + cut]) for at in range(0, len(data), cut))
    assert got == b"a message in pieces"


def test_the_end_of_a_client_is_seen(contexts: Contexts) -> None:
    pair = Pair(*contexts)
    pair.greet()
    pair.tls.write(b"last")
    with pytest.raises(ssl.SSLWantReadError):
        pair.tls.unwrap()
    assert pair.take(pair.outgoing.read()) == b"last"
    assert pair.session.is_ended


def test_what_a_client_leaves_unread_is_bounded(contexts: Contexts) -> None:
    pair = Pair(*contexts)
    pair.session = TlsSession(contexts[0], pending_bytes_max=100)
    with pytest.raises(RemoteProtocolError, match="bytes of handshakes and keys that the peer has"):
        pair.take(pair.step())


def test_renegotiation_is_refused(tmp_path: Path) -> None:
    authority = Authority.new(tmp_path)
    context = server_context(authority.server())
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.options & ssl.OP_NO_COMPRESSION
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
