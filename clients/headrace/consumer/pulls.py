"""Pull requests and the meaning of their responses; needs no connection.

A headrace broker gets a bulk pull, any other broker an ordinary pull.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace.consumer.subscription import ALL, SQL92
from headrace.received import BODY_LIMITS, BodyLimits, MessageBatch
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

# A pull costs the client half a millisecond and a round trip, however little it fetches.
SLICE_BYTES = 4 * 1024 * 1024
# RocketMQ's brokers return at most 32 messages and 256 KiB, whatever is requested.
PULL_MESSAGES_MAX = 4096
PULL_BYTES_MAX = 1024 * 1024
BULK_MESSAGES_MAX = 65_536

_ResponseHeader = BulkPullResponseHeader | PullMessageResponseHeader

_SYS_FLAG_SUSPEND = 2
_SYS_FLAG_SUBSCRIPTION = 4
_KNOWN_CODES = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
)


class Wanted(NamedTuple):
    """Parameters of a pull from one queue; by default of a single message.

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
    messages_max: int = 1
    record_bytes_max: int = 1
    suspend_timeout_ms: int = 0
    body_limits: BodyLimits = BODY_LIMITS
    sql: str | None = None
    is_physical: bool = False

    @property
    def is_filtered(self) -> bool:
        """True unless all messages are wanted."""
        return bool(self.sql or self.subscription.expression != ALL)

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
            expression_type=SQL92 if self.sql else self.subscription.kind,
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
            expression_type=SQL92 if self.sql else self.subscription.kind,
        )

    async def ask(self, connection: AsyncConnection, *, timeout_ms: float) -> PullAnswer:
        """Pull over a connection. Raises BrokerError, MalformedAnswer, ConnectionLost, ..."""
        code, header = self.request(peer_is_headrace=connection.peer_is_headrace)
        response = await connection.request(code, header, timeout_ms=timeout_ms)
        if needs_ordinary_pull(response):
            code, header = self.request(peer_is_headrace=False)
            response = await connection.request(code, header, timeout_ms=timeout_ms)
        return self.result(response)

    def result(self, response: Response) -> PullAnswer:
        """Decode a response with its messages. Raises BrokerError, MalformedAnswer."""
        answer = PullAnswer(response)
        columns = answer.columns(self.queue_offset)
        if columns is not None and len(columns := self.subscription.filter(columns)):
            answer.batch = MessageBatch(
                self.queue, self.queue_offset, answer.next_offset, columns, self.body_limits
            )
            if answer.next_offset <= self.queue_offset:
                raise response.malformed(
                    f"messages from offset {self.queue_offset} on, but nextBeginOffset "
                    f"{answer.next_offset}"
                )
        return answer


class PullAnswer:
    """The response to a pull.

    batch: the messages that were wanted, once ``Wanted.result`` has decoded them; None without any.
    next_offset: offset at which the next pull begins.
    min_offset, max_offset: the queue's first offset, and one past its last.
    offset_delta: number to add to the queue offsets in the records.
    suggested_replica_id: broker id of the replica to ask next.
    leader: the broker to ask next, if the one that was asked passed the pull on.
    is_offset_illegal: the requested offset can never hold a message; ``next_offset`` is then the
        nearest valid offset.
    records: undecoded; empty if none were found.
    """

    def __init__(self, response: Response) -> None:
        """Raises BrokerError for a refusal, MalformedAnswer."""
        code = response.expect(*_KNOWN_CODES).command.code
        header = _header(response)
        if header.next_begin_offset < 0:
            raise response.malformed(f"nextBeginOffset {header.next_begin_offset}")
        self.batch: MessageBatch | None = None
        self.next_offset = header.next_begin_offset
        self.min_offset = header.min_offset
        self.max_offset = header.max_offset
        self.offset_delta = header.offset_delta or 0
        self.suggested_replica_id = (
            0 if isinstance(header, BulkPullResponseHeader) else header.suggest_which_broker_id
        )
        self.leader = header.leader
        self.is_offset_illegal = code == ResponseCode.PULL_OFFSET_MOVED
        self.records = response.body if code == ResponseCode.SUCCESS else memoryview(b"")
        self._is_found = code == ResponseCode.SUCCESS
        self._header = header
        self._response = response

    def columns(self, first: int) -> RecordColumns | None:
        """The messages as records of one each; None if none were found.

        first: the queue offset that was requested; a batch that contains it begins before it.
        Raises MalformedAnswer.
        """
        if not self._is_found:
            return None
        return self._response.read(partial(self._unwrapped, first))

    def records_before(self, end: int) -> memoryview:
        """The records of an ordinary pull that begin below ``end``. Raises MalformedAnswer."""
        from headrace_protocol.columns import RecordColumns

        columns = self._response.read(RecordColumns.from_records) if self._is_found else None
        if columns is None:
            return self.records
        count = int(columns.queue_offset.searchsorted(end - self.offset_delta))
        return self.records[: int(columns.start[count])] if count < len(columns) else self.records

    def _unwrapped(self, first: int, body: memoryview) -> RecordColumns:
        from headrace_protocol.columns import RecordColumns
        from headrace_protocol.inner_batch import unwrap

        if isinstance(self._header, BulkPullResponseHeader):
            return unwrap(RecordColumns.from_bulk(self._header, body), first)
        columns = RecordColumns.from_records(body)
        if self.offset_delta:
            columns.queue_offset = columns.queue_offset + self.offset_delta
        return unwrap(columns, first)


def needs_ordinary_pull(response: Response) -> bool:
    """True if a bulk pull has to be repeated as an ordinary one.

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
