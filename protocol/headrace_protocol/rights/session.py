"""Log-in of a connection by SCRAM-SHA-256, without input and output: messages in, messages out.

A client proves that it knows the password, and the server that it knows a verifier of it; neither
is sent. Over TLS both sides add the server's certificate (``tls-server-end-point``), so that nobody
between them can pass the messages on. The library of SCRAM takes long to import: import this module
where a log-in begins. Source: RFC 5802, 7677, 5929; docs/protocol.md "Log-in".
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from scramp import ScramClient, ScramException, ScramMechanism
from scramp.core import CBindData, Username

from headrace_protocol.rights.credentials import BadCredentials
from headrace_protocol.rights.proofs import PasswordProof
from headrace_protocol.rights.session_headers import BOUND, PLAIN, SCRAM_CHARS_MAX, SessionFailed
from headrace_protocol.rights.users import Verifier

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.rights.credentials import Credentials

# Of PBKDF2, RFC 7677: 3 ms for each log-in of a client; a server computes it for new users only.
ITERATIONS: Final = 4096
# More would stall a client whose server is hostile.
ITERATIONS_MAX: Final = 50_000
_SALT_BYTES: Final = 16
_BINDING: Final = "tls-server-end-point"


def verifier_of(password: str) -> Verifier:
    """The verifier of a new user's password. Takes 3 ms of a thread. Raises BadCredentials."""
    salt = secrets.token_bytes(_SALT_BYTES)
    try:
        made = ScramMechanism(PLAIN).make_auth_info(password, ITERATIONS, salt)
    except ScramException as error:
        raise BadCredentials(f"the password can't be used for log-ins: {error}") from None
    _, stored_key, server_key, _ = made
    return Verifier(salt, ITERATIONS, stored_key, server_key)


def mechanism_of(certificate: bytes | None) -> str:
    """The mechanism for a connection. certificate: the server's, DER; None without TLS."""
    return PLAIN if certificate is None else BOUND


@lru_cache(maxsize=16)
def _binding(certificate: bytes) -> tuple[str, bytes]:
    try:
        return _BINDING, bytes(CBindData.from_der(certificate))
    except (ScramException, TypeError):  # RFC 5929 has no hash for such a signature
        return _BINDING, hashlib.sha256(certificate).digest()


def _bound(certificate: bytes | None) -> tuple[str, bytes] | None:
    return None if certificate is None else _binding(certificate)


class Login:
    """The client's side of one log-in: ``first``, ``second``, ``finish``.

    mechanism: to be sent with the first message.
    """

    def __init__(self, credentials: Credentials, certificate: bytes | None) -> None:
        """certificate: the one that the server has shown, DER. Raises BadCredentials."""
        user, password = credentials
        self.mechanism = mechanism_of(certificate)
        try:
            self._client = ScramClient(
                [self.mechanism], user, password, channel_binding=_bound(certificate)
            )
            prepared = str(Username(user))
        except ScramException as error:
            raise BadCredentials(f"user {user!r} can't log in: {error}") from None
        if prepared != user:
            raise BadCredentials(f"user {user!r} can't log in: SASLprep makes {prepared!r} of it")

    def first(self) -> str:
        """The first message."""
        return str(self._client.get_client_first())

    def second(self, answer: str) -> str:
        """The second message. Takes 3 ms. Raises SessionFailed."""
        try:
            self._client.set_server_first(answer)
            count = int(self._client.iterations)
            if count > ITERATIONS_MAX:
                raise SessionFailed(f"{count} iterations: {ITERATIONS_MAX} is the most")
            return str(self._client.get_client_final())
        except ScramException as error:
            raise SessionFailed(str(error)) from None

    def finish(self, answer: str) -> None:
        """Raise SessionFailed unless the server has proved that it knows the user."""
        try:
            self._client.set_server_final(answer)
        except ScramException as error:
            raise SessionFailed(str(error)) from None


class ServerLogin:
    """The server's side of one log-in: ``first``, ``finish``. Takes some 100 µs in all.

    user: the name, which is proved once ``finish`` returns. proof: the same, for later requests.
    """

    __slots__ = ("_server", "proof", "user")

    chars_max: Final = SCRAM_CHARS_MAX
    user: str
    proof: PasswordProof

    def __init__(self, find: Callable[[str], Verifier], certificate: bytes | None) -> None:
        """find: a verifier for each name. certificate: of this connection, DER; None for TCP."""

        def found(name: str) -> tuple[bytes, bytes, bytes, int]:
            verifier = find(name)
            self.user, self.proof = name, PasswordProof(verifier)
            salt, iterations, stored_key, server_key = verifier
            return salt, stored_key, server_key, iterations

        mechanism = ScramMechanism(mechanism_of(certificate))
        self._server = mechanism.make_server(found, channel_binding=_bound(certificate))

    def first(self, message: str) -> str:
        """The answer to the first message. Raises SessionFailed."""
        try:
            self._server.set_client_first(message)
            return str(self._server.get_server_first())
        except ScramException as error:
            raise SessionFailed(str(error)) from None

    def finish(self, message: str) -> str:
        """The answer to the second message. Raises SessionFailed."""
        try:
            self._server.set_client_final(message)
            return str(self._server.get_server_final())
        except ScramException as error:
            raise SessionFailed(str(error)) from None


class UnknownUsers:
    """Verifiers of names that no user has, so that a log-in doesn't tell which names there are."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def verifier(self, name: str) -> Verifier:
        """Always the same one for a name; nobody knows its password."""
        salt = hmac.digest(self._key, b"salt" + name.encode(), hashlib.sha256)[:_SALT_BYTES]
        return Verifier(salt, ITERATIONS, secrets.token_bytes(32), secrets.token_bytes(32))
