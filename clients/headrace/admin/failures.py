"""Error output and exit codes of failed commands."""

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
    """A command failed."""


class NotFound(CommandFailed):
    """The requested object does not exist."""


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
    """Print an error to standard error, one line per cause; return the exit code.

    Raises ``error`` itself if it, or a part of it, is unexpected and therefore a bug.
    """
    return command.report(error, _expected(), _exit_code)


def _expected() -> tuple[type[Exception], ...]:
    types: list[type[Exception]] = [HeadraceError, ProtocolError, OSError]
    # Errors of the daemons occur only in commands that have loaded a daemon.
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
