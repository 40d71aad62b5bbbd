"""One queue that a consumer reads: what is fetched, what is handed out, what is processed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import anyio

if TYPE_CHECKING:
    from headrace.messages import MessageBatch, ReceivedMessage
    from headrace_protocol.bodies import MessageQueue

# How many messages are made at once; other tasks get their turn between two such parts.
_READY_MAX = 1024


class Limits(NamedTuple):
    """How much of one queue is held unprocessed before its pulls wait; both above 0."""

    messages: int
    record_bytes: int


class Delivery:
    """A batch on its way through the user's hands, in parts or message by message.

    ready: messages to hand out next: who takes one out of it has handed it out.

    What was handed out last is at hand; it is processed when more is asked for.
    """

    __slots__ = (
        "_at_hand_max",
        "_processed_count",
        "_taken_count",
        "batch",
        "is_done",
        "process_queue",
        "ready",
    )

    def __init__(self, process_queue: ProcessQueue, batch: MessageBatch) -> None:
        self.process_queue = process_queue
        self.batch = batch
        self.ready: deque[ReceivedMessage] = deque()
        self.is_done = False
        self._taken_count = 0
        self._processed_count = 0
        self._at_hand_max = 0

    @property
    def is_wanted(self) -> bool:
        """Whether it may be handed out: its queue is ours and was not reset since."""
        return not (self.is_done or self.process_queue.is_dropped)

    @property
    def handed_count(self) -> int:
        """How many messages of the batch have been handed out."""
        # So that handing one out costs nothing but taking it from ``ready``.
        return self._taken_count - len(self.ready)

    @property
    def handed_offset(self) -> int:
        """All messages before it have been handed out."""
        return self.batch.offset_at(self.handed_count)

    @property
    def processed_offset(self) -> int:
        """All messages of the batch before it are processed."""
        at_hand_from = self.handed_count - self._at_hand_max
        return self.batch.offset_at(max(self._processed_count, at_hand_from))

    @property
    def has_more(self) -> bool:
        """Whether some of it has not been handed out, and may be."""
        return self.is_wanted and self.handed_count < len(self.batch)

    def next_part(self, messages_max: int | None = None) -> MessageBatch:
        """Hand out the rest, or so many messages of it."""
        self.put_back()
        start, end = self._taken_count, len(self.batch)
        if messages_max is not None:
            end = min(end, start + messages_max)
        self._processed_count, self._taken_count, self._at_hand_max = start, end, end - start
        return self.batch.part(start, end)

    def make_ready(self) -> deque[ReceivedMessage]:
        """Put the next messages into ``ready``, unless there are some; returns it."""
        self._processed_count, self._at_hand_max = self.handed_count, 1
        if not self.ready:
            start = self._taken_count
            self._taken_count = min(start + _READY_MAX, len(self.batch))
            self.ready.extend(self.batch.part(start, self._taken_count))
        return self.ready

    def put_back(self) -> None:
        """Make nothing ready any more."""
        self._taken_count = self.handed_count
        self.ready.clear()

    def processed_all(self) -> None:
        """The whole batch is processed."""
        if not self.is_done:
            self.is_done = True
            self.process_queue.delivery_done(self)

    def processed_handed(self) -> None:
        """What was handed out of the batch so far is processed."""
        self._processed_count = self.handed_count
        if self._processed_count >= len(self.batch):
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
        self._record_bytes = 0
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
    def room(self) -> Limits:
        """How much the next pull may bring; it waits while either is 0."""
        return Limits(
            max(0, self._limits.messages - self._message_count),
            max(0, self._limits.record_bytes - self._record_bytes),
        )

    def add(self, batch: MessageBatch) -> Delivery:
        """Take what a pull brought."""
        delivery = Delivery(self, batch)
        self._deliveries.append(delivery)
        self._message_count += len(batch)
        self._record_bytes += batch.buffer_bytes
        self.pull_offset = batch.next_offset
        return delivery

    def delivery_done(self, delivery: Delivery) -> None:
        """What ``Delivery.processed_all`` calls."""
        self._message_count -= len(delivery.batch)
        self._record_bytes -= delivery.batch.buffer_bytes
        while self._deliveries and self._deliveries[0].is_done:
            self._deliveries.popleft()
        self._signal_room()

    def reset(self, offset: int) -> None:
        """Go on from ``offset``; what was fetched before counts no more."""
        for delivery in self._deliveries:
            delivery.is_done = True
            delivery.put_back()
        self._deliveries.clear()
        self._message_count = self._record_bytes = 0
        self.pull_offset = offset
        self.committed_offset = None
        self.pulling.cancel()
        self._signal_room()

    def drop(self) -> None:
        """Give the queue up."""
        self.is_dropped = True
        for delivery in self._deliveries:
            delivery.put_back()
        self.fetching.cancel()

    async def wait_for_room(self) -> None:
        """Wait until another pull is allowed."""
        while not all(self.room):
            self._room = self._room or anyio.Event()
            await self._room.wait()

    def _signal_room(self) -> None:
        if self._room:
            self._room.set()
            self._room = None
