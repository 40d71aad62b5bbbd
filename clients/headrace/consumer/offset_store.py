"""Offsets kept by brokers: a group's progress, and the bounds of queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.outages import is_absence
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetHeader,
    SearchOffsetHeader,
    UpdateConsumerOffsetHeader,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from headrace.instance import ClientInstance
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.response import Response

    CommitOne = Callable[[MessageQueue, int], Awaitable[None]]


class OffsetStore:
    """Queries the master of a queue's broker; raises the errors of ``ClientInstance.ask_queue``."""

    def __init__(self, instance: ClientInstance) -> None:
        self._instance = instance

    async def open(self) -> None:
        """Prepare to keep progress; brokers are always ready for that."""

    async def close(self) -> None:
        """Let go of what ``open`` has taken."""

    async def committed(self, group: str, queue: MessageQueue) -> int | None:
        """The offset that ``group`` resumes from; None if it has committed none."""
        header = QueryConsumerOffsetHeader(
            consumer_group=group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            # By default a broker answers 0 for a new queue, whatever start the group configured.
            set_zero_if_not_found=False,
        )
        response = await self._instance.ask_queue(queue, RequestCode.QUERY_CONSUMER_OFFSET, header)
        if response.command.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return _offset(response)

    async def commit(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Store progress and wait until the brokers confirm.

        A queue that fails does not hold up the others. Raises the error of the first that failed.
        """

        async def commit(queue: MessageQueue, offset: int) -> None:
            header = _commit_header(group, queue, offset)
            response = await self._instance.ask_queue(
                queue, RequestCode.UPDATE_CONSUMER_OFFSET, header
            )
            response.expect()

        await self._commit_each(offsets, commit)

    async def commit_oneway(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Store progress without waiting for a response; raises like ``commit``."""

        async def commit(queue: MessageQueue, offset: int) -> None:
            header = _commit_header(group, queue, offset)
            address = await self._instance.queue_address(queue)
            connection = await self._instance.connection(address)
            connection.oneway(RequestCode.UPDATE_CONSUMER_OFFSET, header)

        await self._commit_each(offsets, commit)

    async def _commit_each(self, offsets: Mapping[MessageQueue, int], commit: CommitOne) -> None:
        async def commit_at(part: tuple[str, list[MessageQueue]]) -> None:
            problem = None
            for queue in part[1]:
                try:
                    await commit(queue, offsets[queue])
                except HeadraceError as error:
                    problem = problem or error
                    if is_absence(error):
                        break
            if problem:
                raise problem

        await self._instance.at_each_broker(offsets, commit_at)

    async def min_offset(self, queue: MessageQueue) -> int:
        """Offset of the oldest message that still exists."""
        header = GetMinOffsetHeader(topic=queue.topic, queue_id=queue.queue_id)
        return _offset(await self._instance.ask_queue(queue, RequestCode.GET_MIN_OFFSET, header))

    async def max_offset(self, queue: MessageQueue) -> int:
        """Offset that the next message will get."""
        header = GetMaxOffsetHeader(topic=queue.topic, queue_id=queue.queue_id)
        return _offset(await self._instance.ask_queue(queue, RequestCode.GET_MAX_OFFSET, header))

    async def offset_at(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Offset of the first message stored at ``timestamp_ms`` (since 1970) or later."""
        header = SearchOffsetHeader(
            topic=queue.topic, queue_id=queue.queue_id, timestamp=timestamp_ms
        )
        return _offset(
            await self._instance.ask_queue(queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)
        )


def _commit_header(group: str, queue: MessageQueue, offset: int) -> UpdateConsumerOffsetHeader:
    return UpdateConsumerOffsetHeader(
        consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, commit_offset=offset
    )


def _offset(response: Response) -> int:
    # Apache RocketMQ answers -1 for a queue that was never written to.
    return max(0, response.expect().header(OffsetResponseHeader).offset)
