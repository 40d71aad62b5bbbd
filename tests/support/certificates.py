"""Authorities and certificates of tests."""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme

from headrace_protocol.tls.settings import ClientAuth, ClientTls, ServerTls, TlsMode


class Raw:
    """A client's TLS without input and output."""

    def __init__(self, context: ssl.SSLContext, host: str = "127.0.0.1") -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)

    def step(self) -> bytes:
        """The bytes that the client sends next in its handshake."""
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self.outgoing.read()


def der_of(name: str) -> bytes:
    """A certificate, DER."""
    return ssl.PEM_cert_to_DER_cert(
        trustme.CA().issue_cert(name).cert_chain_pems[0].bytes().decode()
    )


@dataclass
class Authority:
    """An authority whose files are in a folder."""

    folder: Path
    ca: trustme.CA

    @classmethod
    def new(cls, folder: Path) -> Authority:
        folder.mkdir(exist_ok=True)
        ca = trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca.pem")
        return cls(folder, ca)

    @property
    def ca_file(self) -> str:
        return str(self.folder / "ca.pem")

    def issue(
        self, name: str, *identities: str, not_after: datetime | None = None
    ) -> tuple[str, str]:
        """Certificate and key of a server or client, in files."""
        made = self.ca.issue_cert(
            *(identities or ("127.0.0.1",)), common_name=name, not_after=not_after
        )
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)
        return str(cert), str(key)

    def server(
        self,
        mode: TlsMode = TlsMode.ENFORCING,
        client_auth: ClientAuth = ClientAuth.NONE,
        name: str = "server",
    ) -> ServerTls:
        """The settings of a server of 127.0.0.1."""
        cert, key = self.issue(name)
        return ServerTls(mode, cert, key, None, client_auth, self.ca_file)

    def client(self, *, name: str | None = None) -> ClientTls:
        """The settings of a client; name: of the certificate that it shows, if any."""
        cert, key = self.issue(name, f"{name}@example.org") if name else (None, None)
        return ClientTls(self.ca_file, cert, key)
