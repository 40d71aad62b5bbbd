"""A queue that a consumer reads: messages fetched, handed out and processed."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.consumer.rates import Rates
    from headrace.errors import HeadraceError
    from headrace.received import MessageBatch, ReceivedMessage
    from headrace_protocol.bodies import MessageQueue

# Messages built at once; other tasks run between two such parts.
_READY_MAX = 1024
# Messages from the first unprocessed one on, in shares of those that may be unprocessed. RocketMQ
# has the same ratio: consumeConcurrentlyMaxSpan 2000 to pullThresholdForQueue 1000.
_SPAN_RATIO = 2


class Limits(NamedTuple):
    """Limits on a queue's unprocessed messages, beyond which pulls wait; both above 0."""

    messages: int
    record_bytes: int


class Delivery:
    """A batch that is handed out to the user, in parts or message by message.

    ready: messages to hand out next; removing a message from it hands it out.
    record_bytes: its share of the bytes that were fetched, of which its batch may be a part.
    fetched_before: number of messages of the queue that were fetched before its first.

    The messages handed out last are the current ones, processed once the user asks for more.
    """

    __slots__ = (
        "_current_max",
        "_noted_at",
        "_noted_count",
        "_processed_count",
        "_taken_count",
        "batch",
        "fetched_before",
        "is_done",
        "process_queue",
        "ready",
        "record_bytes",
    )

    def __init__(
        self, process_queue: ProcessQueue, batch: MessageBatch, fetched_before: int
    ) -> None:
        self.process_queue = process_queue
        self.batch = batch
        self.fetched_before = fetched_before
        self.record_bytes = batch.buffer_bytes
        self.ready: deque[ReceivedMessage] = deque()
        self.is_done = False
        self._taken_count = 0
        self._processed_count = 0
        self._current_max = 0
        self._noted_count = 0
        self._noted_at: float | None = None

    @property
    def is_valid(self) -> bool:
        """True while it may be handed out: its queue is neither dropped nor reset since."""
        return not (self.is_done or self.process_queue.is_dropped)

    @property
    def handed_out_count(self) -> int:
        """Number of messages of the batch that have been handed out."""
        # Computed, so that handing out a message costs no more than removing it from ``ready``.
        return self._taken_count - len(self.ready)

    @property
    def handed_out_offset(self) -> int:
        """Offset before which all messages have been handed out."""
        return self.batch.offset_at(self.handed_out_count)

    @property
    def processed_count(self) -> int:
        """Number of messages of the batch that are processed."""
        return max(self._processed_count, self.handed_out_count - self._current_max)

    @property
    def processed_offset(self) -> int:
        """Offset before which all messages of the batch are processed."""
        return self.batch.offset_at(self.processed_count)

    @property
    def remaining_count(self) -> int:
        """Number of messages that may still be handed out."""
        return len(self.batch) - self.handed_out_count if self.is_valid else 0

    @property
    def has_more(self) -> bool:
        """True while messages remain that may be handed out."""
        return self.remaining_count > 0

    def next_part(self, messages_max: int | None = None) -> MessageBatch:
        """Hand out the remaining messages, at most ``messages_max``."""
        self.put_back()
        start, end = self._taken_count, len(self.batch)
        if messages_max is not None:
            end = min(end, start + messages_max)
        self._processed_count, self._taken_count, self._current_max = start, end, end - start
        return self.batch.part(start, end)

    def make_ready(self) -> deque[ReceivedMessage]:
        """Fill ``ready`` with the next messages if it is empty; return it."""
        self._processed_count, self._current_max = self.handed_out_count, 1
        if not self.ready:
            start = self._taken_count
            # The lock is checked before each message.
            ready_max = 1 if self.process_queue.is_locked else _READY_MAX
            self._taken_count = min(start + ready_max, len(self.batch))
            self.ready.extend(self.batch.part(start, self._taken_count))
        return self.ready

    def cut_off_half(self) -> MessageBatch:
        """Give away the later half of the messages that have not been handed out.

        Another thread may hand out messages meanwhile, so it may be less, or nothing.
        """
        index = self.handed_out_count + self.remaining_count // 2
        with suppress(IndexError):
            while self._taken_count > index:
                self.ready.pop()
                self._taken_count -= 1
        index = max(index, self._taken_count)
        rest = self.batch.part(index, len(self.batch))
        self.batch = self.batch.part(0, index)
        return rest

    def put_back(self) -> None:
        """Empty ``ready``: its messages count as not handed out."""
        self._taken_count = self.handed_out_count
        self.ready.clear()

    def handed_out(self, now: float) -> None:
        """The user begins to process it, or continues. now: loop time."""
        if self._noted_at is None:
            self._noted_at = now

    def take_progress(self, now: float) -> tuple[int, float]:
        """Messages processed since the last call, and the seconds that they took."""
        count = len(self.batch) if self.is_done else self.processed_count
        if (new := count - self._noted_count) <= 0 or self._noted_at is None:
            return 0, 0.0
        seconds = now - self._noted_at
        self._noted_count, self._noted_at = count, now
        return new, seconds

    def mark_all_processed(self) -> None:
        """Mark the whole batch as processed."""
        if not self.is_done:
            self.is_done = True
            self.process_queue.delivery_done(self)

    def mark_handed_out_processed(self) -> None:
        """Mark the messages handed out so far as processed."""
        self._processed_count = self.handed_out_count
        if self._processed_count >= len(self.batch):
            self.mark_all_processed()


class Failure(NamedTuple):
    """An error that leaves a queue unread. since: loop time at which the first failure began."""

    since: float
    error: HeadraceError


def long_failures(
    failures: Mapping[MessageQueue, Failure | None], after_ms: float
) -> dict[MessageQueue, HeadraceError]:
    """The errors of the queues that have failed for ``after_ms`` and longer."""
    before = anyio.current_time() - after_ms / 1000
    return {
        queue: failure.error
        for queue, failure in failures.items()
        if failure is not None and failure.since <= before
    }


class ProcessQueue:
    """State of one queue; only ``wait_for_room`` blocks.

    pull_offset: offset at which the next pull begins.
    committed_offset: progress known to the broker; None if it has to be committed again.
    replica_id: replica of the broker that the last response suggested.
    locked_until: loop time at which this member's lock ends; None if it has none.
    suspended_until: loop time before which no message is handed out, because of a retry.
    is_paused: whether no message is handed out until the user resumes it.
    fetching: scope of the task that pulls. pulling: scope of the pull in flight.
    failure: why the last pulls have failed; None after one that did not.
    rates: counts what is pulled and processed, if anybody asks for it.
    """

    def __init__(
        self, queue: MessageQueue, limits: Limits, offset: int, committed_offset: int | None = None
    ) -> None:
        self.queue = queue
        self.pull_offset = offset
        self.committed_offset = committed_offset
        self.replica_id = 0
        self.locked_until: float | None = None
        self.suspended_until = -math.inf
        self.is_paused = False
        self.failure: Failure | None = None
        self.rates: Rates | None = None
        self.fetching = anyio.CancelScope()
        self.pulling = anyio.CancelScope()
        self._limits = limits
        self._deliveries: deque[Delivery] = deque()
        self._message_count = 0
        self._record_bytes = 0
        self._fetched_count = 0
        self._room: anyio.Event | None = None
        self._is_dropped = False
        self._retried_offset = -1
        self._retry_count = 0

    @property
    def is_locked(self) -> bool:
        """True if the queue is processed under a lock."""
        return self.locked_until is not None

    @property
    def has_lost_lock(self) -> bool:
        """True once the lock has ended, so that another member may process the queue."""
        return self.locked_until is not None and anyio.current_time() >= self.locked_until

    @property
    def is_suspended(self) -> bool:
        """True while no message may be handed out: the queue is paused, or waits for a retry."""
        return self.is_paused or self.suspended_until > anyio.current_time()

    @property
    def is_dropped(self) -> bool:
        """True once the queue is released or lost; fetched messages are then not handed out."""
        return self._is_dropped or self.has_lost_lock

    @property
    def processed_offset(self) -> int:
        """Offset before which all messages are processed."""
        return self._deliveries[0].processed_offset if self._deliveries else self.pull_offset

    @property
    def message_count(self) -> int:
        """Number of messages fetched and not processed."""
        return self._message_count

    @property
    def span(self) -> int:
        """Number of messages fetched from the first unprocessed one on; a crash repeats them."""
        return self._fetched_count - self._deliveries[0].fetched_before if self._deliveries else 0

    @property
    def room(self) -> Limits:
        """Limits of the next pull, which waits while either is 0."""
        span = _SPAN_RATIO * self._limits.messages - self.span
        return Limits(
            max(0, min(self._limits.messages - self._message_count, span)),
            max(0, self._limits.record_bytes - self._record_bytes),
        )

    def add(self, batch: MessageBatch) -> Delivery:
        """Add a fetched batch."""
        delivery = Delivery(self, batch, self._fetched_count)
        self._deliveries.append(delivery)
        self._message_count += len(batch)
        self._fetched_count += len(batch)
        self._record_bytes += delivery.record_bytes
        self.pull_offset = batch.next_offset
        return delivery

    def skip_to(self, offset: int) -> None:
        """Continue from ``offset``: no message before it matches."""
        self.pull_offset = offset

    def delivery_done(self, delivery: Delivery) -> None:
        """Remove a processed delivery; called by ``Delivery.mark_all_processed``."""
        self._count(delivery)
        self._message_count -= len(delivery.batch)
        self._record_bytes -= delivery.record_bytes
        self._deliveries.remove(delivery)
        self._signal_room()

    def count_progress(self) -> None:
        """Count what is processed of deliveries that the program still has."""
        for delivery in self._deliveries:
            self._count(delivery)

    def _count(self, delivery: Delivery) -> None:
        if self.rates is not None:
            count, seconds = delivery.take_progress(anyio.current_time())
            if count:
                self.rates.of(self._topic(delivery)).processed(count, seconds)

    def _topic(self, delivery: Delivery) -> str:  # noqa: ARG002
        """The topic that a delivery counts for."""
        return self.queue.topic

    def retry(self, delivery: Delivery, offset: int) -> Delivery:
        """Replace a delivery by one that hands out its messages from ``offset`` on again."""
        self._count(delivery)
        index = delivery.handed_out_count
        while index and delivery.batch.offset_at(index) > offset:
            index -= 1
        delivery.is_done = True
        delivery.put_back()
        self._message_count -= index
        rest = delivery.batch.part(index, len(delivery.batch))
        again = Delivery(self, rest, delivery.fetched_before + index)
        again.record_bytes = delivery.record_bytes
        self._deliveries[self._deliveries.index(delivery)] = again
        return again

    def split(self, delivery: Delivery) -> Delivery | None:
        """Move half of what is not handed out to a delivery of its own, which follows this one."""
        message_count = len(delivery.batch)
        batch = delivery.cut_off_half()
        if not batch:
            return None
        rest = Delivery(self, batch, delivery.fetched_before + len(delivery.batch))
        rest.record_bytes = delivery.record_bytes * len(batch) // message_count
        delivery.record_bytes -= rest.record_bytes
        self._deliveries.insert(self._deliveries.index(delivery) + 1, rest)
        return rest

    def reset(self, offset: int) -> None:
        """Continue from ``offset``; discard everything fetched so far."""
        for delivery in self._deliveries:
            delivery.is_done = True
            delivery.put_back()
        self._deliveries.clear()
        self._message_count = self._record_bytes = 0
        self.pull_offset = offset
        self.committed_offset = None
        self.failure = None
        self.pulling.cancel()
        self._signal_room()

    def drop(self) -> None:
        """Stop reading the queue."""
        self._is_dropped = True
        for delivery in self._deliveries:
            delivery.put_back()
        self.fetching.cancel()

    def count_attempt(self, offset: int) -> int:
        """Count a failed attempt at the message at ``offset``; return how many it had in a row."""
        self._retry_count = self._retry_count + 1 if offset == self._retried_offset else 1
        self._retried_offset = offset
        return self._retry_count

    async def wait_for_room(self) -> None:
        """Wait until another pull is allowed."""
        while not all(self.room):
            self._room = self._room or anyio.Event()
            await self._room.wait()

    def _signal_room(self) -> None:
        if self._room:
            self._room.set()
            self._room = None
