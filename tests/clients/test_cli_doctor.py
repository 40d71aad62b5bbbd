"""The doctor says what is at an address, whatever it is."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trio

from headrace.admin.probe import Role, Timeouts, examine, recognise
from tests.support.cli import headrace

Session = Callable[[socket.socket], None]


@contextlib.contextmanager
def server(session: Session) -> Iterator[str]:
    """A real server on a free port; ``session`` has each of its connections in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(client,), daemon=True).start()

        def serve(client: socket.socket) -> None:
            with client, contextlib.suppress(OSError):
                session(client)

        threading.Thread(target=accept, daemon=True).start()
        host, port = listener.getsockname()
        yield f"{host}:{port}"
        listener.shutdown(socket.SHUT_RDWR)


def silent(client: socket.socket) -> None:
    while client.recv(65536):
        pass


def closing(client: socket.socket) -> None:
    client.recv(1)


def http2(client: socket.socket) -> None:
    client.sendall(bytes.fromhex("000000040000000000"))
    silent(client)


def tls(client: socket.socket) -> None:
    """A real TLS server that has no certificate: it refuses in TLS's own words."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.wrap_socket(client, server_side=True)


def chatty(client: socket.socket) -> None:
    client.sendall(b"220 mail.example ESMTP ready\r\n")
    silent(client)


@contextlib.contextmanager
def web_server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}).start()
        host, port = httpd.server_address[:2]
        yield f"{host!s}:{port}"
        httpd.shutdown()


# Loopback answers at once or never.
IMPATIENT = Timeouts(connect_s=0.3, answer_s=0.1, foreign_s=0.1)


def problem_of(address: str, role: Role = Role.NAMESERVER) -> str:
    problem = trio.run(examine, address, role, None, IMPATIENT).problem
    assert problem
    return problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("session", "words"),
    [
        (http2, "speaks HTTP/2"),
        (tls, "speaks TLS"),
        (silent, "accepts connections but does not respond"),
        (closing, "accepts connections but does not respond"),
        (chatty, "it sent b'220 mail.example"),
    ],
)
def test_servers_of_other_kinds_are_recognised(session: Session, words: str) -> None:
    with server(session) as address:
        assert words in problem_of(address)


@pytest.mark.slow
def test_a_web_server_is_recognised() -> None:
    with web_server() as address:
        assert "speaks HTTP, so it is not a nameserver" in problem_of(address)
        assert "speaks HTTP, so it is not a broker" in problem_of(address, Role.BROKER)


def test_a_dead_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    assert "connection refused: nothing listens" in problem_of(f"127.0.0.1:{port}")


@pytest.mark.slow
def test_a_full_backlog_or_a_firewall_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address), contextlib.suppress(OSError):
            # The kernel takes one or two into the queue and drops the rest, as a firewall does.
            queued = [socket.socket() for _ in range(3)]
            for sock in queued:
                sock.setblocking(False)
                sock.connect_ex(address)
            assert "no connection within" in problem_of(f"127.0.0.1:{address[1]}")
            for sock in queued:
                sock.close()


def test_a_name_that_does_not_resolve_is_named_so() -> None:
    assert "does not resolve" in problem_of("no-such-host.invalid:9876")


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"HTTP/1.1 400 Bad Request", "HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "TLS"),
        (b"\x16\x03\x03\x00\x7a", "TLS"),
        (b"SSH-2.0-OpenSSH_9.2", "SSH"),
        (bytes.fromhex("000012040000000000"), "HTTP/2"),
        (bytes.fromhex("000008070000000000"), "HTTP/2"),
    ],
)
def test_first_words_tell_protocols_apart(start: bytes, name: str) -> None:
    protocol = recognise(start)
    assert protocol is not None
    assert protocol.startswith(name)


def test_unknown_bytes_are_not_guessed_at() -> None:
    assert recognise(b"") is None
    assert recognise(b"\0\0\0\x10\0\0\0\x0c{}") is None


@pytest.mark.slow
def test_the_command_lists_each_address_and_fails_if_one_does() -> None:
    with web_server() as address:
        outcome = headrace("doctor", "--json", "--nameserver", f"{address};127.0.0.1:1")
    assert outcome.exit_code == 1
    web, dead = outcome.json()
    assert (web["role"], web["address"], web["ok"]) == ("nameserver", address, False)
    assert "HTTP" in web["problem"]
    assert "refused" in dead["problem"]
