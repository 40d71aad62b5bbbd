"""Pull loops: one task per queue, with a pull always in flight while there is room."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn, Protocol

import anyio

from headrace.consumer.process_queue import Failure
from headrace.consumer.pulls import SLICE_BYTES, Wanted
from headrace.errors import BrokerError, HeadraceError
from headrace.pacing import Pacer, pause_after
from headrace_protocol.codes import ResponseCode

if TYPE_CHECKING:
    from headrace.consumer.process_queue import Delivery, ProcessQueue
    from headrace.consumer.pulls import PullAnswer
    from headrace.consumer.subscription import Subscription
    from headrace.instance import ClientInstance
    from headrace.received import BodyLimits

_log = logging.getLogger("headrace.consumer")

SUSPEND_MS = 15_000
_TIMEOUT_MS = 30_000


def _is_topic_deleted(error: HeadraceError) -> bool:
    """True if the queue's broker reports that the topic does not exist."""
    return isinstance(error, BrokerError) and error.code == ResponseCode.TOPIC_NOT_EXIST


def _has_moved(error: HeadraceError) -> bool:
    """True if another broker serves the queue now, which the next route names."""
    return isinstance(error, BrokerError) and error.code == ResponseCode.NOT_LEADER_FOR_QUEUE


class Deliveries(Protocol):
    """Takes the fetched deliveries: a consumer's inbox."""

    def put(self, delivery: Delivery) -> None:
        """Take a fetched delivery."""
        ...


class Fetcher:
    """Pulls messages for one group into an inbox."""

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        inbox: Deliveries,
        body_limits: BodyLimits,
    ) -> None:
        self._instance = instance
        self._group = group
        self._inbox = inbox
        self._body_limits = body_limits

    async def run(self, process_queue: ProcessQueue, subscription: Subscription) -> None:
        """Pull until the queue is dropped."""
        try:
            with process_queue.fetching:
                await self._pull_forever(process_queue, subscription)
        finally:
            self._instance.outages.leave(process_queue.queue)

    async def _pull_forever(
        self, process_queue: ProcessQueue, subscription: Subscription
    ) -> NoReturn:
        pacer = Pacer()
        while True:
            await process_queue.wait_for_room()
            pacer.begin()
            has_progress = True
            # A seek cancels the pull in flight, which would keep waiting at the old offset.
            with anyio.CancelScope() as process_queue.pulling:
                has_progress = await self._pull_once(process_queue, subscription)
            delay_s = pacer.delay_s(progress=has_progress)
            if delay_s:
                # A new scope: correcting an offset has cancelled the scope of the pull.
                with anyio.CancelScope() as process_queue.pulling:
                    await anyio.sleep(delay_s)

    async def check(self, process_queue: ProcessQueue, subscription: Subscription) -> None:
        """Raise BrokerError if the group may not read a queue."""
        offset = process_queue.pull_offset
        await self._request(Wanted(self._group, process_queue.queue, offset, subscription), 0)

    async def _pull_once(self, process_queue: ProcessQueue, subscription: Subscription) -> bool:
        """Pull once; return whether the pull advanced the offset."""
        offset, began = process_queue.pull_offset, anyio.current_time()
        try:
            result = await self._pull(process_queue, offset, subscription)
        except HeadraceError as error:
            since = process_queue.failure.since if process_queue.failure else began
            process_queue.failure = Failure(since, error)
            if _is_topic_deleted(error) and offset and not process_queue.replica_id:
                # A topic created again starts at offset 0, with messages that were never read.
                process_queue.reset(0)
            if _has_moved(error):
                self._instance.invalidate_route(process_queue.queue.topic)
            else:
                await self._pause(process_queue, error)
            return False
        process_queue.failure = None
        if result.batch and process_queue.rates is not None:
            pull_s = anyio.current_time() - began
            process_queue.rates.of(process_queue.queue.topic).pulled(len(result.batch), pull_s)
        route = self._instance.known_route(process_queue.queue.topic)
        if result.leader and route:
            route.note_leader(process_queue.queue, result.leader, anyio.current_time())
        # The response may have arrived just before a seek.
        if offset == process_queue.pull_offset:
            self._accept(process_queue, result)
        return result.next_offset > offset and not result.is_offset_illegal

    async def _pull(
        self, process_queue: ProcessQueue, offset: int, subscription: Subscription
    ) -> PullAnswer:
        room = process_queue.room
        wanted = Wanted(
            self._group,
            process_queue.queue,
            offset,
            subscription,
            room.messages,
            min(room.record_bytes, SLICE_BYTES),
            SUSPEND_MS,
            self._body_limits,
        )
        return await self._request(wanted, process_queue.replica_id)

    async def _request(self, wanted: Wanted, replica_id: int) -> PullAnswer:
        address = await self._instance.queue_address(wanted.queue, replica_id)
        connection = await self._instance.connection(address)
        result = await wanted.ask(connection, timeout_ms=_TIMEOUT_MS)
        self._instance.outages.answered(wanted.queue.topic, address, wanted.queue)
        return result

    def _accept(self, process_queue: ProcessQueue, result: PullAnswer) -> None:
        process_queue.replica_id = result.suggested_replica_id
        if result.is_offset_illegal:
            queue = process_queue.queue
            # After a reset of the group the broker moves members although their offset exists.
            if not result.min_offset <= process_queue.pull_offset <= result.max_offset:
                _log.warning(
                    "%s/%s/%d has no offset %d (it has %d to %d): continuing at %d",
                    queue.topic,
                    queue.broker_name,
                    queue.queue_id,
                    process_queue.pull_offset,
                    result.min_offset,
                    result.max_offset,
                    result.next_offset,
                )
            process_queue.reset(result.next_offset)
            return
        if result.batch:
            self._inbox.put(process_queue.add(result.batch))
        else:
            process_queue.skip_to(result.next_offset)

    async def _pause(self, process_queue: ProcessQueue, error: HeadraceError) -> None:
        queue = process_queue.queue
        process_queue.replica_id = 0
        broker_name = self._instance.broker_of(queue)
        await pause_after(self._instance, error, queue.topic, broker_name, queue)
