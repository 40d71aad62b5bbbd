"""Reasons of failed handshakes and connections, with remedies, in place of OpenSSL's names."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME_MISMATCH: Final = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_UNKNOWN_AUTHORITY: Final = (18, 19, 20)
# Reasons of the other side, which hold for another attempt, too.
_ALERTS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": (
        "a certificate is required: set cert_file and key_file (HEADRACE_TLS_CERT, "
        "HEADRACE_TLS_KEY)"
    ),
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not trust the authority of our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the other side rejects our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other side rejects our certificate: it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other side rejects our certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other side speaks another version of TLS",
}
_FAULTS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client shows no certificate, which is required here",
    "UNSUPPORTED_PROTOCOL": "the client speaks only versions before TLS 1.2",
    "HTTP_REQUEST": "this is an HTTP request, not TLS",
    "WRONG_VERSION_NUMBER": "these bytes are not TLS",
}


def alert_of(error: object) -> str | None:
    """The text of an alert of the other side; None for another error."""
    return _ALERTS.get(error.reason or "") if isinstance(error, ssl.SSLError) else None


def reason_of(error: ssl.SSLError) -> str:
    """The text of an error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is rejected: {error.verify_message}"
    name = error.reason or str(error)
    return alert_of(error) or _FAULTS.get(name, name.lower().replace("_", " "))


def is_of_another(error: BaseException) -> bool:
    """True if a certificate is valid, but for another name."""
    return isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _NAME_MISMATCH


def why(error: BaseException, names: Sequence[str]) -> str:
    """The reason of a client's failed handshake. names: one of which the certificate must have."""
    if is_of_another(error):
        return (
            f"its certificate is not for {' or '.join(names)}: connect by a name that it has, or "
            "set server_name (HEADRACE_TLS_SERVER_NAME) to one"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _UNKNOWN_AUTHORITY:
            return (
                "its certificate is of an authority that is not trusted here: set ca_file "
                "(HEADRACE_TLS_CA) to the authority's certificate"
            )
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason != "UNEXPECTED_EOF_WHILE_READING":
        return reason_of(error)
    return (
        "it closed the connection during the handshake: it does not speak TLS (connect with "
        "tls=False), or has too many handshakes to serve"
    )
