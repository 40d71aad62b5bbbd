"""Topics that only Apache RocketMQ serves in full, in a store that its broker wrote."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from headrace_broker.topics.peer import PeerKind
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    CreateTopicHeader,
    DeleteTopicHeader,
    GetConsumeStatsHeader,
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    GetTopicStatsHeader,
    OffsetResponseHeader,
    PullMessageHeader,
    ResetOffsetHeader,
    SendMessageHeaderV2,
)
from headrace_protocol.message import decode_records
from tests.support.broker import BrokerUnderTest
from tests.support.golden import STORES, copy_golden_store, golden_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import msgspec

KINDS = {
    "G_BCQ": PeerKind.INNER_BATCH,
    "G_COMPACT": PeerKind.COMPACTED,
}
# Apache's files; of a topic's folder in consumequeue only that there is none.
KEPT = ("config/topicQueueMapping.json", "batchconsumequeue", "compaction", "consumequeue/G_BCQ")


def open_golden(folder: Path) -> BrokerUnderTest:
    sizes = dataclasses.asdict(golden_settings(folder / "store"))
    del sizes["root"]
    return BrokerUnderTest(folder, **sizes)


@pytest.fixture(params=STORES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerUnderTest]:
    """Fails if it leaves something of Apache's other than it was."""
    root = copy_golden_store(request.param, tmp_path / "store")
    before = kept(root)
    broker = open_golden(tmp_path)
    yield broker
    broker.close()
    assert not broker.unexpected
    assert kept(root) == before


def kept(root: Path) -> dict[Path, bytes]:
    paths = [path for name in KEPT for path in ((root / name), *(root / name).rglob("*"))]
    return {path: path.read_bytes() for path in paths if path.is_file()}


def pull(topic: str, queue_id: int = 0, queue_offset: int = 0) -> PullMessageHeader:
    return PullMessageHeader(
        consumer_group="g",
        topic=topic,
        queue_id=queue_id,
        queue_offset=queue_offset,
        max_msg_nums=32,
        sys_flag=4,
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
        subscription="*",
    )


def create(topic: str) -> CreateTopicHeader:
    return CreateTopicHeader(
        topic=topic,
        default_topic="TBW102",
        read_queue_nums=9,
        write_queue_nums=9,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )


def send(topic: str) -> SendMessageHeaderV2:
    return SendMessageHeaderV2(
        producer_group="p",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=0,
        flag=0,
    )


def assert_refused(
    broker: BrokerUnderTest, topic: str, code: RequestCode, header: msgspec.Struct, **more: Any
) -> None:
    answer = broker.ask(code, header, **more)
    assert answer.code == ResponseCode.NO_PERMISSION, answer.remark
    assert answer.remark.startswith(f"topic[{topic}] is {KINDS[topic].value}, which ")
    assert "start Apache's broker on this store" in answer.remark


def test_they_are_known(opened: BrokerUnderTest) -> None:
    assert opened.topics.kinds() == {kind: [topic] for topic, kind in KINDS.items()}


@pytest.mark.parametrize("topic", KINDS)
def test_nothing_is_sent_to_them_and_nothing_changed(opened: BrokerUnderTest, topic: str) -> None:
    log_end = opened.store.commit_log.max_offset
    config = opened.topics.expect(topic)
    assert_refused(opened, topic, RequestCode.SEND_MESSAGE_V2, send(topic), body=b"new")
    assert_refused(opened, topic, RequestCode.UPDATE_AND_CREATE_TOPIC, create(topic))
    assert_refused(
        opened, topic, RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic=topic)
    )
    assert opened.store.commit_log.max_offset == log_end
    assert opened.topics.expect(topic) is config


def test_queues_of_inner_batches_are_not_taken_for_empty(opened: BrokerUnderTest) -> None:
    topic = "G_BCQ"
    place: dict[str, Any] = {"topic": topic, "queue_id": 0}
    opened.offsets.commit("g", topic, 0, 8)
    opened.join("g", "member", topic)
    reset = ResetOffsetHeader(group="g", topic=topic, timestamp=-1, is_force=True)
    for code, header in (
        (RequestCode.PULL_MESSAGE, pull(topic, queue_offset=8)),
        (RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(**place)),
        (RequestCode.GET_MAX_OFFSET, GetMaxOffsetHeader(**place)),
        (RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic=topic)),
        (RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset),
    ):
        assert_refused(opened, topic, code, header)
    progress = opened.ask(RequestCode.GET_CONSUME_STATS, GetConsumeStatsHeader(consumer_group="g"))
    assert progress.code == ResponseCode.SUCCESS
    assert topic.encode() not in progress.body
    assert opened.offsets.query("g", topic, 0) == 8


@pytest.mark.parametrize(("topic", "count"), [("G_COMPACT", 65)])
def test_the_others_are_read_from_the_log(opened: BrokerUnderTest, topic: str, count: int) -> None:
    found = 0
    for queue_id in range(opened.topics.expect(topic).read_queue_nums):
        queue = opened.store.queue(topic, queue_id)
        while (offset := found_in(opened, topic, queue_id)) < queue.next_offset:
            answer = opened.ask(RequestCode.PULL_MESSAGE, pull(topic, queue_id, offset))
            records = decode_records(answer.body)
            assert [record.queue_offset for record in records] == list(
                range(offset, offset + len(records))
            )
            found += len(records)
            opened.offsets.commit("g", topic, queue_id, offset + len(records))
    assert found == count


def found_in(broker: BrokerUnderTest, topic: str, queue_id: int) -> int:
    return broker.offsets.query("g", topic, queue_id) or 0


def test_a_compacted_topic_is_read_while_the_log_has_all_of_it(tmp_path: Path) -> None:
    root = copy_golden_store("clean", tmp_path / "store")
    paths = sorted((root / "commitlog").iterdir())
    broker = open_golden(tmp_path)
    last = broker.store.queue("G_COMPACT", 0).consume_queue.last_physical_offset
    broker.close()
    for path in paths:
        if int(path.name) + 262_144 <= last:
            path.unlink()
    broker = open_golden(tmp_path)
    queue = broker.store.queue("G_COMPACT", 0)
    min_offset = broker.store.source(queue).min_offset()
    assert 0 < min_offset < queue.next_offset
    header = GetMinOffsetHeader(topic="G_COMPACT", queue_id=0)
    assert_refused(broker, "G_COMPACT", RequestCode.GET_MIN_OFFSET, header)
    assert_refused(broker, "G_COMPACT", RequestCode.PULL_MESSAGE, pull("G_COMPACT"))
    for queue_id in (0, -1):  # one queue, all
        reset = ResetOffsetHeader(
            group="g", topic="G_COMPACT", queue_id=queue_id, timestamp=0, is_force=True
        )
        assert_refused(broker, "G_COMPACT", RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)
    end = GetMaxOffsetHeader(topic="G_COMPACT", queue_id=0)
    answer = broker.ask(RequestCode.GET_MAX_OFFSET, end)
    assert answer.command.header(OffsetResponseHeader).offset == queue.next_offset
    later = pull("G_COMPACT", queue_offset=min_offset)
    answer = broker.ask(RequestCode.PULL_MESSAGE, later)
    assert len(decode_records(answer.body)) == queue.next_offset - min_offset
    broker.close()
