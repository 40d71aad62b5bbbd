"""PullConsumer: reads queues assigned by hand, from offsets set by hand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self, Unpack

from headrace.config import check_count, check_limits
from headrace.consumer.fetcher import Fetcher
from headrace.consumer.inbox import Inbox, Receiver, time_after
from headrace.consumer.process_queue import Limits, ProcessQueue, long_failures
from headrace.consumer.start import (
    DEFAULT_START,
    Start,
    check_offset,
    check_start,
    start_offset,
)
from headrace.consumer.subscription import ALL, Subscription
from headrace.consumer.topic_offsets import offset_store
from headrace.errors import ConfigurationError
from headrace.instance import ClientInstance
from headrace.lifecycle import Startable
from headrace.names import check_group, check_queue, check_topic
from headrace.received import BodyLimits
from headrace.values import plain_int
from headrace_protocol.compression import BATCH_BYTES_MAX, BODY_BYTES_MAX
from headrace_protocol.system_topics import READER_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from anyio.abc import TaskGroup

    from headrace.config import ConnectOptions
    from headrace.errors import HeadraceError
    from headrace.missing import MissingPart
    from headrace.received import MessageBatch
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.aio import Connect


class PullConsumer(Startable):
    """Reads the queues you assign, from the offsets you choose.

    Use it in ``async with``, or ``start`` and ``stop`` it.

    group: the group whose progress ``committed`` reads and ``commit`` stores; both require it.
    start: where to start in an assigned queue unless the group has committed or you ``seek``:
        "earliest", "latest", a datetime or milliseconds since 1970.
    offsets_topic: keep the group's progress in this compacted topic instead of its brokers. See
        "Progress in a topic" in docs/clients.md.
    queue_messages_max, queue_bytes_max: how much of each queue is fetched ahead.
    body_bytes_max: reading a compressed body that is larger when decompressed raises an error.
    batch_bytes_max: the same limit for all bodies of a batch, when they are read together.

    Offsets are committed only by ``commit``, and an assigned queue is never taken away.
    """

    def __init__(
        self,
        group: str | None = None,
        *,
        nameserver: str | Sequence[str] | None = None,
        start: Start = DEFAULT_START,
        offsets_topic: str | None = None,
        queue_messages_max: int = 100_000,
        queue_bytes_max: int = 16 * 1024 * 1024,
        body_bytes_max: int = BODY_BYTES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        connect: Connect | None = None,
        **how: Unpack[ConnectOptions],
    ) -> None:
        group = None if group is None else check_group(group)
        start = check_start(start)
        if offsets_topic is not None and group is None:
            raise ConfigurationError(f"offsets_topic={offsets_topic!r} requires a group")
        check_limits(
            queue_messages_max=queue_messages_max,
            queue_bytes_max=queue_bytes_max,
            body_bytes_max=body_bytes_max,
            batch_bytes_max=batch_bytes_max,
        )
        self.group = group
        self._start = start
        self._limits = Limits(queue_messages_max, queue_bytes_max)
        self._instance = ClientInstance(nameserver, connect=connect, how=how)
        self._offsets = offset_store(self._instance, offsets_topic)
        self._inbox = Inbox("PullConsumer")
        self._instance.outages.on_denied = self._inbox.fail
        self._fetcher = Fetcher(
            self._instance,
            group or READER_GROUP,
            self._inbox,
            BodyLimits(body_bytes_max, batch_bytes_max),
        )
        self._process_queues: dict[MessageQueue, ProcessQueue] = {}
        self._receiver = Receiver(self._inbox)
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        await self._offsets.open()
        try:
            self._tasks = await self._instance.start()
        except BaseException:
            await self._offsets.close()
            raise
        self._inbox.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._inbox.close()
        try:
            await self._instance.stop()
        finally:
            await self._offsets.close()

    # -- queues and positions ----------------------------------------------------------------------

    async def queues(self, topic: str) -> Sequence[MessageQueue]:
        """The currently readable queues of ``topic``. Raises RouteNotFound."""
        self._instance.check_open("PullConsumer")
        return (await self._instance.route(check_topic(topic))).read_queues

    async def missing(self, topic: str) -> Sequence[MissingPart]:
        """The parts of ``topic`` that no registered broker serves. Raises RouteNotFound."""
        self._instance.check_open("PullConsumer")
        return (await self._instance.current_route(topic)).missing

    async def assign(
        self,
        queues: Iterable[MessageQueue],
        tags: str = ALL,
        filter: str | None = None,  # noqa: A002 - as users call it
    ) -> None:
        """Read exactly these queues from now on.

        tags: tag filter, ``"*"`` or ``"a || b"``. filter: SQL92 condition on properties instead.
        Queues that are already assigned keep their position.
        """
        self._instance.check_open("PullConsumer")
        wanted = {check_queue(queue): Subscription(queue.topic, tags, filter) for queue in queues}
        for queue in self._process_queues.keys() - wanted.keys():
            self._process_queues.pop(queue).drop()
        for queue in sorted(wanted.keys() - self._process_queues.keys()):
            await self._add(queue, wanted[queue])

    async def _add(self, queue: MessageQueue, subscription: Subscription) -> None:
        committed = await self._offsets.committed(self.group, queue) if self.group else None
        offset = committed
        if offset is None:
            offset = await start_offset(self._start, queue, self._offsets)
        process_queue = ProcessQueue(queue, self._limits, offset, committed)
        self._process_queues[queue] = process_queue
        assert self._tasks is not None
        self._tasks.start_soon(self._fetcher.run, process_queue, subscription)

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue from ``offset`` in an assigned queue; an offset out of range is corrected."""
        self._instance.check_open("PullConsumer")
        self._process_queue(queue).reset(check_offset(offset))

    async def seek_to(self, start: Start) -> None:
        """Move to "earliest", "latest" or a point in time in all assigned queues."""
        start = check_start(start)
        for queue in self._process_queues:
            self.seek(queue, await start_offset(start, queue, self._offsets))

    def position(self, queue: MessageQueue) -> int:
        """Offset after the last message of an assigned queue that ``receive_many`` returned."""
        process_queue = self._process_queue(queue)
        delivery = self._receiver.delivery
        if delivery and delivery.process_queue is process_queue and delivery.is_valid:
            return delivery.handed_out_offset
        return process_queue.processed_offset

    def failures(self, after_ms: float = 0) -> dict[MessageQueue, HeadraceError]:
        """The assigned queues that can't be read now, each with the last error; they are retried.

        after_ms: only queues that have failed for so long.
        """
        pulled = {queue: pulled.failure for queue, pulled in self._process_queues.items()}
        return long_failures(pulled, after_ms)

    def _process_queue(self, queue: MessageQueue) -> ProcessQueue:
        try:
            return self._process_queues[check_queue(queue)]
        except KeyError:
            raise ConfigurationError(f"{queue} is not assigned; call assign first") from None

    # -- reading and committing --------------------------------------------------------------------

    async def receive_many(
        self, *, max_messages: int | None = None, timeout_ms: float | None = None
    ) -> MessageBatch | None:
        """The next messages of one of the assigned queues, in order.

        max_messages: most messages to return; None returns all of one broker response.
        timeout_ms: time after which to return None; 0 returns only messages that are already
            fetched, None waits forever.
        """
        self._instance.check_open("PullConsumer")
        max_messages = check_count("max_messages", max_messages)
        check_limits(0, timeout_ms=timeout_ms)
        if not self._process_queues:
            raise ConfigurationError("no queue is assigned; call assign first")
        tracing = self._instance.tracing
        started_ns = time.time_ns() if tracing else 0
        delivery = await self._receiver.receive(time_after(timeout_ms))
        batch = delivery.next_part(max_messages) if delivery else None
        if tracing and batch:
            tracing.received(batch, self.group, started_ns)
        return batch

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store the group's progress, and wait for confirmation.

        offsets: next offset to read, by queue; None means the positions of all assigned queues.
        """
        group = self._check_group()
        if offsets is None:
            offsets = {queue: self.position(queue) for queue in self._process_queues}
        plain = {check_queue(queue): check_offset(offset) for queue, offset in offsets.items()}
        await self._offsets.commit(group, plain)

    async def committed(self, queue: MessageQueue) -> int | None:
        """The offset that the group resumes from; None if it has committed none."""
        return await self._offsets.committed(self._check_group(), check_queue(queue))

    async def min_offset(self, queue: MessageQueue) -> int:
        """Offset of the oldest message that still exists."""
        self._instance.check_open("PullConsumer")
        return await self._offsets.min_offset(check_queue(queue))

    async def max_offset(self, queue: MessageQueue) -> int:
        """Offset that the next message will get."""
        self._instance.check_open("PullConsumer")
        return await self._offsets.max_offset(check_queue(queue))

    async def offset_at(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Offset of the first message stored at ``timestamp_ms`` (since 1970) or later."""
        self._instance.check_open("PullConsumer")
        timestamp_ms = plain_int(timestamp_ms, "timestamp_ms", ConfigurationError)
        return await self._offsets.offset_at(check_queue(queue), timestamp_ms)

    def _check_group(self) -> str:
        self._instance.check_open("PullConsumer")
        if self.group is None:
            raise ConfigurationError("progress belongs to a group; use PullConsumer(group=...)")
        return self.group
