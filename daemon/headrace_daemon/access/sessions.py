"""Log-ins of clients: who a channel belongs to.

A log-in costs the loop some 100 µs. One that fails takes a token of the user's bucket at the host,
so that a flood for one name leaves the host's other users alone, and one of the host's, so that a
flood of names costs a few percent of a core. While a bucket is empty, log-ins are rejected unread.
The library of SCRAM takes long to import: import this module at a start, with authentication only.
Source: docs/protocol.md "Log-in".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from headrace_daemon.buckets import Buckets
from headrace_protocol.bounds import check_text
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.session import ServerLogin, SessionFailed, UnknownUsers
from headrace_protocol.rights.session_headers import (
    BOUND,
    PLAIN,
    SCRAM_CHARS_MAX,
    AuthSessionHeader,
)
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
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
_REJECTED: Final = "log-in rejected: unknown user, wrong password, or disabled"

OnOutcome = Callable[["Channel", str, bool], None]


class Sessions:
    """The log-ins of a daemon.

    on_outcome: called with channel, name and outcome after each log-in.
    """

    def __init__(
        self,
        users: Users,
        log: HostLog,
        now_s: Callable[[], float] = trio.current_time,
    ) -> None:
        self._users = users
        self._log = log
        self._now_s = now_s
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
        check_text("scram", header.scram, SCRAM_CHARS_MAX)
        if channel.verifier is not None:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"log-in rejected: this connection belongs to {channel.user!r}; open another one",
            )
        login = self._release(channel)
        try:
            if header.mechanism is not None:
                answer = self._begin(channel, header.mechanism, header.scram)
            elif login is not None:
                answer = self._finish(channel, login, header.scram)
            else:
                raise _rejected()
        except SessionFailed:
            self._failed(channel, login)
            raise _rejected() from None
        return Reply(AuthSessionHeader(scram=answer))

    def _begin(self, channel: Channel, mechanism: str, message: str) -> str:
        expected = PLAIN if channel.certificate is None else BOUND
        if mechanism != expected:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"log-in rejected: {mechanism[:_SHOWN_CHARS]!r}: this connection takes {expected}",
            )
        self._check(channel.ip, channel.ip, self._of_hosts)
        login = ServerLogin(self._verifier, channel.certificate)
        answer = login.first(message)
        self._check(channel.ip, _key(channel, login), self._of_users)
        channel.login = login
        channel.charge(_WAITING_BYTES)
        return answer

    def _finish(self, channel: Channel, login: ServerLogin, message: str) -> str:
        answer = login.finish(message)
        user = self._users.users.get(login.user)
        # It may have changed since the first message.
        if user is None or not user.is_enabled or user.verifier != login.verifier:
            raise SessionFailed("no such user")
        channel.log_in(login.user, login.verifier)
        self.on_outcome(channel, login.user, True)
        return answer

    def _release(self, channel: Channel) -> ServerLogin | None:
        """The log-in that waits for its second message, no longer kept."""
        login: ServerLogin | None = channel.login
        channel.login = None
        if login is not None:
            channel.charge(-_WAITING_BYTES)
        return login

    def _failed(self, channel: Channel, login: ServerLogin | None) -> None:
        now_s = self._now_s()
        self._of_hosts.take(channel.ip, now_s)
        if login is not None:
            self._of_users.take(_key(channel, login), now_s)
        user = "" if login is None else login.user[:_SHOWN_CHARS]
        self._log.warning(channel.address, "log-in rejected", user=user)
        self.on_outcome(channel, user, False)

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
        if user is not None:
            return user.verifier
        return self._unknown.verifier(name)


def _rejected() -> RequestError:
    return RequestError(ResponseCode.NO_PERMISSION, _REJECTED)


def _key(channel: Channel, login: ServerLogin) -> str:
    return f"{channel.ip} {login.user}"
