"""A file's certificate and the end of its validity, which the standard library does not read.

Source: RFC 5280, 4.1.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace_protocol.tls.settings import TlsError

if TYPE_CHECKING:
    from collections.abc import Iterator

_END: Final = "-----END CERTIFICATE-----"
_VERSION_TAG: Final = 0xA0
_UTC_TIME: Final = 0x17
_FORMATS: Final = {_UTC_TIME: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
# Of the fields of a certificate without its version: serial number, algorithm, issuer, validity.
_VALIDITY: Final = 3


def first_certificate(cert_file: str) -> bytes:
    """The first certificate of a file in PEM, DER. Raises TlsError."""
    try:
        first, end, _ = Path(cert_file).read_text().partition(_END)
        begin = first.index("-----BEGIN CERTIFICATE-----")
        return ssl.PEM_cert_to_DER_cert(first[begin:] + end)
    except (OSError, ValueError) as error:
        raise TlsError(f"{cert_file}: no certificate in PEM: {error}") from error


def expires_s(cert_file: str) -> float:
    """Unix time at which the first certificate of a file in PEM expires. Raises TlsError."""
    try:
        return not_after(first_certificate(cert_file)).timestamp()
    except (ValueError, IndexError, KeyError) as error:
        raise TlsError(f"{cert_file}: no certificate in PEM: {error}") from error


def not_after(certificate: bytes) -> datetime:
    """The last moment of a certificate in DER. Raises ValueError, IndexError, KeyError."""
    (_, whole), *_ = _elements(certificate)
    (_, signed), *_ = _elements(whole)
    fields = [element for element in _elements(signed) if element[0] != _VERSION_TAG]
    _, (tag, value) = _elements(fields[_VALIDITY][1])
    return datetime.strptime(value.decode(), _FORMATS[tag]).replace(tzinfo=UTC)


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and value of each element."""
    position = 0
    while position < len(data):
        tag, length = data[position], data[position + 1]
        position += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(data[position : position + size])
            position += size
        yield tag, data[position : position + length]
        position += length
