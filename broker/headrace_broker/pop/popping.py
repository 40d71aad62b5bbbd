"""Takes messages out of queues for members of a group, and gives the answer that has them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.pop.pop_queue import Attempt, OrderedBatch, Taken
from headrace_broker.pop.reading import BYTES_MAX, Found, Scan, as_first_sent, read
from headrace_broker.pop.threshold import Threshold
from headrace_protocol.errors import NotReady
from headrace_protocol.pop.handle import Handle, TopicKind
from headrace_protocol.pop.headers import INIT_MIN, PopMessageResponseHeader
from headrace_protocol.pop.infos import (
    OrderCount,
    PoppedQueue,
    encode_offsets,
    encode_order_counts,
)
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import Unfinished

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.pop.pop_queue import Checkpoint, PopQueue
    from headrace_broker.pop.pops import Pops
    from headrace_broker.pop.targets import PopSource, PopTarget
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.frame import Buffer

# A queue whose first message is no further from the end of the log is young: a group that begins
# at the end begins at its first message.
_YOUNG_BYTES: Final = 1 << 30


class Ask(NamedTuple):
    """A POP, apart from its target."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    invisible_ms: int
    init_mode: int
    bytes_max: int = BYTES_MAX
    is_ordered: bool = False
    attempt_id: str | None = None

    @property
    def is_open(self) -> bool:
        """True if more messages fit in the answer."""
        return self.count > 0 and self.bytes_max > 0

    def after(self, found: Found) -> Ask:
        """The ask less the messages that were found."""
        return self._replace(
            count=self.count - len(found.offsets), bytes_max=self.bytes_max - found.body_bytes
        )


class _Part(NamedTuple):
    """The messages of an answer that come from one queue."""

    source: PopSource
    checkpoint: Checkpoint
    found: Found


class Peeked(NamedTuple):
    """Messages that a POP would get.

    rest: how many remain. is_complete: False if their filter has yet to look at some queue's.
    """

    buffers: list[Buffer]
    rest: int
    is_complete: bool


def is_locked(queue: PopQueue, ask: Ask, now_ms: int) -> bool:
    """True if a POP must skip a queue to keep the order of messages that are out."""
    batch = queue.batch
    if batch is None:
        return ask.is_ordered and queue.has_out
    is_repeated = ask.attempt_id is not None and ask.attempt_id == batch.attempt_id
    return now_ms < batch.due_ms and not is_repeated


def _counts(parts: list[_Part]) -> Iterator[OrderCount]:
    """Earlier attempts of each message that had any, and the fewest of each queue."""
    for source, checkpoint, found in parts:
        assert isinstance(checkpoint, OrderedBatch)
        counts = checkpoint.counts
        for offset, times in counts.items():
            yield OrderCount(source.kind, source.queue_id, times, offset)
        fewest = min(counts.values()) if len(counts) == len(found.offsets) else 0
        yield OrderCount(source.kind, source.queue_id, fewest)


class Popping:
    """Serves POPs from all sources of their targets."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        offsets: ConsumerOffsets,
        pops: Pops,
        statistics: BrokerStatistics,
    ) -> None:
        self._config = config
        self._store = store
        self._offsets = offsets
        self._pops = pops
        self._statistics = statistics
        self.threshold = Threshold(config, pops)
        self._revive_qid = 0

    def pop(self, target: PopTarget, ask: Ask) -> Reply | None:
        """The answer with messages that are out from now on; None if there are none.

        Raises NotReady if none are found yet: others must be fetched first, or looked at.
        """
        self._revive_qid = (self._revive_qid + 1) % self._config.revive_queue_num
        scan = Scan(self._store.clock.now_ms())
        parts: list[_Part] = []
        rest = 0
        away: NotReady | None = None
        left = ask
        for source in self._sources(target, ask):
            try:
                queue = self._queue(target, source, ask.init_mode)
                if left.is_open and not self._is_closed(queue, ask, scan.now_ms):
                    found, checkpoint = self._take(target, source, queue, left, scan)
                    if checkpoint is not None:
                        parts.append(_Part(source, checkpoint, found))
                        left = left.after(found)
                    elif not found.is_at_end:
                        away = away or Unfinished()
            except NotReady as wait:
                away = wait
                continue
            rest += max(0, source.source.known_range()[1] - queue.next_offset)
        if not parts and away is not None:
            raise away
        return self._reply(target, ask, parts, scan.now_ms, rest) if parts else None

    def _sources(self, target: PopTarget, ask: Ask) -> tuple[PopSource, ...]:
        """The queues in the order of a POP; what was popped in order comes again in its place."""
        if ask.is_ordered:
            target = target._replace(retries=())
        return target.in_order(self._config.pop_from_retry_probability)

    def peek(self, target: PopTarget, ask: Ask) -> Peeked:
        """Messages that a POP would get. Raises NotReady."""
        buffers: list[Buffer] = []
        left, rest, is_complete = ask, 0, True
        scan = Scan(self._store.clock.now_ms())
        for source in self._sources(target, ask):
            queue = self._pops.find(target.wanted.group, source.topic, source.queue_id)
            first = self._next_offset(target, source, ask.init_mode)
            if left.is_open and not self._is_closed(queue, ask, scan.now_ms):
                tags = self._tags(target, source)
                found = read(source, first, left.count, left.bytes_max, tags, scan)
                buffers += found.buffers
                left = left.after(found)
                first = found.next_offset
                is_complete &= bool(found.offsets) or found.is_at_end
            rest += max(0, source.source.known_range()[1] - first)
        return Peeked(buffers, rest, is_complete)

    def _is_closed(self, queue: PopQueue | None, ask: Ask, now_ms: int) -> bool:
        """True if a POP must skip a queue for now; None is one that the group has yet to pop."""
        if queue is None:
            return False
        return is_locked(queue, ask, now_ms) or self.threshold.is_full(queue)

    def _queue(self, target: PopTarget, source: PopSource, init_mode: int) -> PopQueue:
        group = target.wanted.group
        queue = self._pops.find(group, source.topic, source.queue_id)
        if queue is None:
            first = self._next_offset(target, source, init_mode)
            queue = self._pops.open(group, source.topic, source.queue_id, first)
        return queue

    def _next_offset(self, target: PopTarget, source: PopSource, init_mode: int) -> int:
        """The offset at which a POP of a queue begins. Raises NotReady."""
        group = target.wanted.group
        queue = self._pops.find(group, source.topic, source.queue_id)
        if queue is not None:
            return queue.next_offset if queue.batch is None else queue.batch.first_out
        committed = self._offsets.query(group, source.topic, source.queue_id)
        if committed is not None:
            return committed
        min_offset, max_offset = source.source.min_offset(), source.source.max_offset()
        if init_mode == INIT_MIN or source.kind is not TopicKind.NORMAL or self._is_young(source):
            return min_offset
        return max(max_offset - 1, min_offset)

    def _is_young(self, source: PopSource) -> bool:
        if source.source.min_offset() > 0 or not source.source.max_offset():
            return not source.source.max_offset()
        physical_offset, _, _ = source.source.unit(0)
        return self._store.commit_log.max_offset - physical_offset <= _YOUNG_BYTES

    def _tags(self, target: PopTarget, source: PopSource) -> frozenset[int] | None:
        """A message to retry has passed the filter before."""
        return target.tags if source.kind is TopicKind.NORMAL else None

    def _take(
        self, target: PopTarget, source: PopSource, queue: PopQueue, ask: Ask, scan: Scan
    ) -> tuple[Found, Checkpoint | None]:
        tags = self._tags(target, source)
        batch = queue.batch
        first = queue.next_offset if batch is None else batch.first_out
        found = read(source, first, ask.count, ask.bytes_max, tags, scan)
        if batch is not None:
            self._pops.give_back(batch)
        checkpoint = None
        if found.offsets:
            checkpoint = self._out(queue, found, ask, scan.now_ms, batch)
        if found.next_offset != queue.next_offset:
            self._pops.move(queue, found.next_offset)
        return found, checkpoint

    def _out(
        self, queue: PopQueue, found: Found, ask: Ask, now_ms: int, before: OrderedBatch | None
    ) -> Checkpoint:
        """Record messages as out. before: the batch that had locked the queue."""
        taken = Taken(queue, found.offsets, found.physical_offset, now_ms, ask.invisible_ms)
        if not ask.is_ordered:
            return self._pops.take(*taken, self._revive_qid)
        counts = before.counts_of(found.offsets, ask.attempt_id) if before is not None else None
        batch = OrderedBatch(taken, Attempt(ask.attempt_id, counts))
        self._pops.take_in_order(batch)
        return batch

    def _reply(
        self, target: PopTarget, ask: Ask, parts: list[_Part], now_ms: int, rest: int
    ) -> Reply:
        body: list[Buffer] = []
        group = target.wanted.group
        for source, checkpoint, found in parts:
            body += self._body(target, source, checkpoint, found)
            self._statistics.get(group, source.topic, len(found.offsets), found.body_bytes)
        starts, messages = encode_offsets(
            PoppedQueue(source.kind, source.queue_id, found.offsets[0], found.offsets)
            for source, _, found in parts
        )
        header = PopMessageResponseHeader(
            pop_time=now_ms,
            invisible_time=ask.invisible_ms,
            revive_qid=parts[0].checkpoint.revive_qid,
            rest_num=rest,
            start_offset_info=starts,
            msg_offset_info=messages,
            order_count_info=encode_order_counts(_counts(parts)) if ask.is_ordered else None,
        )
        on_lost = partial(self._give_back, [part.checkpoint for part in parts])
        return Reply(header, tuple(body), remark="FOUND", on_lost=on_lost)

    def _give_back(self, checkpoints: list[Checkpoint]) -> None:
        """Messages of an answer that nobody got become visible, and no attempt is counted."""
        now_ms = self._store.clock.now_ms()
        for checkpoint in checkpoints:
            if checkpoint.queue.get(checkpoint.key) is checkpoint:
                self._pops.suspend(checkpoint, now_ms)

    def _body(
        self, target: PopTarget, source: PopSource, checkpoint: Checkpoint, found: Found
    ) -> list[Buffer]:
        is_named = self._config.pop_response_return_actual_retry_topic
        if source.kind is TopicKind.NORMAL or is_named:
            return [*found.buffers]
        handle = Handle(
            checkpoint.offsets[0],
            checkpoint.pop_time,
            checkpoint.invisible_ms,
            checkpoint.revive_qid,
            source.kind,
            self._config.broker_name,
            source.queue_id,
        )
        return [*as_first_sent(found.buffers, target.wanted.topic, handle)]
