"""Lag and statistics of compacted topics count the messages that are there."""

from __future__ import annotations

from pathlib import Path

from headrace_protocol.admin_headers import GetConsumeStatsHeader, GetTopicStatsHeader
from headrace_protocol.bodies import ConsumeStats, OffsetWrapper, TopicOffset, TopicStatsTable
from headrace_protocol.codes import RequestCode
from tests.broker.compaction.test_compaction_source import (
    SIZES,
    C,
    compact,
    create,
    fill,
    follow,
    read,
)
from tests.broker.metrics.test_metrics import AGE, LAG
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.metrics import collect, value


def progress(broker: BrokerUnderTest, topic: str = C) -> OffsetWrapper:
    header = GetConsumeStatsHeader(consumer_group="g", topic=topic)
    answer = broker.ask(RequestCode.GET_CONSUME_STATS, header)
    (found,) = ConsumeStats.decode(answer.body).offset_table.values()
    return found


def extent(broker: BrokerUnderTest, topic: str = C) -> TopicOffset:
    answer = broker.ask(RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic=topic))
    (found,) = TopicStatsTable.decode(answer.body).offset_table.values()
    return found


def metrics(broker: BrokerUnderTest, *, may_wait: bool = True) -> tuple[float | None, float | None]:
    page = collect(*broker.core.added.collectors, may_wait=may_wait)
    labels = {"consumer_group": "g", "topic": C}
    return value(page, LAG, **labels), value(page, AGE, **labels)


def start(folder: Path) -> BrokerUnderTest:
    config = broker_config(folder, monitor_port=0, **SIZES)
    return BrokerUnderTest(folder, config, commit_log_file_bytes=1 << 16)


def start_compacted(folder: Path) -> BrokerUnderTest:
    """Offsets 40 to 59 remain of 0 to 59, then 45, 55 and 60 to 69 are written again."""
    broker = start(folder)
    create(broker)
    for _ in range(3):
        fill(broker, 0, 20)
    fill(broker, 5, 6)
    fill(broker, 15, 16)
    follow(broker)
    compact(broker)
    fill(broker, 20, 30)
    return broker


def test_offsets_without_a_message_do_not_count(tmp_path: Path) -> None:
    broker = start_compacted(tmp_path)
    broker.join("g", "c", C)
    first_ms = broker.clock.ms
    for is_followed in (False, True):
        if is_followed:
            follow(broker)
        offsets = [message.queue_offset for message in read(broker)]
        stored_ms = {m.queue_offset: m.store_timestamp for m in read(broker)}
        assert len(offsets) == 30
        assert offsets[-1] == 71
        assert extent(broker).message_count == 30
        for committed in range(73):
            broker.offsets.commit("g", C, 0, committed)
            left = [offset for offset in offsets if offset >= committed]
            at = progress(broker)
            assert at.broker_offset - at.consumer_offset - (at.missing_count or 0) == len(left)
            age_ms = first_ms - stored_ms[left[0]] if left else 0
            assert metrics(broker) == (len(left), age_ms)


def test_a_group_without_progress_has_all_messages_to_consume(tmp_path: Path) -> None:
    broker = start_compacted(tmp_path)
    broker.join("g", "c", C)
    assert progress(broker).missing_count == 42
    assert metrics(broker)[0] == 30


def test_answers_about_other_topics_are_those_of_apaches_broker(tmp_path: Path) -> None:
    broker = start(tmp_path)
    broker.create_topic("plain", 1)
    create(broker)
    fill(broker, 0, 3)
    broker.store_message("plain", 0)
    for topic in ("plain", C):
        assert extent(broker, topic).missing_count is None
        assert progress(broker, topic).missing_count is None
    answer = broker.ask(RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic="plain"))
    assert b"missing" not in answer.body
