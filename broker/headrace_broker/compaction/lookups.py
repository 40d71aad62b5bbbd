"""GET_BY_KEY: the newest messages of keys; also for queries by key and by the producer's id.

A key is looked up among the messages that the key index lacks so far, then in the index. The index
is opened when a queue is asked for the first time, and followed from then on.

Source: docs/protocol.md "Get by key"; tests/broker/compaction/test_compaction_lookups.py.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.compaction.id_search import IdSearch
from headrace_broker.queue_directory import Use
from headrace_broker.store.files.residency import OLD_DATA
from headrace_broker.store.store_source import GetStatus
from headrace_broker.topics.attributes import is_compacted
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.errors import CorruptRecord, NotReady, RequestError
from headrace_protocol.headers import GetByKeyHeader, GetByKeyResponseHeader
from headrace_protocol.key_lookup import (
    ANSWER_BYTES_MAX,
    ANY_QUEUE,
    NoRecord,
    WantedKey,
    decode_keys,
    encode_found,
)
from headrace_protocol.message import decode_record, property_value
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import now_or_later, ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.compaction.index_builds import IndexBuilds
    from headrace_broker.compaction.queues import CompactedQueue, CompactedQueues
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.reader import WantedMessages
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.store.store_source import StoreSource
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.key_lookup import Found
    from headrace_protocol.serving import LongFunction, Registry, Request, Work

_TAIL_BYTES: Final = 1 << 20
_TAIL_COUNT: Final = 4096
# Keys of a queue that the index has by now stay in memory until there are so many.
_FORGET_KEYS: Final = 50_000
_TAILS_MAX: Final = 10_000
_QUEUES_PER_BOUND: Final = 256
_KEYS: Final = b"KEYS"
_TYPES_OF_KEYS: Final = (None, "K")


class LookupLimits(NamedTuple):
    """answer_s: a longer answer would hold up others; the asker sends the rest of its keys again.

    keys_max: in memory, of all queues; a key takes some 200 bytes, however long it is.
    id_part_count, id_bytes_max: messages that a search for an id reads at once, and bytes in all.
    """

    answer_s: float = 0.002
    keys_max: int = 250_000
    id_part_count: int = 4096
    id_bytes_max: int = 256 << 20


class _Tail:
    """The messages of a queue from ``first`` to ``end``: queue offsets by the hash of the key.

    compacted: the queue. counted: the number of keys when it was counted last.
    """

    def __init__(self, compacted: CompactedQueue) -> None:
        self.compacted = compacted
        self.counted = 0
        self.first = self.end = compacted.key_index.position
        self.offsets: dict[int, int] = {}

    def forget(self, position: int) -> None:
        """Drop keys of messages that the index has."""
        if self.end <= position:
            self.first = self.end = position
            self.offsets = {}
        elif len(self.offsets) > _FORGET_KEYS:
            kept = {key: at for key, at in self.offsets.items() if at >= position}
            self.first, self.offsets = position, kept

    def extend(self, source: StoreSource, until_s: float) -> None:
        """Take the messages up to the end of the queue. Raises NotReady, also after ``until_s``."""
        while self.end < source.max_offset():
            result = source.get(self.end, _TAIL_COUNT, _TAIL_BYTES, None)
            if result.status is GetStatus.FOUND:
                self._take(RecordColumns.from_records(b"".join(result.buffers)))
            self.end = result.next_offset
            # Afterwards: each turn gets on, however late it begins.
            if monotonic() > until_s and self.end < source.max_offset():
                raise NotReady(_go_on, OLD_DATA)

    def _take(self, records: RecordColumns) -> None:
        hashes, has_key = self.compacted.key_index.hashes_of(records)
        offsets = records.queue_offset[has_key]
        self.offsets.update(zip(hashes.tolist(), offsets.tolist(), strict=True))


class Tails:
    """The tails of queues, the one that was asked for last at the end; bounded.

    key_count: the number of keys in all when ``bound`` was called last.
    """

    def __init__(self) -> None:
        self.key_count = 0
        self._tails: OrderedDict[tuple[str, int], _Tail] = OrderedDict()
        # Those that may have changed since.
        self._asked: dict[_Tail, None] = {}

    def __len__(self) -> int:
        return len(self._tails)

    def of(self, queue: StoreQueue, compacted: CompactedQueue) -> _Tail:
        """The tail of a queue, without what its index has by now."""
        name = queue.topic, queue.queue_id
        tail = self._tails.get(name)
        if tail is None or tail.compacted is not compacted:
            self._drop(name)
            tail = self._tails[name] = _Tail(compacted)
        self._tails.move_to_end(name)
        self._asked[tail] = None
        tail.forget(compacted.key_index.position)
        return tail

    def _drop(self, name: tuple[str, int]) -> None:
        tail = self._tails.pop(name, None)
        if tail is not None:
            self.key_count -= tail.counted
            self._asked.pop(tail, None)

    def bound(self, keys_max: int) -> None:
        """Drop what was asked for least recently beyond the bounds, all but the last tail."""
        for tail in self._asked:
            self.key_count += len(tail.offsets) - tail.counted
            tail.counted = len(tail.offsets)
        self._asked.clear()
        tails = self._tails
        while len(tails) > 1 and (self.key_count > keys_max or len(tails) > _TAILS_MAX):
            self._drop(next(iter(tails)))

    def drop_topics(self, is_there: Callable[[str], bool]) -> None:
        """Drop the tails of topics that were deleted."""
        for name in [name for name in self._tails if not is_there(name[0])]:
            self._drop(name)


class _Newest:
    """The newest of the messages taken; None without one."""

    def __init__(self) -> None:
        self.record: bytes | None = None
        self._stored_ms = -1

    def take(self, record: bytes) -> None:
        stored_ms = decode_record(record).store_timestamp
        if stored_ms > self._stored_ms:
            self.record, self._stored_ms = record, stored_ms


def _go_on() -> None:
    """Nothing to fetch: other clients had their turn."""


class KeyLookups:
    """Serves GET_BY_KEY. tails: the keys that indexes lack, for reading."""

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        directory: QueueDirectory,
        queues: CompactedQueues,
        index_builds: IndexBuilds,
    ) -> None:
        self.limits = LookupLimits()
        self._store = store
        self._topics = topics
        self._directory = directory
        self._queues = queues
        self._index_builds = index_builds
        self.tails = Tails()
        self._begin_long: Callable[[LongFunction, Request], None]
        topics.subscribe(self._topic_changed)

    def register(self, registry: Registry) -> None:
        """Route the request."""
        self._begin_long = registry.begin_long
        registry.route(RequestCode.GET_BY_KEY, self.get)

    def _topic_changed(self, topic: TopicConfig | None) -> None:
        if topic is None:
            self.tails.drop_topics(lambda name: self._topics.get(name) is not None)

    def get(self, request: Request) -> Reply | Work | None:
        """Answer for as many keys as fit, the first ones.

        One to be looked up in all queues takes slices.
        """
        header = request.header(GetByKeyHeader)
        self._compacted(header.topic)
        keys = decode_keys(header.count, request.body)
        bytes_max = min(header.max_msg_bytes, ANSWER_BYTES_MAX)
        if keys and keys[0].queue_id == ANY_QUEUE:
            work = partial(self._get_anywhere, header.topic, keys, bytes_max)
            self._begin_long(work, request)
            return None
        return now_or_later(partial(self._get_each, header.topic, keys, bytes_max))

    def _compacted(self, name: str) -> TopicConfig:
        topic = self._topics.check_readable(name)
        if not is_compacted(topic):
            raise _invalid(f"topic {name} is not compacted: keys have no newest message")
        return topic

    def _get_each(self, name: str, keys: list[WantedKey], bytes_left: int) -> Reply:
        """The answer for keys with a queue, up to the first without one. Raises NotReady."""
        topic = self._compacted(name)
        until_s = monotonic() + self.limits.answer_s
        found: list[Found] = []
        for wanted in takewhile(lambda each: each.queue_id != ANY_QUEUE, keys):
            try:
                result = self._find(topic, wanted, until_s)
            except NotReady:
                if not found:
                    raise
                break
            bytes_left -= 0 if isinstance(result, NoRecord) else len(result)
            if found and bytes_left < 0:
                break
            found.append(result)
            if monotonic() > until_s:
                break
        self.tails.bound(self.limits.keys_max)
        return _answer(found)

    async def _get_anywhere(
        self, topic: str, keys: list[WantedKey], bytes_left: int, _request: Request
    ) -> Reply | None:
        """The answer for keys that may be in any queue, up to the first with a queue."""
        until_s = monotonic() + self.limits.answer_s
        found: list[Found] = []
        for wanted in takewhile(lambda each: each.queue_id == ANY_QUEUE, keys):
            newest = _Newest()
            try:
                await self._find_in_each(topic, wanted, newest.take)
            except RequestError:
                if not found:
                    raise
                break
            bytes_left -= len(newest.record or b"")
            if found and bytes_left < 0:
                break
            found.append(NoRecord.NEVER if newest.record is None else newest.record)
            if monotonic() > until_s:
                break
        return _answer(found)

    def has_foreign_ids(self, topic: str) -> bool:
        """True if a topic is compacted: its messages may have been copied from another broker."""
        return self._queues.wants(topic)

    async def find(self, wanted: WantedMessages) -> list[bytes]:
        """The newest message of a key in each queue; or, without any yet, messages with an id."""
        if wanted.index_type in _TYPES_OF_KEYS:
            return await self._newest(wanted.topic, wanted.key)
        if wanted.index_type == "U" and not wanted.found_count:
            return await self._with_id(wanted.topic, wanted.key, wanted.begin_ms)
        return []

    async def _newest(self, topic: str, key: str) -> list[bytes]:
        records: list[bytes] = []
        wanted = WantedKey(key.encode(errors="surrogatepass"))
        await self._find_in_each(topic, wanted, records.append)
        return records

    async def _find_in_each(
        self, topic: str, wanted: WantedKey, take: Callable[[bytes], None]
    ) -> None:
        """Pass the newest message of a key in each queue that has one to ``take``."""
        config = self._topics.get(topic)
        if config is None or not is_compacted(config):
            return

        def find_in(queue_id: int) -> None:
            found = self._find_in(topic, queue_id, wanted, monotonic() + self.limits.answer_s)
            if not isinstance(found, NoRecord):
                take(bytes(found))

        for queue_id in range(_queue_count(config)):
            await ready(partial(find_in, queue_id))
            if not queue_id % _QUEUES_PER_BOUND:
                self.tails.bound(self.limits.keys_max)

    async def _with_id(self, topic: str, message_id: str, begin_ms: int) -> list[bytes]:
        """Messages with the id that their producer gave them, stored from a time on.

        Those that the CommitLog has lost are in no index, so the compaction logs are searched, up
        to some hundred MiB.
        """
        if not self._queues.wants(topic):
            return []
        search = IdSearch(message_id, begin_ms, self.limits.id_part_count, self.limits.id_bytes_max)
        for queue in self._store.queues_of(topic):
            compacted = self._queues.find(queue)
            if compacted is not None:
                compacted.require_whole()
                search.begin(compacted.reader)
                while await ready(search.step):
                    pass
        return search.found

    def _find(self, topic: TopicConfig, wanted: WantedKey, until_s: float) -> Found:
        """The newest message of a key in its queue. Raises RequestError, NotReady."""
        queue_count = _queue_count(topic)
        if wanted.queue_id >= queue_count:
            raise _invalid(
                f"queue {wanted.queue_id} of topic {topic.topic_name}: there are {queue_count}"
            )
        return self._find_in(topic.topic_name, wanted.queue_id, wanted, until_s)

    def _find_in(self, topic: str, queue_id: int, wanted: WantedKey, until_s: float) -> Found:
        place = self._directory.find(topic, queue_id, Use.INSPECT)
        end = place.source.max_offset() if place is not None else 0
        if wanted.seen_offset >= end:
            return NoRecord.NOT_YET
        if place is None or place.queue is None:
            return NoRecord.NEVER
        queue = place.queue
        compacted = self._indexed(queue)
        tail = self.tails.of(queue, compacted)
        tail.extend(self._store.source(queue), until_s)
        offset = tail.offsets.get(compacted.key_index.hash_of(wanted.key)) if tail.offsets else None
        if offset is None:
            offset = compacted.key_index.find(wanted.key)
        record = None if offset is None else self._record(queue, compacted, offset)
        is_found = record is not None and _has_key(record, wanted.key)
        return record if is_found and record is not None else NoRecord.NEVER

    def _indexed(self, queue: StoreQueue) -> CompactedQueue:
        """A queue whose key index can be read. Raises NotReady, RequestError."""
        compacted = self._queues.find(queue)
        if compacted is not None:
            compacted.require_whole()
        if compacted is None or not compacted.key_index.is_open:
            name = queue.topic, queue.queue_id
            self._index_builds.check(name)
            raise NotReady(partial(self._index_builds.prepare, name), OLD_DATA)
        return compacted

    def _record(
        self, queue: StoreQueue, compacted: CompactedQueue, offset: int
    ) -> memoryview | bytes | None:
        """The message at a queue offset. Raises NotReady."""
        if offset <= compacted.reader.last_offset:
            return compacted.reader.record(offset)
        result = self._store.source(queue).get(offset, 1, 1, None)
        return b"".join(result.buffers) if result.next_offset == offset + 1 else None


def _answer(found: list[Found]) -> Reply:
    return Reply(GetByKeyResponseHeader(count=len(found)), encode_found(found))


def _queue_count(topic: TopicConfig) -> int:
    return max(topic.read_queue_nums, topic.write_queue_nums)


def _has_key(record: memoryview | bytes, key: bytes) -> bool:
    try:
        return property_value(decode_record(record).raw_properties, _KEYS) == key
    except CorruptRecord:
        return False


def _invalid(problem: str) -> RequestError:
    return RequestError(ResponseCode.INVALID_PARAMETER, problem)
