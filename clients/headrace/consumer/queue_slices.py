"""Reads a range of one queue over a plain socket, slice by slice, with pulls under way meanwhile.

A broker of ours is asked for a whole slice at once, and for the next one before a slice is handed
out. Others give 32 messages for a pull, or 8 from the disk, so many pulls are under way: each is
for a piece of the range as long as what the broker gives, and what comes is joined.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from headrace.consumer.pulls import PullAnswer, Wanted
from headrace.errors import MalformedAnswer, OffsetNotFound
from headrace_protocol.codes import RequestCode
from headrace_protocol.message import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.consumer.subscription import Subscription
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.columns import RecordColumns
    from headrace_protocol.drivers.blocking import BlockingConnection
    from headrace_protocol.drivers.response import Response

_TIMEOUT_MS = 30_000
# Enough for a broker to be busy while we are, and to send and receive many at once.
_PULLS_MAX = 32
# Each so many pulls one asks for twice as much, in case the broker gives more than before.
_PROBE_EVERY = 64


class QueueSlice(NamedTuple):
    """What lies between two queue offsets.

    columns: the messages there that the filter lets through; tags may still be others of the same
    hash. None if there are none.
    """

    start_offset: int
    next_offset: int
    columns: RecordColumns | None


class _Pull:
    """A pull under way for ``start`` to ``end``."""

    __slots__ = ("answers", "end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.answers: list[Response] = []


class SliceReader:
    """An iterator over the slices of a range.

    Raises OffsetNotFound where the range has no messages any more, or not yet, and what
    ``BlockingConnection.drain`` and a refusal raise.
    """

    def __init__(
        self,
        connection: BlockingConnection,
        queue: MessageQueue,
        start_offset: int,
        end_offset: int,
        *,
        subscription: Subscription,
        sql: str | None = None,
        group: str,
        slice_bytes: int,
    ) -> None:
        """connection: nobody else uses it meanwhile. slice_bytes: two such slices are in memory.

        sql: an SQL92 filter instead of the subscription's tags.
        """
        self._connection = connection
        self._queue = queue
        self._end = end_offset
        self._subscription = subscription
        self._sql = sql
        self._group = group
        self._slice_bytes = slice_bytes
        self._is_filtered = bool(sql or subscription.tags)
        self._under_way: deque[_Pull] = deque()
        self._unasked = self._next_offset = start_offset
        self._pulls_max = 1
        self._pull_count = 0
        self._step = end_offset - start_offset

    def __iter__(self) -> Iterator[QueueSlice]:
        self._ask()
        while self._under_way:
            yield self._joined() if self._pulls_max > 1 else self._single()

    def _single(self) -> QueueSlice:
        """What one pull brings."""
        pull = self._under_way[0]
        answer = self._answer(pull)
        self._under_way.popleft()
        self._unasked = answer.next_offset
        if not self._connection.peer_is_headrace and not self._is_filtered:
            self._pulls_max, self._step = _PULLS_MAX, answer.next_offset - pull.start
        self._ask()
        return self._slice(min(answer.next_offset, pull.end), answer.columns())

    def _joined(self) -> QueueSlice:
        """What many pulls bring."""
        pieces: list[memoryview] = []
        piece_bytes, delta, next_offset = 0, 0, self._next_offset
        while self._under_way and piece_bytes < self._slice_bytes:
            pull = self._under_way[0]
            try:
                answer = self._answer(pull)
            except OffsetNotFound:
                if pieces:
                    break  # what there is comes first
                raise
            if pieces and answer.offset_delta != delta:
                break
            self._under_way.popleft()
            self._adapt(pull, answer)
            self._ask()
            pieces.append(_before(pull.end, answer))
            piece_bytes += len(pieces[-1])
            delta, next_offset = answer.offset_delta, min(answer.next_offset, pull.end)
        return self._slice(next_offset, self._columns(b"".join(pieces), delta))

    def _adapt(self, pull: _Pull, answer: PullAnswer) -> None:
        """Ask for what is missing of a piece, and learn how much the broker gives."""
        asked_count, given_count = pull.end - pull.start, answer.next_offset - pull.start
        if given_count < asked_count:
            self._under_way.appendleft(self._begin(answer.next_offset, pull.end))
            if asked_count <= self._step:
                self._step = given_count
        elif asked_count > self._step:
            self._step = asked_count

    def _ask(self) -> None:
        """Put pulls under way: many in one send, once half of them have been answered."""
        if len(self._under_way) > self._pulls_max // 2 or self._unasked >= self._end:
            return
        while len(self._under_way) < self._pulls_max and self._unasked < self._end:
            self._pull_count += 1
            is_probe = self._pulls_max > 1 and self._pull_count % _PROBE_EVERY == 0
            end = min(self._unasked + self._step * (1 + is_probe), self._end)
            self._under_way.append(self._begin(self._unasked, end))
            self._unasked = end
        self._connection.drain(len(self._under_way), timeout_ms=_TIMEOUT_MS)

    def _begin(self, start: int, end: int) -> _Pull:
        wanted = Wanted(
            self._group,
            self._queue,
            start,
            self._subscription,
            messages_max=end - start,
            record_bytes_max=self._slice_bytes,
            suspend_timeout_ms=0,
            sql=self._sql,
        )
        pull = _Pull(start, end)
        code, header = wanted.request(peer_is_headrace=self._connection.peer_is_headrace)
        self._connection.submit(code, header, b"", pull.answers.append)
        return pull

    def _answer(self, pull: _Pull) -> PullAnswer:
        """Wait for it."""
        while not pull.answers:
            waiting_count = sum(not each.answers for each in self._under_way)
            self._connection.drain(waiting_count - 1, timeout_ms=_TIMEOUT_MS)
        answer = PullAnswer.of(pull.answers[0])
        if answer.is_offset_illegal or answer.next_offset <= pull.start:
            raise OffsetNotFound(self._queue, pull.start, answer.min_offset, answer.max_offset)
        return answer

    def _slice(self, next_offset: int, columns: RecordColumns | None) -> QueueSlice:
        start, self._next_offset = self._next_offset, next_offset
        if columns is not None:
            count = int(columns.queue_offset.searchsorted(self._end))
            columns = columns if count == len(columns) else columns.select(slice(0, count))
        return QueueSlice(start, next_offset, columns or None)

    def _columns(self, records: bytes, offset_delta: int) -> RecordColumns:
        from headrace_protocol.columns import RecordColumns

        try:
            columns = RecordColumns.from_records(records)
        except CorruptRecord as error:
            address = self._connection.address
            raise MalformedAnswer(address, RequestCode.PULL_MESSAGE, error) from error
        if offset_delta:
            columns.queue_offset = columns.queue_offset + offset_delta
        return columns


def _before(end: int, answer: PullAnswer) -> memoryview:
    """The records with offsets below ``end``: where some are missing, a broker gives others."""
    if answer.next_offset <= end or (columns := answer.columns()) is None:
        return answer.records
    count = int(columns.queue_offset.searchsorted(end))
    return answer.records[: int(columns.start[count])] if count < len(columns) else answer.records
