"""Where fetched batches wait for the user, and the iterators that hand them out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.consumer.process_queue import Delivery, ProcessQueue
    from headrace.messages import MessageBatch, ReceivedMessage


class Inbox:
    """Deliveries in the order of their arrival, whatever their queue.

    ordered: of one queue, no batch is handed out before the one before it is processed.
    one_user: whichever task it is, it acts for the same user (a thread in front of the loop).
    """

    def __init__(self, *, ordered: bool = False, one_user: bool = False) -> None:
        self._ordered = ordered
        self._one_user = one_user
        self._waiting: deque[Delivery] = deque()
        self._in_hand: dict[Delivery, _Holder] = {}
        self._changed: anyio.Event | None = None

    def put(self, delivery: Delivery) -> None:
        """Add what was fetched."""
        self._waiting.append(delivery)
        self._signal()

    async def take(self) -> Delivery:
        """The next delivery, which is in this task's hand until it is ``finished``.

        What this task left in the middle, by breaking out of a loop, comes first.
        """
        await anyio.lowlevel.checkpoint()
        while True:
            delivery = self._left_by_this_task() or self._next()
            if delivery:
                self._in_hand[delivery] = _Holder()
                return delivery
            await self._wait_for_change()

    def finished(self, delivery: Delivery) -> None:
        """Its task asks for more, so what was handed out of the delivery is processed."""
        self._in_hand.pop(delivery, None)
        if delivery.is_wanted:
            delivery.processed_all()
        else:
            delivery.processed_handed()
        if self._ordered:
            self._signal()

    def _left_by_this_task(self) -> Delivery | None:
        for delivery, holder in list(self._in_hand.items()):
            if self._one_user or holder.is_this_task():
                if delivery.is_wanted and delivery.handed_offset < delivery.batch.next_offset:
                    return delivery
                self.finished(delivery)
        return None

    def is_in_hand(self, process_queue: ProcessQueue) -> bool:
        """Whether a batch of this queue is being worked on."""
        return any(delivery.process_queue is process_queue for delivery in self._in_hand)

    async def wait_until_not_in_hand(self, process_queue: ProcessQueue) -> None:
        """Wait until nobody works on this queue any more; for ordered inboxes."""
        while self.is_in_hand(process_queue):
            await self._wait_for_change()

    def count_in_hand_as_processed(self) -> None:
        """What this task was handed counts as processed, unless its time ran out meanwhile.

        After a time-out nobody knows how far the task got, so the messages come again.
        """
        for delivery, holder in list(self._in_hand.items()):
            if self._one_user or (holder.is_this_task() and holder.is_in_time()):
                delivery.processed_handed()

    def _next(self) -> Delivery | None:
        for _ in range(len(self._waiting)):
            delivery = self._waiting.popleft()
            if not delivery.is_wanted:
                continue
            if not (self._ordered and self.is_in_hand(delivery.process_queue)):
                return delivery
            self._waiting.append(delivery)
        return None

    async def _wait_for_change(self) -> None:
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    def _signal(self) -> None:
        if self._changed:
            self._changed.set()
            self._changed = None


class _Holder:
    """The task that a delivery was handed to, and until when it may work on it."""

    def __init__(self) -> None:
        self._task_id = anyio.get_current_task().id
        self._deadline = anyio.current_effective_deadline()

    def is_this_task(self) -> bool:
        return self._task_id == anyio.get_current_task().id

    def is_in_time(self) -> bool:
        return anyio.current_time() < self._deadline


class BatchIterator:
    """Batches; each is processed when the next one is asked for."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._delivery: Delivery | None = None

    def __aiter__(self) -> BatchIterator:
        return self

    async def __anext__(self) -> MessageBatch:
        delivery = await self._advance()
        batch = delivery.batch.rest(delivery.handed_offset)
        delivery.handed_offset = batch.next_offset
        return batch

    async def _advance(self) -> Delivery:
        if self._delivery:
            self._inbox.finished(self._delivery)
            self._delivery = None
        self._delivery = await self._inbox.take()
        return self._delivery


class MessageIterator(BatchIterator):
    """Messages one by one; each is processed when the next one is asked for."""

    def __init__(self, inbox: Inbox) -> None:
        super().__init__(inbox)
        self._messages: Iterator[ReceivedMessage] = iter(())

    def __aiter__(self) -> MessageIterator:
        return self

    async def __anext__(self) -> ReceivedMessage:  # type: ignore[override]
        # No await that waits while the batch lasts.
        while (message := self.next_of_batch()) is None:
            delivery = await self._advance()
            self._messages = iter(delivery.batch.rest(delivery.handed_offset))
        return message

    def next_of_batch(self) -> ReceivedMessage | None:
        """The next message that is here already and may still be handed out."""
        delivery = self._delivery
        if delivery and delivery.is_wanted:
            for message in self._messages:
                delivery.processed_offset = message.queue_offset
                delivery.handed_offset = message.queue_offset + 1
                return message
        return None
