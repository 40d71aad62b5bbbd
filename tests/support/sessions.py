"""A daemon to which clients must log in, and their side of a log-in without a connection."""

from __future__ import annotations

from typing import Any

import structlog

from headrace_daemon.access.sessions import Sessions
from headrace_daemon.access.settings import TokenSettings
from headrace_daemon.access.tokens import Tokens
from headrace_daemon.host_log import HostLog
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.codes import RequestCode
from headrace_protocol.errors import RequestError
from headrace_protocol.frame import Frame
from headrace_protocol.rights.access import Access, AccessSettings
from headrace_protocol.rights.bearer import TokenLogin
from headrace_protocol.rights.credentials import Credentials, Token
from headrace_protocol.rights.session import Login, mechanism_of, verifier_of
from headrace_protocol.rights.users import User, UserKind, Users, UserStatus
from headrace_protocol.serving import Registry, Reply, Request
from tests.support.channel import MemoryChannel
from tests.support.rights import request_of
from tests.support.tokens import NOW_S

PASSWORD = "a password"
ALICE = Credentials("alice", PASSWORD)
# Made once: it takes milliseconds.
VERIFIER = verifier_of(PASSWORD)
# A request that ``Door`` answers with the name of its user.
WHO = RequestCode.GET_BROKER_RUNTIME_INFO


def user(name: str, status: UserStatus = UserStatus.ENABLE) -> User:
    """A user who logs in with PASSWORD."""
    return User(name, UserKind.SUPER, status, VERIFIER)


def users(*names: str) -> Users:
    """Users who log in with PASSWORD."""
    made = Users()
    for name in names:
        made.put(user(name))
    return made


class Door:
    """A daemon with authentication, whose clocks stand still.

    tokens: settings of the tokens that it takes.
    """

    def __init__(
        self, known: Users, tokens: TokenSettings | None = None, *, needs_tls: bool = True
    ) -> None:
        self.now_s, self.wall_s = 100.0, NOW_S
        self.outcomes: list[tuple[str, bool]] = []
        self.lifetime_ms: int | None = None
        self.users = known
        self.log = HostLog(structlog.get_logger("headrace.server"))
        clocks = (lambda: self.wall_s, lambda: self.now_s)
        self.tokens = None if tokens is None else Tokens(tokens, *clocks)
        self.sessions = Sessions(
            known, self.log, lambda: self.now_s, self.tokens, needs_tls=needs_tls
        )
        self.sessions.on_outcome = lambda _channel, name, is_good: self.outcomes.append(
            (name, is_good)
        )
        self.registry = Registry(_unexpected)
        access = Access(AccessSettings(authentication=True), known, "c")
        self.registry.guard(access.check)
        self.sessions.register(self.registry)
        self.registry.route(WHO, _who)

    # -- FrameHandler

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        return self.registry.handle(channel, frames)

    def finish_turn(self) -> None:
        """All was answered at once."""

    def replied(self) -> None:
        """Nothing is put off."""

    def closed(self, channel: ServerChannel) -> None:
        """Nothing is kept per client."""

    # -- clients without a connection

    def who(self, channel: MemoryChannel) -> tuple[int, str | None]:
        """Code and remark of the answer to a request of a channel."""
        self.registry.admit(request_of(WHO, {}, channel=channel))
        [(command, _)] = channel.replies()
        return command.code, command.remark

    def answer(self, channel: MemoryChannel, message: str, mechanism: str | None = None) -> Any:
        """The message of an answer, or its code and remark."""
        fields = {"message": message, "mechanism": mechanism}
        try:
            reply = self.sessions.serve(
                request_of(RequestCode.AUTH_SESSION, fields, channel=channel)
            )
        except RequestError as error:
            return error.code, error.remark
        self.lifetime_ms = reply.header.lifetime_ms  # type: ignore[union-attr]
        return reply.header.message  # type: ignore[union-attr]

    def log_in(
        self,
        channel: MemoryChannel,
        credentials: Credentials = ALICE,
        certificate: bytes | None = None,
    ) -> Any:
        """None, or code and remark. certificate: the one that the client sees."""
        login = Login(credentials, certificate)
        first = self.answer(channel, login.first(), mechanism_of(certificate))
        if not isinstance(first, str):
            return first
        last = self.answer(channel, login.second(first))
        if not isinstance(last, str):
            return last
        login.finish(last)
        return None

    def log_in_by(self, channel: MemoryChannel, token: str) -> Any:
        """As ``log_in``, by a token."""
        login = TokenLogin(Token(token))
        first = self.answer(channel, login.first(), login.mechanism)
        if first != "":
            return first
        last = self.answer(channel, login.second(first))
        return None if last == "" else last


def _unexpected(_request: Request, error: Exception) -> None:
    raise error


def _who(request: Request) -> Reply:
    return Reply(remark=request.channel.user)
