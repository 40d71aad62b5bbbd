"""TIER_STATUS: how far the uploads are."""

from __future__ import annotations

from pathlib import Path

from headrace_broker.tiered.access.standings import Event
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.tier_bodies import TierStatus
from headrace_protocol.tier_headers import TierStatusHeader
from tests.support.broker import BrokerUnderTest
from tests.support.object_tiers import Fault, FaultyDriver
from tests.support.stores import ready
from tests.support.tiered_broker import (
    TOPIC,
    expire_log,
    put,
    source,
    start,
    tier_of,
    upload,
    wrap_driver,
)


def ask(broker: BrokerUnderTest, topic: str | None = None, max_num: int = 10) -> TierStatus:
    answer = broker.ask(RequestCode.TIER_STATUS, TierStatusHeader(topic=topic, max_num=max_num))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return TierStatus.decode(answer.body)


async def test_ranges_and_what_is_behind(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    low = await expire_log(broker)
    put(broker, 20, 5)
    broker.clock.ms += 2000
    record_bytes = sum(source(broker).unit(offset)[1] for offset in range(20, 25))
    status = ask(broker)
    assert (status.level, status.is_open, status.queue_count) == ("NOT_IN_DISK", True, 1)
    assert (status.upload_problem, status.read_problem, status.is_read_paused) == ("", "", False)
    (queue,) = status.queues
    assert (queue.topic, queue.queue_id, queue.problem) == (TOPIC, 0, "")
    assert (queue.local_min, queue.local_max) == (low, 25)
    assert (queue.tier_min, queue.tier_end) == (0, 20)
    sizes = sum(path.stat().st_size for path in (tmp_path / "tier").rglob("COMMIT_LOG/*"))
    assert queue.tier_bytes == sizes
    assert (queue.behind_messages, queue.behind_bytes) == (5, record_bytes)
    first_ms = ready(lambda: source(broker).store_time_at(20))
    assert first_ms is not None
    assert queue.behind_seconds == (broker.clock.ms - first_ms) / 1000 >= 2
    upload(broker)
    (queue,) = ask(broker).queues
    assert (queue.behind_messages, queue.behind_bytes, queue.behind_seconds) == (0, 0, 0)


async def test_the_queues_that_are_furthest_behind_come_first(broker: BrokerUnderTest) -> None:
    for name, count in (("A", 1), ("B", 3), ("C", 1), ("D", 2)):
        broker.create_topic(name)
        put(broker, 0, count, name)
    broker.create_topic("Local", attributes={"tiered": "false"})
    put(broker, 0, 9, "Local")
    found = [queue.topic for queue in ask(broker).queues]
    assert found == ["B", "D", "A", "C"]
    status = ask(broker, max_num=2)
    assert [queue.topic for queue in status.queues] == ["B", "D"]
    assert status.queue_count == 4
    assert not ask(broker, max_num=-1).queues
    assert [queue.topic for queue in ask(broker, "C").queues] == ["C"]
    header = TierStatusHeader(topic="missing", max_num=1)
    assert broker.ask(RequestCode.TIER_STATUS, header).code == ResponseCode.TOPIC_NOT_EXIST


async def test_problems_are_reported(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 5)
    upload(broker)
    broker.close()
    broker = start(tmp_path, broker.clock)
    driver = wrap_driver(broker, FaultyDriver)
    driver.fault = lambda _call: Fault.FAILS
    tier_of(broker).load()
    put(broker, 5, 2)
    status = ask(broker)
    assert not status.is_open
    (queue,) = status.queues
    # As far as the log's side knows.
    assert (queue.behind_messages, queue.tier_min, queue.tier_end) == (2, None, None)
    driver.fault = lambda _call: Fault.NONE
    tier_of(broker).load()
    assert ask(broker).queues[0].tier_end == 5
    tier_of(broker).upload.standings.apply((TOPIC, 0), Event.FAIL, "damaged")
    (queue,) = ask(broker).queues
    now_ms = broker.clock.now_ms()
    assert (queue.problem, queue.problem_since_ms, queue.foreign_from) == ("damaged", now_ms, None)


def test_a_broker_without_a_tier_says_so(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    answer = broker.ask(RequestCode.TIER_STATUS, TierStatusHeader(max_num=1))
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark is not None
    assert "messageStorePlugIn=tieredstore" in answer.remark
