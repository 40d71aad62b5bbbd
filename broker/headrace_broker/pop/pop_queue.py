"""The messages that a group has out of one queue, and its progress there."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.pop.handle import ORDER_REVIVE_QUEUE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Key = tuple[int, int]  # the first offset and the time of a checkpoint
# Names that are stale stay in the heap until they are as many as the others, and these more.
_STALE_MAX: Final = 64


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
    segment: number of the file of the log of pops that a start reads it from.
    tick: see ``DueTimes``. failures: attempts to store its messages again that have failed.
    """

    __slots__ = (
        "failures",
        "invisible_ms",
        "offsets",
        "origin",
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
    ) -> None:
        self.queue = queue
        self.offsets = offsets
        self.physical_offset = physical_offset
        self.pop_time = pop_time
        self.invisible_ms = invisible_ms
        self.revive_qid = revive_qid
        self.origin = origin
        self.settled = settled
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


class PopQueue:
    """A group's progress in one queue, and the checkpoints of what is out.

    number: its name in the log of pops. next_offset: where the next POP begins.
    segment: see ``Checkpoint``.
    """

    __slots__ = ("_extended", "_lowest", "_taken", "name", "next_offset", "number", "segment")

    def __init__(self, name: QueueName, number: int, next_offset: int) -> None:
        self.name = name
        self.number = number
        self.next_offset = next_offset
        self.segment = -1
        # Checkpoints of POPs, by ascending offsets. An OrderedDict finds its first at once.
        self._taken: OrderedDict[Key, Checkpoint] = OrderedDict()
        # Checkpoints of messages whose time was changed, and a heap of their keys.
        self._extended: dict[Key, Checkpoint] = {}
        self._lowest: list[Key] = []

    def __len__(self) -> int:
        return len(self._taken) + len(self._extended)

    @property
    def batch(self) -> OrderedBatch | None:
        """The batch of an orderly POP, if any of its messages is out."""
        first = next(iter(self._taken.values()), None)
        return first if isinstance(first, OrderedBatch) else None

    def __iter__(self) -> Iterator[Checkpoint]:
        return chain(self._taken.values(), self._extended.values())

    def get(self, key: Key) -> Checkpoint | None:
        """The checkpoint of a name, if any of its messages is out."""
        return self._taken.get(key) or self._extended.get(key)

    @property
    def settled_offset(self) -> int:
        """All messages before it are acked or revived."""
        taken = next(iter(self._taken.values())).first_out if self._taken else self.next_offset
        lowest = self._lowest
        while lowest and lowest[0] not in self._extended:
            heappop(lowest)
        return min(taken, lowest[0][0]) if lowest else taken

    def add(self, checkpoint: Checkpoint) -> None:
        """Note messages that are out; the offsets of a POP exceed those of all before it."""
        if checkpoint.origin in _OF_POPS:
            self._taken[checkpoint.key] = checkpoint
            return
        self._extended[checkpoint.key] = checkpoint
        heappush(self._lowest, checkpoint.key)
        if len(self._lowest) > 2 * len(self._extended) + _STALE_MAX:
            self._lowest = list(self._extended)
            heapify(self._lowest)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint that is done."""
        if checkpoint.origin in _OF_POPS:
            del self._taken[checkpoint.key]
        else:
            del self._extended[checkpoint.key]

    def clear(self) -> None:
        """Forget all that is out."""
        self._taken.clear()
        self._extended.clear()
        self._lowest.clear()

    def sort(self) -> None:
        """Bring what was added in any order in that of the offsets."""
        self._taken = OrderedDict(sorted(self._taken.items()))
