"""Services with 100,000 of what they keep: no step of the loop takes more than 20 ms of CPU.

The CPU time of each step is measured, so other processes don't matter.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from headrace_broker.consumer.groups import MEMBER_LIFE_MS, Member
from headrace_broker.consumer.locks import LOCK_LIFE_MS
from headrace_broker.consumer.long_polling import HeldRequest
from headrace_broker.consumer.unconsumed import UnconsumedOffsets
from headrace_broker.serving.upkeep import ClientExpiry, expire_locks
from headrace_broker.timer.arrivals import TIMER, Arrivals, key_hash
from headrace_broker.transaction.halves import Decision
from headrace_broker.transaction.table import OpenHalf
from headrace_daemon.slices import in_slices
from headrace_protocol.admin_headers import (
    CloneGroupOffsetHeader,
    GetAllSubscriptionGroupHeader,
    GetAllTopicConfigHeader,
    GetConsumeStatsHeader,
    GetTopicStatsHeader,
    QueryConsumeTimeSpanHeader,
    ResetOffsetHeader,
)
from headrace_protocol.bodies import (
    ConsumerData,
    MessageQueue,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from headrace_protocol.codes import RequestCode
from headrace_protocol.command import Command
from headrace_protocol.headers import ConsumerGroupHeader, GetByKeyHeader
from headrace_protocol.key_lookup import NoRecord, WantedKey, decode_found, encode_keys
from headrace_protocol.serving import Request
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.memory import HOST
from tests.support.paced import paced, running
from tests.support.until import until

__all__ = ["paced"]

pytestmark = [pytest.mark.slow, pytest.mark.steps]

COUNT = 100_000
DUE_MS = 1_800_000_000_000


# -- timers ----------------------------------------------------------------------------------------


def arrived(first: int, count: int, *, is_recall: bool, key_from: int = 0) -> Arrivals:
    rows = np.zeros(count, TIMER)
    rows["due_ms"] = DUE_MS
    rows["queue_offset"] = rows["source"] = rows["physical_offset"] = np.arange(
        first, first + count
    )
    rows["key"] = [key_hash(b"%d" % (key_from + number)) for number in range(count)]
    rows["topic"] = -1 if is_recall else 0
    return Arrivals(rows, np.full(count, DUE_MS - 60_000), np.full(count, -1))


@pytest.mark.parametrize("is_open", [False, True])
async def test_timers_and_recalls_of_one_second(paced: BrokerUnderTest, is_open: bool) -> None:
    waiting = paced.timers.waiting
    waiting.topics.number(b"T")

    async def arrive() -> None:
        for first in range(0, COUNT // 2, 1024):
            waiting.add(arrived(first, 1024, is_recall=False, key_from=first))
            if is_open:
                waiting.due_ms()
            await trio.lowlevel.checkpoint()
        for first in range(0, COUNT // 2, 1024):  # of others
            recalls = arrived(COUNT + first, 1024, is_recall=True, key_from=10 * COUNT + first)
            waiting.add(recalls)
            await trio.lowlevel.checkpoint()
        for number in range(10):
            waiting.add(arrived(3 * COUNT + number, 1, is_recall=False, key_from=COUNT))
            await trio.lowlevel.checkpoint()
        for number in range(10):
            slot, key = (DUE_MS - 1) // 1000, key_hash(b"%d" % number)
            assert waiting.due_of(slot, b"T", key)
            waiting.recall(slot, b"T", key)
            await trio.lowlevel.checkpoint()
        while len(waiting.take_due(DUE_MS + 1000, 64)):
            await trio.lowlevel.checkpoint()

    async with running(paced):
        await arrive()
    assert waiting.count == 0


# -- transactions ----------------------------------------------------------------------------------


def fill(broker: BrokerUnderTest) -> Any:
    table = broker.transactions.table
    for number in range(COUNT):
        table.add(OpenHalf(number, [number], number, HOST, "g", "T", 0, 2**62, 2**62))
    table.next_offset = table.seen = 0
    return table


async def test_undecided_transactions(paced: BrokerUnderTest) -> None:
    table = fill(paced)
    table.seen = COUNT
    transactions = paced.transactions
    async with running(paced):
        await transactions.save()
        for number in range(COUNT - 1, COUNT - 100, -1):
            copies = table.end(number, number, Decision.COMMIT)
            table.owe_names(copies)
            table.named(len(copies))
            await trio.lowlevel.checkpoint()


async def test_decisions_that_are_remembered(paced: BrokerUnderTest) -> None:
    table = paced.transactions.table
    async with running(paced):
        # Enough for a table to fill up with the places of forgotten ones.
        for first in range(0, 4 * COUNT, 200):
            for number in range(first, first + 200):
                copies = table.end(number, number, Decision.COMMIT)
                table.owe_names(copies)
                table.named(len(copies))
            await trio.lowlevel.checkpoint()


# -- locks -----------------------------------------------------------------------------------------


async def test_locks(paced: BrokerUnderTest, autojump_clock: object) -> None:
    locks = paced.locks
    paced.budget.bytes_max = 1 << 40
    queues = [MessageQueue("t", "b", number) for number in range(1000)]
    for client in range(COUNT // 1000):
        locks.lock(f"g{client % 10}", f"c{client}", queues, paced.clock.steady_ms(), HOST)
        locks.lock(f"h{client}", f"c{client}", queues, paced.clock.steady_ms(), HOST)
        locks.left(f"h{client}", f"c{client}")
    async with running(paced, lambda: expire_locks(paced.consumers, paced.clock)):
        await trio.sleep(5)
        paced.clock.ms += LOCK_LIFE_MS + 1
        await trio.sleep(5)
    assert len(locks) == 0


# -- offsets ---------------------------------------------------------------------------------------


async def test_offsets_of_many_groups(paced: BrokerUnderTest, autojump_clock: object) -> None:
    offsets = paced.offsets
    for number in range(COUNT):
        offsets.commit(f"g{number}", f"t{number % 100}", 0, 1)
    async with running(paced, lambda: offsets.run(lambda: 1.0)):
        await trio.sleep(3)


async def test_offsets_of_many_queues(paced: BrokerUnderTest, autojump_clock: object) -> None:
    offsets = paced.offsets
    for number in range(10 * COUNT):
        offsets.commit(f"g{number % 15}", "t", number // 15, 1)
    async with running(paced, lambda: offsets.run(lambda: 1.0)):
        await trio.sleep(3)
        offsets.commit("g0", "t", 0, 2)
        await trio.sleep(3)


# -- queues x groups -------------------------------------------------------------------------------

QUEUES, GROUPS = 65_536, 20


@pytest.fixture
def wide(paced: BrokerUnderTest) -> BrokerUnderTest:
    """A broker whose groups have offsets in each queue of a topic."""
    for number in range(GROUPS):
        paced.groups.put(SubscriptionGroupConfig(group_name=f"g{number}"))
        for queue_id in range(QUEUES):
            paced.offsets.reset(f"g{number}", "big", queue_id, number)
        paced.offsets.make_rooms(f"g{number}", "big", 10, HOST)
    return paced


async def test_the_scan_of_what_groups_have_yet_to_consume(wide: BrokerUnderTest) -> None:
    lowest = UnconsumedOffsets(wide.offsets, wide.groups, wide.consumers)
    async with running(wide):
        found = await in_slices(lowest("big", range(128)))
    assert found[127] == (0, "g0")


async def test_the_deletion_of_progress(wide: BrokerUnderTest) -> None:
    offsets = wide.offsets
    async with running(wide):
        await in_slices(offsets.delete_group("g0"))
        await in_slices(offsets.delete_topic("big"))
    assert offsets.pairs(1) == []
    assert wide.budget.kept_bytes(HOST) == 0


async def test_a_reset_of_all_queues(wide: BrokerUnderTest) -> None:
    wide.create_topic("big", QUEUES)
    channel = MemoryChannel()
    reset = ResetOffsetHeader(topic="big", group="g1", timestamp=-1, is_force=True)
    clone = CloneGroupOffsetHeader(src_group="g0", dest_group="new", topic="big")
    async with running(wide):
        wide.send(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset, channel=channel)
        wide.send(RequestCode.CLONE_GROUP_OFFSET, clone, channel=channel)
        await trio.testing.wait_all_tasks_blocked()
    assert [reply.code for reply, _ in channel.replies()] == [0, 0]


# -- compaction ------------------------------------------------------------------------------------


class ManyQueues:
    """As ``CompactedQueues``, but with none of them. looks: how often they were asked for."""

    def __init__(self) -> None:
        self.names = dict.fromkeys((f"t{number}", 0) for number in range(COUNT))
        self.looks = 0

    def all(self) -> dict[tuple[str, int], None]:
        self.looks += 1
        return self.names


async def test_the_choice_of_queues_to_compact(paced: BrokerUnderTest) -> None:
    queues = ManyQueues()
    paced.compaction.schedule.queues = cast("Any", queues)
    async with running(paced, paced.compaction.schedule.run):
        await until(lambda: queues.looks > 2)


# -- answers ---------------------------------------------------------------------------------------


class PartsChannel(MemoryChannel):
    """A client whose answers stay in parts, as in a server's channel."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes | bytearray | memoryview] = []

    def write(self, *buffers: bytes | bytearray | memoryview) -> None:
        self.parts += buffers

    def replies(self) -> list[tuple[Command, bytes]]:
        self.written += b"".join(self.parts)
        return super().replies()


ANSWERS = [
    (RequestCode.GET_ALL_CONSUMER_OFFSET, None),
    (RequestCode.GET_CONSUME_STATS, GetConsumeStatsHeader(consumer_group="g1", topic="big")),
    (RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic="big")),
    (RequestCode.QUERY_CONSUME_TIME_SPAN, QueryConsumeTimeSpanHeader(topic="big", group="g1")),
    (RequestCode.DESCRIBE_GROUP, ConsumerGroupHeader(consumer_group="g1")),
]


@pytest.mark.parametrize(("code", "header"), ANSWERS, ids=lambda value: getattr(value, "name", ""))
async def test_answers_about_all_queues(
    wide: BrokerUnderTest, code: RequestCode, header: msgspec.Struct | None
) -> None:
    wide.create_topic("big", QUEUES)
    data = ConsumerData(group_name="g1", subscription_data_set=[SubscriptionData(topic="big")])
    wide.consumers.heartbeat(Member(MemoryChannel(), "c", "JAVA", 0), data, 0)
    await answered(wide, code, header)


@pytest.mark.parametrize("member", ["PYTHON", "CPP"])
async def test_a_reset_that_members_must_follow(wide: BrokerUnderTest, member: str) -> None:
    wide.create_topic("big", QUEUES)
    wide.config.use_server_side_reset_offset = False
    channel = PartsChannel()
    data = ConsumerData(group_name="g1")
    wide.consumers.heartbeat(Member(channel, "c", member, 0), data, wide.clock.steady_ms())
    header = ResetOffsetHeader(topic="big", group="g1", timestamp=-1, is_force=True)
    await answered(wide, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
    assert sum(map(len, channel.parts)) > 40 * QUEUES


@pytest.mark.parametrize(
    ("code", "header"),
    [
        (RequestCode.GET_ALL_TOPIC_CONFIG, GetAllTopicConfigHeader()),
        (RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, GetAllSubscriptionGroupHeader()),
    ],
    ids=["topics", "groups"],
)
async def test_answers_about_all_topics_and_groups(
    paced: BrokerUnderTest, code: RequestCode, header: msgspec.Struct
) -> None:
    names = [f"n{number}" for number in range(40_000)]  # about as many as a frame holds
    paced.topics.put_all([TopicConfig(topic_name=name) for name in names])
    paced.groups.wrapper().subscription_group_table.update(
        (name, SubscriptionGroupConfig(group_name=name)) for name in names
    )
    await answered(paced, code, header)


async def answered(
    broker: BrokerUnderTest, code: RequestCode, header: msgspec.Struct | None
) -> None:
    channel = PartsChannel()
    async with running(broker):
        broker.send(code, header, channel=channel)
        await trio.testing.wait_all_tasks_blocked()
    ((answer, body),) = channel.replies()
    assert (answer.code, len(body) > 40 * QUEUES) == (0, True)


# -- keys ------------------------------------------------------------------------------------------


async def test_a_key_in_any_queue_of_a_wide_topic(paced: BrokerUnderTest) -> None:
    paced.create_topic("kv", QUEUES, attributes={"cleanup.policy": "COMPACTION"})
    channel = MemoryChannel()
    header = GetByKeyHeader(topic="kv", count=1, max_msg_bytes=1 << 20)
    async with running(paced):
        paced.send(RequestCode.GET_BY_KEY, header, encode_keys([WantedKey(b"key")]), channel)
        assert channel.replies() == []  # it takes slices
        await trio.testing.wait_all_tasks_blocked()
    ((answer, body),) = channel.replies()
    assert (answer.code, decode_found(1, body)) == (0, [NoRecord.NEVER])


# -- clients ---------------------------------------------------------------------------------------


class Held(HeldRequest):
    """A request that waits until its deadline."""

    def try_answer(self, *, may_wait: bool) -> bool:
        return not may_wait


async def test_held_requests_that_expire_together(
    paced: BrokerUnderTest, autojump_clock: object
) -> None:
    paced.create_topic("t", 1)
    queue, channel = paced.store.queue("t", 0), MemoryChannel()
    pulled = Request(channel, 0, Command(RequestCode.PULL_MESSAGE), b"", 0)
    async with running(paced, paced.long_polling.run):
        for number in range(COUNT):
            paced.long_polling.hold(Held(pulled, 0, 10), (queue,), 2.0)
            if not number % 100:
                await trio.lowlevel.checkpoint()
        paced.long_polling.arrived((queue,))
        await trio.sleep(5)
    assert paced.long_polling.held_count == 0


async def test_members_whose_heartbeats_stop(
    paced: BrokerUnderTest, autojump_clock: object
) -> None:
    for number in range(COUNT // 2):  # of a consumer group and a producer group each
        member, now_ms = Member(MemoryChannel(), f"c{number}", "JAVA", 0), paced.clock.steady_ms()
        paced.producers.heartbeat(member, f"p{number % 10}", now_ms)
        paced.consumers.heartbeat(member, ConsumerData(group_name=f"g{number % 10}"), now_ms)
    expiry = ClientExpiry(paced.consumers, paced.producers, paced.changes, paced.clock)
    async with running(paced, expiry.run):
        paced.clock.ms += 10 * MEMBER_LIFE_MS
        await trio.sleep(60)
    assert paced.producers.member_count == 0
    assert paced.consumers.names() == []


async def test_a_look_at_all_pulls(paced: BrokerUnderTest, autojump_clock: object) -> None:
    watch = paced.pull_watch
    for number in range(COUNT):
        watch.last_pull(f"g{number % 100}", f"t{number % 1000}", number // 1000)
    async with running(paced, watch.run):
        await trio.sleep(60)
    # None of the groups has a member.
    assert not any(watch.pulls_of(f"g{number}") for number in range(100))
