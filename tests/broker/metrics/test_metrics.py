"""Metrics of a broker: values, bounds, and the loop's delay while they are collected."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace_broker.config import BrokerConfig
from headrace_broker.metrics import table
from headrace_broker.metrics.broker_metrics import TrafficMetrics
from headrace_broker.metrics.lag import GroupMetrics
from headrace_broker.server import Broker
from headrace_daemon.metrics.daemon_metrics import DAEMON_METRICS
from headrace_daemon.metrics.samples import Samples
from headrace_daemon.metrics.scrapes import SCRAPE_SECONDS
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.metrics import NAMESERVER_METRICS
from headrace_protocol.bodies import SubscriptionGroupConfig, TopicConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import NotReady
from tests.broker.processors.test_cold_lookups import ColdFiles
from tests.broker.processors.test_send import frame
from tests.broker.serving.test_monitor import ask
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.metrics import Page, collect, parse, value, values
from tests.support.pop_broker import INVISIBLE_MS, PopBroker
from tests.support.running import small_config
from tests.support.stores import put
from tests.support.wire import pull_header

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
LAG = "rocketmq_consumer_lag_messages"
AGE = "rocketmq_consumer_lag_latency"


def measured(folder: Path, **store: Any) -> BrokerUnderTest:
    """A broker with a monitor, without which it collects nothing."""
    return BrokerUnderTest(folder, broker_config(folder, monitor_port=0), **store)


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    return measured(tmp_path)


def page_of(broker: BrokerUnderTest, *, may_wait: bool = True) -> Page:
    return collect(*broker.core.added.collectors, may_wait=may_wait)


def pull(broker: BrokerUnderTest, group: str, topic: str, count: int) -> None:
    header = pull_header(
        consumer_group=group, topic=topic, max_msg_nums=count, sys_flag=0, sub_version=1
    )
    assert broker.ask(RequestCode.PULL_MESSAGE, header).code == ResponseCode.SUCCESS


def send(broker: BrokerUnderTest, topic: str, body: bytes = b"body") -> int:
    channel = MemoryChannel()
    message = {"b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "body": body}
    broker.take(frame(message, 1), channel)
    ((answer, _),) = [reply for reply in channel.replies() if reply[0].is_response]
    return answer.code


# -- what went in and out --------------------------------------------------------------------------


def test_messages_are_counted_by_topic_and_group(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    broker.join("g", "c", "t")
    for body in (b"1", b"22", b"333"):
        assert send(broker, "t", body) == ResponseCode.SUCCESS
    pull(broker, "g", "t", 2)
    page = page_of(broker)
    assert value(page, "rocketmq_messages_in_total", topic="t", is_system="false") == 3
    assert value(page, "rocketmq_throughput_in_total", topic="t") == 6
    assert value(page, "rocketmq_messages_out_total", topic="t", consumer_group="g") == 2
    assert value(page, "headrace_stored_messages_total") == 3
    assert value(page, "headrace_delivered_messages_total") == 2
    assert value(page, "rocketmq_consumer_connections", consumer_group="g") == 1


def test_topics_of_a_flood_share_no_page(broker: BrokerUnderTest) -> None:
    for number in range(5):
        broker.statistics.put(f"t{number}", 1, 1)
    page = collect(TrafficMetrics(broker.statistics, broker.topics, topics_max=3))
    assert values(page, "rocketmq_messages_in_total", "topic").keys() == {"t0", "t1", "t2"}
    assert value(page, "headrace_omitted", kind="topics") == 2
    assert value(page, "headrace_stored_messages_total") == 5


# -- lag -------------------------------------------------------------------------------------------


def behind(broker: BrokerUnderTest, group: str, topic: str = "t") -> tuple[float | None, ...]:
    page = page_of(broker)
    labels = {"consumer_group": group, "topic": topic, "is_retry": "false", "is_system": "false"}
    return value(page, LAG, **labels), value(page, AGE, **labels)


def test_lag_counts_messages_and_time_over_all_queues(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", queue_nums=3)
    broker.join("g", "c", "t")
    assert behind(broker, "g") == (0, 0)
    for number in range(10):  # a second apart
        broker.store_message("t", number % 2)
    assert behind(broker, "g") == (10, 10_000)
    for queue_id, offset in ((0, 4), (1, 2)):  # of 5 each; the oldest left was the sixth
        broker.offsets.commit("g", "t", queue_id, offset)
    assert behind(broker, "g") == (4, 5_000)
    broker.offsets.commit("g", "t", 0, 5)
    broker.offsets.commit("g", "t", 1, 5)
    assert behind(broker, "g") == (0, 0)


def test_lag_of_a_group_that_has_only_pulled_begins_there(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", queue_nums=1)
    broker.join("g", "c", "t")
    for _ in range(3):
        broker.store_message("t", 0)
    pull(broker, "g", "t", 2)
    assert behind(broker, "g") == (1, 1_000)


def test_what_is_popped_is_counted(tmp_path: Path) -> None:
    config = broker_config(tmp_path, monitor_port=0, pop_revive_max_attempt_times=1)
    broker = PopBroker(tmp_path, config)
    labels = {"consumer_group": "g", "topic": "T", "is_retry": "false", "is_system": "false"}
    names = "headrace_popped_messages", "headrace_pop_acked_messages_total", "headrace_held_pops"

    def page() -> tuple[float | None, ...]:
        found = page_of(broker)
        of_group = value(found, "rocketmq_consumer_inflight_messages", **labels)
        return of_group, *(value(found, name) for name in names)

    def expired(outcome: str) -> float | None:
        return value(page_of(broker), "headrace_pop_expired_messages_total", outcome=outcome)

    assert page() == (None, None, None, None)
    for number in range(6):
        broker.store_message("T", number % 2)
    broker.groups.put(SubscriptionGroupConfig(group_name="h", retry_max_times=0))
    first, second, *_ = [handle for _, handle in broker.taken()]
    for handle in (first, first, second):
        broker.ack(handle)
    assert page() == (4, 4, 2, 0)
    broker.taken(consumer_group="h", queue_id=0)
    broker.clock.ms += INVISIBLE_MS
    broker.revive()
    assert page() == (0, 0, 2, 0)
    assert (expired("retry"), expired("dead"), expired("given_up")) == (4, 3, 0)


async def test_pops_that_wait_are_counted(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path, broker_config(tmp_path, monitor_port=0))
    broker.hold()
    assert value(page_of(broker), "headrace_held_pops") == 1
    broker.long_polling.answer_all()
    assert value(page_of(broker), "headrace_held_pops") == 0


def test_groups_that_nothing_waits_for_have_no_lag(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", queue_nums=1)
    broker.store_message("t", 0)
    broker.offsets.commit("gone", "t", 0, 0)  # its group was deleted, its offsets were not
    broker.groups.put(SubscriptionGroupConfig(group_name="away"))
    broker.offsets.commit("away", "t", 0, 0)
    assert values(page_of(broker), LAG, "consumer_group") == {"away": 1}


def test_a_topic_that_is_deleted_takes_its_lag_along(broker: BrokerUnderTest) -> None:
    broker.create_topic("t", queue_nums=1)
    broker.join("g", "c", "t")
    broker.store_message("t", 0)
    assert behind(broker, "g") == (1, 1_000)
    broker.store.delete_topic("t")
    assert behind(broker, "g") == (0, 0)
    broker.store_message("t", 0)
    assert behind(broker, "g") == (1, 1_000)  # the place that was known is of another queue
    broker.topics.delete("t")
    assert behind(broker, "g") == (None, None)


def test_the_age_of_what_was_removed_is_that_of_the_oldest_left(tmp_path: Path) -> None:
    broker = measured(tmp_path, commit_log_file_bytes=4096)
    broker.create_topic("t", queue_nums=1)
    broker.join("g", "c", "t")
    broker.offsets.commit("g", "t", 0, 0)
    for _ in range(20):
        broker.store_message("t", 0, b"x" * 1000)
    first = broker.store.commit_log.files.files[0]
    assert behind(broker, "g") == (20, 20_000)
    broker.store.commit_log.files.detach_first(1)
    gone = first.file_bytes // 1100
    assert behind(broker, "g") == (20, (20 - gone) * 1000)


def test_a_flood_of_groups_leaves_the_older_ones_their_lag(broker: BrokerUnderTest) -> None:
    lag_of(broker).pairs_max = 2
    broker.create_topic("t", queue_nums=1)
    for number in range(5):
        broker.groups.put(SubscriptionGroupConfig(group_name=f"g{number}"))
        broker.offsets.commit(f"g{number}", "t", 0, 0)
    page = page_of(broker)
    assert values(page, LAG, "consumer_group").keys() == {"g0", "g1"}
    assert value(page, "headrace_omitted", kind="groups") == 3


def lag_of(broker: BrokerUnderTest) -> GroupMetrics:
    (lag,) = (each for each in broker.core.added.collectors if isinstance(each, GroupMetrics))
    return lag


def test_queues_of_a_flood_are_not_looked_at(broker: BrokerUnderTest) -> None:
    lag_of(broker).queues_max = 10
    for topic, queue_nums in (("large", 11), ("small", 10), ("more", 1)):
        broker.create_topic(topic, queue_nums=queue_nums)
        broker.join("g-" + topic, "c", topic)
    page = page_of(broker)
    assert values(page, LAG, "consumer_group").keys() == {"g-small"}
    assert value(page, "headrace_omitted", kind="groups") == 2


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[BrokerUnderTest]:
    """A group that is behind in what memory does not hold."""
    files = ColdFiles()
    broker = measured(tmp_path, files=files)
    broker.store.commit_log.hot_bytes = broker.store.commit_log.hot_units = 0
    broker.create_topic("t", queue_nums=1)
    broker.join("g", "c", "t")
    for _ in range(5):
        broker.store_message("t", 0)
    broker.offsets.commit("g", "t", 0, 3)
    yield broker
    files.is_warm = True
    broker.close()


def test_the_disk_is_read_once_for_a_group_that_does_not_move(cold: BrokerUnderTest) -> None:
    files = cold.store.fs
    assert isinstance(files, ColdFiles)
    collectors = cold.core.added.collectors
    page = collect(*collectors)
    assert (value(page, LAG), value(page, AGE)) == (2, 2_000)
    units = {path for path in files.fetched if "consumequeue" in path.parts}
    assert units
    files.fetched -= units
    assert value(collect(*collectors), AGE) == 2_000
    assert not units & files.fetched


def test_without_time_for_the_disk_the_age_is_left_out(cold: BrokerUnderTest) -> None:
    page = page_of(cold, may_wait=False)
    assert (value(page, LAG), value(page, AGE)) == (2, None)
    assert value(page, "headrace_omitted", kind="lag_ages") == 1


# -- times and refusals ----------------------------------------------------------------------------


def test_sends_are_timed_once_a_message(tmp_path: Path) -> None:
    broker = measured(tmp_path)
    broker.create_topic("t")
    for _ in range(3):
        send(broker, "t")
    page = page_of(broker)
    assert value(page, "headrace_send_seconds_count") == 3
    assert 0 < (value(page, "headrace_send_seconds_sum") or 0) < 60


def test_refusals_are_counted_by_stage(tmp_path: Path) -> None:
    config = BrokerConfig(
        broker_name="b",
        store_path_root_dir=tmp_path / "store",
        bind_address="0.0.0.0",
        anonymous_access="read",
        auto_create_topic_enable=False,
        monitor_port=0,
    )
    broker = BrokerUnderTest(tmp_path, config)
    broker.ask(RequestCode.UPDATE_BROKER_CONFIG)
    broker.ask(9999)
    broker.ask(9999)
    assert send(broker, "no-such-topic") == ResponseCode.TOPIC_NOT_EXIST
    page = page_of(broker)
    refusals = {
        (dict(labels)["stage"], dict(labels)["response_code"]): count
        for labels, count in page["headrace_refusals_total"].items()
        if count
    }
    assert refusals == {
        ("guard", "NO_PERMISSION"): 1,
        ("request", "REQUEST_CODE_NOT_SUPPORTED"): 2,
        ("request", "TOPIC_NOT_EXIST"): 1,
    }


# -- the loop --------------------------------------------------------------------------------------


def longest_step_ms(collectors: tuple[Any, ...]) -> float:
    """CPU time between two places where others may have a turn."""
    longest, samples = 0.0, Samples()
    for collector in collectors:
        steps: Iterator[NotReady | None] = collector(samples).__await__()
        began = time.thread_time()
        for wait in steps:
            longest = max(longest, time.thread_time() - began)
            assert wait is None
            began = time.thread_time()
    assert sum(map(len, samples.values.values())) > 1000
    return longest * 1000


@pytest.mark.long
def test_ten_thousand_queues_keep_the_loop_for_less_than_a_slice(tmp_path: Path) -> None:
    broker = measured(tmp_path, consume_queue_file_bytes=20 * 16)
    topics = [f"t{number}" for number in range(1000)]
    broker.topics.put_all(
        [TopicConfig(topic_name=t, read_queue_nums=10, write_queue_nums=10) for t in topics]
    )
    broker.groups.put(SubscriptionGroupConfig(group_name="g"))
    for topic in topics:
        for queue_id in range(10):
            put(broker.store, broker.store.queue(topic, queue_id), dispatch=False)
            broker.offsets.commit("g", topic, queue_id, 0)
        broker.store.write_path.publish()
        broker.statistics.put(topic, 1, 1)
        broker.statistics.get("g", topic, 1, 1)
    collectors = broker.core.added.collectors
    gc.collect()
    gc.disable()
    try:
        # A slice ends within a step of its millisecond. The least of a few: the machine is shared.
        assert min(longest_step_ms(collectors) for _ in range(5)) < 1
    finally:
        gc.enable()
    page = collect(*collectors)
    assert sum(page[LAG].values()) == 10_000
    assert not any(page["headrace_omitted"].values())


# -- over HTTP -------------------------------------------------------------------------------------


async def test_a_running_broker_serves_its_metrics(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "store", broker_name="b", monitor_port=0, flush_disk_type="SYNC_FLUSH"
    )
    network = MemoryNetwork()
    broker = Broker(config, network)
    async with trio.open_nursery() as nursery:
        await nursery.start(broker.run)
        port = int(broker.monitor_address.rpartition(":")[2])
        async with await network.connect(broker.address) as stream:
            for number in range(2):
                message = {"b": "T", "e": 0, "f": 0, "h": 0, "i": "", "body": b"x"}
                await stream.send(frame(message, number))
                await stream.receive()
            page = parse(await trio.to_thread.run_sync(get_text, port))
        labels = {"cluster": "DefaultCluster", "node_id": "b", "node_type": "broker"}
        assert value(page, "rocketmq_messages_in_total", topic="T", **labels) == 2
        assert value(page, "headrace_send_seconds_count", **labels) == 2
        assert (value(page, "headrace_flush_seconds_count") or 0) >= 1
        assert value(page, "headrace_connections") == 1
        names = {metric.name for metric in (*DAEMON_METRICS, *table.BROKER_METRICS)}
        found = {name.removesuffix("_bucket").removesuffix("_count") for name in page}
        unused = {
            "rocketmq_messages_out_total",
            "rocketmq_throughput_out_total",
            "rocketmq_consumer_connections",
            "rocketmq_consumer_inflight_messages",
            "headrace_waiting_requests",
            "headrace_certificate_expiry_seconds",
            "headrace_quota_held_total",
            "headrace_quota_refused_total",
            "headrace_replies_total",
            "headrace_popped_messages",
            "headrace_pop_acked_messages_total",
            "headrace_pop_expired_messages_total",
            "headrace_held_pops",
            "headrace_audit_dropped_total",
            "headrace_audit_failing_seconds",
            LAG,
            AGE,
        }
        assert names - found == unused
        nursery.cancel_scope.cancel()
    assert broker.services.unexpected_errors == 0


def get_text(port: int) -> bytes:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text: bytes = response.read()
        return text


async def test_a_broker_that_loads_has_no_metrics(tmp_path: Path) -> None:
    from headrace_broker.serving.readiness import Readiness
    from headrace_daemon.monitor import Monitor

    async with trio.open_nursery() as nursery:
        port = await nursery.start(Monitor(Readiness(), "127.0.0.1", 0).run)
        answer = await trio.to_thread.run_sync(ask, port, "/metrics")
        assert answer == (503, {"problem": "the broker is loading"})
        nursery.cancel_scope.cancel()


# -- the page of the documents ---------------------------------------------------------------------


def test_the_documents_have_a_row_for_each_metric() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (counter|gauge|histogram) \|([^|]*)\|", DOCS.read_text(), re.MULTILINE
    )
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", text))) for name, kind, text in rows}
    of_broker = (*table.BROKER_METRICS, *table.TIER_METRICS)
    metrics = (*DAEMON_METRICS, *of_broker, *NAMESERVER_METRICS, SCRAPE_SECONDS)
    assert documented == {metric.name: (metric.kind, metric.labels) for metric in metrics}
