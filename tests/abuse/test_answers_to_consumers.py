"""Brokers and nameservers whose answers are empty without end, or malformed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from headrace import Consumer, MessageQueue
from headrace.consumer.assignment import LOCK_TRUST_S
from headrace.consumer.pulls import Wanted
from headrace.consumer.subscription import Subscription
from headrace.errors import ConnectionLost, HeadraceError
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.bodies import (
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    TopicRouteData,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.drivers.response import Response
from headrace_protocol.headers import OffsetResponseHeader
from headrace_protocol.message import encode_record
from headrace_protocol.serving import Reply
from tests.support.member import NO_TOPIC, NOT_FOUND, Apache, Headrace, Member
from tests.support.scripted import Asked, Scripted, close, scripted_cluster

MINUTE_S = 60
# The pause doubles at first, then there is one pull each second.
PULLS_MAX = 75
QUEUE = MessageQueue("T", "broker-0", 0)
RECORDS = [encode_record(topic="T", queue_id=0, body=b"0", queue_offset=0)]
OTHER_QUEUE = MessageQueue("other", "broker-0", 0)


@pytest.fixture(params=[Apache, Headrace])
def peer(request: pytest.FixtureRequest) -> Apache | Headrace:
    return request.param()


def pulls(member: Member) -> list[Asked]:
    return [
        asked
        for asked in member.broker.asked
        if asked.code == member.peer.pull_code and asked.ext["topic"] == "T"
    ]


# -- pulls -----------------------------------------------------------------------------------------


def at_once(code: ResponseCode, next_offset: int) -> Callable[..., Any]:
    return lambda peer: Reply(peer.pulled(next_offset, 10), code=code)


def moved_to_and_fro(peer: Apache | Headrace) -> Callable[..., Any]:
    offsets = iter([5, 3] * 10_000)
    return lambda _asked: Reply(peer.pulled(next(offsets), 10), code=ResponseCode.PULL_OFFSET_MOVED)


NOTHING = {
    "not found": at_once(ResponseCode.PULL_NOT_FOUND, 0),
    "retry immediately": at_once(ResponseCode.PULL_RETRY_IMMEDIATELY, 0),
    "found, but no message": at_once(ResponseCode.SUCCESS, 0),
    "moved to where it was": at_once(ResponseCode.PULL_OFFSET_MOVED, 0),
    "moved to and fro": moved_to_and_fro,
    "a negative offset": at_once(ResponseCode.PULL_OFFSET_MOVED, -1),
    "the same messages again": lambda peer: peer.found(0, 10, RECORDS),
}


@pytest.mark.parametrize("answer", NOTHING.values(), ids=NOTHING.keys())
async def test_empty_pulls_are_spaced_out(
    peer: Apache | Headrace, answer: Callable[..., Any], autojump_clock: object
) -> None:
    async with Member(peer) as member:
        member.broker.answer(peer.pull_code, answer(peer))
        async with member.consumer:
            await trio.sleep(MINUTE_S)
            assert 30 <= len(pulls(member)) <= PULLS_MAX
            before = trio.current_time()
            member.broker.answer(peer.pull_code, member.log.pull)
            assert (await member.take(2))[1] > 0
            assert trio.current_time() <= before + 1


async def test_pulls_that_a_broker_held_are_followed_by_the_next_at_once(
    peer: Apache, autojump_clock: object
) -> None:
    began = []

    async with Member(peer, count=0) as member:

        def held(asked: Asked) -> None:
            if asked.ext["topic"] == "T":
                began.append(trio.current_time())
                member.tasks.start_soon(answer_later)

        async def answer_later() -> None:
            await trio.sleep(15)
            code = ResponseCode.PULL_NOT_FOUND
            member.reply(pulls(member)[-1], peer.pulled(0, 0), code)

        member.broker.answer(peer.pull_code, held)
        async with trio.open_nursery() as member.tasks:
            async with member.consumer:
                await trio.sleep(MINUTE_S)
            member.tasks.cancel_scope.cancel()
    assert [round(later - earlier, 3) for earlier, later in itertools.pairwise(began)] == [
        15,
        15,
        15,
    ]


async def test_progress_costs_no_pause(peer: Apache, autojump_clock: object) -> None:
    """Empty answers that advance, as with a filter that matches nothing."""
    async with Member(peer) as member:

        def next_one(asked: Asked) -> Reply | None:
            offset = int(asked.ext["queueOffset"])
            if offset == 500 or asked.ext["topic"] != "T":
                return None
            header = peer.pulled(offset + 1, 500)
            return Reply(header, code=ResponseCode.PULL_RETRY_IMMEDIATELY)

        member.broker.answer(peer.pull_code, next_one)
        async with member.consumer:
            before = trio.current_time()
            await trio.testing.wait_all_tasks_blocked()
            assert len(pulls(member)) == 501
            assert trio.current_time() == before


texts = st.one_of(
    st.sampled_from(["0", "1", "-1", "true", "log", "gathered", "", "x" * 99]),
    st.integers(-(2**70), 2**70).map(str),
)
FIELDS = [
    "nextBeginOffset",
    "minOffset",
    "maxOffset",
    "suggestWhichBrokerId",
    "offsetDelta",
    "count",
    "layout",
    "firstPhysicalOffset",
    "hasQueueOffsets",
]
good_fields = st.fixed_dictionaries(
    {name: st.sampled_from(["0", "1", "9"]) for name in ("nextBeginOffset", "minOffset")}
    | {"maxOffset": st.just("9"), "suggestWhichBrokerId": st.just("0")},
    optional=dict.fromkeys(FIELDS[4:], texts),
)


@given(
    st.sampled_from([RequestCode.PULL_MESSAGE, RequestCode.BULK_PULL]),
    st.sampled_from([0, 19, 20, 21, 1, -5]),
    st.one_of(good_fields, st.dictionaries(st.sampled_from(FIELDS), texts), st.just([])),
    st.one_of(st.binary(max_size=200), st.binary(max_size=30).map(lambda more: RECORDS[0] + more)),
)
def test_any_answer_to_a_pull_is_messages_or_an_error_that_names_the_broker(
    request_code: RequestCode, code: int, fields: dict[str, str] | list[Any], body: bytes
) -> None:
    wanted = Wanted("g", QUEUE, 0, Subscription("T", "a"), 9, 9, 0)
    response = Response(
        "10.0.0.1:1", request_code, Command(code, ext_fields=fields), memoryview(body)
    )
    try:
        result = wanted.result(response)
    except HeadraceError as error:
        assert "10.0.0.1:1" in str(error)  # noqa: PT017 - or none is raised
    else:
        assert result.next_offset >= 0
        assert not result.batch or result.next_offset > 0


# -- sharing the queues ----------------------------------------------------------------------------

MEMBERS = RequestCode.GET_CONSUMER_LIST_BY_GROUP
LOCK = RequestCode.LOCK_BATCH_MQ


async def test_notices_without_a_change_do_not_keep_a_member_busy(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer) as member, member.consumer:
        await member.take(1)
        for _ in range(2000):
            member.push(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
            await trio.sleep(0.005)
        assert member.broker.count(MEMBERS) < 30


@pytest.mark.parametrize("body", [b"", b"{", b'{"consumerIdList":{"a":1}}', b"[[["])
async def test_a_malformed_list_of_members_leaves_the_queues_as_they_are(
    peer: Apache | Headrace, body: bytes, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with Member(peer) as member, member.consumer as consumer:
        await member.take(1)
        member.broker.answer(MEMBERS, Reply(body=(body,)))
        with caplog.at_level(logging.WARNING):
            await trio.sleep(MINUTE_S)
        assert consumer.assignment == [QUEUE]
        assert member.broker.address in caplog.text
        nobody = GetConsumerListByGroupResponseBody(consumer_id_list=["somebody else"])
        member.broker.answer(MEMBERS, Reply(body=(nobody.encode(),)))
        await trio.sleep(MINUTE_S)
        assert consumer.assignment == [], "the task goes on"


async def test_only_locks_that_were_asked_for_are_taken(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer, ordered=True) as member:
        granted = LockBatchResponseBody(lock_ok_mq_set=[QUEUE, OTHER_QUEUE])
        member.broker.answer(LOCK, Reply(body=(granted.encode(),)))
        async with member.consumer as consumer:
            assert consumer.assignment == [QUEUE]


@pytest.mark.parametrize("body", [b"", b'{"lockOKMQSet":[{"queueId":"x"}]}', b'{"lockOKMQSet":7}'])
async def test_malformed_answers_about_locks_are_logged_and_asked_again(
    peer: Apache | Headrace, body: bytes, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    def granted(asked: Asked) -> Reply:
        wanted = LockBatchRequestBody.decode(asked.body).mq_set
        return Reply(body=(LockBatchResponseBody(lock_ok_mq_set=wanted).encode(),))

    async with Member(peer, ordered=True) as member:
        member.broker.answer(LOCK, granted, Reply(body=(body,)))
        async with member.consumer as consumer:
            await trio.sleep(MINUTE_S)
            assert f"LOCK_BATCH_MQ: the answer from {member.broker.address}" in caplog.text
            member.broker.answer(LOCK, granted)
            await trio.sleep(MINUTE_S)
            assert consumer.assignment == [QUEUE]
            assert member.broker.count(LOCK) < 2 * PULLS_MAX


async def test_a_route_without_brokers_does_not_end_a_consumer(
    peer: Apache | Headrace, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with Member(peer) as member, member.consumer as consumer:
        await member.take(1)
        known = member.routes.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC][0]
        empty = Reply(body=(TopicRouteData().encode(),))
        member.routes.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, empty)
        with caplog.at_level(logging.WARNING):
            await trio.sleep(2 * MINUTE_S)
        assert "has no queue to read from now" in caplog.text
        member.routes.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, known)
        await trio.sleep(MINUTE_S)
        assert consumer.assignment == [QUEUE]
        assert await member.take(9)


# -- one broker of several -------------------------------------------------------------------------


@pytest.fixture
async def two_brokers() -> AsyncIterator[tuple[Scripted, list[Scripted], MemoryNetwork]]:
    """A nameserver, and two brokers with a queue each."""
    async with scripted_cluster(brokers=2) as (nameserver, brokers, network):
        topic = nameserver.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC][0]
        nameserver.answer(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            lambda asked: topic if asked.ext["topic"] == "T" else NO_TOPIC,
        )
        for broker in brokers:

            def members(_asked: Asked, broker: Scripted = broker) -> Reply:
                last = HeartbeatData.decode(broker.last(RequestCode.HEART_BEAT).body)
                known = GetConsumerListByGroupResponseBody(consumer_id_list=[last.client_id])
                return Reply(body=(known.encode(),))

            def granted(asked: Asked) -> Reply:
                wanted = LockBatchRequestBody.decode(asked.body).mq_set
                return Reply(body=(LockBatchResponseBody(lock_ok_mq_set=wanted).encode(),))

            broker.answer(MEMBERS, members)
            broker.answer(LOCK, granted)
            broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, NOT_FOUND)
            broker.answer(RequestCode.GET_MIN_OFFSET, Reply(OffsetResponseHeader(offset=0)))
            broker.answer(RequestCode.PULL_MESSAGE, None)
        yield nameserver, brokers, network


FAILURES = {
    "no connection": (RequestCode.HEART_BEAT, close),
    "no answer": (RequestCode.QUERY_CONSUMER_OFFSET, None),
    "refused": (RequestCode.QUERY_CONSUMER_OFFSET, Reply(code=ResponseCode.SYSTEM_BUSY)),
    "nonsense": (RequestCode.QUERY_CONSUMER_OFFSET, Reply(body=(b"{",))),
    "no offset": (RequestCode.GET_MIN_OFFSET, close),
    "no lock": (LOCK, Reply(body=(b"{",))),
}


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(("code", "answer"), FAILURES.values(), ids=FAILURES.keys())
async def test_a_failing_broker_does_not_affect_the_others(
    two_brokers: tuple[Scripted, list[Scripted], MemoryNetwork],
    code: RequestCode,
    answer: Callable[..., Any] | Reply | None,
    bad: int,
    autojump_clock: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nameserver, brokers, network = two_brokers
    queues = [MessageQueue("T", f"broker-{number}", 0) for number in range(2)]
    good_answers = brokers[bad].answers[code].copy()
    brokers[bad].answer(code, answer)
    connect: dict[str, Any] = {"nameserver": nameserver.address, "connect": network.connect}
    async with Consumer("g", "T", start="earliest", ordered=True, **connect) as consumer:
        assert consumer.assignment == [queues[1 - bad]]
        (line,) = caplog.messages
        assert f"broker broker-{bad}" in line
        await trio.sleep(MINUTE_S)
        assert consumer.assignment == [queues[1 - bad]]
        assert brokers[bad].count(code) < 2 * PULLS_MAX
        brokers[bad].answer(code, *(good_answers or [Reply()]))
        await trio.sleep(MINUTE_S)
        assert consumer.assignment == queues


async def test_a_broker_that_fails_later_keeps_its_queues_while_its_locks_last(
    two_brokers: tuple[Scripted, list[Scripted], MemoryNetwork],
    autojump_clock: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nameserver, brokers, network = two_brokers
    connect: dict[str, Any] = {"nameserver": nameserver.address, "connect": network.connect}
    async with Consumer("g", "T", start="earliest", ordered=True, **connect) as consumer:
        both = consumer.assignment
        assert len(both) == 2
        brokers[1].answer(LOCK, Reply(code=ResponseCode.SYSTEM_BUSY))
        await trio.sleep(LOCK_TRUST_S - 5)
        assert consumer.assignment == both
        assert "group g on broker broker-1 is unavailable" in caplog.text
        await trio.sleep(MINUTE_S)  # another member may hold the queue by now
        assert consumer.assignment == both[:1]


async def test_an_error_is_raised_if_all_brokers_fail(
    two_brokers: tuple[Scripted, list[Scripted], MemoryNetwork], autojump_clock: object
) -> None:
    nameserver, brokers, network = two_brokers
    for broker in brokers:
        broker.answer(RequestCode.HEART_BEAT, close)
    connect: dict[str, Any] = {"nameserver": nameserver.address, "connect": network.connect}
    with pytest.raises(ConnectionLost):
        async with Consumer("g", "T", **connect):
            pass
