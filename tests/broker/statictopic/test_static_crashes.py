"""A broker killed between any two writes of a change: a static topic is never served as plain."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.broker.statictopic.test_static_changes import (
    EPOCH,
    change,
    item,
    led_here,
    moved,
    stored,
)
from tests.support.broker import BrokerUnderTest
from tests.support.noted_files import NotedFiles
from tests.support.stores import FaultyFiles, put

FILES = ("topicQueueMapping.json", "staticTopic.json", "topicIncarnation.json", "topics.json")


def create(broker: BrokerUnderTest) -> int:
    return change(broker, led_here()).code


def grow(broker: BrokerUnderTest) -> int:
    return change(broker, led_here(3, EPOCH + 1000), 3).code


def move_away(broker: BrokerUnderTest) -> int:
    return change(broker, moved(0, item(1, 5, -1, bname="broker-b"), led_here())).code


def move_here(broker: BrokerUnderTest) -> int:
    theirs = (item(0, 3, 0, bname="broker-b"), item(1, 2, -1))
    hosted = {**led_here().hosted, 2: theirs}
    mapping = msgspec.structs.replace(led_here(epoch=EPOCH + 1000), total_queues=3, hosted=hosted)
    return change(broker, mapping, 3).code


def delete(broker: BrokerUnderTest) -> int:
    return broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic="T")).code


class Snapshots:
    """Copies of the tables after each write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []
        self.files = NotedFiles(self._copy)

    def _copy(self, path: Path, _text: bytes) -> None:
        if path.name in FILES:
            shutil.copytree(path.parent, self.folder / str(len(self.names)) / "store/config")
            self.names.append(path.name)

    def begin(self) -> None:
        """Forget those before."""
        self.names.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.parametrize("last", [create, grow, move_away, move_here, delete])
def test_a_change_that_is_cut_off_can_be_repeated(
    tmp_path: Path, last: Callable[[BrokerUnderTest], int]
) -> None:
    taken = Snapshots(tmp_path / "cut")
    broker = BrokerUnderTest(tmp_path, files=taken.files)
    broker.clock.ms = EPOCH
    if last is not create:
        create(broker)
    taken.begin()
    assert last(broker) == ResponseCode.SUCCESS
    outcome, count = state(broker), len(taken.names)
    broker.close()
    assert count
    for number in range(count):
        again = BrokerUnderTest(tmp_path / "cut" / str(number))
        again.clock.ms = EPOCH
        is_static = again.mappings.is_static("T")
        assert is_static or again.topics.get("T") is None, taken.names[: number + 1]
        assert last(again) == ResponseCode.SUCCESS, taken.names[: number + 1]
        assert state(again) == outcome
        assert not again.unexpected
        again.close()


def state(broker: BrokerUnderTest) -> object:
    topic = broker.topics.get("T")
    if topic is None:
        return broker.mappings.is_static("T")
    return topic.write_queue_nums, topic.read_queue_nums, stored(broker).hosted.keys()


def test_the_mapping_is_on_disk_before_the_topic(tmp_path: Path) -> None:
    taken = Snapshots(tmp_path / "cut")
    broker = BrokerUnderTest(tmp_path, files=taken.files)
    broker.clock.ms = EPOCH
    taken.begin()
    create(broker)
    assert taken.names == list(FILES)
    taken.begin()
    delete(broker)
    assert taken.names[0] == "topicQueueMapping.json"
    assert taken.names[-1] == "staticTopic.json"


def test_a_full_disk_while_a_queue_is_closed(tmp_path: Path) -> None:
    files = FaultyFiles()
    broker = BrokerUnderTest(tmp_path, files=files)
    broker.clock.ms = EPOCH
    create(broker)
    files.is_unwritable = True
    answer = change(broker, moved(0, item(1, 5, -1, bname="broker-b"), led_here()))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "static topic T can't be saved" in answer.remark
    assert broker.mappings.leads("T", 0) is None
    files.is_unwritable = False
    assert move_away(broker) == ResponseCode.SUCCESS
    assert broker.mappings.led("T") == {1: 1}
    broker.close()
    again = BrokerUnderTest(tmp_path)
    assert again.mappings.led("T") == {1: 1}


def test_a_full_disk_while_a_queue_is_opened(tmp_path: Path) -> None:
    files = FaultyFiles()
    broker = BrokerUnderTest(tmp_path, files=files)
    broker.clock.ms = EPOCH
    create(broker)
    files.is_unwritable = True
    assert grow(broker) == ResponseCode.SYSTEM_ERROR
    assert broker.mappings.led("T") == {0: 0, 1: 1}
    files.is_unwritable = False
    assert grow(broker) == ResponseCode.SUCCESS
    assert broker.mappings.led("T") == {0: 0, 1: 1, 2: 2}


async def test_with_synchronous_flush_the_end_is_on_disk_and_in_the_queue(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, flush="sync")
    broker.clock.ms = EPOCH
    create(broker)
    queue = broker.store.queue("T", 0)
    put(broker.store, queue, b"not flushed yet", dispatch=False)
    assert move_away(broker) == ResponseCode.SUCCESS
    assert broker.store.commit_log.flushed_offset == broker.store.commit_log.max_offset
    assert queue.consume_queue.max_offset == queue.next_offset == 1
