"""Apache RocketMQ's file of TLS, and the contexts that are made of it."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization as kinds

from headrace_protocol.tls.contexts import client_context, server_context
from headrace_protocol.tls.expiry import expires_s
from headrace_protocol.tls.settings import (
    ClientAuth,
    ClientTls,
    ServerTls,
    TlsError,
    TlsFile,
    TlsMode,
    read_tls_file,
)
from tests.support.certificates import Authority

CERTIFICATE = "tls.server.certPath=c.pem\ntls.server.keyPath=k.pem\n"
SERVER = ServerTls(TlsMode.ENFORCING, "c.pem", "k.pem", None, ClientAuth.NONE, None)


def read(folder: Path, text: str) -> TlsFile:
    path = folder / "tls.properties"
    path.write_text(text)
    return read_tls_file(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", TlsFile(None, None, ())),
        ("# nothing\n\n! here either\ntls.server.certPath=\n", TlsFile(None, None, ())),
        (CERTIFICATE, TlsFile(SERVER, ClientTls(), ())),
        (CERTIFICATE + "tls.server.mode=disabled", TlsFile(None, None, ())),
        (
            CERTIFICATE + "tls.server.mode = Permissive",
            TlsFile(SERVER._replace(mode=TlsMode.PERMISSIVE), None, ()),
        ),
        (CERTIFICATE + "tls.enable=false", TlsFile(SERVER, None, ())),
        (
            (
                "tls.enable=true\ntls.client.trustCertPath=a.pem\ntls.client.certPath=b.pem\n"
                "tls.client.keyPath=b.key\ntls.client.keyPassword=secret"
            ),
            TlsFile(None, ClientTls("a.pem", "b.pem", "b.key", "secret"), ()),
        ),
        (
            CERTIFICATE + "tls.server.need.client.auth=require\ntls.server.trustCertPath=a.pem\n"
            "tls.server.keyPassword=secret",
            TlsFile(
                ServerTls(
                    TlsMode.ENFORCING, "c.pem", "k.pem", "secret", ClientAuth.REQUIRE, "a.pem"
                ),
                ClientTls(),
                (),
            ),
        ),
        (
            "tls.client.authServer=false\ntls.server.authClient=true\ntls.test.mode.enable=false",
            TlsFile(
                None,
                None,
                ("tls.client.authServer", "tls.server.authClient", "tls.test.mode.enable"),
            ),
        ),
    ],
)
def test_a_file_is_read_as_apache_writes_it(tmp_path: Path, text: str, expected: TlsFile) -> None:
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tls.server.mode=strict", "tls.server.mode=strict: expected disabled, permissive, enf"),
        ("tls.server.mode=enforcing", "tls.server.mode=enforcing needs tls.server.certPath"),
        ("tls.server.certPath=c", "tls.server.mode=enforcing needs tls.server.keyPath"),
        (
            CERTIFICATE + "tls.server.need.client.auth=require",
            "tls.server.need.client.auth=require needs tls.server.trustCertPath",
        ),
        ("tls.enable=yes", "tls.enable=yes: expected true, false"),
        ("tls.test.mode.enable=true", "certificates that nobody can verify are not made here"),
        ("tls.server.cert=c", "tls.properties:1: 'tls.server.cert' is no setting of TLS"),
        ("\nnonsense", "tls.properties:2: 'nonsense' is no setting of TLS"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(TlsError, match=re.escape(reason)):
        read(tmp_path, text)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"nowhere: cannot read the settings of TLS"):
        read_tls_file(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cert_file": "nowhere.pem"}, "nowhere.pem: no such file, but TLS needs it"),
        ({"key_file": "nowhere.key"}, "nowhere.key: no such file, but TLS needs it"),
        ({"key_file": "OTHER"}, "the key is not that of the certificate"),
        ({"key_file": "ENCRYPTED"}, "the password is missing or wrong"),
        ({"key_file": "ENCRYPTED", "key_password": "wrong"}, "the password is missing or wrong"),
        ({"cert_file": "EMPTY"}, "no certificate and key in PEM"),
        ({"trust_file": "EMPTY"}, "no certificates of authorities in PEM"),
        ({"trust_file": "nowhere.pem"}, "nowhere.pem: No such file or directory"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    authority = Authority.new(tmp_path / "ca")
    settings = authority.server()
    _, other = authority.issue("other")
    (tmp_path / "empty.pem").touch()
    files = {
        "OTHER": other,
        "EMPTY": str(tmp_path / "empty.pem"),
        "ENCRYPTED": _encrypted(settings.key_file, tmp_path / "encrypted.key"),
    }
    changed: dict[str, Any] = {name: files.get(value, value) for name, value in change.items()}
    with pytest.raises(TlsError, match=re.escape(reason)):
        server_context(settings._replace(**changed))


def test_an_encrypted_key_is_read_with_its_password(tmp_path: Path) -> None:
    settings = Authority.new(tmp_path).server()
    key = _encrypted(settings.key_file, tmp_path / "encrypted.key")
    server_context(settings._replace(key_file=key, key_password="secret"))


def _encrypted(key_file: str, path: Path) -> str:
    key = kinds.load_pem_private_key(Path(key_file).read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            kinds.Encoding.PEM,
            kinds.PrivateFormat.PKCS8,
            kinds.BestAvailableEncryption(b"secret"),
        )
    )
    return str(path)


def test_clients_verify_chain_and_name() -> None:
    context = client_context(ClientTls())
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("year", [2049, 2050])
def test_the_end_of_a_certificate(tmp_path: Path, year: int) -> None:
    """The year 2050 is the first of another format."""
    end = datetime(year, 3, 1, 12, 30, 15, tzinfo=UTC)
    authority = Authority(tmp_path, trustme.CA())
    cert_file, _ = authority.issue("long", not_after=end)
    assert expires_s(cert_file) == end.timestamp()


@pytest.mark.parametrize("damage", [0, 10, 60, 100, 400, b"", b"0\0", b"0\2\x30\0", b"0\x82"])
def test_a_damaged_certificate_has_no_end(tmp_path: Path, damage: int | bytes) -> None:
    """Cut, or with other bytes in it."""
    whole = Path(Authority.new(tmp_path).issue("whole")[0]).read_text()
    path = tmp_path / "damaged.pem"
    damaged = whole[:damage] if isinstance(damage, int) else ssl.DER_cert_to_PEM_cert(damage)
    path.write_text(damaged)
    with pytest.raises(TlsError, match=r"damaged\.pem: no certificate in PEM"):
        expires_s(str(path))
