"""Where fetched batches wait for the user, and the iterators that hand them out."""

from __future__ import annotations

import contextlib
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
            delivery = self.take_ready()
            if delivery:
                return delivery
            await self._wait_for_change()

    def take_ready(self) -> Delivery | None:
        """``take`` what is here already."""
        delivery = self._left_by_this_task() or self._next()
        if delivery:
            self._in_hand[delivery] = _Holder()
        return delivery

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
                if delivery.has_more:
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


class Receiver:
    """Goes through deliveries one after the other; what was handed out is processed then.

    delivery: the one at hand.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.delivery: Delivery | None = None

    async def receive(self) -> Delivery:
        """The delivery at hand if it has more, else another one."""
        if self.delivery and self.delivery.has_more:
            await anyio.lowlevel.checkpoint()
        self._let_go_if_done()
        if self.delivery is None:
            self.delivery = await self._inbox.take()
        return self.delivery

    def receive_ready(self) -> Delivery | None:
        """``receive`` what is here already."""
        self._let_go_if_done()
        if self.delivery is None:
            self.delivery = self._inbox.take_ready()
        return self.delivery

    def _let_go_if_done(self) -> None:
        if self.delivery and not self.delivery.has_more:
            self._inbox.finished(self.delivery)
            self.delivery = None


class BatchIterator:
    """Batches; each is processed when the next one is asked for.

    max_messages: in one of them; None for as many as came together.
    """

    def __init__(self, inbox: Inbox, max_messages: int | None) -> None:
        self._receiver = Receiver(inbox)
        self._max_messages = max_messages

    def __aiter__(self) -> BatchIterator:
        return self

    async def __anext__(self) -> MessageBatch:
        return (await self._receiver.receive()).next_part(self._max_messages)


class MessageIterator:
    """Messages one by one; each is processed when the next one is asked for."""

    def __init__(self, inbox: Inbox) -> None:
        self._receiver = Receiver(inbox)
        self._ready: deque[ReceivedMessage] = deque()

    def __aiter__(self) -> MessageIterator:
        return self

    async def __anext__(self) -> ReceivedMessage:
        # All that a message costs as a rule: nobody else needs to know that it is handed out.
        if self._ready:
            return self._ready.popleft()
        await self.wait_for_some()
        return self._ready.popleft()

    async def wait_for_some(self) -> None:
        """Wait until messages are ready."""
        while not self._ready:
            self._ready = (await self._receiver.receive()).make_ready()

    def take_ready(self) -> Iterator[ReceivedMessage]:
        """Hand out what is ready, without waiting; in another thread, if need be."""
        with contextlib.suppress(IndexError):  # it may be put back at any moment
            while True:
                yield self._ready.popleft()
