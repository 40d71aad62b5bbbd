"""Topics: who may make them, send to them and read them, and what the file holds."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_broker.config import BrokerConfig
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.queues.deletions import DELETIONS_NAME
from headrace_broker.topics.table import TopicTable, unread_warning
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.bodies import TopicConfig
from headrace_protocol.bounds import check_topic
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.golden import STORES, golden_store
from tests.support.golden_frames import golden_frames
from tests.support.running import in_background
from tests.support.stores import FaultyFiles, crash
from tests.support.until import until

NOW_MS = 1_700_000_000_000

CLIENT = MemoryChannel()


def table(folder: Path, **settings: object) -> TopicTable:
    config = broker_config(folder, **settings)
    return TopicTable(config, ConfigFile(folder / "topics.json"), lambda: NOW_MS)


def refused(code: ResponseCode, match: str) -> pytest.RaisesExc[RequestError]:
    return pytest.raises(RequestError, match=match, check=lambda error: error.code == code)


# -- file ------------------------------------------------------------------------------------------


def test_a_new_broker_has_the_topics_of_the_peer(tmp_path: Path) -> None:
    """As the peer registered them at its first start, but for what a client made in between."""
    golden = next(f for f in golden_frames() if f.name == "REGISTER_BROKER")
    wrapper = fastjson.loads(golden.body)["topicConfigSerializeWrapper"]
    expected = {
        name: fastjson.decode(fastjson.dumps(topic), TopicConfig)
        for name, topic in wrapper["topicConfigTable"].items()
    }
    topics = {topic.topic_name: topic for topic in table(tmp_path).all()}
    assert topics == expected


@pytest.mark.parametrize("name", STORES)
def test_a_file_of_the_peer_is_kept(name: str, tmp_path: Path) -> None:
    original = (golden_store(name) / "config/topics.json").read_bytes()
    (tmp_path / "topics.json").write_bytes(original)
    topics = table(tmp_path)
    before = fastjson.loads(original)
    assert {topic.topic_name for topic in topics.all()} >= before["topicConfigTable"].keys()
    assert topics.data_version.counter == before["dataVersion"]["counter"]

    topics.put(TopicConfig(topic_name="new"))
    after = fastjson.loads((tmp_path / "topics.json").read_bytes())
    assert after["dataVersion"]["counter"] == before["dataVersion"]["counter"] + 1
    assert after["dataVersion"]["timestamp"] == NOW_MS
    for topic, config in before["topicConfigTable"].items():
        assert after["topicConfigTable"][topic] == config


def test_a_saved_file_loads_to_the_same_table(tmp_path: Path) -> None:
    first = table(tmp_path)
    first.put(TopicConfig(topic_name="a", attributes={"reserve.time": "5"}, order=True))
    second = table(tmp_path)
    assert list(second.all()) == list(first.all())
    assert second.data_version == first.data_version


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "topics.json").write_text('{"topicConfigTable":{"a":{"perm":"six"}}}')
    with pytest.raises(StoreFormatError, match=r"topics.json: can't be read: .*perm"):
        table(tmp_path)


# -- made by a send --------------------------------------------------------------------------------


def test_a_send_makes_a_topic_as_the_default_topic_says(tmp_path: Path) -> None:
    topics = table(tmp_path)
    topic = topics.create_on_send("new", "TBW102", 4, CLIENT)
    assert topic == TopicConfig(topic_name="new", read_queue_nums=4, write_queue_nums=4, perm=6)
    assert topics.create_on_send("new", "TBW102", 7, CLIENT) is topic
    assert topics.create_on_send("more", "TBW102", 100, CLIENT).write_queue_nums == 8


def test_a_send_makes_no_topic_when_that_is_off(tmp_path: Path) -> None:
    topics = table(tmp_path, auto_create_topic_enable=False)
    with refused(ResponseCode.TOPIC_NOT_EXIST, r"headrace topic create new"):
        topics.create_on_send("new", "TBW102", 4, CLIENT)


def test_a_send_makes_no_topic_by_one_that_does_not_pass_itself_on(tmp_path: Path) -> None:
    topics = table(tmp_path)
    topics.put(TopicConfig(topic_name="mine"))
    for default in ("mine", "missing"):
        with refused(ResponseCode.TOPIC_NOT_EXIST, "not exist"):
            topics.create_on_send("new", default, 4, CLIENT)


def test_retry_and_dead_letter_topics_need_no_default(tmp_path: Path) -> None:
    topics = table(tmp_path, auto_create_topic_enable=False)
    assert topics.create_on_send("%RETRY%g", "", 0, CLIENT).read_queue_nums == 1
    assert topics.create_retry_topic("h", 3).write_queue_nums == 3
    assert topics.create_dlq_topic("g").topic_name == "%DLQ%g"
    before = topics.change_count
    topics.create_dlq_topic("g")
    assert topics.change_count == before


# -- names and permissions -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "A-b_c|d%9", "x" * 127, "%RETRY%" + "g" * 120])
def test_names_that_can_be(name: str) -> None:
    check_topic(name)


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "ä", "a\n", "..", "x" * 128, "%RETRY%" + "g" * 250]
)
def test_names_that_cannot_be(name: str, tmp_path: Path) -> None:
    for put in (
        check_topic,
        lambda name: table(tmp_path).create_on_send(name, "TBW102", 1, CLIENT),
        lambda name: table(tmp_path).put(TopicConfig(topic_name=name)),
    ):
        with refused(ResponseCode.INVALID_PARAMETER, "topic"):
            put(name)


@pytest.mark.parametrize(
    "change", [{"read_queue_nums": -1}, {"write_queue_nums": 70_000}, {"perm": 16}]
)
def test_settings_that_cannot_be(tmp_path: Path, change: dict[str, Any]) -> None:
    topics = table(tmp_path)
    good = TopicConfig(topic_name="good")
    with refused(ResponseCode.INVALID_PARAMETER, "topic bad"):
        topics.put_all([good, TopicConfig(topic_name="bad", **change)])
    assert topics.get("good") is None


def test_permissions(tmp_path: Path) -> None:
    topics = table(tmp_path)
    topics.put(TopicConfig(topic_name="r", perm=4))
    topics.put(TopicConfig(topic_name="w", perm=2))
    topics.check_readable("r")
    topics.check_writable(topics.expect("w"))
    with refused(ResponseCode.NO_PERMISSION, "its perm is 4, give it 6"):
        topics.check_writable(topics.expect("r"))
    with refused(ResponseCode.NO_PERMISSION, "its perm is 2, give it 6"):
        topics.check_readable("w")
    with refused(ResponseCode.TOPIC_NOT_EXIST, "headrace topic create x"):
        topics.check_readable("x")


def test_permissions_of_the_broker(tmp_path: Path) -> None:
    config = BrokerConfig(broker_name="b", store_path_root_dir=tmp_path)
    topics = TopicTable(config, ConfigFile(tmp_path / "topics.json"), lambda: NOW_MS)
    topics.put(TopicConfig(topic_name="t"))
    config.broker_permission = 4
    with refused(ResponseCode.NO_PERMISSION, r"broker\[b\] sending message is forbidden"):
        topics.check_writable(topics.expect("t"))
    assert topics.registered(4)["t"].perm == 4
    assert topics.registered(4)["TBW102"].perm == 5
    assert topics.registered(6)["TBW102"].perm == 7
    config.broker_permission = 2
    with refused(ResponseCode.NO_PERMISSION, r"broker\[b\] pulling message is forbidden"):
        topics.check_readable("t")


# -- changes ---------------------------------------------------------------------------------------


def test_every_change_is_told_once(tmp_path: Path) -> None:
    topics = table(tmp_path)
    told: list[Any] = []
    topics.subscribe(told.append)
    topic = TopicConfig(topic_name="t")
    before = topics.change_count, topics.data_version.counter
    topics.put(topic)
    topics.put(msgspec.structs.replace(topic))
    assert topics.delete("t")
    assert not topics.delete("t")
    assert told == [topic, None]
    assert (topics.change_count, topics.data_version.counter) == (before[0] + 2, before[1] + 2)


def test_queues_that_nobody_reads_are_warned_of() -> None:
    topic = TopicConfig(topic_name="t", write_queue_nums=4, read_queue_nums=2)
    assert "messages in queues 2 to 3 reach no consumer" in (unread_warning(topic) or "")
    assert unread_warning(msgspec.structs.replace(topic, write_queue_nums=1)) is None


def test_a_deletion_cut_short_leaves_no_messages_to_a_topic_of_this_name(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t", 1)
    broker.topics.incarnations.saved.finish()
    broker.topics.saved.finish()
    for _ in range(3):
        broker.store_message("t", 0)
    broker.store.flusher.flush_now()
    # Killed after the queues are gone and the table is saved, before the flush.
    broker.store.use_threads = True
    broker.send(
        RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic="t"), b"", MemoryChannel()
    )
    broker.topics.saved.finish()
    crash(broker.store)
    broker = BrokerUnderTest(tmp_path)
    # The deletion was not acknowledged: done again, it leaves nothing.
    assert broker.topics.get("t") is not None
    header = DeleteTopicHeader(topic="t")
    assert broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, header).code == ResponseCode.SUCCESS
    broker.topics.saved.finish()
    crash(broker.store)
    broker = BrokerUnderTest(tmp_path)
    assert broker.topics.get("t") is None
    broker.create_topic("t", 1)
    assert broker.store.queue("t", 0).consume_queue.max_offset == 0


def assert_may_come_back(answer: Answer) -> None:
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "topic t may come back at the next start, delete it then" in answer.remark


class UnnotedDeletions(FaultyFiles):
    """Fails to save the ends of deleted topics while ``is_failing``."""

    is_failing = False

    def replace(
        self, path: Path, data: bytes | Iterable[bytes], backup_path: Path | None = None
    ) -> None:
        if self.is_failing and path.name == DELETIONS_NAME:
            raise OSError(errno.EIO, "Input/output error")
        super().replace(path, data, backup_path)


@pytest.mark.parametrize("use_threads", [True, False])
def test_a_deletion_that_cannot_be_noted_is_no_success(use_threads: bool, tmp_path: Path) -> None:
    disk = UnnotedDeletions()
    broker = BrokerUnderTest(tmp_path, files=disk)
    broker.store.use_threads = use_threads
    broker.create_topic("t", 1)
    broker.store_message("t", 0)
    broker.store.flusher.flush_now()
    disk.is_failing = True
    header = DeleteTopicHeader(topic="t")
    assert_may_come_back(broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, header))
    disk.is_failing = False
    with pytest.raises(RequestError, match="is being deleted"):
        broker.create_topic("t", 1)
    broker.topics.saved.finish()
    crash(broker.store)
    broker = BrokerUnderTest(tmp_path)
    assert broker.topics.get("t") is not None
    assert broker.store.queue("t", 0).next_offset == 1


async def test_a_deletion_whose_flush_fails_is_no_success(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.store.use_threads = True
    broker.create_topic("t", 1)
    broker.store_message("t", 0)
    channel = MemoryChannel()
    header = DeleteTopicHeader(topic="t")
    broker.send(RequestCode.DELETE_TOPIC_IN_BROKER, header, b"", channel)
    broker.store.flusher.stop_writing("a flush failed")
    async with in_background(broker.store.flusher.run_thorough_flushes):
        await until(lambda: bool(channel.written))
    ((command, body),) = channel.replies()
    assert_may_come_back(Answer(command, body))
    broker.topics.saved.finish()
    crash(broker.store)
    assert BrokerUnderTest(tmp_path).topics.get("t") is not None
