"""Static topics in clients: fixed queues, brokers found by queue, leaders that move.

``static_routes.txt.gz`` is made by tests/conformance/java's ``headrace.conformance.StaticRoutes``:
``java -cp "classes:lib/*" headrace.conformance.StaticRoutes 400 static_routes.txt`` in
``tests.conformance.peer.java_build()``, and ``gzip -9n``.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from headrace import Consumer, Message, Producer
from headrace.consumer.locks import QueueLockClient
from headrace.consumer.offset_store import OffsetStore
from headrace.consumer.pulls import Wanted
from headrace.consumer.queue_slices import SliceReader
from headrace.consumer.subscription import Subscription
from headrace.errors import HeadraceError, MalformedAnswer, NoQueue
from headrace.instance import ROUTE_INTERVAL_S
from headrace.outages import ClientOutages
from headrace.producer.selector import queue_index
from headrace.route import TopicRoute
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.bodies import (
    BrokerData,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
    QueueData,
    TopicRouteData,
)
from headrace_protocol.bounds import QUEUE_NUMS_MAX
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.headers import OffsetResponseHeader, PullMessageResponseHeader
from headrace_protocol.message import encode_record
from headrace_protocol.message_ids import encode_host, encode_offset_message_id
from headrace_protocol.serving import Reply
from headrace_protocol.statictopic.mapping import MappingInfo
from tests.support.member import NO_TOPIC, NOT_FOUND
from tests.support.scripted import (
    Asked,
    Scripted,
    open_instance,
    producing,
    scripted_cluster,
    scripted_in_thread,
    sent_queue,
    static_route,
    stored,
)

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
LOGIC = "__syslo__global__"
NOT_LEADER = Reply(code=ResponseCode.NOT_LEADER_FOR_QUEUE, remark="the leader is elsewhere")


def queue(queue_id: int) -> MessageQueue:
    return MessageQueue("T", LOGIC, queue_id)


def key_of(queue_id: int, total: int) -> str:
    return next(key for n in range(1000) if queue_index(key := f"k{n}", total) == queue_id)


def made(
    infos: dict[str, MappingInfo], *, live: list[str], perms: dict[str, int] | None = None
) -> TopicRoute:
    data = TopicRouteData(
        broker_datas=[
            BrokerData(broker_name=name, broker_addrs={0: f"{name}:1", 1: f"{name}:2"})
            for name in live
        ],
        queue_datas=[
            QueueData(
                broker_name=name,
                perm=(perms or {}).get(name, 6),
                read_queue_nums=9,
                write_queue_nums=9,
            )
            for name in live
        ],
        topic_queue_mapping_by_broker=infos,
    )
    return TopicRoute("T", data, 0)


def info(broker: str, epoch: int, total: int, *queues: int, scope: str = "__global__") -> Any:
    ids = {number: 50 + number for number in queues}
    return MappingInfo(
        topic="T", bname=broker, epoch=epoch, total_queues=total, curr_id_map=ids, scope=scope
    )


# -- routes ----------------------------------------------------------------------------------------


def test_a_static_topic_has_all_its_queues_whatever_happens_to_brokers() -> None:
    route = made({"b": info("b", 1, 4, 2), "a": info("a", 1, 4, 0, 1)}, live=["a"])
    assert route.is_static
    assert route.write_queues == route.read_queues == tuple(map(queue, range(4)))
    assert [route.broker_of(queue(n)) for n in range(4)] == ["a", "a", "b", "__syslo__none__"]
    assert [route.address_of(queue(n)) for n in range(4)] == ["a:1", "a:1", None, None]
    assert route.address_of(queue(0), 1) == "a:2"
    assert route.why_not_writable(queue(0)) is None
    assert "no master of its leader b is up" in str(route.why_not_writable(queue(2)))
    assert "__syslo__global__/3 now: no broker leads it" in str(route.why_not_writable(queue(3)))


def test_the_higher_epoch_leads_a_queue() -> None:
    for infos in (["a", "b"], ["b", "a"]):
        claims = {"a": info("a", 2**40, 3, 0, 1), "b": info("b", 1, 2, 1, 0)}
        route = made({name: claims[name] for name in infos}, live=["a", "b"])
        assert [route.broker_of(queue(n)) for n in range(3)] == ["a", "a", "__syslo__none__"]


def test_queues_beyond_the_total_and_other_scopes_are_ignored() -> None:
    claims = {"a": info("a", 1, 1, 0, 7), "b": info("b", 9, 5, 0, scope="other")}
    route = made(claims, live=["a", "b"])
    assert route.write_queues == (queue(0),)
    assert route.broker_of(queue(0)) == "a"


def test_the_permission_is_that_of_the_leader() -> None:
    claims = {"a": info("a", 1, 2, 0), "b": info("b", 1, 2, 1)}
    route = made(claims, live=["a", "b"], perms={"a": 4})
    assert "its leader a forbids writes" in str(route.why_not_writable(queue(0)))
    assert route.why_not_writable(queue(1)) is None


def test_the_name_of_a_broker_finds_no_queue_of_a_static_topic() -> None:
    route = made({"a": info("a", 1, 2, 0, 1)}, live=["a"])
    assert route.address_of(MessageQueue("T", "a", 0)) is None


EPOCHS = st.integers(0, 2**62)
CLAIMS = st.dictionaries(
    st.sampled_from("abc"), st.tuples(EPOCHS, st.integers(1, 6), st.sets(st.integers(0, 7)))
)


@given(CLAIMS.filter(bool))
def test_any_claims_give_each_queue_one_leader(
    claims: dict[str, tuple[int, int, set[int]]],
) -> None:
    infos = {name: info(name, epoch, total, *ids) for name, (epoch, total, ids) in claims.items()}
    route = made(infos, live=["a", "b"])
    total = max(total for _, total, _ in claims.values())
    assert [each.queue_id for each in route.write_queues] == list(range(total))
    for each in route.write_queues:
        epochs = {n: epoch for n, (epoch, _, ids) in claims.items() if each.queue_id in ids}
        leader = route.broker_of(each)
        assert leader == "__syslo__none__" if not epochs else epochs[leader] == max(epochs.values())


def test_leaders_are_those_that_javas_client_finds() -> None:
    lines = gzip.decompress(Path(__file__).with_name("static_routes.txt.gz").read_bytes())
    for line in lines.splitlines():
        text, _, found = line.partition(b"\t")
        data = TopicRouteData.decode(text)
        assert data.encode() == text
        for either in (data, TopicRouteData.decode(data.encode(strict=True))):
            route = TopicRoute("T", either, 0)
            leaders = [f"{each.broker_name}/{route.broker_of(each)}" for each in route.write_queues]
            assert " ".join(leaders).encode() == found


async def test_too_many_queues_are_refused() -> None:
    async with scripted_cluster() as (nameserver, (broker,), network):
        nameserver.answer(ROUTE, static_route(broker, leads=[[0]], total=QUEUE_NUMS_MAX + 1))
        async with open_instance(nameserver.address, network) as client:
            with pytest.raises(MalformedAnswer, match="65537 static queues"):
                await client.route("T")


# -- producer --------------------------------------------------------------------------------------


def producer(nameserver: Scripted, network: MemoryNetwork, **options: Any) -> Producer:
    return Producer(nameserver=nameserver.address, connect=network.connect, **options)


def queues_sent(broker: Scripted) -> list[int]:
    return [sent_queue(asked) for asked in broker.sends]


@pytest.mark.parametrize("headrace", [False, True])
async def test_messages_go_to_the_leaders_of_their_queues(headrace: bool) -> None:
    async with producing(2, headrace=headrace) as (p, nameserver, brokers):
        nameserver.answer(ROUTE, static_route(*brokers, leads=[[1, 3], [0, 2]], total=4))
        for number in range(4):
            sent = await p.send(Message("T", b"x", key=key_of(number, 4)))
            assert sent.queue == queue(number)
        keyless = [await p.send(Message("T", b"x")) for _ in range(4)]
        assert [sent.queue for sent in keyless] == list(map(queue, range(4)))
        assert list(await p.queues("T")) == list(map(queue, range(4)))
        assert queues_sent(brokers[0]) == [1, 3, 1, 3]
        assert queues_sent(brokers[1]) == [0, 2, 0, 2]
        assert {asked.ext["n"] for asked in brokers[0].sends} == {"broker-0"}


async def test_messages_without_a_key_avoid_queues_without_a_leader() -> None:
    async with producing(2) as (p, nameserver, brokers):
        leads = [[1], [0, 2]]
        nameserver.answer(ROUTE, static_route(*brokers, leads=leads, total=5, away=1))
        for _ in range(6):
            await p.send(Message("T", b"x"))
        async with p.pipeline() as pipeline:
            for _ in range(6):
                await pipeline.send(Message("T", b"x"))
        assert set(queues_sent(brokers[0])) == {1}


async def test_a_key_without_a_leader_fails_by_name(autojump_clock: MockClock) -> None:
    async with producing(2, delivery_timeout_ms=1000) as (p, nameserver, brokers):
        leads = [[1], [0, 2]]
        nameserver.answer(ROUTE, static_route(*brokers, leads=leads, total=4, away=1))
        with pytest.raises(NoQueue, match=r"global__/0 now: no master of its leader broker-1"):
            await p.send(Message("T", b"x", key=key_of(0, 4)))
        with pytest.raises(NoQueue, match=r"global__/3 now: no broker leads it"):
            await p.send_many([Message("T", b"x", key=key_of(3, 4))])
        outcomes: list[Any] = []
        async with p.pipeline(on_result=lambda _, outcome: outcomes.append(outcome)) as pipe:
            await pipe.send(Message("T", b"x", key=key_of(3, 4)))
            await pipe.send(Message("T", b"x", key=key_of(1, 4)))
        assert sorted(isinstance(outcome, NoQueue) for outcome in outcomes) == [False, True]
        assert queues_sent(brokers[0]) == [1]
        assert brokers[1].sends == []


async def test_the_log_names_the_leader_that_is_away(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_cluster(2) as (nameserver, brokers, network):
        nameserver.answer(ROUTE, static_route(*brokers, leads=[[1], [0]], total=2, away=1))
        async with producer(nameserver, network, delivery_timeout_ms=1000) as p:
            with pytest.raises(NoQueue):
                await p.send(Message("T", b"x", key=key_of(0, 2)))
            (line,) = caplog.messages
            assert line.startswith("broker broker-1 is unavailable, retrying: ")
        async with open_instance(nameserver.address, network) as instance:
            read = (await instance.route("T")).unserved(queue(0))
        outages = ClientOutages([], lambda: 0.0)
        outages.report(read, "T", queue(0).broker_name)
        assert outages.names == {"broker broker-1"}


@pytest.mark.parametrize("way", ["send", "send_many", "pipeline"])
async def test_a_moved_leader_is_found_at_once(way: str, autojump_clock: MockClock) -> None:
    async with producing(2) as (p, nameserver, (old, new)):
        before = static_route(old, new, leads=[[0], []], total=1)
        after = static_route(old, new, leads=[[0], [0]], total=1)
        nameserver.answer(ROUTE, before, after)
        await p.send(Message("T", b"1", key="k"))
        old.answer_sends(NOT_LEADER)
        started = trio.current_time()
        if way == "send":
            await p.send(Message("T", b"2", key="k"))
        elif way == "send_many":
            await p.send_many([Message("T", b"2", key="k")])
        else:
            async with p.pipeline() as pipeline:
                await pipeline.send(Message("T", b"2", key="k"))
        assert trio.current_time() - started < 0.2
        assert new.sent == [b"2"]
        assert not p._sender.faults.current(), "the old leader is not down"


@pytest.mark.parametrize("way", ["send", "pipeline"])
async def test_a_send_that_was_passed_on_names_the_new_leader(
    way: str, autojump_clock: MockClock
) -> None:
    async with producing(2) as (p, nameserver, (old, new)):
        before = static_route(old, new, leads=[[0], []], total=1)
        after = static_route(old, new, leads=[[0], [0]], total=1)
        nameserver.answer(ROUTE, before, before, after)
        passed_on = stored(7)

        def forward(asked: Asked) -> Reply:
            reply = passed_on(asked)
            reply.header.leader = "broker-1"  # type: ignore[union-attr]
            return reply

        old.answer_sends(forward)
        for _ in range(9):
            if way == "send":
                await p.send(Message("T", b"x", key="k"))
            else:
                async with p.pipeline() as pipeline:
                    await pipeline.send(Message("T", b"x", key="k"))
            await trio.sleep(0.15)
        # The nameserver learned of it late, and is not asked with every send.
        assert nameserver.count(ROUTE) == 3
        assert (len(old.sends), len(new.sends)) == (6, 3)


async def test_undecided_offsets_are_not_counted_up() -> None:
    async with producing(headrace=True) as (p, nameserver, (broker,)):
        nameserver.answer(ROUTE, static_route(broker, leads=[[0]], total=1))
        broker.answer_sends(stored(-1))
        results = await p.send_many([Message("T", b"x")] * 3)
        offsets = [each.queue_offset for result in results for each in result.of_each()]
        assert offsets == [-1, -1, -1]


async def test_a_transaction_ends_where_its_message_is(autojump_clock: MockClock) -> None:
    async with scripted_cluster(2) as (nameserver, (old, new), network):
        before = static_route(old, new, leads=[[0], []], total=1)
        after = static_route(old, new, leads=[[0], [0]], total=1)
        nameserver.answer(ROUTE, before, after)
        answer = stored()

        def at_old(asked: Asked) -> Reply:
            reply = answer(asked)
            host, port = old.address.rsplit(":", 1)
            header: Any = reply.header
            header.msg_id = encode_offset_message_id(encode_host(host, int(port)), 777)
            return reply

        old.answer_sends(at_old)
        async with producer(nameserver, network) as p, p.transaction("T") as transaction:
            await transaction.send(Message("T", b"x"))
            await trio.sleep(ROUTE_INTERVAL_S + 1)
        assert old.last(RequestCode.END_TRANSACTION).ext["commitLogOffset"] == "777"
        assert new.count(RequestCode.END_TRANSACTION) == 0


# -- offsets and locks -----------------------------------------------------------------------------


async def test_offsets_are_kept_by_the_leader_of_the_moment() -> None:
    async with scripted_cluster(2) as (nameserver, (old, new), network):
        before = static_route(old, new, leads=[[0], []], total=1)
        after = static_route(old, new, leads=[[0], [0]], total=1)
        nameserver.answer(ROUTE, before, after)
        for broker, offset in ((old, 7), (new, 9)):
            broker.answer(
                RequestCode.QUERY_CONSUMER_OFFSET, Reply(OffsetResponseHeader(offset=offset))
            )
        async with open_instance(nameserver.address, network) as client:
            offsets = OffsetStore(client)
            assert await offsets.committed("g", queue(0)) == 7
            old.answer(RequestCode.QUERY_CONSUMER_OFFSET, NOT_LEADER)
            old.answer(RequestCode.UPDATE_CONSUMER_OFFSET, NOT_LEADER)
            assert await offsets.committed("g", queue(0)) == 9
            await offsets.commit("g", {queue(0): 12})
            assert new.last(RequestCode.UPDATE_CONSUMER_OFFSET).ext["commitOffset"] == "12"
            with pytest.raises(NoQueue, match="global__/5 now: no broker leads it"):
                await offsets.max_offset(queue(5))


def lock_all(asked: Asked) -> Reply:
    wanted = LockBatchRequestBody.decode(asked.body).mq_set
    return Reply(body=(LockBatchResponseBody(lock_ok_mq_set=wanted).encode(),))


async def test_locks_are_asked_of_each_queues_leader() -> None:
    async with scripted_cluster(2) as (nameserver, brokers, network):
        leads = [[0, 1], [2], [3]]
        nameserver.answer(ROUTE, static_route(*brokers, leads=leads, total=5, away=1))
        for broker in brokers:
            broker.answer(RequestCode.LOCK_BATCH_MQ, lock_all)
        async with open_instance(nameserver.address, network) as client:
            locks = QueueLockClient(client, "g")
            failures: dict[str, HeadraceError] = {}
            locked = await locks.lock(map(queue, range(5)), failures)
            assert locked == {queue(0), queue(1), queue(2)}
            assert set(failures) == {"broker-2", "__syslo__none__"}
            with pytest.raises(NoQueue):
                await locks.unlock(map(queue, range(5)))
        for broker, ids in zip(brokers, leads, strict=False):
            for code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ):
                asked = LockBatchRequestBody.decode(broker.last(code).body).mq_set
                assert asked == [queue(number) for number in ids]


# -- consumer --------------------------------------------------------------------------------------


class Leader:
    """Scripts a broker that leads some queues: static offsets from ``base``, ``count`` messages."""

    def __init__(self, broker: Scripted, base: int, count: int) -> None:
        self.broker = broker
        self.base = base
        self.count = count
        broker.answer(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self._members)
        broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, NOT_FOUND)
        broker.answer(RequestCode.GET_MIN_OFFSET, Reply(OffsetResponseHeader(offset=0)))
        broker.answer(RequestCode.LOCK_BATCH_MQ, lock_all)
        broker.answer(RequestCode.PULL_MESSAGE, self._pull)

    def _members(self, _asked: Asked) -> Reply:
        client_id = HeartbeatData.decode(self.broker.last(RequestCode.HEART_BEAT).body).client_id
        body = GetConsumerListByGroupResponseBody(consumer_id_list=[client_id])
        return Reply(body=(body.encode(),))

    def _pull(self, asked: Asked) -> Reply | None:
        offset = int(asked.ext["queueOffset"])
        end = self.base + self.count
        if offset >= end:
            return None
        if offset < self.base:
            return Reply(self._header(self.base), code=ResponseCode.PULL_RETRY_IMMEDIATELY)
        records = [
            encode_record(topic="T", queue_id=150, body=b"%d" % at, queue_offset=at - self.base)
            for at in range(offset, end)
        ]
        return Reply(self._header(end, self.base), tuple(records))

    def _header(self, next_offset: int, delta: int | None = None) -> PullMessageResponseHeader:
        return PullMessageResponseHeader(
            suggest_which_broker_id=0,
            next_begin_offset=next_offset,
            min_offset=0,
            max_offset=self.base + self.count,
            offset_delta=delta,
        )


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_consumer_follows_a_moved_leader(ordered: bool, autojump_clock: MockClock) -> None:
    async with scripted_cluster(2) as (nameserver, (old, new), network):
        routes = [
            static_route(old, new, leads=[[0], []], total=1),
            static_route(old, new, leads=[[0], [0]], total=1),
        ]

        def answer(asked: Asked) -> Reply:
            return routes[0] if asked.ext["topic"] == "T" else NO_TOPIC

        nameserver.answer(ROUTE, answer)
        Leader(old, 0, 3)
        Leader(new, 10, 2)
        consumer = Consumer(
            "g",
            "T",
            nameserver=nameserver.address,
            connect=network.connect,
            start="earliest",
            ordered=ordered,
        )
        seen = []
        async with consumer:
            async for message in consumer:
                assert message.queue == queue(0)
                assert message.queue_offset == int(message.body)
                seen.append(message.queue_offset)
                if len(seen) == 3:
                    await trio.testing.wait_all_tasks_blocked()
                    del routes[0]
                    old.answer(RequestCode.PULL_MESSAGE, NOT_LEADER)
                    started = trio.current_time()
                    held = old.last(RequestCode.PULL_MESSAGE)
                    held.channel.close("")  # a broker answers the pulls that it holds
                if len(seen) == 5:
                    break
            assert trio.current_time() - started < 2
        assert seen == [0, 1, 2, 10, 11]
        assert int(new.last(RequestCode.UPDATE_CONSUMER_OFFSET).ext["commitOffset"]) > 10


async def test_queues_with_a_leader_are_read_while_others_have_none(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_cluster(1) as (nameserver, (broker,), network):
        here = static_route(broker, leads=[[1], [0]], total=3, away=1)
        nameserver.answer(ROUTE, lambda asked: here if asked.ext["topic"] == "T" else NO_TOPIC)
        Leader(broker, 0, 3)
        consumer = Consumer(
            "g", "T", nameserver=nameserver.address, connect=network.connect, start="earliest"
        )
        seen = []
        async with consumer:
            async for message in consumer:
                seen.append((message.queue.queue_id, message.queue_offset))
                if len(seen) == 3:
                    await trio.sleep(60)
                    break
        assert seen == [(1, 0), (1, 1), (1, 2)]
        for name in ("broker broker-1", "the leader of some queues"):
            assert caplog.text.count(f"{name} is unavailable") == 1


async def test_messages_at_a_broker_of_apache_are_pulled_through_our_leader(
    autojump_clock: MockClock,
) -> None:
    async with scripted_cluster(1, headrace=True) as (nameserver, (broker,), network):
        here = static_route(broker, leads=[[0]], total=1)
        nameserver.answer(ROUTE, lambda asked: here if asked.ext["topic"] == "T" else NO_TOPIC)
        Leader(broker, 0, 3)
        not_supported = Reply(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        broker.answer(RequestCode.BULK_PULL, not_supported, not_supported, None)
        consumer = Consumer(
            "g", "T", nameserver=nameserver.address, connect=network.connect, start="earliest"
        )
        seen = []
        async with consumer:
            async for message in consumer:
                seen.append(message.queue_offset)
                if len(seen) == 3:
                    break
        assert seen == [0, 1, 2]


def test_also_in_slices() -> None:
    with scripted_in_thread() as (broker,):
        broker.is_headrace = True
        broker.answer(RequestCode.BULK_PULL, Reply(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED))
        Leader(broker, 0, 3)
        with BlockingConnection.connect(broker.address) as connection:
            wanted = Wanted("g", queue(0), 0, Subscription("T"), record_bytes_max=1 << 20)
            (piece,) = SliceReader(connection, wanted, 3)
        assert piece.columns is not None
        assert piece.columns.queue_offset.tolist() == [0, 1, 2]
