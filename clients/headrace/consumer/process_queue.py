"""One queue that a consumer reads: what is fetched, what is handed out, what is processed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import anyio

if TYPE_CHECKING:
    from headrace.messages import MessageBatch
    from headrace_protocol.bodies import MessageQueue


class Limits(NamedTuple):
    """How much of one queue is held unprocessed before its pulls wait; both above 0."""

    messages: int
    body_bytes: int


class Delivery:
    """A batch on its way through the user's hands.

    processed_offset: all messages of the batch before it are processed.
    handed_offset: all messages before it have been handed out.
    """

    __slots__ = ("batch", "handed_offset", "is_done", "process_queue", "processed_offset")

    def __init__(self, process_queue: ProcessQueue, batch: MessageBatch) -> None:
        self.process_queue = process_queue
        self.batch = batch
        self.processed_offset = self.handed_offset = batch.queue_offset
        self.is_done = False

    @property
    def is_wanted(self) -> bool:
        """Whether it may be handed out: its queue is ours and was not reset since."""
        return not (self.is_done or self.process_queue.is_dropped)

    def processed_all(self) -> None:
        """The whole batch is processed."""
        if not self.is_done:
            self.is_done = True
            self.process_queue.delivery_done(self)

    def processed_handed(self) -> None:
        """What was handed out of the batch so far is processed."""
        self.processed_offset = self.handed_offset
        if self.processed_offset >= self.batch.next_offset:
            self.processed_all()


class ProcessQueue:
    """The state of one queue; nothing here waits but ``wait_for_room``.

    pull_offset: where the next pull begins.
    committed_offset: what the broker knows of our progress; None if that has to be told anew.
    replica_id: which replica of the broker the last answer told us to ask.
    is_dropped: the queue is not ours any more; what was fetched is not handed out.
    fetching: scope of the task that pulls. pulling: scope of the pull under way.
    """

    def __init__(
        self, queue: MessageQueue, limits: Limits, offset: int, committed_offset: int | None = None
    ) -> None:
        self.queue = queue
        self.pull_offset = offset
        self.committed_offset = committed_offset
        self.replica_id = 0
        self.is_dropped = False
        self.fetching = anyio.CancelScope()
        self.pulling = anyio.CancelScope()
        self._limits = limits
        self._deliveries: deque[Delivery] = deque()
        self._message_count = 0
        self._body_bytes = 0
        self._room: anyio.Event | None = None

    @property
    def processed_offset(self) -> int:
        """All messages before this offset are processed."""
        return self._deliveries[0].processed_offset if self._deliveries else self.pull_offset

    @property
    def message_count(self) -> int:
        """Messages fetched and not processed."""
        return self._message_count

    @property
    def room(self) -> int:
        """How many messages the next pull may bring; 0 makes it wait."""
        if self._body_bytes >= self._limits.body_bytes:
            return 0
        return max(0, self._limits.messages - self._message_count)

    def add(self, batch: MessageBatch) -> Delivery:
        """Take what a pull brought."""
        delivery = Delivery(self, batch)
        self._deliveries.append(delivery)
        self._message_count += len(batch)
        self._body_bytes += batch.body_bytes
        self.pull_offset = batch.next_offset
        return delivery

    def delivery_done(self, delivery: Delivery) -> None:
        """What ``Delivery.processed_all`` calls."""
        self._message_count -= len(delivery.batch)
        self._body_bytes -= delivery.batch.body_bytes
        while self._deliveries and self._deliveries[0].is_done:
            self._deliveries.popleft()
        self._signal_room()

    def reset(self, offset: int) -> None:
        """Go on from ``offset``; what was fetched before counts no more."""
        for delivery in self._deliveries:
            delivery.is_done = True
        self._deliveries.clear()
        self._message_count = self._body_bytes = 0
        self.pull_offset = offset
        self.committed_offset = None
        self.pulling.cancel()
        self._signal_room()

    def drop(self) -> None:
        """Give the queue up."""
        self.is_dropped = True
        self.fetching.cancel()

    async def wait_for_room(self) -> None:
        """Wait until another pull is allowed."""
        while not self.room:
            self._room = self._room or anyio.Event()
            await self._room.wait()

    def _signal_room(self) -> None:
        if self._room:
            self._room.set()
            self._room = None
