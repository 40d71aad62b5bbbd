"""A broker with a tier: what it uploads, and what consumers read over both tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.queue_directory import Use
from headrace_broker.store.retention.topic_floors import TopicLimit
from headrace_broker.store.store_source import GetStatus
from headrace_broker.tiered.container.tier import Tier
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import NotReady, RequestError
from headrace_protocol.java_hash import tags_code
from headrace_protocol.tier.driver import Failure
from tests.support.broker import BrokerUnderTest
from tests.support.object_tiers import Fault, FaultyDriver
from tests.support.stores import crash, held, ready
from tests.support.tiered_broker import (
    BODY_BYTES,
    TOPIC,
    expire_log,
    follow,
    put,
    read_all,
    source,
    start,
    tier_of,
    upload,
    wrap_driver,
)


async def test_old_messages_come_from_the_tier_and_new_ones_from_the_log(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    assert await expire_log(broker) > 10
    put(broker, 20, 5)
    assert read_all(broker) == [*range(25)]
    assert ready(source(broker, Use.BEGIN).min_offset) == 0
    assert source(broker).known_range() == (0, 25)
    broker.close()
    assert not held(tmp_path)


async def test_what_waits_has_no_records_of_other_queues(broker: BrokerUnderTest) -> None:
    """The log is read in pieces that other queues share; only own records are kept and counted."""
    others = ("Others", "More")
    for name in others:
        broker.create_topic(name)
    for number in range(20):
        for name in (TOPIC, *others):
            put(broker, number, 1, name)
    broker.store.index_tick()
    broker.store.flusher.flush_now()
    follow(broker)
    queues = [broker.store.queue(name, 0) for name in (TOPIC, *others)]
    waiting_bytes = sum(broker.store.source(queue).record_bytes() for queue in queues)
    assert tier_of(broker).upload.waiting_bytes == waiting_bytes
    upload(broker)
    await expire_log(broker)
    for name in (TOPIC, *others):
        assert read_all(broker, name) == [*range(20)]


@pytest.mark.parametrize("provider", ["posix", "file"])
async def test_a_killed_broker_continues_where_it_was(tmp_path: Path, provider: str) -> None:
    broker = start(tmp_path, tiered_backend_service_provider=provider)
    put(broker, 0, 10)
    upload(broker)
    put(broker, 10, 10)
    # Uploaded, and killed before the positions were saved.
    follow(broker)
    tier_of(broker).upload.sync()
    crash(broker.store)
    broker = start(tmp_path, broker.clock, tiered_backend_service_provider=provider)
    put(broker, 20, 5)
    upload(broker)
    assert await expire_log(broker) > 15
    assert read_all(broker) == [*range(25)]
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    assert (queue.min_offset, queue.commit_offset) == (0, 25)
    index = tier_of(broker).access.tier.index
    assert index is not None
    for number in (3, 15, 24):
        hits = index.query(TOPIC, f"k{number}", 0, 1 << 60, 10)
        assert not isinstance(hits, Failure)
        assert len(hits) == 1


async def test_the_log_keeps_what_is_not_uploaded(broker: BrokerUnderTest) -> None:
    put(broker, 0, 20)
    broker.store.index_tick()
    broker.store.flusher.flush_now()
    assert await expire_log(broker) == 0
    upload(broker)
    assert await expire_log(broker) > 10


async def test_a_group_that_is_behind_holds_no_log_files_that_are_uploaded(
    broker: BrokerUnderTest,
) -> None:
    put(broker, 0, 20)
    broker.join("group", "client", TOPIC)
    broker.offsets.commit("group", TOPIC, 0, 3)
    upload(broker)
    assert await expire_log(broker) > 10
    assert read_all(broker, offset=3) == [*range(3, 20)]


async def test_a_store_that_is_away_fails_only_reads_of_the_tier(
    broker: BrokerUnderTest,
) -> None:
    driver = wrap_driver(broker, FaultyDriver)
    put(broker, 0, 20)
    upload(broker)
    local_min = await expire_log(broker)
    driver.fault = lambda _call: Fault.FAILS
    put(broker, 20, 5)
    with pytest.raises(OSError, match="away"):
        upload(broker)
    reader = source(broker)
    assert read_all(broker, offset=local_min) == [*range(local_min, 25)]
    for _ in range(3):
        with pytest.raises(RequestError, match=r"unreachable since .* away") as refused:
            ready(lambda: reader.get(0, 3, 100_000, None))
        assert refused.value.code == ResponseCode.SYSTEM_BUSY
    # Now no thread is asked any more.
    with pytest.raises(RequestError, match="next try in 1 s"):
        reader.get(0, 3, 100_000, None)
    assert "away" in tier_of(broker).runtime_info()["tierProblem"]
    driver.fault = lambda _call: Fault.NONE
    tier_of(broker).reader.breaker.succeeded()
    upload(broker)
    await expire_log(broker)
    assert read_all(broker) == [*range(25)]


async def test_a_start_without_the_store(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    local_min = await expire_log(broker)
    broker.close()
    broker = start(tmp_path, broker.clock)
    driver = wrap_driver(broker, FaultyDriver)
    driver.fault = lambda _call: Fault.FAILS
    tier_of(broker).load()
    assert read_all(broker, offset=local_min) == [*range(local_min, 20)]
    with pytest.raises(RequestError, match=r"unreachable since .* away") as refused:
        ready(lambda: source(broker).get(0, 3, 100_000, None))
    assert refused.value.code == ResponseCode.SYSTEM_BUSY
    driver.fault = lambda _call: Fault.NONE
    assert read_all(broker) == [*range(20)]


async def test_a_queue_whose_tier_has_other_messages_is_not_uploaded(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 5)
    upload(broker)
    broker.close()
    (tmp_path / "store").rename(tmp_path / "lost")
    broker = start(tmp_path)
    broker.clock.ms += 12345
    put(broker, 0, 20)
    other = "Others"
    broker.create_topic(other)
    put(broker, 0, 20, other)
    upload(broker)
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    assert queue.commit_offset == 5
    assert tier_of(broker).runtime_info()["tierStuckQueues"] == "1"
    # The log keeps what can't be uploaded, and other queues go on.
    assert await expire_log(broker) == 0
    others = tier_of(broker).access.queue(other, 0)
    assert others is not None
    assert others.commit_offset == 20
    tier_of(broker).clean_up({TOPIC: TopicLimit(1 << 50, None)})
    assert (queue.min_offset, queue.commit_offset) == (0, 5)
    assert not isinstance(queue.store_time(4), Failure)


async def test_a_deleted_topic_leaves_the_tier(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    header = DeleteTopicHeader(topic=TOPIC)
    assert broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, header).code == ResponseCode.SUCCESS
    upload(broker)
    assert not list((tmp_path / "tier").rglob("COMMIT_LOG/*"))
    broker.create_topic(TOPIC)
    put(broker, 100, 3)
    upload(broker)
    assert read_all(broker) == [100, 101, 102]


def test_system_topics_and_those_with_the_attribute_are_not_tiered(broker: BrokerUnderTest) -> None:
    broker.create_topic("Local", attributes={"tiered": "false"})
    broker.create_topic("%RETRY%group")
    wants = tier_of(broker).upload.wants
    assert [wants(name) for name in (TOPIC, "%RETRY%group")] == [True, True]
    not_tiered = ("Local", "missing", "SCHEDULE_TOPIC_XXXX", "rmq_sys_x", "broker-a")
    assert not any(wants(name) for name in not_tiered)


async def test_a_message_larger_than_a_group_is_uploaded(tmp_path: Path) -> None:
    broker = start(tmp_path, tiered_store_group_commit_size=100)
    put(broker, 0, 3)
    upload(broker)
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    assert queue.commit_offset == 3


@pytest.mark.parametrize("level", ["DISABLE", "FORCE"])
async def test_levels(tmp_path: Path, level: str) -> None:
    broker = start(tmp_path, tiered_storage_level=level)
    put(broker, 0, 20)
    upload(broker)
    put(broker, 20, 2)
    reader = source(broker)
    if level == "FORCE":
        with pytest.raises(NotReady, match="messages of the tier"):
            reader.get(18, 5, 100_000, None)
        assert read_all(broker) == [*range(22)]
    else:
        assert reader.get(18, 5, 100_000, None).count == 2
        assert await expire_log(broker) > 10
        assert reader.get(0, 3, 1000, None).status is GetStatus.OFFSET_TOO_SMALL


async def test_a_block_by_tag_holds_no_more_with_what_lies_between_its_messages(
    tmp_path: Path,
) -> None:
    broker = start(tmp_path)
    tier_of(broker).reader.blocks.bytes_max = 16 * 10 * BODY_BYTES
    put(broker, 0, 40)
    upload(broker)
    await expire_log(broker)
    wanted = frozenset({tags_code("odd")})
    with pytest.raises(NotReady) as due:
        source(broker).get_bulk(0, 32, 100_000, wanted)
    due.value.fetch()
    assert BODY_BYTES < tier_of(broker).reader.blocks.byte_count < 12 * BODY_BYTES
    result = source(broker).get_bulk(0, 32, 100_000, wanted)
    assert 0 < result.count < result.next_offset < 10


async def test_expired_segments_leave_the_tier(tmp_path: Path) -> None:
    broker = start(tmp_path, tiered_store_file_reserved_time=1)
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    put(broker, 20, 3)
    upload(broker)
    tier_of(broker).clean_up({})
    low = ready(source(broker, Use.BEGIN).min_offset)
    assert 0 < low <= 20
    result = ready(lambda: source(broker).get(0, 3, 1000, None))
    assert (result.status, result.next_offset) == (GetStatus.OFFSET_TOO_SMALL, low)
    assert read_all(broker, offset=low) == [*range(low, 23)]


async def test_a_queue_without_messages_in_the_tier_has_the_range_of_the_log(
    broker: BrokerUnderTest,
) -> None:
    put(broker, 0, 20)
    upload(broker)
    low = await expire_log(broker)
    assert low > 5
    tier = tier_of(broker).access.tier
    assert isinstance(tier, Tier)
    # As after an expiry whose messages a crash then took out of the units, too.
    assert tier.cut((TOPIC, 0), 5, broker.clock.ms) is None
    queue = tier.queues[TOPIC, 0]
    queue.min_offset = queue.commit_offset
    assert source(broker).known_range() == (low, 20)
    assert ready(source(broker, Use.BEGIN).min_offset) == low
    result = ready(lambda: source(broker).get(5, 3, 1000, None))
    assert result.status is GetStatus.OFFSET_TOO_SMALL
    assert (result.min_offset, result.next_offset) == (low, low)


async def test_a_topics_reserve_time_counts_hours(tmp_path: Path) -> None:
    broker = start(tmp_path, tiered_store_file_reserved_time=1000)
    topic = "Short"
    broker.create_topic(topic, attributes={"reserve.time": "2"})
    for name in (TOPIC, topic):
        put(broker, 0, 20, name)
    upload(broker)
    cleaner = tier_of(broker)
    queues = {name: cleaner.access.tier.queues[name, 0] for name in (TOPIC, topic)}
    broker.clock.ms += 2 * 3_600_000 - 60_000
    cleaner.clean_up(cleaner.limits())
    assert {name: queue.min_offset for name, queue in queues.items()} == {TOPIC: 0, topic: 0}
    # For Apache's broker.
    tier = cleaner.access.tier
    assert isinstance(tier, Tier)
    rows = {name: tier.metadata.topic(name) for name in (TOPIC, topic)}
    assert {name: row.reserve_time for name, row in rows.items() if row} == {TOPIC: -1, topic: 2}
    broker.clock.ms += 60_000
    cleaner.clean_up(cleaner.limits())
    assert queues[TOPIC].min_offset == 0
    assert 10 < queues[topic].min_offset < 20


async def test_a_topics_reserve_size_counts_both_tiers(tmp_path: Path) -> None:
    broker = start(tmp_path)
    topic, limit = "Small", 12_000
    broker.create_topic(topic, attributes={"reserve.size": str(limit)})
    put(broker, 0, 20, topic)
    upload(broker)
    cleaner = tier_of(broker)
    tier = cleaner.access.tier
    assert isinstance(tier, Tier)
    queue = tier.queues[topic, 0]
    cleaner.clean_up(cleaner.limits())
    # Whole segments of less than 5000 bytes go, and what is left is no less than the limit.
    assert limit <= queue.log_bytes < limit + 5000
    assert queue.log_bytes == queue.log.end - queue.log.base
    low = queue.min_offset
    put(broker, 20, 6, topic)
    behind_bytes = cleaner.state.behind_bytes(topic)
    assert 6000 < behind_bytes < 7000
    cleaner.clean_up(cleaner.limits())
    assert queue.min_offset > low
    assert limit <= queue.log_bytes + behind_bytes < limit + 5000
    stored = {path.name for path in (tmp_path / "tier").rglob(f"{topic}/0/COMMIT_LOG/*")}
    assert len(stored) == len(queue.log.segments)
    assert read_all(broker, topic, queue.min_offset) == [*range(queue.min_offset, 26)]


async def test_what_is_not_uploaded_holds_the_log_by_name_unless_it_may_go(
    broker: BrokerUnderTest,
) -> None:
    put(broker, 0, 4)
    upload(broker)
    put(broker, 4, 20)
    broker.store.index_tick()
    broker.store.flusher.flush_now()
    tier_of(broker).state.following._note_scan(tier_of(broker).state.following._start_scan())
    low = await expire_log(broker)
    assert low <= 4
    assert broker.store.cleaner.status().oldest_unconsumed.startswith("follower tier")
    broker.config.update({"deleteUntieredEnable": "true"})
    low = await expire_log(broker)
    assert low > 10
    # The tier keeps what it has, and continues behind the gap.
    upload(broker)
    put(broker, 24, 2)
    upload(broker)
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    assert (queue.min_offset, queue.commit_offset) == (0, 26)
    result = ready(lambda: source(broker).get(0, 10, 100_000, None))
    assert (result.status, result.count) == (GetStatus.FOUND, 4)
    behind_the_gap = ready(lambda: source(broker).get(4, 1, 100_000, None))
    assert behind_the_gap.next_offset == low + 1
    assert read_all(broker, offset=low) == [*range(low, 26)]
