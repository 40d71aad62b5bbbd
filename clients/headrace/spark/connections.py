"""Connections of Spark's driver and tasks to brokers and nameservers.

Uses blocking sockets, opened on first use, and pipelines many requests to each address.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from headrace.config import with_password
from headrace.errors import ConnectionLost
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.headers import OffsetResponseHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import msgspec

    from headrace.accounts import Account
    from headrace_protocol.bodies import BrokerData, MessageQueue
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.frame import Buffer
    from headrace_protocol.headers import QueueHeader
    from headrace_protocol.tls.names import ServerNames
    from headrace_protocol.tls.settings import ClientTls

Request = tuple[int, "msgspec.Struct | None", "Buffer"]
Key = TypeVar("Key")

TASK_TIMEOUT_MS: Final = 30_000
_DRIVER_TIMEOUT_MS: Final = 10_000
# A broker stops reading from a client with too many pending responses.
_IN_FLIGHT_MAX: Final = 256


class Dial(NamedTuple):
    """How to connect: with TLS, and as a user. Without passwords, since plans show it.

    Each process finds them in files, or in its environment.

    names: of brokers with TLS; the driver learns them, and its tasks have what it knows then.
    """

    tls: ClientTls | None = None
    account: Account | None = None
    names: ServerNames | None = None

    def connect(self, address: str) -> BlockingConnection:
        """A new connection. Raises as ``BlockingConnection.connect``, and ConfigurationError."""
        proof = None if self.account is None else self.account.find()
        return BlockingConnection.connect(address, with_password(self.tls), proof, self.names)

    def learn(self, brokers: Iterable[BrokerData]) -> None:
        """Note the names of brokers."""
        if self.names is not None:
            self.names.learn(brokers)


PLAIN: Final = Dial()


class Connections:
    """Connections by address. A context manager; not thread-safe. dial: how to open each."""

    def __init__(self, dial: Dial = PLAIN, timeout_ms: float = _DRIVER_TIMEOUT_MS) -> None:
        self.dial = dial
        self._timeout_ms = timeout_ms
        self._connections: dict[str, BlockingConnection] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; the next request reopens them."""
        while self._connections:
            self._connections.popitem()[1].close()

    def open(self, address: str) -> BlockingConnection:
        """The open connection to an address, or a new one. Raises as ``Dial.connect``."""
        known = self._connections.get(address)
        if known is not None and known.is_log_in_due:
            self._connections.pop(address).close()
        if address not in self._connections:
            self._connections[address] = self.dial.connect(address)
        return self._connections[address]

    def ask(self, address: str, requests: Sequence[Request]) -> list[Response]:
        """The responses, in the order of the requests, which must be idempotent.

        Raises ConnectFailed, ConnectionLost, RequestTimeout.
        """
        if address in self._connections:
            # Perhaps closed by the peer as idle: reconnect once.
            with suppress(ConnectionLost):
                return self._answers(address, requests)
        return self._answers(address, requests)

    def _answers(self, address: str, requests: Sequence[Request]) -> list[Response]:
        connection = self.open(address)
        answers: list[Response | None] = [None] * len(requests)
        try:
            for index, (code, header, body) in enumerate(requests):
                connection.submit(code, header, body, _setter(answers, index))
                connection.drain(_IN_FLIGHT_MAX, timeout_ms=self._timeout_ms)
            connection.drain(timeout_ms=self._timeout_ms)
        except BaseException:
            self._connections.pop(address).close()
            raise
        return [answer for answer in answers if answer]

    def ask_each(
        self, requests: Mapping[Key, Request], addresses: Mapping[Key, str]
    ) -> dict[Key, Response]:
        """Send each key's request to its address; returns the responses by key."""
        by_address: dict[str, list[Key]] = defaultdict(list)
        for key in requests:
            by_address[addresses[key]].append(key)
        answers: dict[Key, Response] = {}
        for address, keys in by_address.items():
            found = self.ask(address, [requests[key] for key in keys])
            answers.update(zip(keys, found, strict=True))
        return answers

    def offsets(
        self, queues: Mapping[MessageQueue, str], code: int, header: Callable[..., QueueHeader]
    ) -> dict[MessageQueue, int]:
        """The offset in each queue's answer to a request. header: takes topic and queue_id."""
        requests: dict[MessageQueue, Request] = {
            queue: (code, header(topic=queue.topic, queue_id=queue.queue_id), b"")
            for queue in queues
        }
        answers = self.ask_each(requests, queues)
        # Apache RocketMQ reports -1 for a queue that was never written to.
        return {
            queue: max(0, answer.expect().header(OffsetResponseHeader).offset)
            for queue, answer in answers.items()
        }


def _setter(answers: list[Response | None], index: int) -> Callable[[Response], None]:
    def set_answer(response: Response) -> None:
        answers[index] = response

    return set_answer
