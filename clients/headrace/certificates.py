"""Authorities and certificates for labs and tests; needs the extra ``tls``."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from headrace.errors import ConfigurationError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
except ImportError as error:
    raise ConfigurationError("certificates need cryptography: pip install cryptography") from error

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CA_DAYS: Final = 3650
DAYS: Final = 365
_CA: Final = "ca"
# Clocks of machines differ.
_BEFORE: Final = timedelta(hours=1)


def make_ca(folder: Path, days: int = CA_DAYS) -> Path:
    """Write ``ca.pem`` and ``ca.key``; returns the certificate's path.

    Raises ConfigurationError if there are some already.
    """
    _check_new(folder, _CA)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("headrace authority")
    usage = x509.BasicConstraints(ca=True, path_length=0)
    made = _certificate(name, key, days).issuer_name(name).add_extension(usage, critical=True)
    return _write(folder, _CA, key, made.sign(key, SHA256()))


def issue(folder: Path, name: str, hosts: Iterable[str], days: int = DAYS) -> Path:
    """Write ``NAME.pem``, with the chain, and ``NAME.key``; returns the certificate's path.

    folder: that of the authority. hosts: names and IP addresses of the server.
    Raises ConfigurationError.
    """
    _check_new(folder, name)
    ca, ca_key = _authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.BasicConstraints(ca=False, path_length=None)
    made = _certificate(_name(name), key, days).issuer_name(ca.subject)
    made = made.add_extension(usage, critical=True)
    if alternatives := [_alternative(host) for host in hosts]:
        made = made.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return _write(folder, name, key, made.sign(ca_key, SHA256()), ca)


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / f"{_CA}.pem").read_bytes())
        key = load_pem_private_key((folder / f"{_CA}.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{folder} has no authority: {error}; make one with `headrace cert make-ca`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{folder / _CA}.key is not of an authority made here")
    return certificate, key


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _check_new(folder: Path, name: str) -> None:
    for path in (folder / f"{name}.pem", folder / f"{name}.key"):
        if path.exists():
            raise ConfigurationError(f"{path} is there already: remove it, or choose another name")


def _write(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, *chain: x509.Certificate
) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(folder / f"{name}.key", flags, 0o600), "wb") as file:
        file.write(secret)
    path = folder / f"{name}.pem"
    path.write_bytes(b"".join(each.public_bytes(Encoding.PEM) for each in chain))
    return path
