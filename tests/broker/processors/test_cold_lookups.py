"""Lookups of what memory does not hold: a thread reads it first, then the answer is the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_broker.store.files.filesystem import Paged
from headrace_protocol.admin_headers import (
    GetConsumeStatsHeader,
    GetTopicStatsHeader,
    QueryConsumeQueueHeader,
    QueryConsumeTimeSpanHeader,
    ResetOffsetHeader,
)
from headrace_protocol.channel import Channel
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import NotReady
from headrace_protocol.headers import (
    GetEarliestMsgStoretimeHeader,
    GetMinOffsetHeader,
    QueryConsumerOffsetHeader,
    QueryMessageHeader,
    SearchOffsetHeader,
    ViewMessageHeader,
)
from headrace_protocol.serving import Then
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.stores import FaultyFiles
from tests.support.wire import pull_header

QUEUES: dict[str, Any] = {"topic": "t", "queue_id": 0}
GROUP: dict[str, Any] = {"topic": "t", "group": "g"}
START_MS = 1_700_000_000_000
LOOKUPS: list[tuple[RequestCode, Any, set[str]]] = [
    (
        RequestCode.QUERY_MESSAGE,
        QueryMessageHeader(
            topic="t", key="k2", max_num=9, begin_timestamp=0, end_timestamp=1 << 62
        ),
        {"index", "commitlog"},
    ),
    (
        RequestCode.VIEW_MESSAGE_BY_ID,
        ViewMessageHeader(offset=0),
        {"consumequeue", "commitlog"},
    ),
    (
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        SearchOffsetHeader(**QUEUES, timestamp=START_MS + 2500),
        {"consumequeue", "commitlog"},
    ),
    (RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(**QUEUES), {"consumequeue"}),
    (
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        GetEarliestMsgStoretimeHeader(**QUEUES),
        {"consumequeue", "commitlog"},
    ),
    (
        RequestCode.GET_CONSUME_STATS,
        GetConsumeStatsHeader(consumer_group="g"),
        {"consumequeue", "commitlog"},
    ),
    (
        RequestCode.QUERY_CONSUME_TIME_SPAN,
        QueryConsumeTimeSpanHeader(**GROUP),
        {"consumequeue", "commitlog"},
    ),
    (
        RequestCode.GET_TOPIC_STATS_INFO,
        GetTopicStatsHeader(topic="t", with_bytes=True),
        {"consumequeue", "commitlog"},
    ),
    (
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        ResetOffsetHeader(**GROUP, timestamp=START_MS + 2500, is_force=True),
        {"consumequeue", "commitlog"},
    ),
    (
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        ResetOffsetHeader(**GROUP, timestamp=0, is_force=True, queue_id=0, offset=1),
        {"consumequeue"},
    ),
    (
        RequestCode.QUERY_CONSUME_QUEUE,
        QueryConsumeQueueHeader(**QUEUES, index=1, count=3),
        {"consumequeue"},
    ),
    (
        RequestCode.QUERY_CONSUMER_OFFSET,
        QueryConsumerOffsetHeader(**QUEUES, consumer_group="new"),
        {"consumequeue"},
    ),
    (RequestCode.GET_BROKER_RUNTIME_INFO, None, {"commitlog"}),
]


class ColdFiles(FaultyFiles):
    """A file is in memory once it was opened to read it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_warm = False
        self.fetched: set[Path] = set()

    def is_cached(self, file: Paged, _start: int, _end: int) -> bool:
        return self.is_warm or file.path in self.fetched

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        if flags == os.O_RDONLY:
            self.fetched.add(path)
        return super().open(path, flags)


class Threads:
    """Runs what is to be fetched when it is told to."""

    def __init__(self) -> None:
        self._asked: list[tuple[NotReady, Then]] = []

    def start(self, _channel: Channel, wait: NotReady, then: Then) -> None:
        self._asked.append((wait, then))

    def run(self) -> int:
        count = 0
        while self._asked:
            wait, then = self._asked.pop()
            wait.fetch()
            then(None)
            count += 1
        return count


@pytest.fixture
def files() -> ColdFiles:
    return ColdFiles()


@pytest.fixture
def broker(tmp_path: Path, files: ColdFiles) -> Iterator[BrokerUnderTest]:
    """Five messages, a second apart, none of which counts as written lately."""
    broker = BrokerUnderTest(tmp_path, files=files)
    broker.store.commit_log.hot_bytes = broker.store.commit_log.hot_units = 0
    broker.create_topic("t", queue_nums=1)
    broker.join("g", "c", "t")
    for number in range(5):
        broker.store_message("t", 0, KEYS=f"k{number}")
    broker.store.index_tick()
    broker.offsets.commit("g", "t", 0, 3)
    yield broker
    files.is_warm = True
    broker.close()
    assert not broker.unexpected


@pytest.mark.parametrize(("code", "header", "folders"), LOOKUPS)
async def test_a_lookup_waits_for_the_disk_in_a_thread(
    broker: BrokerUnderTest,
    files: ColdFiles,
    code: RequestCode,
    header: msgspec.Struct | None,
    folders: set[str],
) -> None:
    threads = Threads()
    broker.registry.run_fetch = threads.start
    channel = MemoryChannel()
    broker.send(code, header, channel=channel)
    assert channel.written == b""
    assert threads.run() == len(folders)
    root = broker.store.root
    assert {path.relative_to(root).parts[0] for path in files.fetched} == folders
    ((cold, cold_body),) = channel.replies()
    files.is_warm = True
    warm = broker.ask(code, header)
    assert cold.code == warm.code == ResponseCode.SUCCESS
    assert cold.ext() == warm.command.ext()
    assert cold_body == warm.body


def test_a_reset_is_told_without_the_disk(broker: BrokerUnderTest, files: ColdFiles) -> None:
    """It is told once: a pull that waited for the disk with it would have lost it."""
    broker.offsets.reset("g", "t", 0, 2)
    header = pull_header(4, topic="t", max_msg_nums=9, sys_flag=0)
    assert broker.ask(RequestCode.PULL_MESSAGE, header).code == ResponseCode.PULL_OFFSET_MOVED
    assert files.fetched == set()
