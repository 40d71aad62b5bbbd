"""What can go wrong on the wire, told apart by whose fault it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ProtocolError(Exception):
    """The remoting protocol was broken."""


class LocalProtocolError(ProtocolError):
    """We were asked to send something that the protocol cannot carry."""


class RemoteProtocolError(ProtocolError):
    """The other side sent bytes that are not the remoting protocol.

    The connection is beyond repair: frame boundaries are lost.
    """


class NotReady(Exception):
    """What a request asks for must be fetched first.

    fetch: does so, however long it takes, in any thread; then ask again.
    """

    def __init__(self, fetch: Callable[[], None]) -> None:
        super().__init__("must be fetched first")
        self.fetch = fetch


class RequestError(Exception):
    """A request that cannot be served, as the answer that its sender gets.

    code: response code of the peer, e.g. ``ResponseCode.TOPIC_NOT_EXIST``.
    remark: names the cause, the place and the way out.
    """

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(f"{code}: {remark}")
        self.code = code
        self.remark = remark
