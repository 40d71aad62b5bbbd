"""Each table that strangers can make grow has an owner and a bound.

Strangers send all requests that ``anonymousAccess=read`` permits, with other names each time, and
leave. The tables that have grown then are found by walking all objects of the broker: a new one
fails here until it has a bound, and a row that names it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_protocol.bodies import LockBatchRequestBody, MessageQueue
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.key_lookup import WantedKey, encode_keys
from headrace_protocol.rights.wanted import ADMINISTRATIVE
from headrace_protocol.staging import Decision, StagedAttempt, encode_names
from tests.abuse.hostile import plain_value
from tests.support.batches import block
from tests.support.broker import BrokerUnderTest, heartbeat
from tests.support.channel import MemoryChannel
from tests.support.wire_types import REQUEST_HEADERS
from tests.support.wires import request

COUNT = 24
# By what bounds it, each table that grows, with its class. What names topics, groups and queues is
# bounded by those: they count for the host that creates them, and the tables follow deletions.
COUNTED = "the budget of the host, which counts it"
BOUNDED = {
    COUNTED: "HostBudget._kept TopicTable._topics "
    "SubscriptionGroups._groups _Table.offsets ConsumerOffsets._counted QueueLocks._locks "
    "Staging.queries",
    "topics and their queues": "Cleaner._topics DiskForecast._topics Followers._topics "
    "Following._topics TopicTrimmer._topics Incarnations._created_at Incarnations._ids "
    "Dispatcher.dirty Dispatcher.queues Indexer.queues MessageStore.queues QueueTable.by_key "
    "QueueTable.by_name QueueTable.by_topic BrokerStatistics.topic_puts TableText._entries "
    "SendProcessor._targets",
    "groups in topics": "ConsumerOffsets._groups_of ConsumerOffsets._topics_of _Table._changed "
    "BrokerStatistics.group_gets BrokerStatistics.sampled PullWatch._pulls",
    "locks": "QueueLocks._of",
    "staged writes": "Decision.attempts",
    "groups": "SubscriptionGroupConfig.group_retry_policy",
    "files on the disk": "IndexFiles._full IndexFiles.files MappedFileQueue.files "
    "PageCache._valid_until",
    "10,000 entries": "QueueDirectory._cache",
    "their bytes": "PullProcessor._targets PopTargets._targets",
    "a quarter of a second, then it is emptied": "ConsumerManager._notice_counts",
    "a step of the loop, then it is emptied": "Watchdog._parts",
    # On a machine that is so busy that many answers take over a second.
    "the codes of requests": "LateRequests._logged LateRequests.counts",
}
# They would undo what others did.
UNLOCKS = {Code.UNLOCK_BATCH_MQ, Code.STAGE_FORGET}
VALUES: dict[str, Any] = {
    "body_crc32": None,
    "index_type": "K",
    "boundary_type": "LOWER",
    "max_msg_nums": 32,
    "max_msg_bytes": 1000,
    "subscription": "*",
    "expression_type": "TAG",
    "default_topic": "TBW102",
    "default_topic_queue_nums": 4,
    "count": 1,
    "timestamp": -1,
    "properties": "",
    "src_group": "g",
    "logical": None,
    "commit_offset": 1,
}
PULLS = {Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.BULK_PULL}
OF_GROUPS = {"group", "consumer_group", "dest_group", "group_name", "producer_group"}


def fields(code: int, group: str, topic: str, other: str, number: int) -> dict[str, Any]:
    header_type = REQUEST_HEADERS.get(code)
    named = {}
    for field in msgspec.structs.fields(header_type) if header_type else ():
        value = VALUES.get(field.name, plain_value(field.type))
        if field.name == "sys_flag":
            value = 4 if code in PULLS else 0  # with a subscription
        elif field.name in OF_GROUPS:
            value = group
        elif field.name == "topic":
            value = topic
        elif field.name == "queue_id":
            value = number
        elif value == "Foreign":
            value = other
        if value is not None:
            named[field.encode_name] = value
    return named


def body(code: int, group: str, topic: str, other: str, number: int) -> bytes:
    if code in (Code.BULK_SEND, Code.STAGE_SEND):
        return bytes(block(b"body", topic=topic).body)
    if code == Code.GET_BY_KEY:
        return encode_keys([WantedKey(other.encode())])
    if code == Code.STAGE_DECIDE:
        return Decision("d", number + 1, {other: (StagedAttempt(other, 1, 1),)}).encode()
    if code == Code.STAGE_ABORT:
        return encode_names([other])
    if code in (Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ):
        queues = [MessageQueue(topic, other, number)]
        return LockBatchRequestBody(consumer_group=group, client_id=other, mq_set=queues).encode()
    if code == Code.HEART_BEAT:
        return heartbeat(group, other, topic)
    return b"body"


def frame_of(code: int, group: str, topic: str, other: str, number: int = 0) -> bytes:
    header = fields(code, group, topic, other, number)
    return request(code, header, body(code, group, topic, other, number))


def strangers(broker: BrokerUnderTest) -> Iterator[bytes]:
    """Requests with another topic each time, another group, or others of everything else."""
    for _ in range(2):  # the second time, all names are known
        for code in sorted(broker.registry.functions.keys() - ADMINISTRATIVE - UNLOCKS):
            for number in range(COUNT):
                yield frame_of(code, "g", f"n{number}", "other")
                yield frame_of(code, f"n{number}", "T", "other")
                yield frame_of(code, "g", "T", f"n{number}", number)
                yield frame_of(code, "g", "kv", f"n{number}")


def processors(broker: BrokerUnderTest) -> Iterator[object]:
    """The objects that serve requests."""
    for function in broker.registry.functions.values():
        for each in (function, *getattr(function, "args", ())):
            yield getattr(each, "__self__", None)


def sizes(broker: BrokerUnderTest) -> Counter[str]:
    """Sizes of all containers in the broker's objects, by class and attribute."""
    found: Counter[str] = Counter()
    waiting = deque([broker.core, *broker.core.tables, *broker.core.clients, *processors(broker)])
    seen = {id(each) for each in waiting}
    while waiting:
        each = waiting.popleft()
        for name, value in attributes(each):
            for inner in (value, *elements(value)):
                if type(inner).__module__.startswith("headrace_") and id(inner) not in seen:
                    seen.add(id(inner))
                    waiting.append(inner)
            if isinstance(value, (dict, set, list, deque)):
                nested = [
                    inner for inner in elements(value) if isinstance(inner, (dict, set, list))
                ]
                found[f"{type(each).__name__}.{name}"] += len(value) + sum(map(len, nested))
    return found


def attributes(each: object) -> Iterator[tuple[str, object]]:
    yield from getattr(each, "__dict__", {}).items()
    for owner in type(each).__mro__:
        for name in getattr(owner, "__slots__", ()):
            if hasattr(each, name):
                yield name, getattr(each, name)
    if isinstance(each, msgspec.Struct):
        yield from ((name, getattr(each, name)) for name in each.__struct_fields__)


def elements(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, (tuple, list, set, deque)) else []


@pytest.mark.slow
async def test_every_table_that_strangers_make_grow_has_a_bound(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, commit_log_file_bytes=1 << 24)
    broker.create_topic("T", COUNT)
    broker.create_topic("kv", 1, attributes={"cleanup.policy": "COMPACTION"})
    broker.join("g", "c", "T")
    before = sizes(broker)
    for frame in strangers(broker):
        channel = MemoryChannel()
        broker.take(frame, channel)
        for part in (broker.consumers, broker.producers, broker.long_polling):
            part.channel_closed(channel)
    grown = {name for name, size in (sizes(broker) - before).items() if size >= COUNT // 2}
    assert grown - {name for names in BOUNDED.values() for name in names.split()} == set()
    assert {*BOUNDED[COUNTED].split()} <= grown
