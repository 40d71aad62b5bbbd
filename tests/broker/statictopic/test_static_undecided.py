"""Queues that stay undecided are listed and logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog.testing
import trio
from trio.testing import MockClock

from headrace_broker.statictopic.undecided import UndecidedQueues
from tests.broker.statictopic.test_static_changes import EPOCH, change, item, led_here, moved
from tests.support.broker import BrokerUnderTest


def info(broker: BrokerUnderTest) -> dict[str, str]:
    undecided = broker.part(UndecidedQueues)
    return {**broker.mapping_changes.runtime_info(), **undecided.runtime_info()}


async def looked(broker: BrokerUnderTest) -> list[Any]:
    with structlog.testing.capture_logs() as logs, trio.move_on_after(1.5):
        await broker.part(UndecidedQueues).run()
    return [(line["topic"], line["queues"]) for line in logs]


async def test_undecided_queues_are_listed_with_their_age_and_logged_once(
    broker: BrokerUnderTest, autojump_clock: MockClock
) -> None:
    broker.clock.ms = EPOCH
    change(broker, led_here())
    assert info(broker)["staticQueuesLed"] == "2"
    assert info(broker)["staticQueuesUndecidedCount"] == "0"
    change(broker, moved(0, item(1, 5, -1, bname="broker-b"), led_here()))
    broker.clock.ms += 9000
    assert info(broker)["staticQueuesUndecided"] == "T/0 for 9 s"
    assert info(broker)["staticQueuesLed"] == "1"
    assert await looked(broker) == []
    broker.clock.ms += 1000
    assert await looked(broker) == [("T", [0])]
    assert await looked(broker) == []
    change(broker, moved(0, item(1, 5, 10_000, bname="broker-b"), led_here()))
    assert info(broker)["staticQueuesUndecided"] == ""
    change(broker, led_here(epoch=1))
    assert info(broker)["staticMappingsRefused"] == "1"


def test_they_are_known_after_a_restart(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.clock.ms = EPOCH
    change(broker, moved(0, item(1, 2, -1), led_here()), 3)
    broker.close()
    again = BrokerUnderTest(tmp_path)
    assert info(again)["staticQueuesUndecidedCount"] == "1"
