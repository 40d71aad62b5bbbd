"""What a driver's caller is told when a request did not get the answer that it wanted.

Clients build on these: a retry loop reads ``retryable`` and ``refresh_route`` and nothing else.
"""

from __future__ import annotations

from headrace_protocol.codes import ResponseCode, code_name


class HeadraceError(Exception):
    """Base of all that a client of ours raises on purpose.

    retryable: the same request may succeed if it is sent again, perhaps to another broker.
    refresh_route: what we believe about who serves a topic may be out of date.
    """

    retryable = False
    refresh_route = False


class ConnectFailed(HeadraceError):
    """No connection could be opened."""

    retryable = True
    refresh_route = True

    def __init__(self, address: str, reason: object) -> None:
        super().__init__(
            f"cannot connect to {address}: {reason}. Is it running, and is this address "
            "reachable from here?"
        )
        self.address = address


class ConnectionLost(HeadraceError):
    """The connection ended before the answer came; whether the request was served is unknown."""

    retryable = True
    refresh_route = True

    def __init__(self, address: str, reason: object) -> None:
        super().__init__(f"the connection to {address} is closed: {reason}")
        self.address = address


class RequestTimeout(HeadraceError):
    """No answer in time; whether the request was served is unknown."""

    retryable = True

    def __init__(self, address: str, code: int, timeout_ms: float) -> None:
        super().__init__(
            f"{code_name(code)}: no answer from {address} within {timeout_ms:g} ms; "
            "it is slow or stuck: allow more time or look at its log"
        )
        self.address = address
        self.code = code


class MalformedAnswer(HeadraceError):
    """An answer that does not hold what the protocol says it holds."""

    def __init__(self, address: str, code: int, reason: object) -> None:
        super().__init__(
            f"{code_name(code)}: the answer from {address} cannot be read: {reason}. "
            "It is damaged, or this server is of another kind or version"
        )
        self.address = address
        self.code = code


class BrokerError(HeadraceError):
    """A broker or nameserver answered that it did not do what was asked.

    code: its response code; see ``ResponseCode``.
    remark: its own words.
    """

    def __init__(self, code: int, remark: str | None, address: str, request_code: int) -> None:
        super().__init__(
            f"{code_name(request_code)} at {address}: {_response_name(code)} ({code})"
            + (f": {remark}" if remark else "")
            + _way_out(code)
        )
        self.code = code
        self.remark = remark
        self.address = address
        self.request_code = request_code

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        """Whether the official clients would try another queue."""
        return self.code in _RETRYABLE

    @property
    def refresh_route(self) -> bool:  # type: ignore[override]
        """Whether the answer says that the route may have changed."""
        return self.code in _ROUTE_CHANGED


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
_WAYS_OUT = {
    ResponseCode.TOPIC_NOT_EXIST: "create it with `headrace topic create NAME`",
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: "create the group, or let the broker create groups",
    ResponseCode.SYSTEM_BUSY: "it will take messages again when it has caught up: try later",
    ResponseCode.FLOW_CONTROL: "it will take messages again when it has caught up: try later",
    ResponseCode.NO_PERMISSION: "see the topic's and the broker's perm (`headrace topic describe`)",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "this kind or version of server does not do it",
}


def _response_name(code: int) -> str:
    try:
        return ResponseCode(code).name
    except ValueError:
        return "unknown response"


def _way_out(code: int) -> str:
    way_out = _WAYS_OUT.get(code)  # type: ignore[call-overload]
    return f" ({way_out})" if way_out else ""
