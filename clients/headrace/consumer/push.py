"""Consumer: a member of a group that shares the queues of its topics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

import anyio

from headrace.config import check_count, check_limits
from headrace.consumer.assignment import Assignment, Membership
from headrace.consumer.direct import DirectMessages, refuse
from headrace.consumer.inbox import (
    BatchIterator,
    Inbox,
    MessageIterator,
    TimedIterator,
    time_after,
)
from headrace.consumer.local_offsets import LocalOffsetStore
from headrace.consumer.popping import PoppedShare
from headrace.consumer.process_queue import Limits
from headrace.consumer.rates import Rates
from headrace.consumer.returns import NoReturns, Retries, Returns
from headrace.consumer.running_info import consumer_status, running_info
from headrace.consumer.start import (
    DEFAULT_START,
    Start,
    check_offset,
    check_start,
    consume_from_where,
)
from headrace.consumer.strategies import Strategy, averagely, name_of, named
from headrace.consumer.subscription import (
    Filters,
    Subscription,
    expressions_of,
    subscriptions_of,
)
from headrace.consumer.topic_offsets import offset_store
from headrace.errors import ConfigurationError
from headrace.instance import ClientInstance
from headrace.lifecycle import Startable
from headrace.loops import current_task
from headrace.names import check_group, check_queue
from headrace.received import BodyLimits, MessageBatch, ReceivedMessage
from headrace.trace_start import start_traces
from headrace.typed import Typed, ValueIterator
from headrace.values import shown
from headrace_protocol.bodies import ConsumerData, ResetOffsetBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.compression import BATCH_BYTES_MAX, BODY_BYTES_MAX
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
    from pathlib import Path

    from headrace.config import ConnectOptions
    from headrace.consumer.assignment import OnQueue
    from headrace.consumer.offset_store import OffsetStore
    from headrace.consumer.process_queue import ProcessQueue
    from headrace.errors import HeadraceError
    from headrace.typed import OnBad
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.connection import RequestReceived
    from headrace_protocol.drivers.aio import AsyncConnection, Connect

Item = TypeVar("Item", ReceivedMessage, MessageBatch)

_LEAVE_S = 5.0
# RocketMQ's name of an instance. Each start of a broadcasting consumer must find its file again.
_INSTANCE = "DEFAULT"
_NOT_OF_BROADCASTING = ("ordered", "strategy", "max_attempts", "retry_delay", "offsets_topic")
_NOT_OF_POPPING = (
    "ordered",
    "broadcast",
    "strategy",
    "offsets_topic",
    "on_assigned",
    "on_revoked",
)


class Consumer(Startable):
    """Reads topics together with the other members of a group.

    Use it in ``async with``, or ``start`` and ``stop`` it.

    group: members of the same group share queues and progress. All members must subscribe to the
        same topics and tags.
    topics: a topic, several topics, or topics with tag expressions:
        ``{"orders": "created || paid"}``, ``"*"`` for all tags. The topics must exist.
    filter: SQL92 condition on properties, instead of tags, which brokers evaluate:
        ``"price > 5 AND region IN ('EU', 'US')"``; or a condition for each topic, as a mapping.
    mode: "pull" reads the queues of this member's share. "pop" takes messages out of all queues,
        as a SimpleConsumer does: any number of members can work on one queue, in no order. See
        "Popping in a loop" in docs/clients.md.
    start: where a group starts that has committed nothing yet: "earliest", "latest", a datetime or
        milliseconds since 1970.
    ordered: lock each queue at its broker, so that two members never process it at the same time,
        not even while queues move between members, and hand out one message, or batch, per queue
        at a time.
    broadcast: every consumer of the group gets all messages, and keeps its own progress in a file;
        see "Broadcasting" in docs/clients.md.
    offsets_dir: folder of that file; ``~/.rocketmq_offsets`` by default. Its parent must exist.
    offsets_topic: keep the group's progress in this compacted topic instead of its brokers; all
        members must use the same. See "Progress in a topic" in docs/clients.md.
    strategy: how the members share queues: "averagely", "averagely_by_circle", "consistent_hash",
        one of ``headrace.consumer.strategies``, or a function like those; all members must use the
        same.
    max_attempts: after so many deliveries, ``message.retry`` sends a message to the group's dead
        letters; 17 by default, unlimited in an ordered consumer.
    retry_delay: seconds after which ``message.retry`` delivers a message again; see there.
    on_assigned, on_revoked: called with each queue that this member gets, before its first message,
        and loses, before its progress is committed; may be async. Not for the retry topic.
    queue_messages_max, queue_bytes_max: how much of each queue is fetched ahead.
    model: the type of the values that ``values`` yields, unless each topic is a ``Topic``.
    on_bad: called with the error and the message for one that is no value, maybe async. By default
        the message is retried, so that it goes to the dead letters after ``max_attempts``; an
        ordered consumer rejects it at once.
    body_bytes_max: reading a compressed body that is larger when decompressed raises an error.
    batch_bytes_max: the same limit for all bodies of a batch, when they are read together.

    ``async for message in consumer`` and ``async for batch in consumer.batches()`` never end;
    several tasks may use either at once, and share the messages: a task that has none takes half of
    those that another one has not reached yet. A message counts as processed when its task asks for
    the next one. Processed messages are committed every 5 s and on leaving the block. Leaving the
    block without an exception counts the current message as processed; leaving it with an
    exception does not. A timeout therefore belongs around the block: inside it, the current
    message may be lost. Messages can be redelivered after a crash or when queues move between
    members.
    """

    # The holder of a message, until it asks for the next one.
    _current_user: Callable[[], object] = staticmethod(current_task)

    def __init__(
        self,
        group: str,
        topics: str | Iterable[str] | Mapping[str, str],
        *,
        mode: Literal["pull", "pop"] = "pull",
        filter: Filters = None,  # noqa: A002 - as users call it
        nameserver: str | Sequence[str] | None = None,
        start: Start = DEFAULT_START,
        ordered: bool = False,
        broadcast: bool = False,
        offsets_dir: str | Path | None = None,
        offsets_topic: str | None = None,
        strategy: Strategy | str = averagely,
        max_attempts: int | None = None,
        retry_delay: float | None = None,
        queue_messages_max: int = 100_000,
        queue_bytes_max: int = 16 * 1024 * 1024,
        body_bytes_max: int = BODY_BYTES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        model: type[Any] | None = None,
        on_bad: OnBad | None = None,
        on_assigned: OnQueue | None = None,
        on_revoked: OnQueue | None = None,
        connect: Connect | None = None,
        **how: Unpack[ConnectOptions],
    ) -> None:
        self.group = group = check_group(group)
        expressions = expressions_of(topics)
        self._typed = Typed.of(expressions, model, on_bad, rejects=ordered)
        check_limits(queue_messages_max=queue_messages_max, queue_bytes_max=queue_bytes_max)
        check_limits(body_bytes_max=body_bytes_max, batch_bytes_max=batch_bytes_max)
        self._member = Membership(
            group,
            check_start(start),
            ordered,
            broadcast,
            named(strategy),
            Limits(queue_messages_max, queue_bytes_max),
            BodyLimits(body_bytes_max, batch_bytes_max),
            on_assigned,
            on_revoked,
        )
        if broadcast:
            given = (ordered, strategy is not averagely, max_attempts, retry_delay, offsets_topic)
            _check_not_given(given)
            self._typed.check_handles_bad()
        elif offsets_dir is not None:
            raise ConfigurationError(f"offsets_dir={str(offsets_dir)!r} requires broadcast=True")
        shared = (ordered, broadcast, strategy is not averagely, offsets_topic)
        self._pops = _is_popping(mode, start, (*shared, on_assigned, on_revoked))
        retries = not (broadcast or self._pops)
        self._subscriptions = _subscriptions(group, expressions, filter, retries=retries)
        name = _INSTANCE if broadcast else None
        self._instance = ClientInstance(nameserver, connect=connect, how=how, instance_name=name)
        self._offsets = self._new_offsets(offsets_dir, offsets_topic)
        self._inbox = Inbox("Consumer", ordered=ordered, current_user=self._current_user)
        self._direct = DirectMessages(self._inbox, self._member.body_limits)
        max_attempts = check_count("max_attempts", max_attempts)
        self._assignment = self._new_share(Retries(max_attempts, retry_delay))

    def _new_offsets(self, folder: str | Path | None, topic: str | None) -> OffsetStore:
        if self._member.broadcast:
            return LocalOffsetStore(self._instance, self.group, folder)
        return offset_store(self._instance, topic)

    def _new_share(self, retries: Retries) -> Assignment | PoppedShare:
        """What this member gets of its group; and the inbox's way back."""
        self._rates = Rates()
        instance, member, inbox = self._instance, self._member, self._inbox
        if self._pops:
            return PoppedShare(instance, member, self._subscriptions, inbox, retries, self._rates)
        share = Assignment(instance, member, self._subscriptions, inbox, self._offsets, self._rates)
        inbox.returns = (
            NoReturns(instance, self.group)
            if member.broadcast
            else Returns(instance, member, inbox, share, self._direct.returned, retries)
        )
        return share

    # -- for users ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._register()
        self._rates.begin(subscription.topic for subscription in self._subscriptions)
        await self._offsets.open()
        try:
            await self._open()
        except BaseException:
            await self._offsets.close()
            raise
        return self

    async def _open(self) -> None:
        self._inbox.open()
        tasks = await self._instance.start()
        start_traces(self._instance, tasks)
        try:
            await self._assignment.start(tasks)
        except BaseException:
            await self._instance.stop()
            raise

    async def __aexit__(
        self,
        error_type: type[BaseException] | None = None,
        *rest: object,
    ) -> None:
        self._inbox.close()
        try:
            if error_type is None:
                self._inbox.mark_current_processed()
            self._direct.end(rest[0] if error_type else None)
            with anyio.move_on_after(_LEAVE_S, shield=True):
                await self._assignment.release_all()
        finally:
            try:
                await self._instance.stop()
            finally:
                await self._offsets.close()

    async def stop(self) -> None:
        """End the loops over the messages, and close a consumer that was opened by ``start``.

        A loop in another task ends when it asks for the next message, which counts its current one
        as processed; this waits up to 5 s for that. The current message of this task counts as
        processed.
        """
        if self._running_host():
            await self._end_loops()
        await super().stop()

    async def _end_loops(self) -> None:
        self._inbox.close()
        self._inbox.mark_current_processed()
        with anyio.move_on_after(_LEAVE_S):
            await self._inbox.wait_until_others_are_done()

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        return self._in_spans(self._messages())

    def values(self) -> AsyncIterator[tuple[Any, ReceivedMessage]]:
        """Iterate over values with their messages, as ``async for`` over messages.

        Requires ``model`` or a ``Topic``. A message that is no value is left to ``on_bad``.
        """
        return ValueIterator(aiter(self), self._typed)

    def _messages(self) -> MessageIterator:
        self._instance.check_open("Consumer")
        return MessageIterator(self._inbox)

    def _in_spans(self, items: AsyncIterator[Item]) -> AsyncIterator[Item]:
        tracing = self._instance.tracing
        if tracing is None:
            return items
        from headrace.processing import ProcessSpans

        return ProcessSpans(items, tracing, self.group)

    def until(self, timeout_ms: float) -> AsyncIterator[ReceivedMessage]:
        """Iterate over messages for ``timeout_ms``, counted from the first one asked for.

        The last message counts as processed, as in a loop that is left by ``break``.
        """
        self._instance.check_open("Consumer")
        check_limits(0, timeout_ms=timeout_ms)
        return self._in_spans(TimedIterator(self._inbox, timeout_ms / 1000))

    def receive(
        self, max_messages: int | None = None, timeout_ms: float | None = None
    ) -> Coroutine[Any, Any, MessageBatch | None]:
        """The next messages, from one queue; the ones received before count as processed.

        max_messages: most messages to return; None returns all of one broker response.
        timeout_ms: time after which to return None; None waits until the consumer is stopped.

        Each task has messages of its own, and the task that calls gets them, also by
        ``asyncio.wait_for``. A task that ends without asking again or calling ``commit`` leaves its
        messages to the next one.
        """
        check_limits(0, timeout_ms=timeout_ms)
        return self._receive(self._batches(max_messages, timeout_ms, is_call=True))

    async def _receive(self, batches: BatchIterator) -> MessageBatch | None:
        tracing = self._instance.tracing
        started_ns = time.time_ns() if tracing else 0
        try:
            batch = await anext(batches)
        except StopAsyncIteration:
            return None
        if tracing:
            tracing.received(batch, self.group, started_ns)
        return batch

    def batches(self, *, max_messages: int | None = None) -> AsyncIterator[MessageBatch]:
        """Iterate over batches, from one queue each, instead of single messages.

        max_messages: most messages per batch; None yields all of one broker response.
        """
        return self._in_spans(self._batches(max_messages))

    def _batches(
        self, max_messages: int | None, timeout_ms: float | None = None, *, is_call: bool = False
    ) -> BatchIterator:
        self._instance.check_open("Consumer")
        messages_max = check_count("max_messages", max_messages)
        return BatchIterator(self._inbox, messages_max, time_after(timeout_ms), is_call=is_call)

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues assigned to this member now."""
        return sorted(self._assignment.process_queues)

    def failures(self, after_ms: float = 0) -> dict[MessageQueue, HeadraceError]:
        """Queues of this member's share that can't be read now, with the last error of each.

        They are retried, and those that were never read are not in ``assignment``. after_ms: only
        queues that have failed for so long.
        """
        return self._assignment.failures(after_ms)

    def pause(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Hand out no messages of these assigned queues, or of all, until ``resume``.

        Messages are still fetched ahead. A queue that is assigned again is not paused.
        """
        for process_queue in self._assigned(queues):
            self._inbox.pause(process_queue)

    def resume(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """End ``pause`` for these assigned queues, or for all."""
        for process_queue in self._assigned(queues):
            self._inbox.resume(process_queue)

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue from ``offset`` in an assigned queue; an offset out of range is corrected.

        The group's progress moves there, too, also backwards.
        """
        (process_queue,) = self._assigned([queue])
        process_queue.reset(check_offset(offset))

    def _assigned(self, queues: Iterable[MessageQueue] | None) -> list[ProcessQueue]:
        """The assigned queues of those given. Raises ConfigurationError for another."""
        self._instance.check_open("Consumer")
        assigned = self._assignment.process_queues
        if queues is None:
            return self._assignment.read_queues()
        try:
            return [assigned[check_queue(queue)] for queue in queues]
        except KeyError as error:
            raise ConfigurationError(
                f"{error.args[0]} is not assigned to this member; see assignment and on_assigned"
            ) from None

    async def commit(self) -> None:
        """Commit now and wait for confirmation; the current message or batch is included."""
        self._instance.check_open("Consumer")
        self._inbox.mark_current_processed()
        await self._assignment.commit()

    # -- requests of brokers -----------------------------------------------------------------------

    def _register(self) -> None:
        self._instance.consumers = [
            ConsumerData(
                group_name=self.group,
                consume_type="CONSUME_POP" if self._pops else "CONSUME_PASSIVELY",
                message_model="BROADCASTING" if self._member.broadcast else "CLUSTERING",
                consume_from_where=consume_from_where(self._member.start),
                subscription_data_set=[subscription.data() for subscription in self._subscriptions],
            )
        ]
        self._instance.handlers = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._on_group_changed,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._on_reset,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._on_running_info,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._on_status,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: refuse if self._pops else self._direct.asked,
        }

    def _on_group_changed(self, _connection: AsyncConnection, _request: RequestReceived) -> None:
        self._assignment.group_changed.set()

    def _on_reset(self, _connection: AsyncConnection, request: RequestReceived) -> None:
        for queue, offset in ResetOffsetBody.decode(request.body).offset_table.items():
            process_queue = self._assignment.process_queues.get(queue)
            if process_queue:
                process_queue.reset(offset)

    def _on_status(self, connection: AsyncConnection, request: RequestReceived) -> None:
        body = consumer_status(self._assignment.process_queues, request)
        connection.respond(request, ResponseCode.SUCCESS, body=body)

    def _on_running_info(self, connection: AsyncConnection, request: RequestReceived) -> None:
        (member,) = self._instance.consumers
        for process_queue in self._assignment.read_queues():
            process_queue.count_progress()
        info = running_info(
            member,
            self._assignment.process_queues.values(),
            self._subscriptions,
            self._rates,
            ordered=self._member.ordered,
            strategy="" if self._pops else name_of(self._member.strategy),
        )
        connection.respond(request, ResponseCode.SUCCESS, body=info)


def _check_not_given(values: Iterable[object]) -> None:
    """Raise ConfigurationError for an option that a broadcasting consumer has no use for."""
    for name, value in zip(_NOT_OF_BROADCASTING, values, strict=True):
        if value:
            raise ConfigurationError(
                f"{name}= cannot be combined with broadcast=True: a broadcasting consumer reads "
                "all queues without locks, keeps its own progress, and returns no messages"
            )


def _is_popping(mode: str, start: Start, values: Iterable[object]) -> bool:
    """Whether a consumer pops. Raises ConfigurationError for an option that it has no use for."""
    if mode not in ("pull", "pop"):
        raise ConfigurationError(f"mode={shown(mode)}: must be 'pull' or 'pop'")
    if mode == "pull":
        return False
    for name, value in zip(_NOT_OF_POPPING, values, strict=True):
        if value:
            raise ConfigurationError(
                f"{name}= cannot be combined with mode='pop': its group shares messages, in no "
                "order, and no member has queues"
            )
    if start not in ("earliest", "latest"):
        raise ConfigurationError(
            f"start={shown(start)}: must be 'earliest' or 'latest' with mode='pop'"
        )
    return True


def _subscriptions(
    group: str, topics: Mapping[str, str], filters: Filters, *, retries: bool
) -> list[Subscription]:
    """Subscriptions to the group's topics and, with ``retries``, its retry topic.

    Raises ConfigurationError.
    """
    subscriptions = subscriptions_of(group, topics, filters)
    return [*subscriptions, Subscription(f"{RETRY_PREFIX}{group}")] if retries else subscriptions
