"""Topics that only Apache RocketMQ serves in full, in a store that its broker wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_broker.topics.peer import PeerKind
from headrace_protocol.admin_headers import (
    CreateTopicHeader,
    DeleteTopicHeader,
    GetConsumeStatsHeader,
    GetTopicStatsHeader,
    ResetOffsetHeader,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    PullMessageHeader,
    SendMessageHeaderV2,
)
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.golden import CONFIG, STORES, copy_golden_store, golden_settings
from tests.support.wire import pull_header, send_header

KINDS = {
    "G_BCQ": PeerKind.INNER_BATCH,
}
# Apache's files; of a topic's folder in consumequeue only that there is none.
KEPT = ("config/topicQueueMapping.json", "batchconsumequeue", "consumequeue/G_BCQ")


def open_golden(folder: Path) -> BrokerUnderTest:
    sizes = dataclasses.asdict(golden_settings(folder / "store"))
    del sizes["root"]
    return BrokerUnderTest(folder, broker_config(folder, **CONFIG), **sizes)


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
    return pull_header(queue_offset, queue_id, topic=topic)


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
    return send_header(topic=topic)


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
