"""Queues that no member of a live group pulls are reported, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from headrace_protocol.at_once import run_at_once
from headrace_protocol.codes import RequestCode
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.running import in_background
from tests.support.wire import pull_header


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("t", 3)
    return broker


def pull(broker: BrokerUnderTest, queue_id: int, suspend_ms: int = 0) -> None:
    header = pull_header(
        topic="t",
        queue_id=queue_id,
        max_msg_nums=1,
        sys_flag=2 if suspend_ms else 0,
        suspend_timeout_millis=suspend_ms,
    )
    broker.send(RequestCode.PULL_MESSAGE, header, channel=MemoryChannel())


def look(broker: BrokerUnderTest, *pulled: int, times: int = 1) -> dict[str, list[int]]:
    """Reports of the next looks by topic, with pulls of some queues before each."""
    watch = broker.pull_watch
    with capture_logs() as logs:
        for _ in range(times):
            for queue_id in pulled:
                pull(broker, queue_id)
            watch.look += 1
            run_at_once(watch.find_idle_queues())
    return {line["topic"]: line["queues"] for line in logs if "without pulls" in line["event"]}


def idle_count(broker: BrokerUnderTest) -> str:
    return broker.pull_watch.runtime_info()["queuesWithoutPulls"]


def test_a_queue_without_pulls_is_reported_once(broker: BrokerUnderTest) -> None:
    broker.join("g", "c1", "t")
    assert look(broker, 0, 2, times=4) == {}
    assert look(broker, 0, 2) == {"t": [1]}
    assert idle_count(broker) == "1"
    assert broker.pull_watch.runtime_info()["groupsWithoutPulls"] == "g"
    assert look(broker, 0, 2, times=3) == {}
    assert look(broker, 0, 1, 2) == {}
    assert idle_count(broker) == "0"
    assert look(broker, 0, 2, times=5) == {"t": [1]}


def test_a_held_pull_counts_until_its_timeout(broker: BrokerUnderTest) -> None:
    channel = broker.join("g", "c1", "t")
    broker.create_topic("t", 1)

    async def hold() -> None:
        pull(broker, 0, 60_000)

    trio.run(hold)
    assert look(broker, times=9) == {}
    assert look(broker) == {"t": [0]}
    broker.consumers.channel_closed(channel)


@pytest.mark.parametrize("why", ["nobody", "broadcasting", "unsubscribed", "unreadable"])
def test_queues_that_need_no_pulls(broker: BrokerUnderTest, why: str) -> None:
    if why == "nobody":
        pull(broker, 0)
    else:
        broker.join("g", "c1", *(["other"] if why == "unsubscribed" else ["t"]))
    if why == "broadcasting":
        group = broker.consumers.group("g")
        assert group is not None
        group.data.message_model = "BROADCASTING"
    if why == "unreadable":
        broker.create_topic("t", 3, perm=2)
    assert look(broker, times=10) == {}


def test_groups_that_left_are_forgotten(broker: BrokerUnderTest) -> None:
    channel = broker.join("g", "c1", "t")
    look(broker, 0, 1, 2)
    broker.consumers.channel_closed(channel)
    look(broker)
    assert broker.pull_watch.pulls_of("g") == {}
    broker.join("g", "c2", "t")
    assert look(broker, 0, 1, 2, times=10) == {}


async def test_it_looks_all_the_time(broker: BrokerUnderTest, autojump_clock: object) -> None:
    broker.join("g", "c1", "t")
    with capture_logs() as logs:
        async with in_background(broker.pull_watch.run):
            await trio.sleep(60)
    found = next(line for line in logs if line.get("topic") == "t")
    assert (found["group"], found["queues"], found["members"]) == ("g", [0, 1, 2], 1)
