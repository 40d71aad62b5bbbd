"""``headrace cert``: certificates that TLS takes, and what is refused by name."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization as kinds
from cryptography.hazmat.primitives.asymmetric import ed25519

from headrace_protocol.tls.contexts import client_context, server_context
from headrace_protocol.tls.expiry import expires_s
from headrace_protocol.tls.session import TlsSession
from headrace_protocol.tls.settings import ClientAuth, ClientTls, ServerTls, TlsMode
from tests.support.certificates import Raw
from tests.support.cli import fail, succeed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With an authority."""
    made = tmp_path / "made"
    outcome = succeed("cert", "make-ca", "--folder", str(made))
    assert f"HEADRACE_TLS_CA={made / 'ca.pem'}" in outcome.stderr
    return made


def test_a_server_of_the_made_files_is_verified(folder: Path) -> None:
    hosts = ("broker.example.org", "10.0.0.7", "::1")
    outcome = succeed("cert", "issue", "broker", *hosts, "--folder", str(folder))
    cert, key = str(folder / "broker.pem"), str(folder / "broker.key")
    assert f"tls.server.certPath={cert}\ntls.server.keyPath={key}\n" in outcome.stderr
    settings = ServerTls(TlsMode.ENFORCING, cert, key, None, ClientAuth.NONE, None)
    client = client_context(ClientTls(str(folder / "ca.pem")))
    for host in hosts:
        shake_hands(server_context(settings), client, host)
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'other"):
        shake_hands(server_context(settings), client, "other.example.org")


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """A handshake in memory. Raises SSLCertVerificationError."""
    session, raw = TlsSession(server), Raw(client, host)
    for _ in range(3):
        session.decrypt(raw.step(), memoryview(bytearray(1 << 16)))
        raw.incoming.write(session.pending())
    assert session.is_ready


def test_keys_are_for_their_owner_alone(folder: Path) -> None:
    assert not succeed("cert", "issue", "alice", "--folder", str(folder), "--days", "3").stderr
    for name in ("ca.key", "alice.key"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    made = x509.load_pem_x509_certificate((folder / "alice.pem").read_bytes())
    assert made.subject.rfc4514_string() == "CN=alice"
    assert expires_s(str(folder / "alice.pem")) == made.not_valid_after_utc.timestamp()


def test_nothing_is_replaced(folder: Path) -> None:
    before = (folder / "ca.key").read_bytes()
    refused = fail(2, "cert", "make-ca", "--folder", str(folder))
    assert "ca.pem is there already: remove it, or choose another name" in refused
    succeed("cert", "issue", "alice", "--folder", str(folder))
    refused = fail(2, "cert", "issue", "alice", "--folder", str(folder))
    assert "alice.pem is there already" in refused
    assert (folder / "ca.key").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (None, "has no authority: "),
        (b"damaged", "has no authority: "),
        ("ed25519", "ca.key is not of an authority made here"),
    ],
)
def test_an_authority_that_is_none_is_named(
    folder: Path, damage: bytes | str | None, reason: str
) -> None:
    key = folder / "ca.key"
    key.unlink()
    if isinstance(damage, bytes):
        key.write_bytes(damage)
    elif damage:
        key.write_bytes(_other_key())
    assert reason in fail(2, "cert", "issue", "alice", "--folder", str(folder))


def _other_key() -> bytes:
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, kinds.NoEncryption()
    )


def test_names_are_those_of_files(folder: Path) -> None:
    refused = fail(2, "cert", "issue", "../alice", "--folder", str(folder))
    assert "'../alice' is not a name for files" in refused
