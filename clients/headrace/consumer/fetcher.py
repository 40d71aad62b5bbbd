"""Pull loops: one task per queue, a pull always under way while there is room."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import anyio

from headrace.errors import HeadraceError, MalformedAnswer
from headrace.messages import MessageBatch
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import PullMessageHeader, PullMessageResponseHeader
from headrace_protocol.message import CorruptRecord

if TYPE_CHECKING:
    from headrace.consumer.inbox import Inbox
    from headrace.consumer.process_queue import ProcessQueue
    from headrace.consumer.subscription import Subscription
    from headrace.instance import ClientInstance
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.response import Response

_log = logging.getLogger("headrace.consumer")

SUSPEND_MS = 15_000
_TIMEOUT_MS = 30_000
_PAUSE_S = 1.0
# Java's brokers answer with less (32 messages, 256 KiB) whatever is asked.
PULL_MESSAGES_MAX = 4096
PULL_BYTES_MAX = 1024 * 1024

_SYS_FLAG_SUSPEND = 2
_SYS_FLAG_SUBSCRIPTION = 4
_KNOWN_CODES = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
)


class PullResult(NamedTuple):
    """What a pull answered.

    batch: empty unless there were messages. is_offset_illegal: there is nothing at the offset
    asked for and never will be; ``batch.next_offset`` is the nearest one there is.
    """

    batch: MessageBatch
    min_offset: int
    max_offset: int
    suggested_replica_id: int
    is_offset_illegal: bool


class Fetcher:
    """Pulls for one group into an inbox."""

    def __init__(self, instance: ClientInstance, group: str, inbox: Inbox) -> None:
        self._instance = instance
        self._group = group
        self._inbox = inbox

    async def run(self, process_queue: ProcessQueue, subscription: Subscription) -> None:
        """Pull until the queue is dropped."""
        with process_queue.fetching:
            while True:
                await process_queue.wait_for_room()
                # A seek cancels the pull under way, which would wait at an offset that is past.
                with anyio.CancelScope() as process_queue.pulling:
                    await self._pull_once(process_queue, subscription)

    async def _pull_once(self, process_queue: ProcessQueue, subscription: Subscription) -> None:
        offset = process_queue.pull_offset
        try:
            result = await self._pull(process_queue, offset, subscription)
        except HeadraceError as error:
            await self._pause(process_queue, error)
        else:
            # The answer may have been here already when a seek came.
            if offset == process_queue.pull_offset:
                self._take(process_queue, subscription, result)

    async def _pull(
        self, process_queue: ProcessQueue, offset: int, subscription: Subscription
    ) -> PullResult:
        queue = process_queue.queue
        address = await self._instance.broker_address(
            queue.topic, queue.broker_name, process_queue.replica_id
        )
        header = PullMessageHeader(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=min(process_queue.room, PULL_MESSAGES_MAX),
            max_msg_bytes=PULL_BYTES_MAX,
            sys_flag=_SYS_FLAG_SUSPEND | _SYS_FLAG_SUBSCRIPTION,
            commit_offset=0,
            suspend_timeout_millis=SUSPEND_MS,
            subscription=subscription.expression,
            sub_version=subscription.version,
            expression_type="TAG",
        )
        response = await self._instance.request(
            address, RequestCode.PULL_MESSAGE, header, timeout_ms=_TIMEOUT_MS
        )
        return _pull_result(queue, offset, response)

    def _take(
        self, process_queue: ProcessQueue, subscription: Subscription, result: PullResult
    ) -> None:
        process_queue.replica_id = result.suggested_replica_id
        if result.is_offset_illegal:
            queue = process_queue.queue
            _log.warning(
                "%s/%s/%d has no offset %d (it has %d to %d): going on at %d",
                queue.topic,
                queue.broker_name,
                queue.queue_id,
                process_queue.pull_offset,
                result.min_offset,
                result.max_offset,
                result.batch.next_offset,
            )
            process_queue.reset(result.batch.next_offset)
            return
        subscription.filter(result.batch)
        if result.batch:
            self._inbox.put(process_queue.add(result.batch))
        else:
            process_queue.pull_offset = result.batch.next_offset

    async def _pause(self, process_queue: ProcessQueue, error: HeadraceError) -> None:
        queue = process_queue.queue
        _log.warning(
            "pull of %s/%s/%d failed and will be tried again: %s",
            queue.topic,
            queue.broker_name,
            queue.queue_id,
            error,
        )
        process_queue.replica_id = 0
        if error.refresh_route:
            self._instance.doubt_route(queue.topic)
        await anyio.sleep(_PAUSE_S)


def _pull_result(queue: MessageQueue, offset: int, response: Response) -> PullResult:
    header = response.expect(*_KNOWN_CODES).header(PullMessageResponseHeader)
    found = response.command.code == ResponseCode.SUCCESS
    try:
        batch = MessageBatch.decode(
            queue,
            offset,
            header.next_begin_offset,
            response.body if found else memoryview(b""),
            header.offset_delta or 0,
        )
    except CorruptRecord as error:
        raise MalformedAnswer(response.address, response.request_code, error) from error
    return PullResult(
        batch,
        header.min_offset,
        header.max_offset,
        header.suggest_which_broker_id,
        response.command.code == ResponseCode.PULL_OFFSET_MOVED,
    )
