"""Errors of client drivers for requests without a usable response.

Clients build on these: a retry loop reads only ``retryable``, ``refresh_route`` and
``retry_after_ms``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace_protocol.codes import RequestCode, ResponseCode, code_name
from headrace_protocol.errors import ForeignProtocol, PortableError, reason_of
from headrace_protocol.frame import TLS
from headrace_protocol.tls.reasons import alert_of

if TYPE_CHECKING:
    from collections.abc import Mapping


class HeadraceError(PortableError):
    """Base of all errors that headrace clients raise deliberately.

    retryable: the same request may succeed if sent again, possibly to another broker.
    refresh_route: the cached route of the topic may be out of date.
    retry_after_ms: the time after which the server may accept the request, if it has named one.
    """

    retryable = False
    refresh_route = False
    retry_after_ms = 0


class ConnectFailed(HeadraceError):
    """No connection could be opened."""

    retryable = True
    refresh_route = True

    def __init__(self, address: str, reason: object) -> None:
        super().__init__(
            f"cannot connect to {address}: {reason_of(reason)}. Is it running, and is this address "
            "reachable from here?"
        )
        self.address = address


class ConnectionLost(HeadraceError):
    """The connection ended before the response; whether the request was served is unknown."""

    retryable = True
    refresh_route = True

    def __init__(self, address: str, reason: object) -> None:
        super().__init__(f"the connection to {address} is closed: {reason_of(reason)}")
        self.address = address


class WrongServer(HeadraceError):
    """The server at an address is of another kind than the one that belongs there."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address


class TlsFailed(WrongServer):
    """The server is not verified, rejects this client, or one of both is without TLS."""


def connection_ended(address: str, reason: object) -> HeadraceError:
    """The error for a connection that ended: WrongServer if the peer's bytes tell what it is."""
    if isinstance(reason, ForeignProtocol):
        if reason.protocol == TLS:
            return TlsFailed(
                address,
                "this port speaks TLS: connect with tls=True (HEADRACE_TLS=1), and with ca_file "
                "(HEADRACE_TLS_CA) unless the system trusts its authority",
            )
        return WrongServer(
            address, f"speaks {reason.protocol}, not RocketMQ's remoting protocol: fix the address"
        )
    if alert := alert_of(reason):
        return TlsFailed(address, alert)
    return ConnectionLost(address, reason)


class RequestTimeout(HeadraceError):
    """No response in time; whether the request was served is unknown."""

    retryable = True

    def __init__(self, address: str, code: int, timeout_ms: float) -> None:
        super().__init__(
            f"{code_name(code)}: no answer from {address} within {timeout_ms:g} ms; "
            "it is slow or stuck: allow more time or check its log"
        )
        self.address = address
        self.code = code


class MalformedAnswer(HeadraceError):
    """A response that violates the protocol."""

    def __init__(self, address: str, code: int, reason: object) -> None:
        super().__init__(
            f"{code_name(code)}: the answer from {address} cannot be read: {reason}. "
            "It is damaged, or the server is of another kind or version"
        )
        self.address = address
        self.code = code


_COMMAND = re.compile(r"`headrace\b")
_REMEDIES: Mapping[int, str] = {
    ResponseCode.TOPIC_NOT_EXIST: "create it with `headrace topic create NAME`",
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: "create the group, or let the broker create groups",
    ResponseCode.CONSUMER_NOT_ONLINE: "`headrace group members GROUP` lists the connected ones",
    ResponseCode.SYSTEM_BUSY: "the broker is overloaded: retry later",
    ResponseCode.FLOW_CONTROL: "the broker is overloaded: retry later",
    ResponseCode.NO_PERMISSION: "see the topic's and the broker's perm (`headrace topic describe`)",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "this kind or version of server does not support it",
}


class BrokerError(HeadraceError):
    """A broker or nameserver rejected a request.

    code: the response code; see ``ResponseCode``.
    remark: the server's explanation.
    """

    def __init__(self, code: int, remark: str | None, address: str, request_code: int) -> None:
        super().__init__(
            f"{code_name(request_code)} at {address}: {_response_name(code)} ({code})"
            + (f": {remark}" if remark else "")
            + _in_brackets(self._remedy(code, remark))
        )
        self.code = code
        self.remark = remark
        self.address = address
        self.request_code = request_code

    @staticmethod
    def _remedy(code: int, remark: str | None) -> str | None:
        """A way out; none if the remark names a command, or NO_PERMISSION is not about a perm."""
        text = remark or ""
        is_other = code == ResponseCode.NO_PERMISSION and text and "is forbidden" not in text
        return None if is_other or _COMMAND.search(text) else _REMEDIES.get(code)

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        """True if the official clients would try another queue."""
        return self.code in _RETRYABLE

    @property
    def refresh_route(self) -> bool:  # type: ignore[override]
        """True if the response code indicates that the route may have changed."""
        return self.code in _ROUTE_CHANGED


class AccessDenied(BrokerError):
    """The user has no right to what it requests, or is not known; another try changes nothing."""

    retryable = False
    refresh_route = False

    @staticmethod
    def _remedy(_code: int, _remark: str | None) -> str:
        """See BrokerError."""
        return (
            "set HEADRACE_USER and HEADRACE_PASSWORD of a user who may, or grant the right: "
            "`headrace acl rule add`"
        )


class LogInFailed(AccessDenied):
    """A server does not accept name and password or token, or does not prove that it knows them."""

    def __init__(self, address: str, who: str, reason: str, remedy: str) -> None:
        """who: the user, as in "as 'alice'" or "by a token"."""
        HeadraceError.__init__(self, f"cannot log in to {address} {who}: {reason} ({remedy})")
        self.code: int = ResponseCode.NO_PERMISSION
        self.remark = reason
        self.address = address
        self.request_code: int = RequestCode.AUTH_SESSION


def is_denial(code: int, remark: str | None) -> bool:
    """True if NO_PERMISSION means the user; without rights it means a topic or a broker."""
    return code == ResponseCode.NO_PERMISSION and bool(remark and _DENIAL.search(remark))


# Apache RocketMQ's words, and those of log-ins.
_DENIAL = re.compile(
    r"has no permission to (?:access|create)|check signature failed|username cannot be null"
    r"|^User:.* is (?:not found|disabled)\.|^Authorization failed|log-in|MetadataProvider is not"
)


class QueuePartAway(BrokerError):
    """Another broker is needed for a part of a static topic's queue, and does not answer.

    next_offset: where the part behind it begins.
    """

    def __init__(
        self, code: int, remark: str | None, address: str, request_code: int, next_offset: int
    ) -> None:
        super().__init__(code, remark, address, request_code)
        self.next_offset = next_offset


# The field of a refusal with ``QueuePartAway.next_offset``.
NEXT_ITEM = "nextItemOffset"

_RETRYABLE = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.NOT_LEADER_FOR_QUEUE,
        ResponseCode.GO_AWAY,
    }
)
_ROUTE_CHANGED = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.NOT_LEADER_FOR_QUEUE,
        ResponseCode.GO_AWAY,
    }
)


def _in_brackets(remedy: str | None) -> str:
    return f" ({remedy})" if remedy else ""


def _response_name(code: int) -> str:
    try:
        return ResponseCode(code).name
    except ValueError:
        return "unknown response"
