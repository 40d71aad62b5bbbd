"""Files with which the daemons of this process serve users only, and encrypt connections.

A folder has an authority and a certificate, and the passwords of two Super users: one for people,
one for the daemons among themselves. All are random, of mode 0600, and made once.
"""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING, Final

from headrace.accounts import Account
from headrace_protocol.drivers.files import replace_file
from headrace_protocol.rights.access import is_loopback
from headrace_protocol.tls.settings import ClientAuth, ClientTls, ServerTls, TlsFile, TlsMode

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_protocol.rights.credentials import Credentials

ROOT: Final = "root"
INNER: Final = "headrace-daemons"
_SERVER: Final = "server"


def account(folder: Path, name: str = ROOT) -> Account:
    """The user whose password is in a file of the folder."""
    return Account(name, password_file=str(folder / f"{name}.password"))


def credentials(folder: Path, name: str) -> Credentials:
    """A Super user of the folder, with a random password if it is new."""
    if not (folder / f"{name}.password").exists():
        replace_file(folder / f"{name}.password", f"{new_password()}\n".encode())
    return account(folder, name).credentials()


def new_password() -> str:
    """A random password."""
    return secrets.token_urlsafe(24)


def client_tls(folder: Path) -> ClientTls:
    """How clients connect."""
    return ClientTls(str(folder / "ca.pem"))


def server_tls(folder: Path, host: str) -> TlsFile:
    """Settings of a daemon that listens at a host; makes the certificate, and a new authority.

    Raises ConfigurationError.
    """
    from headrace.certificates import issue, make_ca

    if not (folder / "ca.pem").exists():
        make_ca(folder)
    certificate, key = folder / f"{_SERVER}.pem", folder / f"{_SERVER}.key"
    # Each start has its own, since hosts change and certificates expire.
    certificate.unlink(missing_ok=True)
    key.unlink(missing_ok=True)
    issue(folder, _SERVER, _names(host))
    server = ServerTls(
        TlsMode.ENFORCING, str(certificate), str(key), None, ClientAuth.NONE, trust_file=None
    )
    return TlsFile(server, client_tls(folder), ())


def _names(host: str) -> set[str]:
    """The names by which clients may know a host."""
    names = {"127.0.0.1", "::1", "localhost", host}
    if is_loopback(host):
        return names
    from headrace_protocol.drivers.address import local_ip

    return {*names, socket.gethostname(), local_ip()} - {"0.0.0.0", "::"}  # noqa: S104 - left out
