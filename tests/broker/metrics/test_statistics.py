"""Counters and rates; what does not change is not looked at."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from headrace_broker.statistics import BrokerStatistics


@pytest.fixture
def statistics() -> BrokerStatistics:
    return BrokerStatistics()


async def seconds(count: int, statistics: BrokerStatistics) -> None:
    for _ in range(count):
        await trio.sleep(1)
        statistics.sample()


async def test_rates_are_those_of_the_last_ten_seconds(
    statistics: BrokerStatistics, autojump_clock: object
) -> None:
    statistics.put("t", 5, 50)
    await seconds(1, statistics)
    for _ in range(10):
        statistics.put("t", 100, 1000)
        statistics.get("g", "t", 30, 300)
        await seconds(1, statistics)
    assert statistics.topic_rate("t") == pytest.approx(100)
    assert statistics.group_rate("g", "t") == pytest.approx(30)
    assert (statistics.puts.count, statistics.puts.body_bytes) == (1005, 10_050)
    assert statistics.puts.rate == pytest.approx(100)


async def test_a_topic_at_rest_costs_nothing_and_wakes_up_again(
    statistics: BrokerStatistics, autojump_clock: object
) -> None:
    for number in range(1000):
        statistics.put(f"t{number}", 1, 10)
    await seconds(5, statistics)
    assert len(statistics.sampled) == 1000
    statistics.put("t7", 1, 10)
    await seconds(7, statistics)
    assert [counter.count for counter in statistics.sampled] == [2]
    await seconds(20, statistics)
    assert statistics.sampled == []
    assert statistics.topic_rate("t7") == 0
    assert statistics.topic_puts["t7"].samples is None
    statistics.put("t7", 50, 10)
    await seconds(1, statistics)
    statistics.put("t7", 50, 10)
    await seconds(1, statistics)
    assert statistics.topic_rate("t7") == pytest.approx(50)


def test_deleted_topics_and_groups_are_forgotten(statistics: BrokerStatistics) -> None:
    for topic in ("t", "u"):
        statistics.put(topic, 1, 10)
        for group in ("g", "h"):
            statistics.get(group, topic, 1, 10)
    statistics.topic_deleted("t")
    statistics.group_deleted("g")
    assert list(statistics.topic_puts) == ["u"]
    assert list(statistics.group_gets) == [("h", "u")]
    assert statistics.puts.count == 2


def test_unknown_topics_and_groups_have_no_rate(statistics: BrokerStatistics) -> None:
    assert statistics.topic_rate("t") == 0
    assert statistics.group_rate("g", "t") == 0
