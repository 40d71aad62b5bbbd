"""Follow the queues of a topic from their start: the local copy's loading and its changes."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

import anyio

from headrace.consumer.fetcher import Fetcher
from headrace.consumer.offset_store import OffsetStore
from headrace.consumer.process_queue import Delivery, Limits, ProcessQueue
from headrace.consumer.subscription import Subscription
from headrace.errors import CopyBehind, HeadraceError
from headrace.instance import ROUTE_INTERVAL_S
from headrace.outages import is_absence
from headrace.pacing import LONGEST_PAUSE_S
from headrace.received import BODY_LIMITS
from headrace.table.entries import Entries, Keyed
from headrace.tasks import gather
from headrace.whole import require_whole
from headrace_protocol.system_topics import READER_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.abc import TaskGroup

    from headrace.instance import ClientInstance
    from headrace.messages import SendResult
    from headrace.missing import MissingPart
    from headrace_protocol.bodies import MessageQueue

_log = logging.getLogger("headrace.table")

# Every delivery is applied as it arrives, so there is always room.
_LIMITS = Limits(2**31, 2**31)
# After so long without a message, a queue's broker is asked whether it is there.
_STALL_S = 1.0


class _FollowedQueue(ProcessQueue):
    """A queue read from offset 0, since Apache's brokers report too high a minimum offset."""

    def __init__(self, queue: MessageQueue, on_move: Callable[[int], None]) -> None:
        """on_move: called after the position changed, with the position before."""
        super().__init__(queue, _LIMITS, 0)
        self._on_move = on_move

    def skip_to(self, offset: int) -> None:
        before = self.pull_offset
        super().skip_to(offset)
        self._on_move(before)

    def reset(self, offset: int) -> None:
        before = self.pull_offset
        super().reset(offset)
        self._on_move(before)


class Follower:
    """Keeps ``entries`` up to date with all queues of a topic."""

    def __init__(
        self,
        instance: ClientInstance,
        topic: str,
        entries: Entries,
        patience_s: float,
        *,
        allow_partial: bool = False,
    ) -> None:
        """patience_s: how long a reader waits for a load that fails. Otherwise see ``Table``."""
        self._instance = instance
        self._topic = topic
        self._entries = entries
        self._patience_s = patience_s
        self._allow_partial = allow_partial
        # Of the last attempt to load that failed.
        self._problem: HeadraceError | None = None
        self._failed_at = -math.inf
        self._offsets = OffsetStore(instance)
        self._fetcher = Fetcher(instance, READER_GROUP, self, BODY_LIMITS)
        self._subscription = Subscription(topic)
        self._queues: dict[MessageQueue, _FollowedQueue] = {}
        self._numbers: dict[MessageQueue, int] = {}
        self._loaded = anyio.Event()
        self._moved = anyio.Event()

    @property
    def is_loaded(self) -> bool:
        """True once all messages that were there at the start are applied."""
        return self._loaded.is_set()

    async def start(self, tasks: TaskGroup) -> None:
        """Begin to follow. Raises PartialAnswer, RouteNotFound and other HeadraceErrors."""
        route = await self._instance.current_route(self._topic)
        self._require_whole(route.missing)
        await self._add_queues(tasks)
        tasks.start_soon(self._load)
        tasks.start_soon(self._watch_route, tasks)

    def _require_whole(self, missing: Sequence[MissingPart]) -> None:
        require_whole(self._topic, missing, allow_partial=self._allow_partial, warn=_log.warning)

    async def _add_queues(self, tasks: TaskGroup) -> None:
        route = await self._instance.route(self._topic)
        for queue in route.read_queues:
            if queue not in self._queues:
                number = self._numbers[queue] = len(self._numbers)
                followed = _FollowedQueue(queue, partial(self._note_move, queue, number))
                self._queues[queue] = followed
                tasks.start_soon(self._fetcher.run, followed, self._subscription)

    async def _watch_route(self, tasks: TaskGroup) -> None:
        """Follow new queues, too."""
        while True:
            await anyio.sleep(ROUTE_INTERVAL_S)
            try:
                await self._add_queues(tasks)
            except HeadraceError as error:
                self._instance.outages.report(error, self._topic)

    async def _load(self) -> None:
        while not self._loaded.is_set():
            try:
                await self.synced()
            except HeadraceError as error:
                self._problem, self._failed_at = error, anyio.current_time()
                self._instance.outages.report(error, self._topic)
                await anyio.sleep(LONGEST_PAUSE_S)

    def put(self, delivery: Delivery) -> None:
        """Apply the next messages of a queue; see ``Fetcher``."""
        self._entries.apply(self._numbers[delivery.batch.queue], Keyed.of(delivery.batch))
        delivery.mark_all_processed()
        self._signal()

    def _note_move(self, queue: MessageQueue, number: int, before: int) -> None:
        if self._queues[queue].pull_offset < before:
            _log.warning(
                "table %s: queue %s begins anew: its topic was created again", self._topic, queue
            )
            self._entries.drop_queue(number)
        self._signal()

    def _signal(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()

    async def loaded(self) -> None:
        """Wait until the copy has all messages that were there at the start.

        Raises the error that keeps it from loading, after ``patience_s``.
        """
        while not self._loaded.is_set():
            began = anyio.current_time()
            with anyio.move_on_after(self._patience_s):
                await self._loaded.wait()
                return
            if self._problem and self._failed_at >= began:
                raise self._problem

    async def synced(self) -> None:
        """Wait until the copy has all messages that are there now.

        Raises the error of a broker that does not tell the end of its queues, or has not let them
        be read for ``patience_s``.
        """
        queues = list(self._queues)
        for queue, end in zip(queues, await gather(self._offsets.max_offset, queues), strict=True):
            if not isinstance(end, HeadraceError):
                await self._reached(queue, end)
            elif not (self._allow_partial and is_absence(end)):
                raise end
        if not self._loaded.is_set():
            self._entries.forget_deleted()
            self._loaded.set()

    async def applied(self, result: SendResult) -> None:
        """Wait until the copy has a message that was sent. Raises CopyBehind."""
        if result.queue in self._queues:
            try:
                await self._reached(result.queue, result.queue_offset + 1)
            except HeadraceError as error:
                raise CopyBehind(result.queue, result.queue_offset, error) from error

    async def _reached(self, queue: MessageQueue, offset: int) -> None:
        """Wait until the copy has the messages before ``offset``. Raises as ``synced``."""
        while self._queues[queue].pull_offset < offset:
            with anyio.move_on_after(_STALL_S) as stalled:
                await self._moved.wait()
            if stalled.cancelled_caught:
                # The queue of a topic that was created again has fewer.
                offset = min(offset, await self._offsets.max_offset(queue))
                failure = self._queues[queue].failure
                if failure and failure.since + self._patience_s <= anyio.current_time():
                    raise failure.error
