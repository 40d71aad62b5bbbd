"""Queues of every kind with messages that a test knows, read by the requests of clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace_protocol import fastjson
from headrace_protocol.admin_headers import GetTopicStatsHeader
from headrace_protocol.bodies import TopicStatsTable
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.headers import (
    BulkPullResponseHeader,
    GetEarliestMsgStoretimeHeader,
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    OffsetResponseHeader,
    PullMessageResponseHeader,
    QueryMessageHeader,
    SearchOffsetHeader,
    TimestampResponseHeader,
)
from headrace_protocol.message import decode_records, encode_properties
from tests.broker.compaction import test_compaction_source as compaction
from tests.support import tiered_broker
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.static_brokers import TOPIC, Brokers, item
from tests.support.wire import bulk_pull_header, pull_header, send_header

LONG_MAX = 2**63 - 1
# A log file of the small stores has room for some four records.
BODY_BYTES_MIN = 500


class Message(NamedTuple):
    """A message as every reader must get it."""

    body: bytes
    tags: str
    key: str
    store_ms: int


class Read(NamedTuple):
    """The answer to a pull. messages: bodies by queue offset, as the client sees both.

    record_bytes: size of the records.
    """

    code: int
    next_offset: int
    min_offset: int
    max_offset: int
    record_bytes: int
    messages: dict[int, bytes]


class FilledQueue:
    """Queue 0 of a topic. messages: by queue offset. end: one past the last offset.

    brokers: that have messages; the last one is asked for all but queries by key.
    has_next_below: an offset below the first message stands for that message.
    """

    def __init__(self, brokers: Sequence[BrokerUnderTest], topic: str) -> None:
        self.brokers = brokers
        self.messages: dict[int, Message] = {}
        self.end = 0
        self.has_next_below = False
        self._place: dict[str, Any] = {"topic": topic, "queue_id": 0}

    @property
    def broker(self) -> BrokerUnderTest:
        """The broker that serves the queue."""
        return self.brokers[-1]

    @property
    def low(self) -> int:
        """The lowest offset."""
        return min(self.messages, default=0)

    # -- messages ----------------------------------------------------------------------------------

    def next_message(self, store_ms: int, key: str = "") -> Message:
        """The next message, with one of three tags."""
        number = self.end
        body = b"%d " % number + bytes(BODY_BYTES_MIN + number * 137 % 400)
        message = Message(body, f"t{number % 3}", key or f"k{number}", store_ms)
        self.add(message)
        return message

    def add(self, message: Message) -> None:
        """Note a message at the end."""
        self.messages[self.end] = message
        self.end += 1

    def fill(self, count: int, key_count: int = 1 << 30) -> None:
        """Store messages, one a second, with so many keys in turn."""
        for _ in range(count):
            message = self.next_message(self.broker.clock.ms, f"k{self.end % key_count}")
            properties = {"KEYS": message.key, "TAGS": message.tags}
            self.broker.store_message(self._place["topic"], 0, message.body, **properties)

    def lose(self, first: int, end: int) -> None:
        """Note that a range has no messages any more."""
        for offset in range(first, end):
            self.messages.pop(offset, None)

    # -- requests ----------------------------------------------------------------------------------

    def pull(self, offset: int, **fields: Any) -> Read:
        """A pull, which is not held."""
        header = pull_header(offset, **self._place, **fields)
        answer = self.broker.ask(RequestCode.PULL_MESSAGE, header)
        head = answer.command.header(PullMessageResponseHeader)
        delta = head.offset_delta or 0
        records = decode_records(answer.body) if answer.body else []
        found = {record.queue_offset + delta: bytes(record.body) for record in records}
        return _read(answer, head, len(answer.body), found)

    def bulk_pull(self, offset: int, **fields: Any) -> Read:
        """A bulk pull, which is not held."""
        header = bulk_pull_header(offset, **self._place, **{"sys_flag": 4, **fields})
        answer = self.broker.ask(RequestCode.BULK_PULL, header)
        head = answer.command.header(BulkPullResponseHeader)
        if answer.code != ResponseCode.SUCCESS:
            return _read(answer, head, 0, {})
        columns = RecordColumns.from_bulk(head, answer.body)
        columns.check_bodies()
        found = dict(zip(columns.queue_offset.tolist(), columns.bodies(), strict=True))
        return _read(answer, head, int(columns.size.sum()), found)

    def search(self, timestamp: int, boundary: str = "LOWER") -> int:
        """The offset for a time."""
        header = SearchOffsetHeader(**self._place, timestamp=timestamp, boundary_type=boundary)
        return _offset(self.broker.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header))

    def range(self) -> tuple[int, int]:
        """The lowest offset, and the end."""
        low = self.broker.ask(RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(**self._place))
        end = self.broker.ask(RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(**self._place))
        return _offset(low), _offset(end)

    def statistics(self) -> tuple[int, int]:
        """The range that the statistics of the topic state."""
        header = GetTopicStatsHeader(topic=self._place["topic"])
        answer = self.broker.ask(RequestCode.GET_TOPIC_STATS_INFO, header)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        table = fastjson.decode(answer.body, TopicStatsTable).offset_table
        (found,) = (at for queue, at in table.items() if queue.queue_id == 0)
        return found.min_offset, found.max_offset

    def earliest_ms(self) -> int:
        """The store time of the first message; -1 without one."""
        header = GetEarliestMsgStoretimeHeader(**self._place)
        answer = self.broker.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, header)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        return answer.command.header(TimestampResponseHeader).timestamp

    def by_key(self, key: str) -> list[bytes]:
        """The bodies of the messages with a key, as a client collects them."""
        header = QueryMessageHeader(
            topic=self._place["topic"],
            key=key,
            max_num=64,
            begin_timestamp=0,
            end_timestamp=LONG_MAX,
        )
        answers = [broker.ask(RequestCode.QUERY_MESSAGE, header) for broker in self.brokers]
        codes = {answer.code for answer in answers}
        assert codes <= {ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND}, answers
        parts = [answer.body for answer in answers if answer.code == ResponseCode.SUCCESS]
        return [bytes(message.body) for part in parts for message in decode_records(part)]


def _read(
    answer: Answer,
    head: PullMessageResponseHeader | BulkPullResponseHeader,
    record_bytes: int,
    messages: dict[int, bytes],
) -> Read:
    ends = head.next_begin_offset, head.min_offset, head.max_offset
    return Read(answer.code, *ends, record_bytes, messages)


def _offset(answer: Answer) -> int:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer.command.header(OffsetResponseHeader).offset


# -- kinds -----------------------------------------------------------------------------------------

# Builds a queue in a folder, with some messages or, to begin with, none.
Build = Callable[[Path, bool], Awaitable[FilledQueue]]


async def in_log(folder: Path, is_empty: bool) -> FilledQueue:
    """All messages in the log."""
    broker = BrokerUnderTest(folder)
    broker.create_topic(TOPIC)
    queue = FilledQueue([broker], TOPIC)
    queue.fill(0 if is_empty else 40)
    return queue


async def in_log_that_expired(folder: Path, is_empty: bool) -> FilledQueue:
    """The oldest messages have expired."""
    queue = await in_log(folder, is_empty)
    store = queue.broker.store
    store.index_tick()
    store.flusher.flush_now()
    queue.broker.clock.ms += 1 << 40
    store.cleaner.request()
    await store.cleaner.round()
    queue.lose(0, store.source(store.queue(TOPIC, 0)).min_offset())
    assert is_empty or queue.low > 20
    return queue


async def compacted(folder: Path, is_empty: bool) -> FilledQueue:
    """The older messages in a compaction log, no key twice; the newer ones in the log only."""
    return _compacted(folder, is_empty, key_count=1 << 30)


async def compacted_by_a_run(folder: Path, is_empty: bool) -> FilledQueue:
    """As ``compacted``, after a run that has left the newest message of each key."""
    queue = _compacted(folder, is_empty, key_count=20)
    if not is_empty:
        compaction.compact(queue.broker)
        queue.lose(0, 10)
    return queue


def _compacted(folder: Path, is_empty: bool, key_count: int) -> FilledQueue:
    broker = compaction.start(folder)
    compaction.create(broker)
    queue = FilledQueue([broker], compaction.C)
    queue.has_next_below = True
    if not is_empty:
        queue.fill(30, key_count)
        compaction.follow(broker)
        queue.fill(10)
    return queue


def _tiered(provider: str, **settings: Any) -> Build:
    async def build(folder: Path, is_empty: bool) -> FilledQueue:
        """The older messages in the tier, the newer ones in the log, some of them in both."""
        broker = tiered_broker.start(folder, tiered_backend_service_provider=provider, **settings)
        queue = FilledQueue([broker], tiered_broker.TOPIC)
        if not is_empty:
            for count in (12, 1, 17):
                queue.fill(count)
                tiered_broker.upload(broker)
            assert await tiered_broker.expire_log(broker) > 20
            queue.fill(5)
        return queue

    return build


def _tiered_with_a_gap(provider: str) -> Build:
    async def build(folder: Path, is_empty: bool) -> FilledQueue:
        """Messages in the middle have left the log before they were uploaded."""
        broker = tiered_broker.start(
            folder, tiered_backend_service_provider=provider, delete_untiered_enable=True
        )
        queue = FilledQueue([broker], tiered_broker.TOPIC)
        if not is_empty:
            queue.fill(12)
            tiered_broker.upload(broker)
            queue.fill(18)
            broker.store.index_tick()
            broker.store.flusher.flush_now()
            gap_end = await tiered_broker.expire_log(broker)
            queue.lose(12, gap_end)
            assert 15 < gap_end < 30
            queue.fill(5)
            tiered_broker.upload(broker)
        return queue

    return build


def _static(*logic_offsets: int) -> Build:
    async def build(folder: Path, is_empty: bool) -> FilledQueue:
        """Messages in items on two brokers, read at the leader."""
        brokers = Brokers(folder)
        chain = [item("a", 0, 0)]
        brokers.map(tuple(chain))
        queue = FilledQueue([brokers["b"], brokers["a"]], TOPIC)
        if is_empty:
            return queue
        for number, logic_offset in enumerate(logic_offsets, 1):
            _send(brokers, chain[-1].bname[-1], queue, 12)
            if logic_offset > queue.end:
                chain[-1] = item("ba"[number % 2], number - 1, chain[-1].logic_offset, end=12)
            chain.append(item("ab"[number % 2], number, logic_offset, queue_id=number // 2))
            brokers.map(tuple(chain))
            queue.end = logic_offset
        leader = chain[-1].bname[-1]
        _send(brokers, leader, queue, 6)
        queue.brokers = sorted(brokers.values(), key=lambda broker: broker is brokers[leader])
        return queue

    return build


def _send(brokers: Brokers, name: str, queue: FilledQueue, count: int) -> None:
    for _ in range(count):
        end, message = queue.end, queue.next_message(brokers[name].clock.ms)
        properties = encode_properties({"KEYS": message.key, "TAGS": message.tags}).decode()
        header = send_header(properties=properties)
        answer = brokers[name].ask(RequestCode.SEND_MESSAGE_V2, header, message.body)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert queue.end == end + 1
        for broker in brokers.values():
            broker.clock.ms += 1000


KINDS: dict[str, Build] = {
    "log": in_log,
    "log that expired": in_log_that_expired,
    "compacted": compacted,
    "compacted by a run": compacted_by_a_run,
    "tiered files": _tiered("posix"),
    "tiered files, always read": _tiered("posix", tiered_storage_level="FORCE"),
    "tiered files with a gap": _tiered_with_a_gap("posix"),
    "tiered objects": _tiered("file"),
    "tiered objects with a gap": _tiered_with_a_gap("file"),
    "static": _static(12, 24),
    "static with gaps": _static(100, 1000),
}
