"""Log-ins by SCRAM-SHA-256: what both sides make of good and of changed messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from headrace_protocol.rights.credentials import BadCredentials, Credentials
from headrace_protocol.rights.proofs import PasswordProof
from headrace_protocol.rights.session import (
    ITERATIONS,
    ITERATIONS_MAX,
    Login,
    ServerLogin,
    UnknownUsers,
    verifier_of,
)
from headrace_protocol.rights.session_headers import SessionFailed
from headrace_protocol.rights.users import Verifier
from tests.support.certificates import der_of

if TYPE_CHECKING:
    from collections.abc import Callable

PASSWORD = "correct horse, battery=staple €"
ALICE = Credentials("alice", PASSWORD)
VERIFIER = verifier_of(PASSWORD)
CERTIFICATE, OTHER = der_of("broker.example"), der_of("broker.example")


def server_of(certificate: bytes | None = None, verifier: Verifier = VERIFIER) -> ServerLogin:
    return ServerLogin(lambda _name: verifier, certificate)


def log_in(
    client: Login,
    server: ServerLogin,
    change: Callable[[int, str], str] = lambda _number, message: message,
) -> None:
    """One log-in; ``change`` sees each of its messages."""
    answer = change(1, server.first(change(0, client.first())))
    client.finish(change(3, server.finish(change(2, client.second(answer)))))


@pytest.mark.parametrize("certificate", [None, CERTIFICATE], ids=["tcp", "tls"])
@pytest.mark.parametrize("user", ["alice", "a,b=c", "müller", "x" * 255])
def test_right_password_logs_in(user: str, certificate: bytes | None) -> None:
    server = server_of(certificate)
    log_in(Login(Credentials(user, PASSWORD), certificate), server)
    assert server.user == user
    assert server.proof == PasswordProof(VERIFIER)


@pytest.mark.parametrize("certificate", [None, CERTIFICATE], ids=["tcp", "tls"])
def test_wrong_password_fails(certificate: bytes | None) -> None:
    with pytest.raises(SessionFailed):
        log_in(Login(Credentials("alice", "wrong"), certificate), server_of(certificate))


@pytest.mark.parametrize(
    ("seen", "own"),
    [(OTHER, CERTIFICATE), (None, CERTIFICATE), (CERTIFICATE, None)],
    ids=["another certificate", "TLS ends before the client", "TLS ends before the server"],
)
def test_messages_of_another_connection_fail(seen: bytes | None, own: bytes | None) -> None:
    with pytest.raises(SessionFailed):
        log_in(Login(ALICE, seen), server_of(own))


@pytest.mark.parametrize("key", [Ed25519PrivateKey, Ed448PrivateKey])
def test_certificates_of_each_kind_bind(key: type[Ed25519PrivateKey | Ed448PrivateKey]) -> None:
    certificate = self_signed(key.generate())
    log_in(Login(ALICE, certificate), server_of(certificate))
    with pytest.raises(SessionFailed):
        log_in(Login(ALICE, certificate), server_of(self_signed(key.generate())))


def self_signed(key: Ed25519PrivateKey | Ed448PrivateKey) -> bytes:
    """A certificate, DER, whose signature has no hash of its own."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker.example")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
    )
    return builder.sign(key, None).public_bytes(Encoding.DER)


def changed_each(number: int) -> list[int]:
    """The places of a message."""
    lengths: list[int] = []

    def note(at: int, message: str) -> str:
        lengths.extend(range(len(message) if at == number else 0))
        return message

    log_in(Login(ALICE, CERTIFICATE), server_of(CERTIFICATE), note)
    return lengths


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_a_changed_character_anywhere_fails(number: int) -> None:
    # The server has this verifier for each name, so that a changed name is found by the proof.
    for place in changed_each(number):

        def change(at: int, message: str, place: int = place) -> str:
            if at != number:
                return message
            # The last two bits of BASE64 may have no meaning.
            return message[:place] + chr(ord(message[place]) ^ 4) + message[place + 1 :]

        with pytest.raises(SessionFailed):
            log_in(Login(ALICE, CERTIFICATE), server_of(CERTIFICATE), change)


def test_recorded_messages_open_no_second_session() -> None:
    messages: dict[int, str] = {}
    log_in(Login(ALICE, None), server_of(), messages.setdefault)
    server = server_of()
    server.first(messages[0])
    with pytest.raises(SessionFailed):
        server.finish(messages[2])


def test_messages_out_of_order_fail() -> None:
    client, server = Login(ALICE, None), server_of()
    first = client.first()
    with pytest.raises(SessionFailed):
        server.finish(first)
    server = server_of()
    answer = server.first(first)
    with pytest.raises(SessionFailed):
        server.first(first)
    with pytest.raises(SessionFailed):
        client.finish(answer)


def test_a_server_that_does_not_know_the_password_is_found_out() -> None:
    pretended = Verifier(VERIFIER.salt, ITERATIONS, VERIFIER.stored_key, b"\0" * 32)
    with pytest.raises(SessionFailed):
        log_in(Login(ALICE, None), server_of(verifier=pretended))


def test_a_hostile_server_stalls_no_client() -> None:
    slow = VERIFIER._replace(iterations=ITERATIONS_MAX + 1)
    with pytest.raises(SessionFailed, match="iterations"):
        log_in(Login(ALICE, None), server_of(verifier=slow))


def test_unknown_users_look_like_others() -> None:
    unknown = UnknownUsers()
    one, again, other = (unknown.verifier(name) for name in ("x", "x", "y"))
    assert one.salt == again.salt != other.salt
    assert (len(one.salt), one.iterations) == (len(VERIFIER.salt), VERIFIER.iterations)
    with pytest.raises(SessionFailed):
        log_in(Login(ALICE, None), server_of(verifier=one))


@pytest.mark.parametrize("user", ["", "a\nb", "ﬁsh"])
def test_names_that_cannot_log_in_are_said(user: str) -> None:
    with pytest.raises(BadCredentials, match="can't log in") as caught:
        Login(Credentials(user, PASSWORD), None)
    assert PASSWORD not in str(caught.value)


def test_passwords_that_cannot_log_in_are_said_but_not_shown() -> None:
    for make in (verifier_of, lambda text: Login(Credentials("alice", text), None)):
        with pytest.raises(BadCredentials) as caught:
            make("hidden\0password")
        assert "hidden" not in str(caught.value)


def test_no_repr_shows_a_secret() -> None:
    assert PASSWORD not in repr(ALICE)
    assert repr(VERIFIER) == "Verifier(...)"
