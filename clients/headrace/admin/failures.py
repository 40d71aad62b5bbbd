"""Error output and exit codes of failed commands."""

from __future__ import annotations

import re
import sys

from headrace.errors import (
    BrokerError,
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    DelayRejected,
    GroupNotFound,
    HeadraceError,
    InvalidMessage,
    NameserverUnavailable,
    NoBroker,
    NotEverywhere,
    PartialAnswer,
    RequestTimeout,
    RouteNotFound,
    RuleNotFound,
    TlsFailed,
    UserNotFound,
    WrongServer,
)
from headrace_daemon import command
from headrace_daemon.command import FAILED, NOT_FOUND, USAGE
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import ProtocolError

_NOT_FOUND_CODES = {
    ResponseCode.TOPIC_NOT_EXIST,
    ResponseCode.QUERY_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    ResponseCode.CONSUMER_NOT_ONLINE,
    ResponseCode.BROKER_NOT_EXIST,
}


_NAMESERVER_CODES = {
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    RequestCode.DELETE_TOPIC_IN_NAMESRV,
}


# By the argument of ``Message``.
_OPTIONS = {
    "key": "--key",
    "tag": "--tag",
    "delay": "--delay",
    "delay_level": "--delay-level",
    "deliver_at": "--at",
}
_ARGUMENT = re.compile(rf"(?<![\w'\"-])({'|'.join(_OPTIONS)})=(?![\w'\"])")


class CommandFailed(HeadraceError):
    """A command failed."""


class NotFound(CommandFailed):
    """The requested object does not exist."""


_NOT_FOUND = (
    NotFound,
    NoBroker,
    NotEverywhere,
    PartialAnswer,
    WrongServer,
    RouteNotFound,
    GroupNotFound,
    UserNotFound,
    RuleNotFound,
    FileNotFoundError,
    ConnectFailed,
    ConnectionLost,
    NameserverUnavailable,
    RequestTimeout,
)


# By module and name: not imported, since most commands load no daemon. The first one that fits.
_OF_DAEMONS = {
    ("headrace_broker.config", "ConfigError"): USAGE,
    ("headrace_nameserver.config", "ConfigError"): USAGE,
    ("headrace_broker.store_tools.directory", "TopicNotFound"): NOT_FOUND,
    ("headrace_broker.store.errors", "StoreError"): FAILED,
    ("headrace_broker.cluster.registration", "IdentityTaken"): FAILED,
    ("headrace_daemon.access.errors", "AccessError"): FAILED,
    ("headrace_protocol.tls.settings", "TlsError"): FAILED,
}


def report(error: BaseException) -> int:
    """Print an error to standard error, one line per cause; return the exit code.

    Raises ``error`` itself if it, or a part of it, is unexpected and therefore a bug.
    """
    from headrace.tasks import sole_error

    expected: tuple[type[Exception], ...] = (
        HeadraceError,
        ProtocolError,
        OSError,
        *_of_daemons(),
    )
    return command.report(_explained(sole_error(error)), expected, _exit_code)


def _explained(error: BaseException) -> BaseException:
    """The error of a server of another kind as what it is; other errors as they are.

    Arguments of Python in the errors of messages become the command's options.
    """
    if isinstance(error, DelayRejected | InvalidMessage):
        error.args = (_ARGUMENT.sub(lambda found: _OPTIONS[found[1]], str(error)),)
    if isinstance(error, NameserverUnavailable):
        suspects: dict[str, int] = {
            address: RequestCode.GET_ROUTEINFO_BY_TOPIC
            for address, failure in error.failures.items()
            if not isinstance(failure, ConnectFailed | TlsFailed)
        }
    elif isinstance(error, BrokerError) and error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        suspects = {error.address: error.request_code}
    else:
        return error
    for address, code in suspects.items():
        if problem := _problem_of(address, code):
            return WrongServer(address, problem)
    return error


def _problem_of(address: str, request_code: int) -> str | None:
    """The problem with the server that should have served a request, as far as it shows."""
    import trio

    from headrace.admin.probe import Role, examine
    from headrace.config import resolve_tls

    role = Role.NAMESERVER if request_code in _NAMESERVER_CODES else Role.BROKER
    found = trio.run(examine, address, role, resolve_tls({}))
    return None if found.is_denied else found.problem


def _of_daemons() -> dict[type[Exception], int]:
    """The errors of the daemons that this command has loaded, and their exit codes."""
    return {
        getattr(sys.modules[module], name): code
        for (module, name), code in _OF_DAEMONS.items()
        if module in sys.modules
    }


def _exit_code(error: BaseException) -> int:
    for kind, code in _of_daemons().items():
        if isinstance(error, kind):
            return code
    if isinstance(error, ConfigurationError | InvalidMessage):
        return USAGE
    if isinstance(error, _NOT_FOUND):
        return NOT_FOUND
    if isinstance(error, BrokerError) and error.code in _NOT_FOUND_CODES:
        return NOT_FOUND
    return FAILED
