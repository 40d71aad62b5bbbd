"""Which queues are this member's, and what happens when that changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from headrace.consumer.fetcher import Fetcher
from headrace.consumer.locks import QueueLocks
from headrace.consumer.offset_store import OffsetStore
from headrace.consumer.process_queue import Limits, ProcessQueue
from headrace.consumer.rebalance import allocate_averagely
from headrace.consumer.start import Start, start_offset
from headrace.errors import HeadraceError, NoQueue, RouteNotFound
from headrace.pacing import Pacer
from headrace_protocol.bodies import GetConsumerListByGroupResponseBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ConsumerGroupHeader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anyio.abc import TaskGroup

    from headrace.consumer.inbox import Inbox
    from headrace.consumer.subscription import Subscription
    from headrace.instance import ClientInstance
    from headrace.messages import BodyLimits
    from headrace.route import TopicRoute
    from headrace_protocol.bodies import MessageQueue

_log = logging.getLogger("headrace.consumer")

RETRY_TOPIC_PREFIX = "%RETRY%"
REBALANCE_INTERVAL_S = 20.0
COMMIT_INTERVAL_S = 5.0
_RETRY_PAUSE_S = 1.0
_HANDOVER_S = 20.0


class Assignment:
    """A member's share of its group's queues; takes over, commits and gives up queues.

    process_queues: the queues that are ours now.
    group_changed: set it to share the queues anew at once.
    """

    def __init__(
        self,
        instance: ClientInstance,
        group: str,
        subscriptions: list[Subscription],
        inbox: Inbox,
        *,
        start: Start,
        ordered: bool,
        limits: Limits,
        body_limits: BodyLimits,
    ) -> None:
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self.group_changed = anyio.Event()
        self._instance = instance
        self._group = group
        self._subscriptions = subscriptions
        self._inbox = inbox
        self._start = start
        self._ordered = ordered
        self._limits = limits
        self._offsets = OffsetStore(instance)
        self._locks = QueueLocks(instance, group)
        self._fetcher = Fetcher(instance, group, inbox, body_limits)
        self._tasks: TaskGroup | None = None

    async def start(self, tasks: TaskGroup) -> None:
        """Take our first share, then keep it up to date in ``tasks``."""
        self._tasks = tasks
        complete = await self._rebalance()
        tasks.start_soon(self._rebalance_regularly, complete)
        tasks.start_soon(self._commit_regularly)

    async def commit(self) -> None:
        """Commit what is processed, and wait until the brokers have it."""
        await self._commit(list(self.process_queues.values()))

    async def give_up_all(self) -> None:
        """Stop fetching, commit, and let others have the queues."""
        given_up = list(self.process_queues.values())
        self.process_queues.clear()
        try:
            await self._release(given_up)
        except HeadraceError as error:
            _log.warning("group %s: the last messages will come again: %s", self._group, error)

    # -- sharing -----------------------------------------------------------------------------------

    async def _rebalance_regularly(self, complete: bool) -> None:
        pacer = Pacer()
        while True:
            pacer.begin()
            with anyio.move_on_after(REBALANCE_INTERVAL_S if complete else _RETRY_PAUSE_S):
                await self.group_changed.wait()
            self.group_changed = anyio.Event()
            before = set(self.process_queues)
            try:
                complete = await self._rebalance()
            except HeadraceError as error:
                _log.warning("group %s keeps its queues as they are: %s", self._group, error)
                complete = False
            # A broker may say all the time that the group has changed.
            await anyio.sleep(pacer.delay_s(progress=before != self.process_queues.keys()))

    async def _rebalance(self) -> bool:
        """Bring the queues up to date; False if some could not be taken yet."""
        complete = True
        for subscription in self._subscriptions:
            try:
                route = await self._instance.route(subscription.topic)
            except RouteNotFound:
                # Brokers make the retry topic when they first hear of the group.
                if not _is_retry(subscription.topic):
                    raise
            else:
                complete &= await self._share(subscription, route)
        return complete

    async def _share(self, subscription: Subscription, route: TopicRoute) -> bool:
        members = await self._members(route)
        mine = set(allocate_averagely(route.read_queues, members, self._instance.client_id))
        held = {queue for queue in self.process_queues if queue.topic == subscription.topic}
        await self._hand_over(held - mine)
        locked = await self._locks.lock(mine) if self._ordered else mine
        for queue in held & mine - locked:
            # Another member has it already, so there is nothing to commit.
            self.process_queues.pop(queue).drop()
        for queue in sorted(locked - held):
            await self._take_over(queue, subscription)
        return locked == mine

    async def _members(self, route: TopicRoute) -> list[str]:
        """The group's client ids, ours among them: all brokers of the topic hear of us first."""
        addresses = [
            address for replicas in route.brokers.values() for address in replicas.values()
        ]
        new = [address for address in addresses if not self._instance.open_connection(address)]
        await self._instance.heartbeat(new)
        if not addresses:
            raise NoQueue(route.topic, "read from")
        response = await self._instance.request(
            addresses[0],
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            ConsumerGroupHeader(consumer_group=self._group),
        )
        if response.command.code == ResponseCode.SYSTEM_ERROR:
            return []  # the peer's way to say that there is none
        return response.expect().decode(GetConsumerListByGroupResponseBody).consumer_id_list

    async def _take_over(self, queue: MessageQueue, subscription: Subscription) -> None:
        committed = await self._offsets.committed(self._group, queue)
        offset = committed
        if offset is None:
            start = "first" if _is_retry(queue.topic) else self._start
            offset = await start_offset(start, queue, self._offsets)
        process_queue = ProcessQueue(queue, self._limits, offset, committed)
        self.process_queues[queue] = process_queue
        assert self._tasks is not None
        self._tasks.start_soon(self._fetcher.run, process_queue, subscription)

    async def _hand_over(self, queues: Iterable[MessageQueue]) -> None:
        given_up = [self.process_queues.pop(queue) for queue in queues]
        if not self._ordered:
            await self._release(given_up)
            return
        assert self._tasks is not None
        for process_queue in given_up:
            process_queue.drop()
            self._tasks.start_soon(self._hand_over_ordered, process_queue)

    async def _hand_over_ordered(self, process_queue: ProcessQueue) -> None:
        """Keep the lock until what is in hand is processed."""
        with anyio.move_on_after(_HANDOVER_S):
            await self._inbox.wait_until_not_in_hand(process_queue)
        try:
            await self._release([process_queue])
        except HeadraceError as error:
            _log.warning("group %s: messages will come again: %s", self._group, error)

    async def _release(self, process_queues: list[ProcessQueue]) -> None:
        for process_queue in process_queues:
            process_queue.drop()
        await self._commit(process_queues)
        if self._ordered:
            await self._locks.unlock([process_queue.queue for process_queue in process_queues])

    # -- progress ----------------------------------------------------------------------------------

    async def _commit_regularly(self) -> None:
        while True:
            await anyio.sleep(COMMIT_INTERVAL_S)
            offsets = _progress(self.process_queues.values())
            try:
                await self._offsets.commit_oneway(self._group, offsets)
            except HeadraceError as error:
                _log.warning("group %s commits later: %s", self._group, error)
            else:
                self._note_committed(offsets)

    async def _commit(self, process_queues: list[ProcessQueue]) -> None:
        offsets = _progress(process_queues)
        await self._offsets.commit(self._group, offsets)
        self._note_committed(offsets)

    def _note_committed(self, offsets: dict[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if queue in self.process_queues:
                self.process_queues[queue].committed_offset = offset


def _progress(process_queues: Iterable[ProcessQueue]) -> dict[MessageQueue, int]:
    """What is processed and not committed."""
    return {
        process_queue.queue: process_queue.processed_offset
        for process_queue in process_queues
        if process_queue.processed_offset != process_queue.committed_offset
    }


def _is_retry(topic: str) -> bool:
    return topic.startswith(RETRY_TOPIC_PREFIX)
