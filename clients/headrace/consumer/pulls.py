"""Pull requests and the meaning of their responses; needs no connection.

A headrace broker gets a bulk pull, any other broker an ordinary pull.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace.messages import BODY_LIMITS, BodyLimits, MessageBatch
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    BulkPullHeader,
    BulkPullResponseHeader,
    PullMessageHeader,
    PullMessageResponseHeader,
)

if TYPE_CHECKING:
    from headrace.consumer.subscription import Subscription
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.columns import RecordColumns
    from headrace_protocol.drivers.aio import AsyncConnection
    from headrace_protocol.drivers.response import Response

# Group of the pulls when none is given.
READER_GROUP = "headrace_reader"
# A pull costs the client half a millisecond and a round trip, however little it fetches.
SLICE_BYTES = 4 * 1024 * 1024
# RocketMQ's brokers return at most 32 messages and 256 KiB, whatever is requested.
PULL_MESSAGES_MAX = 4096
PULL_BYTES_MAX = 1024 * 1024
BULK_MESSAGES_MAX = 65_536

_ResponseHeader = BulkPullResponseHeader | PullMessageResponseHeader

_TAG, _SQL = "TAG", "SQL92"
_SYS_FLAG_SUSPEND = 2
_SYS_FLAG_SUBSCRIPTION = 4
_KNOWN_CODES = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
)


class Wanted(NamedTuple):
    """Parameters of a pull from one queue.

    messages_max, record_bytes_max: upper limits; a broker may return fewer messages, but returns
        at least one if there is any.
    suspend_timeout_ms: how long the broker may wait for the first message; 0 answers at once.
    body_limits: see ``MessageBatch``. sql: SQL92 filter that replaces the subscription's tags.
    is_physical: whether the queue is a physical one of a static topic.
    """

    group: str
    queue: MessageQueue
    queue_offset: int
    subscription: Subscription
    messages_max: int
    record_bytes_max: int
    suspend_timeout_ms: int
    body_limits: BodyLimits = BODY_LIMITS
    sql: str | None = None
    is_physical: bool = False

    @property
    def _sys_flag(self) -> int:
        return _SYS_FLAG_SUSPEND if self.suspend_timeout_ms else 0

    def request(self, *, peer_is_headrace: bool) -> tuple[int, BulkPullHeader | PullMessageHeader]:
        """Code and header of the request."""
        if peer_is_headrace:
            return RequestCode.BULK_PULL, self._bulk_header()
        return RequestCode.PULL_MESSAGE, self._pull_header()

    def _bulk_header(self) -> BulkPullHeader:
        return BulkPullHeader(
            logical=False if self.is_physical else None,
            consumer_group=self.group,
            topic=self.queue.topic,
            queue_id=self.queue.queue_id,
            queue_offset=self.queue_offset,
            max_msg_nums=min(self.messages_max, BULK_MESSAGES_MAX),
            max_msg_bytes=self.record_bytes_max,
            sys_flag=self._sys_flag,
            commit_offset=0,
            suspend_timeout_millis=self.suspend_timeout_ms,
            subscription=self.sql or self.subscription.expression,
            expression_type=_SQL if self.sql else _TAG,
        )

    def _pull_header(self) -> PullMessageHeader:
        return PullMessageHeader(
            logical=False if self.is_physical else None,
            consumer_group=self.group,
            topic=self.queue.topic,
            queue_id=self.queue.queue_id,
            queue_offset=self.queue_offset,
            max_msg_nums=min(self.messages_max, PULL_MESSAGES_MAX),
            max_msg_bytes=min(self.record_bytes_max, PULL_BYTES_MAX),
            sys_flag=self._sys_flag | _SYS_FLAG_SUBSCRIPTION,
            commit_offset=0,
            suspend_timeout_millis=self.suspend_timeout_ms,
            subscription=self.sql or self.subscription.expression,
            sub_version=self.subscription.version,
            expression_type=_SQL if self.sql else _TAG,
        )

    async def ask(self, connection: AsyncConnection, *, timeout_ms: float) -> PullResult:
        """Pull over a connection. Raises BrokerError, MalformedAnswer, ConnectionLost, ..."""
        code, header = self.request(peer_is_headrace=connection.peer_is_headrace)
        response = await connection.request(code, header, timeout_ms=timeout_ms)
        if needs_ordinary_pull(response):
            code, header = self.request(peer_is_headrace=False)
            response = await connection.request(code, header, timeout_ms=timeout_ms)
        return self.result(response)

    def result(self, response: Response) -> PullResult:
        """Decode a response. Raises BrokerError, MalformedAnswer."""
        answer = PullAnswer.of(response)
        batch = self._batch(answer)
        if batch and answer.next_offset <= self.queue_offset:
            raise response.malformed(
                f"messages from offset {self.queue_offset} on, but nextBeginOffset "
                f"{answer.next_offset}"
            )
        return PullResult(
            batch,
            answer.next_offset,
            answer.min_offset,
            answer.max_offset,
            answer.suggested_replica_id,
            answer.is_offset_illegal,
            answer.header.leader,
        )

    def _batch(self, answer: PullAnswer) -> MessageBatch | None:
        columns = answer.columns()
        if columns is None or not len(columns := self.subscription.filter(columns)):
            return None
        return MessageBatch(
            self.queue, self.queue_offset, answer.next_offset, columns, self.body_limits
        )


class PullResult(NamedTuple):
    """The result of a pull.

    batch: None if there were no messages. next_offset: offset at which the next pull begins.
    is_offset_illegal: whether the requested offset can never hold a message; ``next_offset``
    is then the nearest valid offset.
    leader: the broker to ask next, if the one that was asked passed the pull on.
    """

    batch: MessageBatch | None
    next_offset: int
    min_offset: int
    max_offset: int
    suggested_replica_id: int
    is_offset_illegal: bool
    leader: str | None = None


class PullAnswer(NamedTuple):
    """A pull's response whose records are not decoded yet.

    code: one of the four codes that a pull may return.
    """

    code: int
    header: _ResponseHeader
    response: Response

    @classmethod
    def of(cls, response: Response) -> PullAnswer:
        """Check and wrap a response. Raises BrokerError for a refusal, MalformedAnswer."""
        code = response.expect(*_KNOWN_CODES).command.code
        header = _header(response)
        if header.next_begin_offset < 0:
            raise response.malformed(f"nextBeginOffset {header.next_begin_offset}")
        return cls(code, header, response)

    @property
    def next_offset(self) -> int:
        """Offset at which the next pull begins."""
        return self.header.next_begin_offset

    @property
    def min_offset(self) -> int:
        """The queue's first offset."""
        return self.header.min_offset

    @property
    def max_offset(self) -> int:
        """One past the queue's last offset."""
        return self.header.max_offset

    @property
    def offset_delta(self) -> int:
        """Number to add to the queue offsets in the records."""
        return self.header.offset_delta or 0

    @property
    def suggested_replica_id(self) -> int:
        """Broker id of the replica to ask next."""
        header = self.header
        if isinstance(header, PullMessageResponseHeader):
            return header.suggest_which_broker_id
        return 0

    @property
    def is_offset_illegal(self) -> bool:
        """Whether the requested offset can never hold a message."""
        return self.code == ResponseCode.PULL_OFFSET_MOVED

    @property
    def records(self) -> memoryview:
        """The undecoded records; empty if none were found."""
        return self.response.body if self.code == ResponseCode.SUCCESS else memoryview(b"")

    def columns(self) -> RecordColumns | None:
        """The decoded records; None if none were found. Raises MalformedAnswer."""
        from headrace_protocol.columns import RecordColumns

        if self.code != ResponseCode.SUCCESS:
            return None
        if isinstance(self.header, BulkPullResponseHeader):
            return self.response.read(partial(RecordColumns.from_bulk, self.header))
        columns = self.response.read(RecordColumns.from_records)
        if self.offset_delta:
            columns.queue_offset = columns.queue_offset + self.offset_delta
        return columns


def needs_ordinary_pull(response: Response) -> bool:
    """Whether a bulk pull has to be repeated as an ordinary one.

    A static topic's leader of headrace reads some messages from brokers of Apache RocketMQ.
    """
    return (
        response.request_code == RequestCode.BULK_PULL
        and response.command.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    )


def _header(response: Response) -> _ResponseHeader:
    if response.request_code == RequestCode.BULK_PULL:
        return response.header(BulkPullResponseHeader)
    return response.header(PullMessageResponseHeader)
