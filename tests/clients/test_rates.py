"""Rates that a member reports of each topic, in RocketMQ's fields."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from headrace.consumer.rates import Rates, TopicRates
from headrace.embedded import Embedded
from headrace_protocol.bodies import ConsumerRunningInfo
from tests.support.fixtures import in_memory
from tests.support.verbs import produce

mq = pytest.fixture(in_memory)


async def test_rates_are_those_of_the_last_minute(autojump_clock: MockClock) -> None:
    rates = TopicRates(trio.current_time())
    for _ in range(120):
        rates.pulled(20, 0.25)
        rates.processed(20, 5.0)
        autojump_clock.jump(1)
    report = rates.report()
    assert report["pullTPS"] == report["consumeOKTPS"] == pytest.approx(20, rel=0.2)
    assert (report["pullRT"], report["consumeRT"]) == (250, 250)
    autojump_clock.jump(61)
    idle = rates.report()
    assert (idle["pullTPS"], idle["pullRT"], idle["consumeOKTPS"]) == (0, 0, 0)
    assert idle["consumeRT"] == 250, "that of the last hour"
    autojump_clock.jump(3600)
    assert not any(rates.report().values())


async def test_a_young_member_has_the_rates_of_its_life(autojump_clock: MockClock) -> None:
    rates = Rates()
    rates.begin(["T", "U"])
    autojump_clock.jump(4)
    for _ in range(3):
        rates.of("T").failed()
    rates.of("T").processed(20, 0.0)
    report = rates.report()
    assert (report["T"]["consumeFailedTPS"], report["T"]["consumeFailedMsgs"]) == (0.75, 3)
    assert report["T"]["consumeOKTPS"] == 17 / 4
    assert not any(report["U"].values())
    rates.begin(["T"])
    assert not any(rates.report()["T"].values())


async def reported(mq: Embedded) -> dict[str, Any]:
    async with mq.admin() as admin:
        (member,) = await admin.member_reports("g", await admin.members("g"))
    assert isinstance(member.report, ConsumerRunningInfo)
    return member.report.status_table


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pull", "pop"])
async def test_a_member_reports_what_it_processes(
    mq: Embedded, autojump_clock: MockClock, mode: Any
) -> None:
    await produce(mq, 60, queues=1)
    async with mq.consumer("g", "T", mode=mode) as consumer:
        async for message in consumer:
            autojump_clock.jump(0.5)
            if message.body == b"7":
                await message.retry(after=7200)
            # The rest of its batch is not looked at yet.
            if message.body == b"39":
                break
        rates = (await reported(mq))["T"]
        assert rates["consumeRT"] == pytest.approx(500, rel=0.05)
        assert rates["consumeOKTPS"] == pytest.approx(38 / 20, rel=0.1)
        assert rates["consumeFailedTPS"] == pytest.approx(1 / 20, rel=0.1)
        assert rates["consumeFailedMsgs"] == 1
        assert rates["pullTPS"] >= 40 / 21


@pytest.mark.slow
async def test_idle_topics_have_rates_too(mq: Embedded, autojump_clock: MockClock) -> None:
    await produce(mq, 0)
    async with mq.consumer("g", "T"):
        report = await reported(mq)
        assert sorted(report) == ["%RETRY%g", "T"]
        assert set(report["T"].values()) == {0}
