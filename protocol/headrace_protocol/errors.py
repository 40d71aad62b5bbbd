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


class ForeignProtocol(RemoteProtocolError):
    """The other side speaks another protocol: it is not RocketMQ at all."""

    def __init__(self, protocol: str, start: bytes) -> None:
        super().__init__(f"this is {protocol}, not the remoting protocol: {start!r}")
        self.protocol = protocol


class Lane:
    """A kind of waiting, defined once where the wait is raised.

    name: what is waited for. threads: maximum number of concurrent fetches. No lane uses the
    threads of another, and within a lane clients take turns.
    outlives_client: whether a fetch runs even if its client has disconnected, as one that saves.
    """

    __slots__ = ("name", "outlives_client", "threads")

    def __init__(self, name: str, threads: int, *, outlives_client: bool = False) -> None:
        self.name = name
        self.threads = threads
        self.outlives_client = outlives_client


class NotReady(Exception):
    """What a request asks for must be fetched first.

    fetch: does so, however long it takes, in any thread. lane: whose threads it waits for.

    Look first, change after: a function that raises this is run again from its start, so it
    changes nothing before its last look. Two things may come before: a change that a second run
    finds done (a decision that waits to be saved), and one that is made only while
    ``Request.is_again`` is False because it can't wait for the disk (the offset that comes with a
    pull: the next commit must not overtake it).
    """

    def __init__(self, fetch: Callable[[], None], lane: Lane) -> None:
        super().__init__(f"must be fetched first: {lane.name}")
        self.fetch = fetch
        self.lane = lane


class RequestError(Exception):
    """A request that cannot be served, as the answer that its sender gets.

    code: response code of the peer, e.g. ``ResponseCode.TOPIC_NOT_EXIST``.
    remark: names the cause, the place and the way out.
    """

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(f"{code}: {remark}")
        self.code = code
        self.remark = remark
