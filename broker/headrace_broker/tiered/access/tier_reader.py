"""Reads of the tier for requests: found in memory, or fetched in a thread first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import partial
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from headrace_broker.tiered.access.breaker import Breaker
from headrace_broker.tiered.access.read_blocks import (
    BLOCK_BYTES_MAX,
    ReadBlock,
    ReadBlocks,
)
from headrace_protocol.choose import choose
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import Lane, NotReady, RequestError
from headrace_protocol.tier.driver import Failure
from headrace_protocol.tier.stored_queue import read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from headrace_broker.tiered.access.read_cursors import Stream
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.access.tier_access import TierAccess

# Apart from the threads that read the local disk: a slow store must not take those.
TIERED_DATA: Final = Lane("messages of the tier", threads=8)

_ANSWERS_MAX: Final = 4096
# Of a read by tags.
_SCANNED_UNITS: Final = 16_384
_LOCKS: Final = 64
# A request waits so long for the tier to be opened.
_OPEN_S: Final = 5.0
T = TypeVar("T")


class TierReader:
    """Serves blocks and single answers.

    access_count, hit_count: reads of blocks, and those for which none was fetched. message_counts:
    delivered since the start, by topic.

    Methods raise NotReady, and RequestError while the store is given a pause after failures.
    """

    def __init__(self, access: TierAccess, settings: TierSettings) -> None:
        self.access = access
        self.breaker = Breaker()
        self.blocks = ReadBlocks(settings.expire_ms / 1000, settings.window_count)
        self._settings = settings
        self.access_count = self.hit_count = 0
        self.message_counts: Counter[str] = Counter()
        # Where blocks were fetched for a request that has not run again yet.
        self._fetched: set[tuple[Stream, int]] = set()
        self._answers: OrderedDict[Hashable, Any] = OrderedDict()
        # One fetch for all who wait for the same bytes.
        self._locks = [Lock() for _ in range(_LOCKS)]

    def open_first(self) -> NotReady:
        """The error of a request that needs the tier before it is open. Raises RequestError."""
        self.breaker.check()
        return NotReady(self.open, TIERED_DATA)

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
        raise NotReady(fetch, TIERED_DATA)

    def note_read(self, stream: Stream, begin: int, end: int, count_asked: int) -> None:
        """Note that a reader was given the messages of a range, and will continue at its end."""
        self.blocks.note_read(stream, begin, end, count_asked, monotonic())

    def answer(self, key: Hashable, read: Callable[[], T | Failure]) -> T:
        """The result of a read that stays right; kept under its key."""
        found: T | None = self._answers.get(key)
        if found is not None:
            return found
        self.breaker.check()
        raise NotReady(partial(self._fetch_answer, key, read), TIERED_DATA)

    def expire(self) -> None:
        """Drop what nobody has read for a while, or will read in time. In any thread."""
        self.blocks.expire(monotonic())

    # -- in a thread -------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the tier. Raises RequestError if its store is away, StoreFormatError."""
        try:
            self.access.open(_OPEN_S)
        except OSError as error:
            raise self.breaker.unreachable(str(error)) from None

    def _fetch_block(self, stream: Stream, queue_offset: int, count_asked: int) -> None:
        with self._locks[hash((stream, queue_offset)) % _LOCKS]:
            if self.blocks.find(stream, queue_offset, monotonic()) is not None:
                return
            count = count_asked
            if self._settings.reads_ahead:
                count = min(count_asked, self._settings.window_count)
                count = max(count, self.blocks.window(stream, queue_offset))
            block = self.result(self._read_block(stream, queue_offset, count))
            self.blocks.put(stream, block, monotonic())
            self._fetched.add((stream, queue_offset))
            if len(self._fetched) > _ANSWERS_MAX:  # of clients that are gone
                self._fetched.pop()

    def _read_block(self, stream: Stream, queue_offset: int, count: int) -> ReadBlock | Failure:
        queue, tags = stream
        # Which messages match is in their units, so the bodies of others are not read.
        found = queue.units(queue_offset, count if tags is None else max(count, _SCANNED_UNITS))
        if isinstance(found, Failure):
            return found
        if not len(found.units):
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"the tier has nothing from queue offset {queue_offset} of {queue.name.path} on: "
                "its messages have expired meanwhile",
            )
        bytes_max = min(self._settings.window_bytes, BLOCK_BYTES_MAX)
        where, _, seen = choose(found.units, tags, count, bytes_max, bytes_of=read_bytes)
        end = found.first + seen
        units, offsets = found.units[where], np.arange(found.first, end)[where]
        records = queue.records(units, offsets, check_bodies=self._settings.checks_bodies)
        if isinstance(records, Failure):
            return records
        return ReadBlock(queue_offset, end, offsets, units, records)

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
