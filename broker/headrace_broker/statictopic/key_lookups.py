"""GET_BY_KEY in static topics: the leader's item first, then older ones, wherever they are.

The newest item that has a message of the key decides: a delete marker stays as long as an older
item may have a value. Records are returned with logic queue and static offset.
Source: docs/protocol.md "Get by key"; tests/broker/statictopic/test_static_compaction.py.
"""

from __future__ import annotations

import struct
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic.answer import Answer, MalformedField
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import CorruptRecord, RequestError
from headrace_protocol.headers import GetByKeyHeader
from headrace_protocol.key_lookup import (
    ANSWER_BYTES_MAX,
    ANY_QUEUE,
    NOTHING_SEEN,
    NoRecord,
    WantedKey,
    decode_found,
    decode_keys,
    encode_found,
    encode_keys,
)
from headrace_protocol.message import decode_record
from headrace_protocol.serving import ServedElsewhere
from headrace_protocol.statictopic.offsets import decided, offset_delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.statictopic.leaders import Leaders
    from headrace_broker.statictopic.offsets import AskBroker
    from headrace_broker.statictopic.work import Workers
    from headrace_protocol.key_lookup import Found
    from headrace_protocol.serving import Registry, Reply, Request
    from headrace_protocol.statictopic.mapping import Chain

# Queue id, flag, and queue offset of a record.
_NUMBERS: Final = struct.Struct(">iiq")
_NUMBERS_AT: Final = 12
# Of one broker's answer; its remaining keys are asked for again.
_ROOM_BYTES: Final = 1 << 20
# Searches that begin in one step, some milliseconds.
_SEARCHES_MAX: Final = 1024


class StaticKeyLookups:
    """Serves GET_BY_KEY in static topics."""

    def __init__(self, leaders: Leaders, workers: Workers) -> None:
        self._leaders = leaders
        self._workers = workers

    def add_to(self, registry: Registry) -> None:
        """Stand in front of the processors."""
        guard = self._leaders.guard(GetByKeyHeader, self._serve)
        registry.guard(guard, {RequestCode.GET_BY_KEY})

    async def _serve(self, header: GetByKeyHeader, request: Request) -> Reply:
        wanted = decode_keys(header.count, request.body)
        bytes_max = min(header.max_msg_bytes, ANSWER_BYTES_MAX)
        return (await self._find(header.topic, wanted, bytes_max)).reply

    async def _find(self, topic: str, wanted: list[WantedKey], bytes_max: int) -> Answer:
        """The results of the first keys, as many as fit and take few searches."""
        mapping = self._leaders.mappings.get(topic)
        led: list[int] = []
        if mapping is not None and any(each.queue_id == ANY_QUEUE for each in wanted):
            led = sorted(self._leaders.led(mapping))
            if len(led) > _SEARCHES_MAX:
                return await self._find_anywhere(topic, wanted[0], led, bytes_max)
            wanted = wanted[: _SEARCHES_MAX // len(led)]
        searches = [self._searches(topic, each, led) for each in wanted]
        return await _find(self._workers.ask, topic, searches, bytes_max)

    async def _find_anywhere(
        self, topic: str, wanted: WantedKey, led: Sequence[int], bytes_max: int
    ) -> Answer:
        """The result of one key, from some queues at a time."""
        newest: list[_Search] = []
        for start in range(0, len(led), _SEARCHES_MAX):
            some = self._searches(topic, wanted, led[start : start + _SEARCHES_MAX])
            answer = await _find(self._workers.ask, topic, [[*newest, *some]], bytes_max)
            if answer.code != ResponseCode.SUCCESS or wanted.queue_id != ANY_QUEUE:
                break
            result = _newest([*newest, *some])
            newest = [next(each for each in (*newest, *some) if each.result is result)]
        return answer

    def _searches(self, topic: str, wanted: WantedKey, led: Sequence[int]) -> list[_Search]:
        """The searches for a key: in its queue, or in all of some. Raises RequestError."""
        queues = led if wanted.queue_id == ANY_QUEUE else [wanted.queue_id]
        try:
            return [_Search(wanted, queue, self._leaders.chain(topic, queue)) for queue in queues]
        except ServedElsewhere as error:
            # The keys of one request may have several leaders, so their client must ask these.
            raise RequestError(error.code, error.remark) from None


class _Search:
    """The search for a key in a logic queue, from its newest item with offsets to its earliest.

    result: None while it is under way.
    """

    __slots__ = ("_at", "_items", "_queue", "_wanted", "result")

    def __init__(self, wanted: WantedKey, queue: int, chain: Chain) -> None:
        self._wanted = wanted
        self._queue = queue
        # What an undecided leader has is not readable yet.
        self._items = decided(chain)
        self._at = len(self._items) - 1
        self.result: Found | None = None if self._items else NoRecord.NOT_YET

    @property
    def broker(self) -> str:
        """The broker to ask next."""
        return self._items[self._at].bname

    def asked(self) -> WantedKey:
        """The key as that broker is asked for it."""
        item, seen = self._items[self._at], NOTHING_SEEN
        is_newest = self._at == len(self._items) - 1
        if is_newest and self._wanted.seen_offset >= item.logic_offset:
            seen = self._wanted.seen_offset - offset_delta(item)
        return WantedKey(self._wanted.key, item.queue_id, seen)

    def answered(self, found: Found) -> None:
        """Take the answer: the result, or there may be one in the item before."""
        if found is NoRecord.NEVER and self._at > 0:
            self._at -= 1
        elif isinstance(found, NoRecord):
            self.result = found
        else:
            self.result = _renumbered(found, self._queue, offset_delta(self._items[self._at]))


def _renumbered(record: bytes | memoryview, queue: int, delta: int) -> bytes:
    """A record with its logic queue and static offset."""
    renumbered = bytearray(record)
    _, flag, offset = _NUMBERS.unpack_from(renumbered, _NUMBERS_AT)
    _NUMBERS.pack_into(renumbered, _NUMBERS_AT, queue, flag, offset + delta)
    return bytes(renumbered)


async def _find(
    ask: AskBroker, topic: str, searches: Sequence[Sequence[_Search]], bytes_max: int
) -> Answer:
    """The results of the first keys, as many as fit.

    searches: of each key. Each round asks each broker once for all that is to be found there.
    """
    found_bytes = 0
    while True:
        found = [*takewhile(lambda each: each is not None, map(_newest, searches))]
        under_way = [search for some in searches for search in some if search.result is None]
        if not under_way or (found and found_bytes >= bytes_max):
            return _answer(found, bytes_max)
        # Then only what the answer can't do without.
        if found_bytes >= bytes_max:
            under_way = [search for search in searches[0] if search.result is None]
        by_broker: dict[str, list[_Search]] = {}
        for search in under_way:
            by_broker.setdefault(search.broker, []).append(search)
        for broker, some in by_broker.items():
            answer = await ask(_ask(topic, broker, some, bytes_max - found_bytes))
            if answer.code != ResponseCode.SUCCESS:
                return _answer(found, bytes_max) if found else answer
            found_bytes += sum(map(len, answer.body))
            for search, result in zip(some, _results(broker, answer, len(some)), strict=False):
                search.answered(result)


def _newest(searches: Sequence[_Search]) -> Found | None:
    """The result for a key, the newest one of all queues; None while it is searched."""
    results = [search.result for search in searches]
    if None in results:
        return None
    records = [each for each in results if each is not None and not isinstance(each, NoRecord)]
    if len(records) == 1:  # as a rule, and then nothing is decoded
        return records[0]
    if records:
        return max(records, key=lambda record: decode_record(record).store_timestamp)
    return NoRecord.NOT_YET if NoRecord.NOT_YET in results else NoRecord.NEVER


def _ask(topic: str, broker: str, searches: Sequence[_Search], bytes_max: int) -> Ask:
    room = max(min(bytes_max, _ROOM_BYTES), 1)
    fields = {
        "topic": topic,
        "count": str(len(searches)),
        "maxMsgBytes": str(room),
        "lo": "false",
        "bname": broker,
    }
    body = encode_keys([search.asked() for search in searches])
    return Ask(broker, RequestCode.GET_BY_KEY, fields, body, room)


def _results(broker: str, answer: Answer, count_max: int) -> list[Found]:
    """Raises MalformedField."""
    count = answer.number("count")
    if not 1 <= count <= count_max:
        raise MalformedField(f"count={count} in the answer of {broker} for {count_max} keys")
    try:
        return decode_found(count, b"".join(answer.body))
    except CorruptRecord as error:
        raise MalformedField(f"{error} in the answer of {broker}") from None


def _answer(found: Sequence[Found | None], bytes_max: int) -> Answer:
    fitting: list[Found] = []
    for each in found:
        if each is None:
            break
        bytes_max -= 0 if isinstance(each, NoRecord) else len(each)
        if fitting and bytes_max < 0:
            break
        fitting.append(each)
    return Answer(ResponseCode.SUCCESS, fields={"count": len(fitting)}, body=encode_found(fitting))
