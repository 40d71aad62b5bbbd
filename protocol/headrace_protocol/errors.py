"""Errors of the protocol, by the side at fault."""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping


class PortableError(Exception):
    """An error that survives pickle and copy, whatever arguments its class takes.

    By default Python calls the class again with the error's text alone. A pool of processes hangs
    on an error for which that fails.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


def reason_of(error: object) -> str:
    """The words of an OSError, for a message that names its file; the text of any other error."""
    return getattr(error, "strerror", None) or str(error)


class ProtocolError(PortableError):
    """A violation of the remoting protocol."""


class LocalProtocolError(ProtocolError):
    """This side tried to send something that the protocol can't carry."""


class RemoteProtocolError(ProtocolError):
    """The other side sent bytes that are not the remoting protocol.

    The connection is unusable: frame boundaries are lost.
    """


class ForeignProtocol(RemoteProtocolError):
    """The other side speaks another protocol: it is not RocketMQ at all."""

    def __init__(self, protocol: str, start: bytes) -> None:
        super().__init__(f"this is {protocol}, not the remoting protocol: {start!r}")
        self.protocol = protocol


class Lane:
    """A kind of waiting with threads of its own, defined once where the wait is raised.

    Within a lane clients take turns.
    name: the awaited data, for logs. threads: maximum number of concurrent fetches.
    outlives_client: whether a fetch runs, and long work resumes, even after the client has
    disconnected, e.g. a save.
    """

    __slots__ = ("name", "outlives_client", "threads")

    def __init__(self, name: str, threads: int, *, outlives_client: bool = False) -> None:
        self.name = name
        self.threads = threads
        self.outlives_client = outlives_client


class NotReady(Exception):
    """A read of data that must be fetched first; after its wait it is repeated.

    fetch: fetches it in any thread, however long that takes. lane: the lane whose threads run it.
    """

    def __init__(self, fetch: Callable[[], None], lane: Lane) -> None:
        super().__init__(f"must be fetched first: {lane.name}")
        self.fetch = fetch
        self.lane = lane

    def __await__(self) -> Generator[Any, Any, Any]:
        """Wait for the fetch; raises its error."""
        yield self


class RequestError(PortableError):
    """A request that can't be served; carries the answer to its sender.

    code: the peer's response code, e.g. ``ResponseCode.TOPIC_NOT_EXIST``.
    remark: the cause, the place and a remedy. fields: extension fields of the answer.
    """

    def __init__(self, code: int, remark: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{code}: {remark}")
        self.code = code
        self.remark = remark
        self.fields = fields


class CorruptRecord(PortableError, ValueError):
    """Bytes that are not a valid record, or not a valid batch item."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"no message record at byte {position}: {reason}")
        self.position = position
        self.reason = reason
