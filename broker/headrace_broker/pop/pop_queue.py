"""The messages that a group has out of one queue, and its progress there."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.pop.handle import ORDER_REVIVE_QUEUE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Key = tuple[int, int]  # the first offset and the time of a checkpoint
# Names that are stale stay in the heap until they are as many as the others, and these more.
_STALE_MAX: Final = 64
UNNAMED: Final = -1


class QueueName(NamedTuple):
    """A queue of a topic, as one group sees it."""

    group: str
    topic: str
    queue_id: int


class Origin(IntEnum):
    """The cause of a checkpoint: a POP, a changed time of one message, or its return.

    A returned message counts no attempt when it becomes visible. ORDERED: by an orderly POP.
    """

    TAKEN = 0
    EXTENDED = 1
    SUSPENDED = 2
    ORDERED = 3


_OF_POPS: Final = frozenset({Origin.TAKEN, Origin.ORDERED})


class Checkpoint:
    """The messages of one answer from one queue; each is out until it is acked or revived.

    offsets: their queue offsets, ascending. settled: a bit for each that is out no more.
    pop_time, invisible_ms: they become visible again at their sum. revive_qid: in their handles.
    physical_offset: none of them begins before it in the log.
    out_since_ms: the time of the first POP, or of one since the start; others have prolonged it.
    segment: number of the file of the log of pops that a start reads it from.
    tick: see ``DueTimes``. failures: attempts to store its messages again that have failed.
    named: the settled bits that messages in Apache's form say, the first of which has yet to be
    read in the revive topic; UNNAMED if there are none.
    """

    __slots__ = (
        "failures",
        "invisible_ms",
        "named",
        "offsets",
        "origin",
        "out_since_ms",
        "physical_offset",
        "pop_time",
        "queue",
        "revive_qid",
        "segment",
        "settled",
        "tick",
    )

    def __init__(
        self,
        queue: PopQueue,
        offsets: Sequence[int],
        physical_offset: int,
        pop_time: int,
        invisible_ms: int,
        revive_qid: int,
        origin: Origin = Origin.TAKEN,
        settled: int = 0,
        named: int = UNNAMED,
    ) -> None:
        self.queue = queue
        self.offsets = offsets
        self.physical_offset = physical_offset
        self.pop_time = pop_time
        self.invisible_ms = invisible_ms
        self.revive_qid = revive_qid
        self.origin = origin
        self.settled = settled
        self.named = named
        self.out_since_ms = pop_time
        self.segment = self.tick = -1
        self.failures = 0

    @property
    def key(self) -> tuple[int, int]:
        """Its name within its queue: the first offset and the time, as in handles."""
        return self.offsets[0], self.pop_time

    @property
    def due_ms(self) -> int:
        """Time at which its messages become visible again."""
        return self.pop_time + self.invisible_ms

    @property
    def is_named(self) -> bool:
        """True if Apache's brokers would find it in the timers or in the revive topic."""
        return self.named != UNNAMED

    @property
    def is_done(self) -> bool:
        """True once all its messages are settled."""
        return not self.bits

    @property
    def bits(self) -> int:
        """A bit for each message that is out."""
        return ~self.settled & ((1 << len(self.offsets)) - 1)

    @property
    def first_out(self) -> int:
        """The lowest offset that is out; there is one."""
        bits = self.bits
        return self.offsets[(bits & -bits).bit_length() - 1]

    def bit(self, offset: int) -> int:
        """The bit of a message that is out; 0 if it is settled or no message of this."""
        offsets = self.offsets
        place = bisect_left(offsets, offset)
        if place == len(offsets) or offsets[place] != offset:
            return 0
        return ~self.settled & (1 << place)

    def out(self) -> Iterator[tuple[int, int]]:
        """The offset and the bit of each message that is out."""
        bits = self.bits
        for place, offset in enumerate(self.offsets):
            if bits >> place & 1:
                yield offset, 1 << place


class Taken(NamedTuple):
    """Messages that a POP takes out of a queue; see ``Checkpoint``."""

    queue: PopQueue
    offsets: Sequence[int]
    physical_offset: int
    pop_time: int
    invisible_ms: int


class Attempt(NamedTuple):
    """The fields that an orderly POP adds to ``Taken``; see ``OrderedBatch``."""

    attempt_id: str | None
    counts: Mapping[int, int] | None = None
    visible_ms: Mapping[int, int] | None = None


class OrderedBatch(Checkpoint):
    """The messages of an orderly POP: nothing else of the queue is out, and none is stored again.

    The queue is locked until all of them are acked, or visible again. They remain here then, until
    the next POP takes them. attempt_id: the POP's; one of the same attempt may take them at any
    time. counts: by offset, earlier attempts. visible_ms: by offset, times that members have set.
    """

    __slots__ = ("attempt_id", "counts", "visible_ms")

    def __init__(self, taken: Taken, attempt: Attempt, settled: int = 0) -> None:
        super().__init__(*taken, ORDER_REVIVE_QUEUE, Origin.ORDERED, settled)
        self.attempt_id = attempt.attempt_id
        self.counts = dict(attempt.counts or {})
        self.visible_ms = dict(attempt.visible_ms or {})

    @property
    def due_ms(self) -> int:
        """Time at which the last of its messages becomes visible again."""
        due_ms = self.pop_time + self.invisible_ms
        return max((self.visible_ms.get(offset, due_ms) for offset, _ in self.out()), default=0)

    def suspend(self, now_ms: int) -> None:
        """Make its messages visible; the next POP counts no attempt for this one."""
        self.attempt_id = None
        for offset, _ in self.out():
            self.visible_ms[offset] = now_ms
            self.counts[offset] = self.counts.get(offset, 0) - 1

    def counts_of(self, offsets: Sequence[int], attempt_id: str | None) -> dict[int, int]:
        """The counts of a POP that takes these messages after this one."""
        if attempt_id is not None and attempt_id == self.attempt_id:
            return {offset: self.counts[offset] for offset in offsets if offset in self.counts}
        before = frozenset(self.offsets)
        return {offset: self.counts.get(offset, 0) + 1 for offset in offsets if offset in before}


class _Unordered:
    """Checkpoints by their keys, in any order."""

    __slots__ = ("_lowest", "by_key")

    def __init__(self) -> None:
        self.by_key: dict[Key, Checkpoint] = {}
        # A heap of the lowest offset that is out of each, which may be stale.
        self._lowest: list[tuple[int, Key]] = []

    def add(self, checkpoint: Checkpoint) -> None:
        self.by_key[checkpoint.key] = checkpoint
        if checkpoint.is_done:
            return
        heappush(self._lowest, (checkpoint.first_out, checkpoint.key))
        if len(self._lowest) > 2 * len(self.by_key) + _STALE_MAX:
            out = [each for each in self.by_key.values() if not each.is_done]
            self._lowest = [(each.first_out, each.key) for each in out]
            heapify(self._lowest)

    @property
    def lowest(self) -> Checkpoint | None:
        """The one whose first message that is out comes before all others; None if none is."""
        while self._lowest:
            offset, key = self._lowest[0]
            found = self.by_key.get(key)
            if found is None or found.is_done:
                heappop(self._lowest)
            elif found.first_out != offset:
                heapreplace(self._lowest, (found.first_out, key))
            else:
                return found
        return None


class PopQueue:
    """A group's progress in one queue, and the checkpoints of what is out.

    number: its name in the log of pops. next_offset: where the next POP begins.
    segment: see ``Checkpoint``. out_count: number of messages that are out.
    resumes_at: POPs get no more until so few are out; -1 while they do.
    """

    __slots__ = (
        "_changed",
        "_named",
        "_taken",
        "name",
        "next_offset",
        "number",
        "out_count",
        "resumes_at",
        "segment",
    )

    def __init__(self, name: QueueName, number: int, next_offset: int) -> None:
        self.name = name
        self.number = number
        self.next_offset = next_offset
        self.segment = self.resumes_at = -1
        self.out_count = 0
        # Checkpoints of POPs, by ascending offsets. An OrderedDict finds its first at once.
        self._taken: OrderedDict[Key, Checkpoint] = OrderedDict()
        # Those of messages whose time was changed.
        self._changed = _Unordered()
        # Those that are named, also once they are done: the saved offset passes them.
        self._named = _Unordered()

    @property
    def batch(self) -> OrderedBatch | None:
        """The batch of an orderly POP, if any of its messages is out."""
        first = next(iter(self._taken.values()), None)
        return first if isinstance(first, OrderedBatch) else None

    def __iter__(self) -> Iterator[Checkpoint]:
        tables = self._taken, self._changed.by_key, self._named.by_key
        return chain.from_iterable(table.values() for table in tables)

    def get(self, key: Key) -> Checkpoint | None:
        """The checkpoint of a name, if any of its messages is out, or if it is named."""
        return self._taken.get(key) or self._changed.by_key.get(key) or self._named.by_key.get(key)

    @property
    def has_out(self) -> bool:
        """True if any message is out."""
        return bool(self.first_unnamed or self._named.lowest)

    @property
    def settled_offset(self) -> int:
        """All messages before it are acked or revived."""
        named = self._named.lowest
        return self.saved_offset if named is None else min(self.saved_offset, named.first_out)

    @property
    def saved_offset(self) -> int:
        """All messages before it are acked, revived, or out by a checkpoint that is named."""
        first = self.first_unnamed
        return self.next_offset if first is None else min(self.next_offset, first.first_out)

    @property
    def first_unnamed(self) -> Checkpoint | None:
        """The checkpoint that keeps the saved offset where it is."""
        taken, changed = next(iter(self._taken.values()), None), self._changed.lowest
        if taken is None or changed is None:
            return taken or changed
        return min(taken, changed, key=lambda each: each.first_out)

    def add(self, checkpoint: Checkpoint) -> None:
        """Note messages that are out; the offsets of a POP exceed those of all before it."""
        if checkpoint.is_named:
            self._named.add(checkpoint)
        elif checkpoint.origin in _OF_POPS:
            self._taken[checkpoint.key] = checkpoint
        else:
            self._changed.add(checkpoint)

    def name_as(self, checkpoint: Checkpoint, named: int) -> None:
        """Set what Apache's form of a checkpoint says."""
        self.remove(checkpoint)
        checkpoint.named = named
        # Later POPs were added since, if it is one.
        (self._named if checkpoint.is_named else self._changed).add(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint."""
        key = checkpoint.key
        if checkpoint.is_named:
            del self._named.by_key[key]
        elif key in self._taken:
            del self._taken[key]
        else:
            del self._changed.by_key[key]

    def sort(self) -> None:
        """Bring what was added in any order in that of the offsets."""
        self._taken = OrderedDict(sorted(self._taken.items()))
