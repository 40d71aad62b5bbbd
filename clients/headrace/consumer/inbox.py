"""Inbox of fetched batches, and the iterators that hand them out to the user."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel

from headrace.errors import ClientClosed
from headrace.loops import current_task, has_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.consumer.process_queue import Delivery, ProcessQueue
    from headrace.errors import HeadraceError
    from headrace.received import MessageBatch, ReceivedMessage, Returns
    from headrace_protocol.bodies import MessageQueue

_log = logging.getLogger("headrace.consumer")

# How long a task processes an ordered queue in a row while other queues wait.
_TURN_S = 60.0
# How often a waiting user looks whether others have ended.
_LOOK_S = 10.0


def time_after(timeout_ms: float | None) -> float:
    """Loop time at which a timeout from now on is over; None never is."""
    return math.inf if timeout_ms is None else anyio.current_time() + timeout_ms / 1000


class Inbox:
    """Deliveries from all queues, in order of arrival.

    client: name of the consumer's class, for errors.
    ordered: hand out a batch of a queue only after the previous batch of that queue is processed.
    current_user: the task that asks for messages, or the thread that calls into the event loop.
    returns: the group's consumer, to which messages can be returned.

    A user that finds no delivery takes half of what another has not been handed out yet, unless
    queues are ordered: so the users share a backlog, however long each takes for a message. What a
    user held that has ended is handed out again.
    """

    def __init__(
        self,
        client: str,
        *,
        ordered: bool = False,
        current_user: Callable[[], object] = current_task,
    ) -> None:
        self._client = client
        self.returns: Returns | None = None
        self._is_open = False
        self._ordered = ordered
        self._current_user = current_user
        self._waiting: deque[Delivery] = deque()
        self._handed_out: dict[Delivery, _Holder] = {}
        self._hand_outs = 0
        self._changed: anyio.Event | None = None
        self._failure: HeadraceError | None = None

    def open(self) -> None:
        """Start to hand out deliveries."""
        self._waiting.clear()
        self._handed_out.clear()
        self._failure = None
        self._is_open = True

    def close(self) -> None:
        """Stop handing out messages; further requests raise ClientClosed."""
        self._is_open = False
        self.put_back_all()
        self._signal()

    def fail(self, error: HeadraceError) -> None:
        """Raise an error once, in the next request for messages."""
        self._failure = error
        self._signal()

    def put_back_all(self) -> None:
        """Hand out nothing more of the deliveries that users hold."""
        for delivery in self._handed_out:
            delivery.put_back()

    def put(self, delivery: Delivery) -> None:
        """Add a fetched delivery."""
        delivery.batch.returns = self.returns
        self._waiting.append(delivery)
        self._signal()

    def caller(self, *, is_done: bool) -> Caller:
        """The user that calls now. is_done: whether it has processed what it holds."""
        return Caller(self._current_user(), self._hand_outs if is_done else 0)

    async def take(self, until: float = math.inf, caller: Caller | None = None) -> Delivery | None:
        """The next delivery, which belongs to this user until ``finish``; None at time ``until``.

        A delivery that this user left unfinished, by breaking out of a loop, comes first.
        caller: on whose behalf this task asks.
        Raises ClientClosed, now or while it waits, once the inbox is closed; and what ``fail`` got.
        """
        await anyio.lowlevel.checkpoint()
        while True:
            self._raise_failure()
            if not self._is_open:
                for held in self._held_by_this_user(caller):
                    self.finish_if_closed(held)
                raise ClientClosed(self._client)
            delivery = self.take_ready(caller)
            if delivery or anyio.current_time() >= until:
                return delivery
            await self._wait_for_change(until)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def take_ready(self, caller: Caller | None = None) -> Delivery | None:
        """The next delivery if there is one; does not wait."""
        delivery = self._unfinished_of_this_user(caller)
        if delivery is None:
            self._take_back_from_ended()
            delivery = self._next() or self._half_of_another()
        if delivery:
            user = self._current_user()
            delivery.handed_out(anyio.current_time())
            self._handed_out[delivery] = _Holder(
                user, caller.user if caller else user, self._hand_outs
            )
            self._hand_outs += 1
        return delivery

    def finish(self, delivery: Delivery) -> None:
        """Mark the delivery's messages as processed: its task asked for more."""
        self._handed_out.pop(delivery, None)
        if delivery.is_valid:
            delivery.mark_all_processed()
        else:
            delivery.mark_handed_out_processed()
        if self._ordered or not self._is_open:
            self._signal()

    def finish_if_closed(self, delivery: Delivery) -> bool:
        """Mark what was handed out as processed, because its task asked for more in vain."""
        if self._is_open:
            return False
        self._handed_out.pop(delivery, None)
        delivery.mark_handed_out_processed()
        self._signal()
        return True

    async def wait_until_others_are_done(self) -> None:
        """Wait until no other user holds a delivery."""
        user = self._current_user()
        while not all(holder.user is user for holder in self._handed_out.values()):
            await self._wait_for_change()

    def _held_by_this_user(self, caller: Caller | None = None) -> list[Delivery]:
        user = self._current_user()
        return [
            delivery
            for delivery, holder in self._handed_out.items()
            if holder.user is user or (caller and holder.had(caller))
        ]

    def _take_back_from_ended(self) -> bool:
        """Hand out again what ended users hold and have not processed; whether there is any."""
        ended = [each for each, holder in self._handed_out.items() if has_ended(holder.user)]
        for delivery in ended:
            del self._handed_out[delivery]
            if delivery.is_valid:
                _log.warning(
                    "the task that received messages of %s from offset %d on has ended without "
                    "asking for more or calling commit(), so they are handed out again",
                    delivery.process_queue.queue,
                    delivery.processed_offset,
                )
                again = delivery.process_queue.retry(delivery, delivery.processed_offset)
                self._waiting.appendleft(again)
        return bool(ended)

    def _unfinished_of_this_user(self, caller: Caller | None) -> Delivery | None:
        for delivery in self._held_by_this_user(caller):
            if delivery.has_more and delivery.process_queue.is_suspended:
                self.yield_turn(delivery)
            elif delivery.has_more:
                return delivery
            else:
                self.finish(delivery)
        return None

    def is_handed_out(self, process_queue: ProcessQueue) -> bool:
        """True if a batch of this queue is handed out and not processed."""
        # A queue that was lost and taken again has a new ProcessQueue.
        return any(
            delivery.process_queue.queue == process_queue.queue for delivery in self._handed_out
        )

    async def wait_until_idle(self, process_queue: ProcessQueue) -> None:
        """Wait until no batch of this queue is handed out; for ordered inboxes."""
        while self.is_handed_out(process_queue):
            await self._wait_for_change()

    def mark_current_processed(self) -> None:
        """Mark the messages handed to this user as processed, unless it timed out meanwhile.

        How far a task got before a timeout is unknown, so its messages are redelivered.
        """
        for delivery in self._held_by_this_user():
            if self._handed_out[delivery].is_in_time():
                delivery.mark_handed_out_processed()

    def retry(self, queue: MessageQueue, offset: int, delay_s: float) -> bool:
        """Hand a queue out again after ``delay_s``, from the message at ``offset`` on.

        Returns False if that message is not handed out.
        """
        for delivery in list(self._handed_out):
            process_queue = delivery.process_queue
            is_current = delivery.processed_offset <= offset < delivery.handed_out_offset
            if process_queue.queue == queue and is_current:
                del self._handed_out[delivery]
                if delivery.is_valid:
                    self._waiting.appendleft(process_queue.retry(delivery, offset))
                    until = anyio.current_time() + delay_s
                    process_queue.suspended_until = max(until, process_queue.suspended_until)
                self._signal()
                return True
        return False

    def pause(self, process_queue: ProcessQueue) -> None:
        """Hand out no more messages of a queue."""
        process_queue.is_paused = True
        for delivery in self._handed_out:
            if delivery.process_queue is process_queue:
                delivery.put_back()

    def resume(self, process_queue: ProcessQueue) -> None:
        """Hand out messages of a paused queue again, after the delay of a retry that waits."""
        process_queue.is_paused = False
        self._signal()

    def yield_turn(self, delivery: Delivery) -> None:
        """Let other queues be handed out before the rest of a handed-out delivery."""
        process_queue = delivery.process_queue
        rest = process_queue.retry(delivery, delivery.handed_out_offset)
        del self._handed_out[delivery]
        waiting = list(self._waiting)
        same_queue = [each for each in waiting if each.process_queue is process_queue]
        others = [each for each in waiting if each.process_queue is not process_queue]
        self._waiting = deque([*others, rest, *same_queue])
        self._signal()

    def _next(self) -> Delivery | None:
        blocked: list[Delivery] = []
        found = None
        while self._waiting and found is None:
            delivery = self._waiting.popleft()
            if delivery.is_valid and self._is_blocked(delivery.process_queue):
                blocked.append(delivery)
            elif delivery.is_valid:
                found = delivery
        self._waiting.extendleft(reversed(blocked))
        return found

    def _half_of_another(self) -> Delivery | None:
        """The later half of the messages that some user has not been handed out yet."""
        if self._ordered or not self._handed_out:
            return None
        longest = max(self._handed_out, key=attrgetter("remaining_count"))
        if not longest.has_more or longest.process_queue.is_suspended:
            return None
        return longest.process_queue.split(longest)

    def _is_blocked(self, process_queue: ProcessQueue) -> bool:
        """True if a queue has to wait: for its current batch, until its retry, or paused."""
        is_busy = self._ordered and self.is_handed_out(process_queue)
        return is_busy or process_queue.is_suspended

    async def _wait_for_change(self, until: float = math.inf) -> None:
        if self._take_back_from_ended():
            return
        self._changed = self._changed or anyio.Event()
        look = anyio.current_time() + _LOOK_S if self._handed_out else math.inf
        with anyio.CancelScope(deadline=min(until, self._next_retry(), look)):
            await self._changed.wait()

    def _next_retry(self) -> float:
        """Loop time at which the first suspended queue may be handed out."""
        now = anyio.current_time()
        times = (each.process_queue.suspended_until for each in self._waiting)
        return min((time for time in times if time > now), default=math.inf)

    def _signal(self) -> None:
        if self._changed:
            self._changed.set()
            self._changed = None


class Caller(NamedTuple):
    """A user that calls for a delivery, though another task may ask for it.

    Before Python 3.12 ``asyncio.wait_for`` runs each call in a task of its own.
    seen: number of deliveries handed out before; what the user holds of them is processed.
    """

    user: object
    seen: int


class _Holder:
    """The user that holds a delivery, and the deadline that its task had on receiving it.

    caller: the user that holds it once the task has ended.
    number: number of deliveries handed out before.
    """

    def __init__(self, task: object, caller: object, number: int) -> None:
        self._task = task
        self._caller = caller
        self._number = number
        self._deadline = anyio.current_effective_deadline()

    @property
    def user(self) -> object:
        return self._caller if has_ended(self._task) else self._task

    def had(self, caller: Caller) -> bool:
        """True if the user held it when it called."""
        return self._number < caller.seen and self.user is caller.user

    def is_in_time(self) -> bool:
        return anyio.current_time() < self._deadline


class Receiver:
    """Takes deliveries one after another; taking the next one finishes the current one.

    caller: on whose behalf it takes them. delivery: the current delivery.
    """

    def __init__(self, inbox: Inbox, caller: Caller | None = None) -> None:
        self._inbox = inbox
        self._caller = caller
        self._taken_at = 0.0
        self.delivery: Delivery | None = None

    async def receive(self, until: float = math.inf) -> Delivery | None:
        """The current delivery if it has more messages, otherwise the next one.

        None if there is none at time ``until``.
        """
        if self.delivery and self.delivery.has_more:
            await anyio.lowlevel.checkpoint()
            if self._is_turn_over(self.delivery):
                self._inbox.yield_turn(self.delivery)
        self._finish_if_exhausted()
        if self.delivery is None:
            self.delivery = await self._inbox.take(until, self._caller)
            self._taken_at = anyio.current_time()
        return self.delivery

    def _is_turn_over(self, delivery: Delivery) -> bool:
        if not delivery.has_more:  # another task has just moved the queue
            return False
        if delivery.process_queue.is_suspended:
            return True
        is_ordered = delivery.process_queue.is_locked
        return is_ordered and anyio.current_time() - self._taken_at >= _TURN_S

    def _finish_if_exhausted(self) -> None:
        if self.delivery and self._inbox.finish_if_closed(self.delivery):
            self.delivery = None
        elif self.delivery and not self.delivery.has_more:
            self._inbox.finish(self.delivery)
            self.delivery = None


async def _next_delivery(receiver: Receiver, until: float = math.inf) -> Delivery:
    """The next delivery; the end of the iteration at ``until``, or if the consumer is closed."""
    try:
        delivery = await receiver.receive(until)
    except ClientClosed:
        raise StopAsyncIteration from None
    if delivery is None:
        raise StopAsyncIteration
    return delivery


class BatchIterator:
    """Iterator over batches; asking for the next batch marks the current one as processed.

    max_messages: most messages in a batch; None yields batches as they were fetched.
    until: loop time at which the iterator ends.
    is_call: it serves one call, by which its user asks for more.
    """

    def __init__(
        self,
        inbox: Inbox,
        max_messages: int | None,
        until: float = math.inf,
        *,
        is_call: bool = False,
    ) -> None:
        self._receiver = Receiver(inbox, inbox.caller(is_done=is_call))
        self._max_messages = max_messages
        self._until = until

    def __aiter__(self) -> BatchIterator:
        return self

    async def __anext__(self) -> MessageBatch:
        delivery = await _next_delivery(self._receiver, self._until)
        return delivery.next_part(self._max_messages)


class MessageIterator:
    """Iterator over messages; asking for the next message marks the current one as processed.

    until: loop time at which ``wait_for_some`` ends the iteration.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._receiver = Receiver(inbox, inbox.caller(is_done=False))
        self.until = math.inf
        self._ready: deque[ReceivedMessage] = deque()

    def __aiter__(self) -> MessageIterator:
        return self

    async def __anext__(self) -> ReceivedMessage:
        # The usual case costs no more than this: ``ready`` also counts the messages handed out.
        if self._ready:
            return self._ready.popleft()
        await self.wait_for_some()
        return self._ready.popleft()

    async def wait_for_some(self) -> None:
        """Wait until messages are ready. Raises StopAsyncIteration once the consumer is closed."""
        while not self._ready:
            self._ready = (await _next_delivery(self._receiver, self.until)).make_ready()

    def take_ready(self) -> Iterator[ReceivedMessage]:
        """Yield the ready messages without waiting; callable from another thread."""
        with contextlib.suppress(IndexError):  # a reset may empty it at any moment
            while True:
                yield self._ready.popleft()


class TimedIterator(MessageIterator):
    """Iterator over messages that ends ``timeout_s`` after the first one is asked for."""

    def __init__(self, inbox: Inbox, timeout_s: float) -> None:
        super().__init__(inbox)
        self._timeout_s = timeout_s

    async def __anext__(self) -> ReceivedMessage:
        now = anyio.current_time()
        if math.isinf(self.until):
            self.until = now + self._timeout_s
        if now >= self.until:
            raise StopAsyncIteration
        return await super().__anext__()
