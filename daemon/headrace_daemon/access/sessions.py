"""Log-ins of clients: who a channel belongs to.

A log-in costs the loop some 100 µs. One that fails takes a token of the user's bucket at the host,
so that a flood for one name leaves the host's other users alone, and one of the host's, so that a
flood of names costs a few percent of a core. While a bucket is empty, log-ins are rejected unread.
The library of SCRAM takes long to import: import this module at a start, with authentication only.
A connection that was logged in by a token is logged in again before the token ends, as one user.
Source: docs/protocol.md "Log-in".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Union

import trio

from headrace_daemon.buckets import Buckets
from headrace_protocol.bounds import check_text
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.bearer import TokenRejected
from headrace_protocol.rights.proofs import TokenProof
from headrace_protocol.rights.session import ServerLogin, UnknownUsers
from headrace_protocol.rights.session_headers import (
    BEARER,
    BOUND,
    NEEDS_TLS,
    PLAIN,
    SCRAM_CHARS_MAX,
    AuthSessionHeader,
    SessionFailed,
)
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_daemon.access.tokens import ServerTokenLogin, Tokens
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.channel import Channel
    from headrace_protocol.rights.users import Users, Verifier
    from headrace_protocol.serving import Registry, Request

# Failures a second: of a user at a host, and of a host.
USER_RATE: Final = 10.0
HOST_RATE: Final = 100.0
# Longest time for which log-ins are rejected after a flood.
_DEBT_S: Final = 10.0
# A log-in that waits for its second message: 2.6 KB as measured, and a long nonce three times.
_WAITING_BYTES: Final = 8 * 1024
_SHOWN_CHARS: Final = 64
_REJECTED: Final = "unknown user, wrong password, or disabled"

Login = Union[ServerLogin, "ServerTokenLogin"]
OnOutcome = Callable[["Channel", str, bool], None]


class Sessions:
    """The log-ins of a daemon.

    tokens: verifies tokens; None to take none. needs_tls: whether a token needs TLS.
    on_outcome: called with channel, name and outcome after each log-in, but not after the
        further ones of a connection.
    """

    def __init__(
        self,
        users: Users,
        log: HostLog,
        now_s: Callable[[], float] = trio.current_time,
        tokens: Tokens | None = None,
        *,
        needs_tls: bool = True,
    ) -> None:
        self._users = users
        self._log = log
        self._now_s = now_s
        self._tokens, self._needs_tls = tokens, needs_tls
        self.on_outcome: OnOutcome = lambda _channel, _user, _is_good: None
        self._of_users = Buckets(USER_RATE, _DEBT_S)
        self._of_hosts = Buckets(HOST_RATE, _DEBT_S)
        self._unknown = UnknownUsers()

    def register(self, registry: Registry) -> None:
        """Serve AUTH_SESSION."""
        registry.route(RequestCode.AUTH_SESSION, self.serve)

    def serve(self, request: Request) -> Reply:
        """AUTH_SESSION (7680040): one of the two messages of a log-in. Raises RequestError."""
        header, channel = request.header(AuthSessionHeader), request.channel
        login = self._release(channel)
        try:
            if header.mechanism is not None:
                check_text("message", header.message, SCRAM_CHARS_MAX)
                return self._begin(channel, header.mechanism, header.message)
            if login is None:
                raise _rejected(_REJECTED)
            check_text("message", header.message, login.chars_max)
            return self._finish(channel, login, header.message)
        except TokenRejected as error:
            raise self._failed(channel, login, f"the token proves no user: {error}") from None
        except SessionFailed:
            raise self._failed(channel, login, _REJECTED) from None

    def _begin(self, channel: Channel, mechanism: str, message: str) -> Reply:
        self._check(channel.ip, channel.ip, self._of_hosts)
        login = self._opened(channel, mechanism)
        answer = login.first(message)
        if login.user:
            self._check(channel.ip, _key(channel, login), self._of_users)
        channel.login = login
        channel.charge(_WAITING_BYTES)
        return Reply(AuthSessionHeader(message=answer))

    def _opened(self, channel: Channel, mechanism: str) -> Login:
        """A log-in that begins. Raises RequestError for one that a connection does not take."""
        is_renewal = isinstance(channel.proof, TokenProof) and mechanism == BEARER
        if channel.proof is not None and not is_renewal:
            raise _taken(channel)
        if mechanism == BEARER:
            return self._token(channel)
        expected = PLAIN if channel.certificate is None else BOUND
        if mechanism != expected:
            raise _rejected(
                f"{mechanism[:_SHOWN_CHARS]!r}: this connection takes {expected} and {BEARER}"
            )
        return ServerLogin(self._verifier, channel.certificate)

    def _token(self, channel: Channel) -> ServerTokenLogin:
        if self._tokens is None:
            raise _rejected("this daemon takes no tokens: authJwksFile is not set")
        if self._needs_tls and not channel.is_encrypted:
            raise _rejected(
                f"{NEEDS_TLS}, because whoever reads it can use it: connect with TLS, or set "
                "authRequiresTls=none at this daemon"
            )
        from headrace_daemon.access.tokens import ServerTokenLogin

        return ServerTokenLogin(self._tokens)

    def _finish(self, channel: Channel, login: Login, message: str) -> Reply:
        answer = login.finish(message)
        user = self._users.users.get(login.user)
        # It may have changed since the first message.
        if user is None or not user.is_enabled or login.proof.refusal(user):
            raise _no_user(login)
        is_first = channel.proof is None
        if not is_first and channel.user != login.user:
            raise _taken(channel)
        channel.log_in(login.user, login.proof)
        if is_first:
            self.on_outcome(channel, login.user, True)
        return Reply(AuthSessionHeader(message=answer, lifetime_ms=_lifetime_ms(login)))

    def _release(self, channel: Channel) -> Login | None:
        """The log-in that waits for its second message, no longer kept."""
        login: Login | None = channel.login
        channel.login = None
        if login is not None:
            channel.charge(-_WAITING_BYTES)
        return login

    def _failed(self, channel: Channel, login: Login | None, reason: str) -> RequestError:
        """The answer to a log-in that failed, which counts."""
        now_s = self._now_s()
        self._of_hosts.take(channel.ip, now_s)
        user = "" if login is None else login.user[:_SHOWN_CHARS]
        if login is not None and user:
            self._of_users.take(_key(channel, login), now_s)
        self._log.warning(channel.address, "log-in rejected", user=user, reason=reason)
        self.on_outcome(channel, user, False)
        return _rejected(reason)

    def _check(self, host: str, key: str, failures: Buckets) -> None:
        """Raise RequestError if too many have failed."""
        wait_s = failures.wait_s(key, self._now_s())
        if wait_s:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"too many log-ins from {host} have failed: check their passwords; again in "
                f"{wait_s:.1f} s",
            )

    def _verifier(self, name: str) -> Verifier:
        """The verifier of a user, or one that looks like it."""
        user = self._users.users.get(name)
        if user is not None and user.verifier is not None:
            return user.verifier
        return self._unknown.verifier(name)


def _rejected(reason: str) -> RequestError:
    return RequestError(ResponseCode.NO_PERMISSION, f"log-in rejected: {reason}")


def _taken(channel: Channel) -> RequestError:
    return _rejected(f"this connection belongs to {channel.user!r}; open another one")


def _no_user(login: Login) -> SessionFailed:
    if isinstance(login.proof, TokenProof):
        return TokenRejected(f"{login.user!r} is no user here, or disabled")
    return SessionFailed("no such user")


def _lifetime_ms(login: Login) -> int | None:
    lifetime_s = login.proof.lifetime_s
    return None if lifetime_s is None else max(0, int(lifetime_s * 1000))


def _key(channel: Channel, login: Login) -> str:
    return f"{channel.ip} {login.user}"
