"""Shares of a group that pops, which change while messages are out and POPs are held."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from headrace import Admin, Consumer, Message, MessageQueue, Producer
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_ONEWAY
from headrace_protocol.header_codecs import encode_frame
from headrace_protocol.serving import Reply
from tests.support.popping import ACK, ACKS, CHANGE, POP, assigned, looping, popped
from tests.support.running_brokers import Brokers, brokers
from tests.support.scripted import Asked, Scripted
from tests.support.until import until

QUERY = RequestCode.QUERY_ASSIGNMENT
QUEUES = 4
MEMBERS_MAX = 6


# -- a real broker ---------------------------------------------------------------------------------


class Group:
    """Members that come and go, and what they have processed."""

    def __init__(self, mq: Brokers, nursery: trio.Nursery, chance: Random) -> None:
        self._mq = mq
        self._nursery = nursery
        self._chance = chance
        self._members: list[trio.CancelScope] = []
        self.attempts: Counter[tuple[bytes, int]] = Counter()

    @property
    def size(self) -> int:
        return len(self._members)

    def join(self) -> None:
        scope = trio.CancelScope()
        self._members.append(scope)
        self._nursery.start_soon(self._work, scope)

    def leave(self) -> None:
        """A member ends while it may have messages, and more that it has not looked at."""
        self._members.pop(self._chance.randrange(self.size)).cancel()

    async def _work(self, scope: trio.CancelScope) -> None:
        async with Consumer("g", "T", mode="pop", **self._mq.at) as consumer:
            with scope:
                async for message in consumer:
                    self.attempts[message.body, message.reconsume_times] += 1
                    with trio.CancelScope(shield=True):
                        for _ in range(self._chance.randrange(30)):
                            await trio.lowlevel.checkpoint()


async def lag(mq: Brokers) -> int:
    async with Admin(**mq.at) as admin:
        return sum(queue.lag for queue in await admin.lag("g", "T"))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 1, 2])
async def test_members_come_and_go(tmp_path: Path, share: int) -> None:
    """Whoever pops which queues, each message is processed once, and nothing stays out."""
    chance = Random(share)
    sent: set[bytes] = set()
    settings: dict[str, Any] = {
        "default_message_request_mode": "POP",
        "default_pop_share_queue_num": share,
    }
    async with brokers(tmp_path, ["a"], **settings) as mq:
        async with Admin(**mq.at) as admin:
            await admin.create_topic("T", queues=QUEUES)
        async with Producer(**mq.at) as producer, trio.open_nursery() as nursery:
            group = Group(mq, nursery, chance)
            for _ in range(12):
                if group.size < 2 or (group.size < MEMBERS_MAX and chance.random() < 0.6):
                    group.join()
                else:
                    group.leave()
                bodies = [b"%d" % number for number in range(len(sent), len(sent) + 20)]
                sent.update(bodies)
                await producer.send_many([Message("T", body) for body in bodies])
                least = chance.randrange(max(1, len(sent) - 40), len(sent))
                await until(lambda least=least: len(group.attempts) >= least)  # type: ignore[misc]
            await until(lambda: len(group.attempts) >= len(sent))
            while group.size:
                group.leave()
        # What is given back counts as no attempt.
        assert group.attempts == {(body, 0): 1 for body in sent}
        assert await lag(mq) == 0


# -- scripted brokers ------------------------------------------------------------------------------


class HeldPops:
    """POPs that a broker holds, by queue, and what it assigns."""

    def __init__(self, broker: Scripted) -> None:
        self._broker = broker
        self.held: defaultdict[int, list[Asked]] = defaultdict(list)
        broker.answer(POP, self._hold)

    def _hold(self, asked: Asked) -> None:
        self.held[int(asked.ext["queueId"])].append(asked)

    @property
    def queues(self) -> set[int]:
        return {queue_id for queue_id, held in self.held.items() if held}

    def assign(self, *queue_ids: int) -> None:
        self._broker.answer(QUERY, _share(*queue_ids))

    async def change(self, *queue_ids: int) -> None:
        """Assign other queues, and say so."""
        self.assign(*queue_ids)
        self.notify()
        await wait_all_tasks_blocked()

    def notify(self) -> None:
        """Say that the group has changed."""
        code, fields = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"}
        frame = encode_frame(0, code, 77, flag=FLAG_ONEWAY, fields=fields)
        self._broker.last(QUERY).channel.write(frame)

    async def answer(self, queue_id: int, reply: Reply) -> None:
        self.held[queue_id].pop(0).reply(reply)
        await wait_all_tasks_blocked()


def _share(*queue_ids: int) -> Reply:
    return assigned(*(MessageQueue("T", "broker-0", queue_id) for queue_id in queue_ids))


def given_back(broker: Scripted) -> list[tuple[int, int]]:
    """Queue and offset of messages that were returned as never seen."""
    asked = [asked.ext for asked in broker.asked if asked.code == CHANGE]
    assert all(each["suspend"] == "true" for each in asked)
    return sorted((int(each["queueId"]), int(each["offset"])) for each in asked)


async def test_a_pop_of_a_queue_that_left_is_withdrawn(autojump_clock: MockClock) -> None:
    async with looping() as (consumer, [broker], _):
        pops = HeldPops(broker)
        pops.assign(0, 1)
        await until(lambda: pops.queues == {0, 1})
        began = trio.current_time()
        await pops.change(1, 2)
        assert pops.queues == {0, 1, 2}
        assert trio.current_time() == began, "the share changes at once"
        await pops.answer(0, popped(7, 8, queue_id=0))
        assert given_back(broker) == [(0, 7), (0, 8)]
        assert pops.queues == {1, 2}
        await pops.answer(2, popped(3, queue_id=2))
        message = await anext(aiter(consumer))
        assert (message.queue.queue_id, message.queue_offset) == (2, 3)
        await consumer.commit()
        assert broker.last(ACK).ext["queueId"] == "2"
        assert broker.count(ACKS) == 0


async def test_a_queue_that_comes_back_is_popped_once(autojump_clock: MockClock) -> None:
    async with looping() as (consumer, [broker], _):
        pops = HeldPops(broker)
        pops.assign(0)
        await until(lambda: pops.queues == {0})
        await pops.change(1)
        await pops.change(0)
        assert len(pops.held[0]) == 1
        await pops.answer(0, popped(7, queue_id=0))
        assert (await anext(aiter(consumer))).queue_offset == 7
        assert not given_back(broker)
        await pops.answer(1, popped(9, queue_id=1))
        assert given_back(broker) == [(1, 9)]
        assert 1 not in pops.queues


async def test_messages_that_are_out_outlive_their_share(autojump_clock: MockClock) -> None:
    async with looping() as (consumer, [broker], _):
        pops = HeldPops(broker)
        pops.assign(0)
        await until(lambda: pops.queues == {0})
        await pops.answer(0, popped(5, 6, queue_id=0))
        messages = aiter(consumer)
        assert (await anext(messages)).queue_offset == 5
        await pops.change(1)
        assert (await anext(messages)).queue_offset == 6
        await consumer.commit()
        acked = [asked for asked in broker.asked if asked.code in {ACK, ACKS}]
        assert acked
        assert not given_back(broker)
        assert not consumer.failures()


async def test_an_answer_from_before_a_change_is_not_kept(autojump_clock: MockClock) -> None:
    queries: list[Asked] = []
    async with looping() as (_, [broker], _):
        pops = HeldPops(broker)
        broker.answer(QUERY, queries.append)
        await until(lambda: bool(queries))
        await pops.change(1)
        queries[0].reply(_share(0))
        await until(lambda: 1 in pops.queues)
        assert trio.current_time() < 1


async def test_what_comes_while_a_share_is_looked_up_is_handed_out(
    autojump_clock: MockClock,
) -> None:
    queries: list[Asked] = []
    async with looping() as (consumer, [broker], _):
        pops = HeldPops(broker)
        pops.assign(0)
        await until(lambda: pops.queues == {0})
        broker.answer(QUERY, queries.append)
        pops.notify()
        await until(lambda: bool(queries))
        await pops.answer(0, popped(5, queue_id=0))
        began = trio.current_time()
        queries[0].reply(_share(0))
        assert (await anext(aiter(consumer))).queue_offset == 5
        assert trio.current_time() - began < 1


async def test_the_failure_of_a_queue_that_left_is_forgotten(autojump_clock: MockClock) -> None:
    async with looping() as (consumer, [broker], _):
        pops = HeldPops(broker)
        pops.assign(0, 1)
        await until(lambda: pops.queues == {0, 1})
        busy = Reply(code=ResponseCode.SYSTEM_BUSY)
        await pops.answer(0, busy)
        assert [queue.queue_id for queue in consumer.failures()] == [0]
        await pops.change(1)
        assert not consumer.failures()
