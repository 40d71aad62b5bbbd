"""What a command that fails says, and the exit code that scripts see."""

from __future__ import annotations

import sys

from headrace.errors import (
    BrokerError,
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    InvalidMessage,
    NameserverUnavailable,
    RequestTimeout,
    RouteNotFound,
)
from headrace_daemon import command
from headrace_daemon.command import FAILED, NOT_FOUND, USAGE
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import ProtocolError

_NOT_FOUND_CODES = {
    ResponseCode.TOPIC_NOT_EXIST,
    ResponseCode.QUERY_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    ResponseCode.CONSUMER_NOT_ONLINE,
    ResponseCode.BROKER_NOT_EXIST,
}


class CommandFailed(HeadraceError):
    """A command could not do what it was asked."""


class NotFound(CommandFailed):
    """What was asked for is not there."""


_NOT_FOUND = (
    NotFound,
    RouteNotFound,
    FileNotFoundError,
    ConnectFailed,
    ConnectionLost,
    NameserverUnavailable,
    RequestTimeout,
)


def report(error: BaseException) -> int:
    """Say on standard error what went wrong, a line for each cause; returns the exit code.

    Raises ``error`` itself when it, or a part of it, is nobody's mistake but ours.
    """
    return command.report(error, _expected(), _exit_code)


def _expected() -> tuple[type[Exception], ...]:
    types: list[type[Exception]] = [HeadraceError, ProtocolError, OSError]
    # A daemon's own errors count only in a command that has loaded the daemon.
    if "headrace_broker.server" in sys.modules:
        from headrace_broker.registration import IdentityTaken
        from headrace_broker.store.errors import StoreError

        types += [StoreError, IdentityTaken]
    return tuple(types)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, ConfigurationError | InvalidMessage):
        return USAGE
    if isinstance(error, _NOT_FOUND):
        return NOT_FOUND
    if isinstance(error, BrokerError) and error.code in _NOT_FOUND_CODES:
        return NOT_FOUND
    return FAILED
