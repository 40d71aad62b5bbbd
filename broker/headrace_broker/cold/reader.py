"""Reads of queues that are not in the local log: found in memory, or fetched in a thread first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import partial
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from headrace_broker.cold.blocks import BLOCK_BYTES_MAX, ReadBlocks
from headrace_broker.cold.queue import Wanted
from headrace_protocol.errors import Lane, NotReady
from headrace_protocol.tier.driver import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from headrace_broker.cold.breaker import Breaker
    from headrace_broker.cold.queue import ReadBlock, Stream
    from headrace_broker.store.store_source import GetResult

_ANSWERS_MAX: Final = 4096
_LOCKS: Final = 64
T = TypeVar("T")


class ReadAhead(NamedTuple):
    """Settings of reads.

    window_count, window_bytes: most messages and bytes that are read at once. expire_s: how long
    they stay in memory. grows: whether more is read than was asked for. checks_bodies: whether
    their checksums are compared.
    """

    window_count: int
    window_bytes: int
    expire_s: float
    grows: bool
    checks_bodies: bool


class ColdReader:
    """Serves blocks and single answers of the queues of one place.

    access_count, hit_count: reads of blocks, and those for which none was fetched. message_counts:
    delivered since the start, by topic.

    Methods raise NotReady, and RequestError while the place is given a pause after failures.
    """

    def __init__(self, lane: Lane, breaker: Breaker, read_ahead: ReadAhead) -> None:
        """lane: the threads that fetch."""
        self.breaker = breaker
        self.blocks = ReadBlocks(read_ahead.expire_s, read_ahead.window_count)
        self.access_count = self.hit_count = 0
        self.message_counts: Counter[str] = Counter()
        self._lane = lane
        self._read_ahead = read_ahead
        # Where blocks were fetched for a request that has not run again yet.
        self._fetched: set[tuple[Stream, int]] = set()
        self._answers: OrderedDict[Hashable, Any] = OrderedDict()
        # One fetch for all who wait for the same bytes.
        self._locks = [Lock() for _ in range(_LOCKS)]

    def get(
        self, stream: Stream, topic: str, wanted: Wanted, shown: tuple[int, int], *, is_bulk: bool
    ) -> GetResult:
        """Messages of a stream for a reader that will continue behind them; see ``ReadBlock``."""
        block = self.block(stream, wanted.queue_offset, wanted.count_max)
        found = block.get(wanted, shown, is_bulk=is_bulk)
        self.blocks.note_read(
            stream, wanted.queue_offset, found.next_offset, wanted.count_max, monotonic()
        )
        if found.count:
            self.message_counts[topic] += found.count
        return found

    def block(self, stream: Stream, queue_offset: int, count_asked: int) -> ReadBlock:
        """The messages of a stream from a queue offset on."""
        now_s = monotonic()
        block = self.blocks.find(stream, queue_offset, now_s)
        if block is None and stream[1] is not None:
            block = self.blocks.find((stream[0], None), queue_offset, now_s)
        if block is not None:
            self.access_count += 1
            self.hit_count += (stream, queue_offset) not in self._fetched
            self._fetched.discard((stream, queue_offset))
            return block
        self.breaker.check()
        fetch = partial(self._fetch_block, stream, queue_offset, count_asked)
        raise NotReady(fetch, self._lane)

    def answer(self, key: Hashable, read: Callable[[], T | Failure]) -> T:
        """The result of a read that stays right; kept under its key."""
        found: T | None = self._answers.get(key)
        if found is not None:
            return found
        self.breaker.check()
        raise NotReady(partial(self._fetch_answer, key, read), self._lane)

    def expire(self) -> None:
        """Drop what nobody has read for a while, or will read in time. In any thread."""
        self.blocks.expire(monotonic())

    # -- in a thread -------------------------------------------------------------------------------

    def _fetch_block(self, stream: Stream, queue_offset: int, count_asked: int) -> None:
        with self._locks[hash((stream, queue_offset)) % _LOCKS]:
            if self.blocks.find(stream, queue_offset, monotonic()) is not None:
                return
            read_ahead, count = self._read_ahead, count_asked
            if read_ahead.grows:
                count = min(count_asked, read_ahead.window_count)
                count = max(count, self.blocks.window(stream, queue_offset))
            bytes_max = min(read_ahead.window_bytes, BLOCK_BYTES_MAX)
            queue, tags = stream
            wanted = Wanted(queue_offset, count, bytes_max, tags)
            block = self.result(queue.fetch(wanted, check_bodies=read_ahead.checks_bodies))
            self.blocks.put(stream, block, monotonic())
            self._fetched.add((stream, queue_offset))
            if len(self._fetched) > _ANSWERS_MAX:  # of clients that are gone
                self._fetched.pop()

    def _fetch_answer(self, key: Hashable, read: Callable[[], T | Failure]) -> None:
        self._answers[key] = self.result(read())
        while len(self._answers) > _ANSWERS_MAX:
            self._answers.popitem(last=False)

    def result(self, result: T | Failure) -> T:
        """What was read. Raises RequestError for a failure, which counts for the breaker."""
        if isinstance(result, Failure):
            raise self.breaker.failed(result)
        self.breaker.succeeded()
        return result
