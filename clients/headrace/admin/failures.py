"""What a command that fails says, and the exit code that scripts see.

0: done. 1: failed. 2: wrong usage. 3: not found, or not reachable. 130: interrupted.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from headrace.admin.output import warn
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
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILED = 1
USAGE = 2
NOT_FOUND = 3
INTERRUPTED = 130

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
    causes = list(_leaves(error))
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return INTERRUPTED
    if all(isinstance(cause, BrokenPipeError) for cause in causes):
        # Whoever read the output has enough, which is no news.
        return FAILED
    if not all(isinstance(cause, _expected()) for cause in causes):
        raise error
    for text in dict.fromkeys(map(_text, causes)):
        warn(text)
    return max(map(_exit_code, causes))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _expected() -> tuple[type[Exception], ...]:
    types: list[type[Exception]] = [HeadraceError, ProtocolError, OSError]
    # A daemon's own errors count only in a command that has loaded the daemon.
    if "headrace_broker.server" in sys.modules:
        from headrace_broker.registration import IdentityTaken
        from headrace_broker.store.errors import StoreError

        types += [StoreError, IdentityTaken]
    return tuple(types)


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, ConfigurationError | InvalidMessage):
        return USAGE
    if isinstance(error, _NOT_FOUND):
        return NOT_FOUND
    if isinstance(error, BrokerError) and error.code in _NOT_FOUND_CODES:
        return NOT_FOUND
    return FAILED
