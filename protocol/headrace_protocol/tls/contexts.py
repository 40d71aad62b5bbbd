"""Contexts of TLS 1.2 and newer, without renegotiation and compression."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace_protocol.errors import reason_of
from headrace_protocol.tls.settings import ClientAuth, TlsError

if TYPE_CHECKING:
    from headrace_protocol.tls.settings import ClientTls, ServerTls

_VERIFY: Final = {
    ClientAuth.NONE: ssl.CERT_NONE,
    ClientAuth.OPTIONAL: ssl.CERT_OPTIONAL,
    ClientAuth.REQUIRE: ssl.CERT_REQUIRED,
}


def server_context(settings: ServerTls) -> ssl.SSLContext:
    """The context of a server's connections. Raises TlsError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, settings.cert_file, settings.key_file, settings.key_password)
    context.verify_mode = _VERIFY[settings.client_auth]
    if settings.trust_file is not None:
        _load_authorities(context, settings.trust_file)
    return context


def client_context(settings: ClientTls) -> ssl.SSLContext:
    """The context of a client's connections, which verifies chain and name. Raises TlsError."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if settings.ca_file is None:
        context.load_default_certs()
    else:
        _load_authorities(context, settings.ca_file)
    if settings.cert_file is not None:
        key_file = settings.key_file or settings.cert_file
        _load_certificate(context, settings.cert_file, key_file, settings.key_password)
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    return context


def _load_certificate(
    context: ssl.SSLContext, cert_file: str, key_file: str, password: str | None
) -> None:
    try:
        # Without a password OpenSSL would ask at the terminal.
        context.load_cert_chain(cert_file, key_file, password or (lambda: b""))
    except FileNotFoundError as error:
        missing = [path for path in (cert_file, key_file) if not Path(path).exists()]
        raise TlsError(f"{' and '.join(missing)}: no such file, but TLS needs it") from error
    except ssl.SSLError as error:
        raise TlsError(f"{cert_file} and {key_file}: {_reason(error, key_file)}") from error
    except OSError as error:
        raise TlsError(f"{cert_file} or {key_file}: {reason_of(error)}") from error


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise TlsError(f"{path}: no certificates of authorities in PEM: {error}") from error
    except OSError as error:
        raise TlsError(f"{path}: {reason_of(error)}") from error


def _reason(error: ssl.SSLError, key_file: str) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    with suppress(OSError):  # the file may be replaced just now
        if b"ENCRYPTED" in Path(key_file).read_bytes():
            return "the key is encrypted, and the password is missing or wrong"
    return f"no certificate and key in PEM: {error}"
