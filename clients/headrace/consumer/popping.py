"""A member of a group that pops: in place of queues, it has messages out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import anyio

from headrace.consumer.held import INVISIBLE_S, HeldMessages
from headrace.consumer.leases import MemberLeases
from headrace.consumer.polls import Polls, Receive
from headrace.consumer.pops import PopMember
from headrace.consumer.process_queue import Limits, ProcessQueue, long_failures
from headrace.consumer.shares import Shares
from headrace.errors import HeadraceError
from headrace.pacing import Pacer
from headrace.popped import PoppedBatch
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.pop.headers import ANY_QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anyio.abc import TaskGroup

    from headrace.consumer.assignment import Membership
    from headrace.consumer.inbox import Inbox
    from headrace.consumer.process_queue import Delivery
    from headrace.consumer.rates import Rates
    from headrace.consumer.returns import Retries
    from headrace.consumer.subscription import Subscription
    from headrace.instance import ClientInstance
    from headrace.popped import PoppedMessage

# As many as RocketMQ's clients have of a queue. Each is renewed while the program works.
_MESSAGES_MAX: Final = 96
_WAIT_S: Final = 20.0
_PAUSE_S: Final = 1.0
_NOWHERE: Final = MessageQueue("", "", ANY_QUEUE)


class PopQueue(ProcessQueue):
    """All messages that a member has out, of any queue.

    on_processed: called with messages that the program is done with.
    """

    def __init__(
        self, limits: Limits, on_processed: Callable[[Iterable[PoppedMessage]], None]
    ) -> None:
        super().__init__(_NOWHERE, limits._replace(messages=min(limits.messages, _MESSAGES_MAX)), 0)
        self._on_processed = on_processed

    @property
    def span(self) -> int:
        """See ProcessQueue; nothing waits for what came before."""
        return 0

    @property
    def room(self) -> Limits:
        """See ProcessQueue; none until half of it is free, so that each POP asks for many."""
        room = super().room
        return room if 2 * room.messages >= self._limits.messages else Limits(0, 0)

    def delivery_done(self, delivery: Delivery) -> None:
        """See ProcessQueue."""
        super().delivery_done(delivery)
        self._on_processed(_messages(delivery))

    def retry(self, delivery: Delivery, offset: int) -> Delivery:
        """See ProcessQueue."""
        again = super().retry(delivery, offset)
        self._on_processed(_messages(delivery)[: len(delivery.batch) - len(again.batch)])
        return again

    def _topic(self, delivery: Delivery) -> str:
        """See ProcessQueue; the topic of a message that is retried is that of its first POP."""
        return _messages(delivery)[0].topic

    def note_processed(self) -> None:
        """Report what the program has done of deliveries that it still has."""
        self.count_progress()
        for delivery in self._deliveries:
            self._on_processed(_messages(delivery)[: delivery.processed_count])

    def unfinished(self) -> list[PoppedMessage]:
        """The messages that the program has, and is not done with."""
        return [
            message
            for delivery in self._deliveries
            for message in _messages(delivery)[: delivery.handed_out_count]
        ]


def _messages(delivery: Delivery) -> Sequence[PoppedMessage]:
    assert isinstance(delivery.batch, PoppedBatch)
    return delivery.batch.messages


class PoppedShare:
    """A member's share of its group's messages, in place of an Assignment of queues.

    process_queues: none are this member's own. group_changed: see Assignment.
    polls: takes the messages out.
    """

    def __init__(
        self,
        instance: ClientInstance,
        member: Membership,
        subscriptions: Sequence[Subscription],
        inbox: Inbox,
        retries: Retries,
        rates: Rates,
    ) -> None:
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self.group_changed = anyio.Event()
        self._instance = instance
        self._group = member.group
        instance.outages.on_denied = inbox.fail
        self._limits = member.limits
        self._inbox = inbox
        self._leases = MemberLeases(instance, member.group, "Consumer")
        self._held = HeldMessages(self._leases, retries, rates)
        popping = PopMember(member.group, member.start == "latest", member.body_limits)
        self.polls = Polls(instance, popping, subscriptions, self._leases)
        self.polls.given = self._held
        self.polls.rates = self._rates = rates
        self.polls.shares = self._shares = Shares(instance, member.group)
        self._queue: PopQueue

    def read_queues(self) -> list[ProcessQueue]:
        """What is read, with all its messages."""
        return [self._queue]

    def failures(self, after_ms: float) -> dict[MessageQueue, HeadraceError]:
        """See ``Consumer.failures``; a broker has all its queues of a topic in one."""
        return long_failures(self.polls.failures, after_ms)

    async def start(self, tasks: TaskGroup) -> None:
        """Begin to take messages out, in ``tasks``. Raises the errors of a route."""
        self._queue = PopQueue(self._limits, self._held.processed)
        self._queue.rates = self._rates
        self._shares.forget()
        self._leases.open(tasks)
        self.polls.open(tasks)
        await self.polls.check_topics()
        tasks.start_soon(self._fetch_regularly)
        tasks.start_soon(self._settle_regularly)
        tasks.start_soon(self._watch_group)

    async def _watch_group(self) -> NoReturn:
        pacer = Pacer()
        while True:
            pacer.begin()
            await self.group_changed.wait()
            self.group_changed = anyio.Event()
            self._shares.forget()
            self.polls.look_again()
            # A broker may announce group changes endlessly.
            await anyio.sleep(pacer.delay_s(progress=False))

    async def _fetch_regularly(self) -> None:
        with self._queue.fetching:
            await self._fetch_forever()

    async def _fetch_forever(self) -> NoReturn:
        pops = f"popping for group {self._group}"
        while True:
            await self._queue.wait_for_room()
            until = anyio.current_time() + _WAIT_S
            call = Receive(self._queue.room.messages, until, round(1000 * INVISIBLE_S))
            try:
                messages = await self.polls.receive(call)
            except HeadraceError as error:
                if not error.retryable:  # else the polls have reported it
                    self._instance.outages.failed(pops, error)
                await anyio.sleep(_PAUSE_S)
                continue
            self._instance.outages.worked(pops)
            self._held.hold(messages)
            for batch in PoppedBatch.each(messages):
                self._inbox.put(self._queue.add(batch))

    async def _settle_regularly(self) -> NoReturn:
        acks = f"acknowledging messages of group {self._group}"
        while True:
            await self._held.wait()
            try:
                await self.commit()
            except HeadraceError as error:
                self._instance.outages.failed(acks, error)
            else:
                self._instance.outages.worked(acks)

    async def commit(self) -> None:
        """Acknowledge all processed messages. Raises the error of the first that fails."""
        self._queue.note_processed()
        await self._held.settle()

    async def release_all(self) -> None:
        """Take nothing more; acknowledge what is processed, and return the rest."""
        self._queue.drop()
        self._queue.note_processed()
        await self._held.close(self._queue.unfinished())
        await self.polls.close()
        await self._leases.close()

    def expect_retries(self) -> None:
        """Nothing: brokers pop from the retry topic, too."""
