"""Reads a range of one queue over a plain socket, slice by slice, with the next pulls in flight.

A headrace broker returns a whole slice per pull; the next slice is requested before the current
one is handed out. Other brokers return 32 messages per pull, or 8 if they read from disk, so many
pulls are in flight. Each covers as many offsets as the broker returns at once, and the pieces are
joined to slices.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from headrace.consumer.pulls import PullAnswer, needs_ordinary_pull
from headrace.errors import MalformedAnswer, OffsetNotFound
from headrace_protocol.codes import RequestCode
from headrace_protocol.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.consumer.pulls import Wanted
    from headrace_protocol.columns import RecordColumns
    from headrace_protocol.drivers.blocking import BlockingConnection
    from headrace_protocol.drivers.response import Response

_TIMEOUT_MS = 30_000
# Enough to keep the broker busy while this side works, and to send and receive many at once.
_PULLS_MAX = 32
# One in so many pulls asks for twice as much, in case the broker now returns more.
_PROBE_EVERY = 64


class QueueSlice(NamedTuple):
    """The messages between two queue offsets.

    columns: messages that pass the broker's filter, which compares only hashes of tags, so other
    tags with the same hash may be among them. None if there are none.
    """

    start_offset: int
    next_offset: int
    columns: RecordColumns | None


class _Pull:
    """A pull in flight for the offsets ``start`` to ``end``."""

    __slots__ = ("answers", "end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.answers: list[Response] = []


class SliceReader:
    """Iterable over the slices of a range.

    Raises OffsetNotFound where messages of the range are deleted or not yet there, BrokerError for
    a refusal, and the errors of ``BlockingConnection.drain``.
    """

    def __init__(
        self,
        connection: BlockingConnection,
        wanted: Wanted,
        end_offset: int,
    ) -> None:
        """connection: for exclusive use.

        wanted: where to begin, and the ``record_bytes_max`` of a slice; up to two are in memory.
        """
        self._connection = connection
        self._wanted = wanted
        self._end = end_offset
        self._in_flight: deque[_Pull] = deque()
        self._unrequested = self._next_offset = wanted.queue_offset
        self._pulls_max = 1
        self._pull_count = 0
        self._step = end_offset - wanted.queue_offset

    def __iter__(self) -> Iterator[QueueSlice]:
        self._fill_window()
        while self._in_flight:
            yield self._next_joined() if self._pulls_max > 1 else self._next_single()

    def _next_single(self) -> QueueSlice:
        """The slice of a single pull."""
        pull = self._in_flight[0]
        answer = self._wait_for_answer(pull)
        self._in_flight.popleft()
        self._unrequested = answer.next_offset
        if not self._connection.peer_is_headrace and not self._wanted.is_filtered:
            self._pulls_max, self._step = _PULLS_MAX, answer.next_offset - pull.start
        self._fill_window()
        return self._slice(min(answer.next_offset, pull.end), answer.columns(pull.start))

    def _next_joined(self) -> QueueSlice:
        """A slice joined from several pulls."""
        pieces: list[memoryview] = []
        piece_bytes, delta, next_offset = 0, 0, self._next_offset
        while self._in_flight and piece_bytes < self._wanted.record_bytes_max:
            pull = self._in_flight[0]
            try:
                answer = self._wait_for_answer(pull)
            except OffsetNotFound:
                if pieces:
                    break  # return the pieces so far first
                raise
            if pieces and answer.offset_delta != delta:
                break
            self._in_flight.popleft()
            self._adapt(pull, answer)
            self._fill_window()
            pieces.append(_before(pull, answer))
            piece_bytes += len(pieces[-1])
            delta, next_offset = answer.offset_delta, min(answer.next_offset, pull.end)
        return self._slice(next_offset, self._columns(b"".join(pieces), delta, next_offset))

    def _adapt(self, pull: _Pull, answer: PullAnswer) -> None:
        """Request the missing rest of a piece, and adapt to how much the broker returns."""
        asked_count, given_count = pull.end - pull.start, answer.next_offset - pull.start
        if given_count < asked_count:
            self._in_flight.appendleft(self._start_pull(answer.next_offset, pull.end))
            if asked_count <= self._step:
                self._step = given_count
        elif asked_count > self._step:
            self._step = asked_count

    def _fill_window(self) -> None:
        """Start more pulls, many in one send, once half of those in flight are answered."""
        if len(self._in_flight) > self._pulls_max // 2 or self._unrequested >= self._end:
            return
        while len(self._in_flight) < self._pulls_max and self._unrequested < self._end:
            self._pull_count += 1
            is_probe = self._pulls_max > 1 and self._pull_count % _PROBE_EVERY == 0
            end = min(self._unrequested + self._step * (1 + is_probe), self._end)
            self._in_flight.append(self._start_pull(self._unrequested, end))
            self._unrequested = end
        self._connection.drain(len(self._in_flight), timeout_ms=_TIMEOUT_MS)

    def _start_pull(self, start: int, end: int, *, is_ordinary: bool = False) -> _Pull:
        wanted = self._wanted._replace(queue_offset=start, messages_max=end - start)
        pull = _Pull(start, end)
        is_bulk = self._connection.peer_is_headrace and not is_ordinary
        code, header = wanted.request(peer_is_headrace=is_bulk)
        self._connection.submit(code, header, b"", pull.answers.append)
        return pull

    def _wait_for_answer(self, pull: _Pull) -> PullAnswer:
        """Wait for a pull's response."""
        self._drain(pull)
        if needs_ordinary_pull(pull.answers[0]):
            pull.answers = self._start_pull(pull.start, pull.end, is_ordinary=True).answers
            self._drain(pull)
        answer = PullAnswer(pull.answers[0])
        if answer.is_offset_illegal or answer.next_offset <= pull.start:
            bounds = answer.min_offset, answer.max_offset
            raise OffsetNotFound(self._wanted.queue, pull.start, *bounds)
        return answer

    def _drain(self, pull: _Pull) -> None:
        while not pull.answers:
            waiting_count = sum(not each.answers for each in self._in_flight)
            self._connection.drain(waiting_count - 1, timeout_ms=_TIMEOUT_MS)

    def _slice(self, next_offset: int, columns: RecordColumns | None) -> QueueSlice:
        start, self._next_offset = self._next_offset, next_offset
        if columns is not None:
            count = int(columns.queue_offset.searchsorted(self._end))
            columns = columns if count == len(columns) else columns.select(slice(0, count))
        return QueueSlice(start, next_offset, columns or None)

    def _columns(self, records: bytes, offset_delta: int, end: int) -> RecordColumns:
        """Messages below ``end``: the next slice begins with the whole batch of that one."""
        from headrace_protocol.columns import RecordColumns
        from headrace_protocol.inner_batch import unwrap

        try:
            columns = RecordColumns.from_records(records)
            if offset_delta:
                columns.queue_offset = columns.queue_offset + offset_delta
            return unwrap(columns, self._next_offset, end)
        except CorruptRecord as error:
            address = self._connection.address
            raise MalformedAnswer(address, RequestCode.PULL_MESSAGE, error) from error


def _before(pull: _Pull, answer: PullAnswer) -> memoryview:
    """The records that begin in the pull; across gaps, a broker returns records past it."""
    if answer.next_offset <= pull.end:
        return answer.records
    return answer.records_before(pull.end)
