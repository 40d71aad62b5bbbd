"""Log-in of a client's connection, for both drivers.

A peer that does not announce itself as headrace is Apache RocketMQ, which gets each request signed,
and never a token. A headrace daemon without authentication has no sessions and needs neither.
Source: docs/protocol.md "Log-in".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import LogInFailed
from headrace_protocol.rights.bearer import TokenLogin
from headrace_protocol.rights.credentials import BadCredentials, Credentials, Token
from headrace_protocol.rights.session_headers import NEEDS_TLS, AuthSessionHeader, SessionFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headrace_protocol.drivers.aio import AsyncConnection
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.rights.session import Login

TIMEOUT_MS: Final = 5000
_REMEDY: Final = "check HEADRACE_USER and HEADRACE_PASSWORD, or the arguments user and password"
_TOKEN_REMEDY: Final = "check HEADRACE_TOKEN_FILE, or the arguments token and token_file"  # noqa: S105
_BINDING_REMEDY: Final = "; whoever terminates TLS in between is rejected, too"
_TLS_REMEDY: Final = "set HEADRACE_TLS=1 or tls=True, at a port that speaks TLS"


class Loggable(Protocol):
    """A connection of either driver."""

    address: str

    @property
    def certificate(self) -> bytes | None:
        """The certificate that the peer has shown, DER; None without TLS."""

    @property
    def peer_is_headrace(self) -> bool:
        """True if the peer is headrace; known with its first response."""

    def sign_as(self, credentials: Credentials) -> None:
        """Sign each request from now on."""


async def log_in(
    connection: AsyncConnection, proof: Credentials | Token, remedy: str | None = None
) -> float | None:
    """Log a new connection in, while it runs; or have it sign, if the peer needs that.

    A connection that was logged in by a token is logged in again by the next one.

    remedy: for the error of a log-in that is rejected.

    Returns the seconds after which a log-in by a token ends; None if it has no end.
    Raises LogInFailed, BrokerError, MalformedAnswer, RequestTimeout, ConnectionLost.
    """
    steps = _steps(connection, proof, remedy)
    step = next(steps)
    while isinstance(step, AuthSessionHeader):
        step = steps.send(
            await connection.request(RequestCode.AUTH_SESSION, step, timeout_ms=TIMEOUT_MS)
        )
    return step


def log_in_blocking(
    connection: Loggable, ask: Callable[[AuthSessionHeader], Response], proof: Credentials | Token
) -> float | None:
    """As ``log_in``. ask: the answer to an AUTH_SESSION."""
    steps = _steps(connection, proof)
    step = next(steps)
    while isinstance(step, AuthSessionHeader):
        step = steps.send(ask(step))
    return step


def _steps(
    connection: Loggable, proof: Credentials | Token, remedy: str | None = None
) -> Generator[AuthSessionHeader | float | None, Response, None]:
    """The requests of a log-in, each for the answer to the one before; at the end its lifetime."""
    lifetime_s = None
    certificate = connection.certificate
    try:
        login = _login(proof, certificate)
        response = yield AuthSessionHeader(mechanism=login.mechanism, message=login.first())
        if not connection.peer_is_headrace:
            # Apache RocketMQ's answer says that the code is unknown, or the name missing.
            _sign(connection, proof)
        elif response.command.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            response = yield AuthSessionHeader(message=login.second(_answer(response).message))
            answer = _answer(response)
            login.finish(answer.message)
            lifetime_s = None if answer.lifetime_ms is None else answer.lifetime_ms / 1000
    except (BadCredentials, SessionFailed, _Rejected) as error:
        reason = str(error)
        remedy = _TLS_REMEDY if NEEDS_TLS in reason else remedy or _remedy(proof, certificate)
        raise LogInFailed(connection.address, proof.who, reason, remedy) from None
    yield lifetime_s


class _Rejected(Exception):
    """The server rejects the log-in."""


def _login(proof: Credentials | Token, certificate: bytes | None) -> Login | TokenLogin:
    """The client's side of a log-in. Raises BadCredentials."""
    if isinstance(proof, Token):
        return TokenLogin(proof)
    # The library of SCRAM takes long to import.
    from headrace_protocol.rights.session import Login

    return Login(proof, certificate)


def _sign(connection: Loggable, proof: Credentials | Token) -> None:
    if isinstance(proof, Token):
        raise _Rejected("the server is not headrace's, and takes no tokens")
    connection.sign_as(proof)


def _remedy(proof: Credentials | Token, certificate: bytes | None) -> str:
    if isinstance(proof, Token):
        return _TOKEN_REMEDY
    return _REMEDY + ("" if certificate is None else _BINDING_REMEDY)


def _answer(response: Response) -> AuthSessionHeader:
    """The message of an answer."""
    if response.command.code == ResponseCode.NO_PERMISSION:
        raise _Rejected(response.command.remark or "rejected")
    return response.expect().header(AuthSessionHeader)
