"""Items on other brokers: their messages are fetched there, and read ahead.

A pull fetches what it asks for. Where a reader continues, larger blocks are fetched before it asks,
since the messages of an item never change.
Source: docs/static-topics.md "Items on other brokers";
tests/broker/statictopic/test_static_reader.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary, ref

import msgspec
import numpy as np
import trio

from headrace_broker.cold.queue import BulkBlock, ReadBlock, Wanted
from headrace_broker.cold.reader import ColdReader, ReadAhead
from headrace_broker.peers.callers import ITEMS
from headrace_broker.statictopic.answer import Answer
from headrace_broker.statictopic.offsets import away
from headrace_broker.statictopic.rows import add_subscription, item_ask
from headrace_broker.store.store_source import GetResult, GetStatus
from headrace_protocol.codes import ResponseCode
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns
from headrace_protocol.drivers.errors import HeadraceError, MalformedAnswer
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import BulkPullResponseHeader
from headrace_protocol.waiting import NotHere, Until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace_broker.cold.queue import Block
    from headrace_broker.peers.peers import Ask, Outcome, Peers
    from headrace_broker.statictopic.part import Part
    from headrace_broker.statictopic.rows import Subscription
    from headrace_protocol.channel import Channel
    from headrace_protocol.columns import Array
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.serving import Reply
    from headrace_protocol.waiting import Run

_COMMIT_OFFSET: Final = 0x1
_SUSPEND: Final = 0x2
# Least room for an answer: what brokers return to a request that says nothing about it.
_ANSWER_BYTES: Final = 256 * 1024
# Java's clients ask for up to 2 GiB. What an answer is charged with must be what it may have.
_ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
_READ_AHEAD: Final = ReadAhead(
    window_count=65_536,
    window_bytes=512 * 1024,
    expire_s=10.0,
    grows=True,
    checks_bodies=False,
    memory_bytes=32 * 1024 * 1024,
)
# Windows that are fetched behind the block that a reader is in.
_AHEAD: Final = 4
# How long a broker is believed not to have an offset of an item, which may still be written.
_OUTSIDE_LIFE_S: Final = 1.0
# The reader of the logic queue knows its range.
_SHOWN: Final = (0, 0)
_FOUND: Final = frozenset({ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY})
_OUTSIDE: Final = frozenset({ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED})
_GONE: Final = RequestError(ResponseCode.SYSTEM_ERROR, "the client has disconnected")


class Outside(NamedTuple):
    """A broker's answer to a pull of an offset that it does not have, and its range."""

    offset: int
    lowest: int
    highest: int
    until_s: float

    def has(self, offset: int) -> bool:
        """True if another offset would get the same answer."""
        return offset <= self.offset if self.offset < self.lowest else offset >= self.highest


# A physical queue, wanted tags codes (None for all) or another filter, whether pulls are in bulk.
Key = tuple[tuple[object, ...], frozenset[int] | str | None, bool]


class RemoteQueue:
    """An item of another broker as one filter shows it.

    block: the one that was read last, as long as it is kept. noted: where its reader was then.
    outside: the last such answer.
    """

    __slots__ = ("__weakref__", "block", "is_bulk", "key", "noted", "outside")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.is_bulk = key[-1]
        self.block: Callable[[], Block | None] = lambda: None
        self.noted = 0
        self.outside: Outside | None = None


class _Fetch(NamedTuple):
    """A request for a block. code, fields: of a client's pull; its channel is charged."""

    queue: RemoteQueue
    part: Part
    wanted: Wanted
    code: int
    fields: Mapping[str, str]
    channel: Channel

    @property
    def key(self) -> tuple[RemoteQueue, int]:
        """The same for equal requests."""
        return self.queue, self.wanted.queue_offset

    @property
    def answer_bytes(self) -> int:
        """Most bytes of the answer, unless it is a single record."""
        return max(self.wanted.bytes_max, _ANSWER_BYTES)

    def enlarged(self, window: int) -> _Fetch:
        """The same for a reader who continues, with as many messages as the item has."""
        queue_offset, count_max, bytes_max, _ = self.wanted
        if window > count_max and not self.queue.is_bulk:
            count_max, bytes_max = window, max(bytes_max, _READ_AHEAD.window_bytes)
        count_max = max(min(count_max, self.part.end - queue_offset), 1)
        wanted = Wanted(queue_offset, count_max, min(bytes_max, _ANSWER_BYTES_MAX), None)
        return self._replace(wanted=wanted)

    def ask(self) -> Ask:
        """The request to the item's broker."""
        item, (queue_offset, count_max, bytes_max, _) = self.part.item, self.wanted
        fields = {**self.fields, "maxMsgNums": str(count_max), "maxMsgBytes": str(bytes_max)}
        ask = item_ask(self.code, fields, item, queue_offset)
        return ask._replace(answer_bytes=self.answer_bytes, payer=self.channel)


class RemoteReader(ColdReader):
    """Reads items of other brokers.

    relayed_count, relayed_bytes: pulls, and bytes fetched for them, since the start.
    """

    def __init__(
        self, peers: Peers, subscription: Subscription, now_s: Callable[[], float]
    ) -> None:
        super().__init__(_READ_AHEAD, now_s)
        self.relayed_count = self.relayed_bytes = 0
        self._peers = peers
        self._subscription = subscription
        # Pulls that wait for a block, by what they have in common.
        self._waiting: dict[tuple[RemoteQueue, int], list[Run]] = {}
        self._queues: WeakValueDictionary[Key, RemoteQueue] = WeakValueDictionary()

    def queue(self, key: Key) -> RemoteQueue:
        """The queue that all readers with this filter share."""
        return self._queues.get(key) or self._queues.setdefault(key, RemoteQueue(key))

    def read(self, queue: RemoteQueue, part: Part, wanted: Wanted) -> GetResult:
        """Records that were fetched. Raises NotHere without any. wanted: without tags."""
        offset, outside = wanted.queue_offset, queue.outside
        if outside is not None and outside.until_s > self._now_s() and outside.has(offset):
            status = GetStatus.NO_MESSAGE_IN_QUEUE
            return GetResult(status, (), 0, 0, offset, outside.lowest, outside.highest)
        found, block = None, queue.block()
        if block is not None and block.asked < offset < block.end:
            found = block.get(wanted, _SHOWN, is_bulk=queue.is_bulk)
        if found is not None and block is not None and found.next_offset < block.end:
            block.is_used = True  # in its middle, where most reads are, nothing is noted
        else:
            found = self._found(queue, wanted)
        if found is None:
            begin = partial(self._begin, queue, part, wanted)
            raise NotHere(Until(f"broker {part.item.bname}", begin))
        self.relayed_count += 1
        return found

    def _found(self, queue: RemoteQueue, wanted: Wanted) -> GetResult | None:
        """Messages at the beginning or end of a block; the reader is noted."""
        stream, now_s = (queue, None), self._now_s()
        block = self.blocks.find(stream, wanted.queue_offset, now_s)
        if block is None:
            return None
        queue.block = ref(block)
        self.blocks.move(stream, queue.noted, wanted.queue_offset, now_s)
        found = self.take(block, wanted, _SHOWN, now_s, is_bulk=queue.is_bulk)
        queue.noted = found.next_offset if found else 0
        return found

    async def run(self) -> None:
        """Drop what nobody reads, until cancelled."""
        while True:
            await trio.sleep(_READ_AHEAD.expire_s)
            self.expire()

    # -- requests ----------------------------------------------------------------------------------

    def _begin(self, queue: RemoteQueue, part: Part, wanted: Wanted, run: Run) -> None:
        """Have a pull wait for the answer of the item's broker."""
        waiting = self._waiting.get((queue, wanted.queue_offset))
        if waiting is not None:
            waiting.append(run)
            return
        command, channel = run.request.command, run.request.channel
        fields = command.ext()
        # The processor has decoded this field of the header before, with the same rules.
        flags = msgspec.convert(fields.get("sysFlag") or "0", int, strict=False)
        fields["sysFlag"] = str(flags & ~(_COMMIT_OFFSET | _SUSPEND))
        add_subscription(fields, self._subscription)
        has_room = self.blocks.has_room(_READ_AHEAD.window_bytes)
        window = self.blocks.window((queue, None), wanted.queue_offset) if has_room else 0
        fetch = _Fetch(queue, part, wanted, command.code, fields, channel)
        self._fetch(fetch.enlarged(window), [run])

    def _fetch(self, fetch: _Fetch, waiting: list[Run]) -> None:
        self._waiting[fetch.key] = waiting
        self._peers.begin(ITEMS, fetch.ask(), partial(self._fetched, fetch))

    def _fetch_next(self, fetch: _Fetch, begin: int, reader_at: int) -> None:
        """Fetch the messages behind a block, for a reader who is in it."""
        stream = fetch.queue, None
        ahead = fetch._replace(wanted=fetch.wanted._replace(queue_offset=begin))
        ahead = ahead.enlarged(_AHEAD * self.blocks.window(stream, reader_at))
        is_known = ahead.key in self._waiting or self.blocks.has(stream, begin)
        if ahead.channel.is_open and not is_known and self.blocks.has_room(ahead.answer_bytes):
            self._fetch(ahead, [])

    # -- answers -----------------------------------------------------------------------------------

    def _fetched(self, fetch: _Fetch, outcome: Outcome) -> None:
        waiting = self._waiting.pop(fetch.key)
        reply: Reply | None = None
        problem: RequestError | None = None
        try:
            reply = self._take(fetch, outcome)
        except (MalformedAnswer, ValueError) as error:
            item = fetch.part.item
            problem = RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"{error} in the answer of {item.bname} to a pull of its queue {item.queue_id} at "
                f"{fetch.wanted.queue_offset}",
            )
        stream, queue_offset = (fetch.queue, None), fetch.wanted.queue_offset
        self.blocks.expect(stream, queue_offset, len(waiting), self._now_s())
        for run in waiting:
            if not run.request.channel.is_open:
                run.called_back(_GONE)
            elif problem is not None:
                run.called_back(problem)
            else:
                run.resume(reply)

    def _take(self, fetch: _Fetch, outcome: Outcome) -> Reply | None:
        """Keep what an answer says, for the pulls to read; returns their answer if it is none.

        Raises MalformedAnswer, ValueError.
        """
        part, offset = fetch.part, fetch.wanted.queue_offset
        if isinstance(outcome, HeadraceError):
            stop = -1 if part.next_start is None else part.next_start
            return away(part.item.bname, part.start, stop, outcome).reply
        self.relayed_bytes += len(outcome.body)
        code = outcome.command.code
        if code not in _FOUND | _OUTSIDE:
            return Answer.of(outcome).reply
        header = outcome.header(BulkPullResponseHeader)
        if code in _FOUND:
            self.put((fetch.queue, None), self._block(fetch, header, outcome))
        else:
            lowest, highest = header.min_offset, header.max_offset
            if min(lowest, highest) < 0:
                raise ValueError(f"offsets from {lowest} to {highest}")
            # Its broker does not have this offset, whatever the range.
            highest = highest if offset < lowest else min(highest, offset)
            until_s = self._now_s() + _OUTSIDE_LIFE_S
            fetch.queue.outside = Outside(offset, lowest, highest, until_s)
        return None

    def _block(self, fetch: _Fetch, header: BulkPullResponseHeader, response: Response) -> Block:
        """The messages of an answer. Raises ValueError."""
        part, offset, next_offset = fetch.part, fetch.wanted.queue_offset, header.next_begin_offset
        end = min(next_offset, part.end)
        has_more = part.next_start is not None and end < part.end
        fetch_next = partial(self._fetch_next, fetch, end) if has_more else None
        if fetch.queue.is_bulk and end == next_offset > offset and header.count:
            return BulkBlock(offset, _whole(fetch, header, response.body), fetch_next)
        columns, units = _records(fetch, header, response)
        offsets = columns.queue_offset
        is_found = response.command.code == ResponseCode.SUCCESS
        if next_offset <= offset or (is_found and not len(offsets)):
            raise ValueError(f"nextBeginOffset={next_offset} and {len(offsets)} records")
        is_ascending = bool((offsets[1:] > offsets[:-1]).all())
        if len(offsets) and not (
            is_ascending and offset <= offsets[0] <= offsets[-1] < next_offset
        ):
            raise ValueError(f"records that are not those from {offset} to {next_offset}")
        if end < next_offset:
            # A filter may have passed the end of an item that took more messages than it has.
            inside = slice(int(np.searchsorted(offsets, end)))
            columns, units, offsets = columns.select(inside), units[inside], offsets[inside]
        return ReadBlock(offset, end, offsets, units, columns, fetch_next)


def _whole(fetch: _Fetch, header: BulkPullResponseHeader, body: memoryview) -> GetResult:
    """The answer to a bulk pull as it is. Raises ValueError."""
    count = header.count
    if count * UNIT_DTYPE.itemsize > len(body):
        raise ValueError(f"{count} records in {len(body)} bytes")
    record_bytes = int(np.frombuffer(body, UNIT_DTYPE, count)["size"].sum(dtype=np.int64))
    _check_size(fetch, count, record_bytes)
    return GetResult(
        GetStatus.FOUND,
        (body,),
        count,
        record_bytes,
        header.next_begin_offset,
        *_SHOWN,
        header.layout,
        header.first_physical_offset,
        header.has_queue_offsets,
    )


def _check_size(fetch: _Fetch, count: int, record_bytes: int) -> None:
    """Raise ValueError for more than was asked for."""
    is_short = count == 1 or record_bytes <= fetch.answer_bytes
    if count > fetch.wanted.count_max or not is_short:
        raise ValueError(f"{count} records of {record_bytes} bytes")


def _records(
    fetch: _Fetch, header: BulkPullResponseHeader, response: Response
) -> tuple[RecordColumns, Array]:
    """The records of an answer and their units. Raises ValueError."""
    body = response.body
    if not fetch.queue.is_bulk:
        columns = RecordColumns.from_records(body, is_passed_on=True)
        _check_size(fetch, len(columns), len(body))
        return columns, np.zeros(len(columns), UNIT_DTYPE)  # which no reader gets to see
    header.offset_delta = 0  # the item's broker has named physical offsets
    columns = RecordColumns.from_bulk(header, body, is_passed_on=True)
    count, start, size = len(columns), columns.start, columns.size
    _check_size(fetch, count, int(size.sum()))
    end = (start + size).max(initial=0)
    if min(start.min(initial=0), size.min(initial=0)) < 0 or end > len(columns.data):
        raise ValueError(f"{count} records in {len(body)} bytes")
    return columns, np.frombuffer(body, UNIT_DTYPE, count)
