"""The state of all pops: what groups have taken, and what of it is out.

No input or output: each change is one event, which goes to the log of pops; a start replays it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from headrace_broker.pop.due_times import DueTimes
from headrace_broker.pop.events import Event, Kind, checkpoint_event, queue_event, unpacked
from headrace_broker.pop.pop_queue import (
    UNNAMED,
    Attempt,
    Checkpoint,
    OrderedBatch,
    Origin,
    PopQueue,
    QueueName,
    Taken,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Events with a key and bits; the last two also with an end of the CommitLog.
_OF_CHECKPOINTS: Final = frozenset({Kind.SETTLE, Kind.REVIVE, Kind.NAME})


class EventLog(Protocol):
    """Stores events, and the state that they leave."""

    def note(self, event: Event) -> None:
        """Write an event with the next frame."""

    def keep(self, entry: PopQueue | Checkpoint) -> None:
        """Keep what the last event says, until ``drop``."""

    def drop(self, entry: PopQueue | Checkpoint) -> None:
        """Forget what is kept of a queue or checkpoint."""


class Pops:
    """All queues that groups pop. out_count: the number of messages that are out.

    ordered_changes: the number of changes of batches since the start.
    """

    def __init__(self, log: EventLog, tick_ms: int) -> None:
        """tick_ms: see ``DueTimes``."""
        self._log = log
        self._queues: dict[QueueName, PopQueue] = {}
        self._by_number: dict[int, PopQueue] = {}
        # By group and topic.
        self._of_topics: dict[tuple[str, str], dict[PopQueue, None]] = {}
        self._last_number = 0
        self._changed: dict[PopQueue, None] = {}
        self._resumed: dict[PopQueue, None] = {}
        self.due = DueTimes(tick_ms)
        self.out_count = 0
        self.ordered_changes = 0

    def __iter__(self) -> Iterator[PopQueue]:
        return iter(self._queues.values())

    def find(self, group: str, topic: str, queue_id: int) -> PopQueue | None:
        """A group's progress in a queue; None if it has popped nothing of it."""
        return self._queues.get(QueueName(group, topic, queue_id))

    def queues_of(self, group: str, topic: str) -> list[PopQueue]:
        """All queues of a topic that a group pops."""
        return list(self._of_topics.get((group, topic), ()))

    def count_out(self, group: str, topic: str, queue_id: int) -> int | None:
        """The number of a queue's messages that a group has out; None if it does not pop it."""
        queue = self.find(group, topic, queue_id)
        return None if queue is None else queue.out_count

    def take_resumed(self) -> Iterable[PopQueue]:
        """The queues whose ``resumes_at`` was reached since the last call."""
        resumed, self._resumed = self._resumed, {}
        return resumed

    def take_changed(self) -> Iterable[PopQueue]:
        """The queues whose settled offset may have changed since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    # -- changes -----------------------------------------------------------------------------------

    def open(self, group: str, topic: str, queue_id: int, next_offset: int) -> PopQueue:
        """A queue that a group pops for the first time."""
        queue = self._open(self._last_number + 1, QueueName(group, topic, queue_id), next_offset)
        self._log.note(queue_event(queue))
        self._log.keep(queue)
        self._changed[queue] = None
        return queue

    def move(self, queue: PopQueue, next_offset: int) -> None:
        """Continue behind messages that were taken, or that the group does not want."""
        queue.next_offset = next_offset
        self._changed[queue] = None
        self._log.note((Kind.MOVE, queue.number, next_offset))

    def take(
        self,
        queue: PopQueue,
        offsets: Sequence[int],
        physical_offset: int,
        pop_time: int,
        invisible_ms: int,
        revive_qid: int,
    ) -> Checkpoint:
        """Messages of a queue go out; ``move`` follows."""
        checkpoint = Checkpoint(queue, offsets, physical_offset, pop_time, invisible_ms, revive_qid)
        self._add(checkpoint)
        return checkpoint

    def take_in_order(self, batch: OrderedBatch) -> None:
        """Messages of a queue of which nothing is out go out in order; ``move`` follows."""
        self._add(batch)
        self.ordered_changes += 1

    def settle_in_order(self, batch: OrderedBatch, bits: int) -> None:
        """Messages that are out in order were acked.

        Its time is due anew: held requests get what follows, or these again.
        """
        self.settle(batch, bits)
        self.due.add(batch, batch.due_ms)
        self.ordered_changes += 1

    def give_back(self, batch: OrderedBatch) -> None:
        """The next POP begins at the first message of a batch that is out."""
        first = batch.first_out
        self.settle(batch, batch.bits)
        self.move(batch.queue, first)

    def delay(self, batch: OrderedBatch, offset: int, visible_ms: int) -> None:
        """A message that is out in order becomes visible at another time."""
        batch.visible_ms[offset] = visible_ms
        self.due.add(batch, batch.due_ms)
        self._log.note(checkpoint_event(batch))
        self._log.keep(batch)
        self.ordered_changes += 1

    def adopt(self, checkpoint: Checkpoint, due_ms: int) -> None:
        """Messages that another broker gave out are out. due_ms: when they become visible."""
        self._add(checkpoint)
        self.due.add(checkpoint, due_ms)
        self._changed[checkpoint.queue] = None

    def settle(self, checkpoint: Checkpoint, bits: int) -> None:
        """Messages that are out were acked."""
        self._note_settled(Kind.SETTLE, checkpoint, bits)

    def revive(self, checkpoint: Checkpoint, bits: int, log_end: int) -> None:
        """Messages that are out have others in their places, which the log has up to its end."""
        self._note_settled(Kind.REVIVE, checkpoint, bits, log_end)

    def extend(
        self, checkpoint: Checkpoint, offset: int, now_ms: int, invisible_ms: int, origin: Origin
    ) -> Checkpoint:
        """A message that is out gets another time, and with it another handle."""
        single = range(offset, offset + 1)
        changed = self._add_again(checkpoint, single, now_ms, invisible_ms, origin)
        self.settle(checkpoint, checkpoint.bit(offset))
        return changed

    def suspend(self, checkpoint: Checkpoint, now_ms: int) -> None:
        """Messages that no member got become visible now; no attempt is counted."""
        if isinstance(checkpoint, OrderedBatch):
            checkpoint.suspend(now_ms)
            self._log.note(checkpoint_event(checkpoint))
            self._log.keep(checkpoint)
            self.due.add(checkpoint, checkpoint.due_ms)
            self.ordered_changes += 1
            return
        offsets, settled = checkpoint.offsets, checkpoint.settled
        self._add_again(checkpoint, offsets, now_ms, 0, Origin.SUSPENDED, settled)
        self.settle(checkpoint, checkpoint.bits)

    def _add_again(
        self,
        checkpoint: Checkpoint,
        offsets: Sequence[int],
        now_ms: int,
        invisible_ms: int,
        origin: Origin,
        settled: int = 0,
    ) -> Checkpoint:
        """Messages of a checkpoint with another time; ``settle`` follows."""
        again = Checkpoint(
            checkpoint.queue,
            offsets,
            checkpoint.physical_offset,
            # An older handle must not name it.
            max(now_ms, checkpoint.pop_time + 1),
            invisible_ms,
            checkpoint.revive_qid,
            origin,
            settled,
        )
        again.out_since_ms = checkpoint.out_since_ms
        self._add(again)
        return again

    def name_as(self, checkpoint: Checkpoint, named: int, log_end: int) -> None:
        """Note what the log, up to its end, says of a checkpoint in Apache's form."""
        self._name_as(checkpoint, named)
        self._changed[checkpoint.queue] = None
        first, pop_time = checkpoint.key
        self._log.note((Kind.NAME, checkpoint.queue.number, first, pop_time, named, log_end))

    def unname(self, checkpoint: Checkpoint) -> None:
        """Note that nothing more is to come of what the log says of a checkpoint."""
        self.name_as(checkpoint, UNNAMED, 0)

    def reset(self, queue: PopQueue, next_offset: int) -> None:
        """The group continues at another offset; nothing is out any more."""
        self._clear(queue)
        queue.next_offset = next_offset
        self._changed[queue] = None
        self._log.note((Kind.RESET, queue.number, next_offset))

    def forget(self, queue: PopQueue) -> None:
        """The group has no progress in the queue any more."""
        self._forget(queue)
        self._log.note((Kind.FORGET, queue.number))

    # -- replay ------------------------------------------------------------------------------------

    def replay(self, event: Event, log_end: int) -> None:
        """Repeat a change. log_end: messages that would begin past it are lost."""
        kind, number, *fields = event
        if kind == Kind.ANEW:
            for each in list(self):
                self._forget(each)
        elif kind == Kind.QUEUE:
            group, topic, queue_id, next_offset = fields
            known = self._by_number.get(number)
            if known is None:
                self._open(number, QueueName(group, topic, queue_id), next_offset)
            else:
                known.next_offset = next_offset
        elif (queue := self._by_number.get(number)) is not None:
            self._replay(kind, queue, fields, log_end)

    def _replay(self, kind: int, queue: PopQueue, fields: list, log_end: int) -> None:  # type: ignore[type-arg]
        if kind == Kind.CHECKPOINT:
            found = _checkpoint(queue, fields)
            known = queue.get(found.key)
            if known is None:
                self._put(found)
                return
            # It was written again.
            if isinstance(known, OrderedBatch) and isinstance(found, OrderedBatch):
                known.attempt_id, known.counts = found.attempt_id, found.counts
                known.visible_ms = found.visible_ms
                self.due.add(known, known.due_ms)
            self._settle(known, found.settled & ~known.settled)
        elif kind == Kind.MOVE:
            (queue.next_offset,) = fields
        elif kind in _OF_CHECKPOINTS:
            first, pop_time, bits, *ends = fields
            checkpoint = queue.get((first, pop_time))
            if checkpoint is not None and all(end <= log_end for end in ends):
                change = self._name_as if kind == Kind.NAME else self._settle
                change(checkpoint, bits)
        elif kind == Kind.RESET:
            self._clear(queue)
            (queue.next_offset,) = fields
        elif kind == Kind.FORGET:
            self._forget(queue)

    def replayed(self) -> None:
        """Bring what was replayed in order, and keep it."""
        for queue in self._queues.values():
            queue.sort()
            self._changed[queue] = None
            self._log.note(queue_event(queue))
            self._log.keep(queue)
            for checkpoint in queue:
                self._log.note(checkpoint_event(checkpoint))
                self._log.keep(checkpoint)

    # -- without events ----------------------------------------------------------------------------

    def _open(self, number: int, name: QueueName, next_offset: int) -> PopQueue:
        self._last_number = max(self._last_number, number)
        queue = self._queues[name] = self._by_number[number] = PopQueue(name, number, next_offset)
        self._of_topics.setdefault(name[:2], {})[queue] = None
        return queue

    def _add(self, checkpoint: Checkpoint) -> None:
        self._put(checkpoint)
        self._log.note(checkpoint_event(checkpoint))
        self._log.keep(checkpoint)

    def _put(self, checkpoint: Checkpoint) -> None:
        checkpoint.queue.add(checkpoint)
        if not checkpoint.is_done:
            self.due.add(checkpoint, checkpoint.due_ms)
        self._count(checkpoint.queue, checkpoint.bits.bit_count())

    def _note_settled(self, kind: Kind, checkpoint: Checkpoint, bits: int, *more: int) -> None:
        self._settle(checkpoint, bits)
        self._changed[checkpoint.queue] = None
        first, pop_time = checkpoint.key
        self._log.note((kind, checkpoint.queue.number, first, pop_time, bits, *more))

    def _settle(self, checkpoint: Checkpoint, bits: int) -> None:
        bits &= checkpoint.bits
        checkpoint.settled |= bits
        self._count(checkpoint.queue, -bits.bit_count())
        if checkpoint.is_done:
            self.due.remove(checkpoint)
            if not checkpoint.is_named:
                self._remove(checkpoint)

    def _count(self, queue: PopQueue, change: int) -> None:
        self.out_count += change
        queue.out_count += change
        if queue.out_count <= queue.resumes_at:
            queue.resumes_at = -1
            self._resumed[queue] = None
            self.due.on_earlier()

    def _name_as(self, checkpoint: Checkpoint, named: int) -> None:
        checkpoint.queue.name_as(checkpoint, named)
        if checkpoint.is_done and not checkpoint.is_named:
            self._remove(checkpoint)

    def _remove(self, checkpoint: Checkpoint) -> None:
        checkpoint.queue.remove(checkpoint)
        self._log.drop(checkpoint)

    def _clear(self, queue: PopQueue) -> None:
        """Settle all that is out."""
        for checkpoint in list(queue):
            self._settle(checkpoint, checkpoint.bits)

    def _forget(self, queue: PopQueue) -> None:
        self._clear(queue)
        for checkpoint in list(queue):
            self._remove(checkpoint)
        self._changed.pop(queue, None)
        del self._queues[queue.name], self._by_number[queue.number]
        others = self._of_topics[queue.name[:2]]
        del others[queue]
        if not others:
            del self._of_topics[queue.name[:2]]
        self._log.drop(queue)


def _checkpoint(queue: PopQueue, fields: list) -> Checkpoint:  # type: ignore[type-arg]
    """The checkpoint of ``checkpoint_event``."""
    packed, physical_offset, pop_time, invisible_ms, revive_qid, origin, settled, *more = fields
    named, *attempt = more
    taken = Taken(queue, unpacked(packed), physical_offset, pop_time, invisible_ms)
    if origin == Origin.ORDERED:
        return OrderedBatch(taken, Attempt(*attempt), settled)
    return Checkpoint(*taken, revive_qid, Origin(origin), settled, named)
