"""Services of delayed messages, staged writes and static topics: as in ``test_long_steps``."""

from __future__ import annotations

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing

from headrace_broker.inner.writer import InnerMessage
from headrace_broker.staging.query import Attempt
from headrace_broker.staging.state import QueryState
from headrace_broker.statictopic.cleanup import MappingCleanup
from headrace_broker.statictopic.fence import Fence
from headrace_broker.statictopic.undecided import UndecidedQueues
from headrace_daemon.slices import in_slices
from headrace_protocol.admin_headers import CloneGroupOffsetHeader, ResetOffsetHeader
from headrace_protocol.codes import RequestCode
from headrace_protocol.staging import Decision, StagedAttempt
from headrace_protocol.statictopic.mapping import MappingInfo, MappingItem, TopicMapping
from headrace_protocol.system_topics import SCHEDULE_TOPIC
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.paced import paced, running
from tests.support.until import until

__all__ = ["paced"]

pytestmark = [pytest.mark.slow, pytest.mark.steps]

COUNT = 100_000
QUEUES = 65_536


# -- delayed messages ------------------------------------------------------------------------------


async def delay(broker: BrokerUnderTest, count: int) -> None:
    """Store messages of the first level, due a second later."""
    names = {"DELAY": "1", "REAL_TOPIC": "t", "REAL_QID": "0"}
    properties = "".join(f"{name}\x01{value}\x02" for name, value in names.items()).encode()
    due_ms = broker.clock.ms + 1000
    message = InnerMessage(
        SCHEDULE_TOPIC, 0, b"body", properties, due_ms, 0, 0, 0, 0, MemoryChannel.host_bytes
    )
    await broker.writer.append([message] * count, lambda *_: None)


async def test_delayed_messages_that_are_due_together(paced: BrokerUnderTest) -> None:
    """Only a block of the messages is in memory, but all that a start found delivered."""
    paced.create_topic("t", 1)
    schedule, count = paced.schedule, 10_000
    schedule.load()
    await delay(paced, count)
    schedule._levels[1].known_end = count
    schedule._delivered._left[1].offsets.update(range(1 << 40, (1 << 40) + COUNT))
    paced.clock.ms += 2000
    async with running(paced, schedule.run, schedule.run_saving):
        await until(lambda: schedule.next_offset(0) == count)
    assert paced.store.queue("t", 0).next_offset == count
    assert not len(schedule._delivered)


# -- staged writes ---------------------------------------------------------------------------------


async def test_queries_without_state(paced: BrokerUnderTest) -> None:
    staging = paced.staging
    for number in range(COUNT):
        query = staging.queries.new(f"q{number}")
        staging.queries[f"q{number}"] = query
    async with running(paced):
        await staging.expire()
    assert staging.queries == {}


async def test_batches_that_are_decided(paced: BrokerUnderTest) -> None:
    staging, name = paced.staging, paced.config.broker_name
    decision = Decision("d", 0, {name: (StagedAttempt("a", 1, 1),)})
    for number in range(COUNT):
        query = staging.queries[f"q{number}"] = staging.queries.new(f"q{number}")
        query.decide(QueryState(-1, decision, 1, 0))
        query.attempts[0, "a"] = Attempt(query.path(0, "a"))
    outcomes: list[Exception | None] = []
    async with running(paced, staging.settlements.run):
        staging.settle("t", range(2), outcomes.append)
        await until(lambda: bool(outcomes))
    assert outcomes == [None]


# -- static topics ---------------------------------------------------------------------------------


def mapping(broker: BrokerUnderTest, topic: str = "big", queues: int = QUEUES) -> TopicMapping:
    """A topic whose queues have moved from physical ones of this broker to others of it."""
    ours = broker.config.broker_name
    old = MappingItem(bname=ours, gen=0, logic_offset=0, end_offset=0)
    new = MappingItem(bname=ours, gen=1, logic_offset=0)
    replace = msgspec.structs.replace
    hosted: dict[int, tuple[MappingItem, ...]] = {
        queue: (replace(old, queue_id=queues + queue), replace(new, queue_id=queue))
        for queue in range(queues)
    }
    return TopicMapping(topic=topic, bname=ours, epoch=1, total_queues=queues, hosted=hosted)


async def test_the_clean_up_of_mappings(
    paced: BrokerUnderTest, autojump_clock: trio.testing.MockClock
) -> None:
    paced.create_topic("big", QUEUES)
    mappings = paced.mappings
    mappings.put(mapping(paced))
    async with running(paced, mappings.saved.run):
        await paced.part(MappingCleanup).clean()
    found = mappings.get("big")
    assert found is not None
    assert found.item_count == QUEUES


async def test_queues_that_are_undecided(
    paced: BrokerUnderTest, autojump_clock: trio.testing.MockClock
) -> None:
    undecided = paced.part(UndecidedQueues)
    now_ms = paced.clock.now_ms()
    paced.mappings.undecided.update({("big", queue): now_ms for queue in range(COUNT)})
    with structlog.testing.capture_logs() as logs:
        async with running(paced, undecided.run):
            await trio.sleep(2)
            paced.clock.ms += 20_000
            await trio.sleep(2)
            info = undecided.runtime_info()
    assert [(line["count"], line["queues"]) for line in logs] == [(COUNT, list(range(10)))]
    assert info["staticQueuesUndecidedCount"] == str(COUNT)


async def test_queues_that_another_broker_claims(paced: BrokerUnderTest) -> None:
    mappings = paced.mappings
    mappings.put(mapping(paced))
    claim = MappingInfo(
        topic="big",
        bname="other",
        epoch=2,
        total_queues=QUEUES,
        curr_id_map={queue: queue for queue in range(QUEUES)},
    )
    with structlog.testing.capture_logs() as logs:
        async with running(paced):
            await in_slices(paced.part(Fence).compare("big", {"other": claim}))
    assert mappings.led("big") == {}
    assert [line["count"] for line in logs if "stopped" in line["event"]] == [QUEUES]


LED = 16_384


@pytest.mark.parametrize("is_here", [True, False], ids=["here", "members"])
async def test_a_reset_of_all_logic_queues(paced: BrokerUnderTest, is_here: bool) -> None:
    paced.create_topic("big", LED)
    paced.mappings.put(mapping(paced, queues=LED))
    paced.config.use_server_side_reset_offset = is_here
    paced.join("g", "c", "big")
    channel = MemoryChannel()
    reset = ResetOffsetHeader(topic="big", group="g", timestamp=-1, is_force=True)
    clone = CloneGroupOffsetHeader(src_group="g", dest_group="new", topic="big")
    async with running(paced):
        paced.send(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset, channel=channel)
        await trio.testing.wait_all_tasks_blocked()
        paced.send(RequestCode.CLONE_GROUP_OFFSET, clone, channel=channel)
        await trio.testing.wait_all_tasks_blocked()
    replies = channel.replies()
    assert [reply.code for reply, _ in replies] == [0, 0], replies
    assert len(replies[0][1]) > 40 * LED
    assert len(paced.offsets.offsets_of("new", "big")) == 2 * LED  # also the ends of old items
