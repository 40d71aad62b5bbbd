"""Log-in of a client's connection, for both drivers.

A peer that does not announce itself as headrace is Apache RocketMQ, which gets each request signed.
A headrace daemon without authentication has no sessions and needs no signatures.
Source: docs/protocol.md "Log-in".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import LogInFailed
from headrace_protocol.rights.credentials import BadCredentials
from headrace_protocol.rights.session import Login, SessionFailed
from headrace_protocol.rights.session_headers import AuthSessionHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headrace_protocol.drivers.aio import AsyncConnection
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.rights.credentials import Credentials

TIMEOUT_MS: Final = 5000
_REMEDY: Final = "check HEADRACE_USER and HEADRACE_PASSWORD, or the arguments user and password"
_TLS_REMEDY: Final = "; whoever terminates TLS in between is rejected, too"


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
    connection: AsyncConnection, credentials: Credentials, remedy: str = _REMEDY
) -> None:
    """Log a new connection in, while it runs; or have it sign, if the peer needs that.

    remedy: for the error of a log-in that is rejected.

    Raises LogInFailed, BrokerError, MalformedAnswer, RequestTimeout, ConnectionLost.
    """
    steps = _steps(connection, credentials, remedy)
    step = next(steps)
    while step is not None:
        step = steps.send(
            await connection.request(RequestCode.AUTH_SESSION, step, timeout_ms=TIMEOUT_MS)
        )


def log_in_blocking(
    connection: Loggable, ask: Callable[[AuthSessionHeader], Response], credentials: Credentials
) -> None:
    """As ``log_in``. ask: the answer to an AUTH_SESSION."""
    steps = _steps(connection, credentials, _REMEDY)
    step = next(steps)
    while step is not None:
        step = steps.send(ask(step))


def _steps(
    connection: Loggable, credentials: Credentials, remedy: str
) -> Generator[AuthSessionHeader | None, Response, None]:
    """The requests of a log-in, each for the answer to the one before; None at the end."""
    certificate = connection.certificate
    try:
        login = Login(credentials, certificate)
        response = yield AuthSessionHeader(mechanism=login.mechanism, scram=login.first())
        if not connection.peer_is_headrace:
            # Apache RocketMQ's answer says that the code is unknown, or the name missing.
            connection.sign_as(credentials)
        elif response.command.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            response = yield AuthSessionHeader(scram=login.second(_scram(response)))
            login.finish(_scram(response))
    except (BadCredentials, SessionFailed, _Rejected) as error:
        remedy += "" if certificate is None else _TLS_REMEDY
        raise LogInFailed(connection.address, credentials.user, str(error), remedy) from None
    yield None


class _Rejected(Exception):
    """The server rejects the log-in."""


def _scram(response: Response) -> str:
    """The message of an answer."""
    if response.command.code == ResponseCode.NO_PERMISSION:
        raise _Rejected(response.command.remark or "rejected")
    return response.expect().header(AuthSessionHeader).scram
