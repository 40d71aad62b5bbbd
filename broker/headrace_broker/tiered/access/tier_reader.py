"""Reads of the tier, which is opened by the first of them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headrace_broker.cold.breaker import Breaker
from headrace_broker.cold.queue import ReadBlock, Wanted
from headrace_broker.cold.reader import ColdReader
from headrace_protocol.errors import Lane, NotReady
from headrace_protocol.tier.driver import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from headrace_broker.store.store_source import GetResult
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.access.tier_access import TierAccess
    from headrace_broker.tiered.container.stored_tier import TierQueue

    # A queue, and the tags codes of the messages that are read of it; None for all.
    TierStream = tuple[TierQueue, frozenset[int] | None]

# Apart from the threads that read the local disk: a slow store must not take those.
TIERED_DATA: Final = Lane("messages of the tier", threads=8)
_ANSWERS_MAX: Final = 4096
_LOCKS: Final = 64
T = TypeVar("T")


class TierReader(ColdReader):
    """Reads the queues of a tier, in threads.

    access: opens it, and requests wait ``open_s`` for that. message_counts: delivered since the
    start, by topic.

    Methods raise NotReady, and RequestError while the tier is given a pause after failures.
    """

    open_s = 5.0

    def __init__(self, access: TierAccess, settings: TierSettings) -> None:
        super().__init__(settings.read_ahead)
        self.access = access
        self.breaker = Breaker("the tier")
        self.message_counts: Counter[str] = Counter()
        self._read_ahead = settings.read_ahead
        self._answers: OrderedDict[Hashable, Any] = OrderedDict()
        # One fetch for all who wait for the same bytes.
        self._locks = [Lock() for _ in range(_LOCKS)]

    def open_first(self) -> NotReady:
        """The error of a request that needs the tier before it is open. Raises RequestError."""
        self.breaker.check()
        return NotReady(self.open, TIERED_DATA)

    def open(self) -> None:
        """Open the tier; may block. Raises RequestError if its store is away, StoreFormatError."""
        try:
            self.access.open(self.open_s)
        except OSError as error:
            raise self.breaker.unreachable(str(error)) from None

    def get(
        self, queue: TierQueue, topic: str, wanted: Wanted, shown: tuple[int, int], *, is_bulk: bool
    ) -> GetResult:
        """Messages of a queue for a reader that will continue behind them; see ``ReadBlock``."""
        stream, now_s = (queue, wanted.tags), self._now_s()
        block = self.blocks.find(stream, wanted.queue_offset, now_s)
        found = self.take(block, wanted, shown, now_s, is_bulk=is_bulk) if block else None
        if found is None:
            raise self._away(stream, wanted.queue_offset, wanted.count_max)
        if found.count:
            self.message_counts[topic] += found.count
        return found

    def block_at(self, queue: TierQueue, queue_offset: int) -> ReadBlock:
        """The block that has a message of a queue."""
        stream = queue, None
        block = self.blocks.find(stream, queue_offset, self._now_s())
        if block is None:
            raise self._away(stream, queue_offset, 1)
        assert isinstance(block, ReadBlock)
        return block

    def answer(self, key: Hashable, read: Callable[[], T | Failure]) -> T:
        """The result of a read that stays right; kept under its key."""
        found: T | None = self._answers.get(key)
        if found is not None:
            return found
        self.breaker.check()
        raise NotReady(partial(self._fetch_answer, key, read), TIERED_DATA)

    def _away(self, stream: TierStream, queue_offset: int, count_asked: int) -> NotReady:
        self.breaker.check()
        fetch = partial(self._fetch_block, stream, queue_offset, count_asked)
        return NotReady(fetch, TIERED_DATA)

    # -- in a thread -------------------------------------------------------------------------------

    def _fetch_block(self, stream: TierStream, queue_offset: int, count_asked: int) -> None:
        with self._locks[hash((stream, queue_offset)) % _LOCKS]:
            if self.blocks.has(stream, queue_offset):
                return
            read_ahead, count = self._read_ahead, count_asked
            if read_ahead.grows:
                count = min(count_asked, read_ahead.window_count)
                count = max(count, self.blocks.window(stream, queue_offset))
            bytes_max = min(read_ahead.window_bytes, self.blocks.block_bytes_max)
            queue, tags = stream
            wanted = Wanted(queue_offset, count, bytes_max, tags)
            self.put(
                stream, self.result(queue.fetch(wanted, check_bodies=read_ahead.checks_bodies))
            )

    def _fetch_answer(self, key: Hashable, read: Callable[[], T | Failure]) -> None:
        self._answers[key] = self.result(read())
        while len(self._answers) > _ANSWERS_MAX:
            self._answers.popitem(last=False)

    def result(self, result: T | Failure) -> T:
        """The result of a read. Raises RequestError for a failure, which counts for the breaker."""
        if isinstance(result, Failure):
            raise self.breaker.failed(result)
        self.breaker.succeeded()
        return result
