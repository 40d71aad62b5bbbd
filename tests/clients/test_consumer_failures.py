"""A group's member when brokers fail, refuse, or ask: against scripted brokers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from headrace import MessageQueue, PullConsumer
from headrace.consumer.assignment import LOCK_TRUST_S
from headrace_protocol import fastjson
from headrace_protocol.bodies import (
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    ResetOffsetBody,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_RESPONSE
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.header_codecs import encode_frame
from headrace_protocol.message import encode_record
from headrace_protocol.serving import Reply
from tests.support.member import COMMIT, Apache, Headrace, Member, lock_all
from tests.support.scripted import Asked, close
from tests.support.until import until


@pytest.fixture(params=[Apache, Headrace])
def peer(request: pytest.FixtureRequest) -> Apache | Headrace:
    return request.param()


async def test_progress_is_committed_regularly_and_on_leaving(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer) as member, member.consumer:
        await member.take(4)
        await trio.sleep(6)
        assert member.committed() == [(3, True)], "the message at hand is not processed yet"
        await member.take(3)
        await trio.sleep(5)
        assert member.committed()[1:] == [(6, True)]
        await trio.sleep(20)
        assert len(member.committed()) == 2, "nothing new, nothing to commit"
    assert member.committed()[2:] == [(7, False)]


async def test_a_failed_commit_on_leaving_is_logged_and_not_raised(
    peer: Apache | Headrace, caplog: pytest.LogCaptureFixture
) -> None:
    async with Member(peer) as member:
        member.broker.answer(COMMIT, Reply(code=ResponseCode.SYSTEM_ERROR, remark="disk"))
        with caplog.at_level(logging.WARNING):
            async with member.consumer:
                await member.take(1)
    assert "will be redelivered" in caplog.text
    assert "disk" in caplog.text


async def test_heartbeats_tell_the_subscription(peer: Apache | Headrace) -> None:
    async with Member(peer) as member, member.consumer:
        heartbeat = HeartbeatData.decode(member.broker.last(RequestCode.HEART_BEAT).body)
    (group,) = heartbeat.consumer_data_set
    assert (group.group_name, group.consume_from_where) == ("g", "CONSUME_FROM_FIRST_OFFSET")
    assert [s.topic for s in group.subscription_data_set] == ["T", "%RETRY%g"]
    goodbye = member.broker.last(RequestCode.UNREGISTER_CLIENT).ext
    assert goodbye == {"clientID": heartbeat.client_id, "consumerGroup": "g"}


async def take_ten(
    peer: Apache | Headrace, caplog: pytest.LogCaptureFixture, *failures: Any
) -> None:
    """Ten messages, the pulls of which fail first."""
    async with Member(peer) as member:
        member.broker.answer(peer.pull_code, *failures, member.log.pull)
        with caplog.at_level(logging.WARNING):
            async with member.consumer:
                assert await member.take(10) == list(range(10))


@pytest.mark.parametrize(
    "failure",
    [
        lambda _peer: close,
        lambda _peer: Reply(code=ResponseCode.SYSTEM_BUSY),
        lambda _peer: Reply(),
        lambda peer: peer.found(1, 10, [b"no record"]),
        lambda peer: peer.found(1, 10, [bytes(200)]),
        lambda peer: Reply(peer.pulled(5, 10, 5), (b"no record",)),
    ],
    ids=["closed", "busy", "no header", "short record", "zeros", "short body"],
)
async def test_a_failed_pull_is_tried_again_and_nothing_is_lost(
    peer: Apache | Headrace,
    failure: Callable[..., Any],
    autojump_clock: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await take_ten(peer, caplog, failure(peer))
    assert caplog.messages[0].startswith(
        ("topic T on broker broker-0 is unavailable", "broker broker-0 is unavailable")
    )


async def test_an_absent_broker_is_one_line_when_it_goes_and_one_when_it_is_back(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    await take_ten(Apache(), caplog, *[close] * 3)
    assert [text.partition(":")[0] for text in caplog.messages] == [
        "broker broker-0 is unavailable, retrying",
        "broker broker-0 is available again after 3 s",
    ]


async def test_a_move_within_the_queue_is_no_warning(
    peer: Apache | Headrace, caplog: pytest.LogCaptureFixture
) -> None:
    reset = Reply(peer.pulled(0, 10), code=ResponseCode.PULL_OFFSET_MOVED)
    await take_ten(peer, caplog, reset)
    assert caplog.messages == []


async def test_a_damaged_body_is_an_error_of_its_message_only(peer: Apache) -> None:
    records = [
        encode_record(topic="T", queue_id=0, body=b"body %d" % offset, queue_offset=offset)
        for offset in range(3)
    ]
    records[1] = records[1].replace(b"body", b"Body")
    async with Member(peer) as member:
        member.broker.answer(
            peer.pull_code,
            lambda asked: peer.found(3, 3, records) if asked.ext["queueOffset"] == "0" else None,
        )
        async with member.consumer as consumer:
            messages = aiter(consumer)
            assert (await anext(messages)).body == b"body 0"
            damaged = await anext(messages)
            for read in (lambda: damaged.body, lambda: damaged.key):
                with pytest.raises(CorruptRecord, match="CRC"):
                    read()
            assert (await anext(messages)).body == b"body 2"
        async with PullConsumer(nameserver=member.nameserver, connect=member.connect) as reader:
            await reader.assign([MessageQueue("T", "broker-0", 0)])
            batch = await reader.receive_many()
            assert batch is not None
            with pytest.raises(CorruptRecord, match="CRC"):
                batch.values()
            assert batch[2].body == b"body 2"


async def test_an_offset_that_does_not_exist_is_corrected(
    peer: Apache | Headrace, caplog: pytest.LogCaptureFixture
) -> None:
    async with Member(peer) as member:
        answer = msgspec.structs.replace(peer.pulled(4, 10), min_offset=4)
        moved = Reply(answer, code=ResponseCode.PULL_OFFSET_MOVED)
        member.broker.answer(peer.pull_code, moved, member.log.pull)
        with caplog.at_level(logging.WARNING):
            async with member.consumer:
                assert await member.take(6) == [4, 5, 6, 7, 8, 9]
    assert "continuing at 4" in caplog.text


async def test_what_a_filter_skipped_counts_as_processed(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer) as member:
        nothing = Reply(peer.pulled(10, 10), code=ResponseCode.PULL_RETRY_IMMEDIATELY)
        member.broker.answer(peer.pull_code, nothing, None)
        async with member.consumer:
            await trio.sleep(6)
            assert member.committed() == [(10, True)]


async def test_held_pulls_outlive_their_suspension(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer, count=0) as member, member.consumer:
        await trio.sleep(100)
        member.log.count = 3
        assert await member.take(3) == [0, 1, 2]


async def test_a_reset_by_the_broker_takes_effect_at_once(peer: Apache | Headrace) -> None:
    async with Member(peer) as member, member.consumer:
        assert await member.take(10) == list(range(10))
        offsets = ResetOffsetBody(offset_table={MessageQueue("T", "broker-0", 0): 2})
        member.push(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, {}, offsets.encode())
        assert await member.take(8) == list(range(2, 10))


async def test_requests_that_make_no_sense_are_answered_so_and_harm_nothing(
    peer: Apache | Headrace, caplog: pytest.LogCaptureFixture
) -> None:
    async with Member(peer) as member, member.consumer:
        await member.take(3)
        member.push(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, {}, b"{nonsense", oneway=False)
        member.push(RequestCode.CHECK_TRANSACTION_STATE, {}, oneway=False)
        member.push(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, {}, b"")
        assert await member.take(7) == list(range(3, 10))
        await trio.testing.wait_all_tasks_blocked()
    codes = [command.code for command, _ in member.broker.responses]
    assert codes == [ResponseCode.INVALID_PARAMETER, ResponseCode.REQUEST_CODE_NOT_SUPPORTED]
    assert "malformed request with code 220" in caplog.text


async def test_administrators_can_ask_what_a_member_is_doing(peer: Apache | Headrace) -> None:
    async with Member(peer) as member, member.consumer:
        await member.take(3)
        member.push(RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "g"}, oneway=False)
        await trio.testing.wait_all_tasks_blocked()
    ((command, body),) = member.broker.responses
    assert (command.opaque, command.code) == (77, ResponseCode.SUCCESS)
    info = fastjson.loads(body)
    assert [s["topic"] for s in info["subscriptionSet"]] == ["T", "%RETRY%g"]
    ((queue, state),) = info["mqTable"].items()
    assert dict(queue) == {"topic": "T", "brokerName": "broker-0", "queueId": 0}
    assert state["cachedMsgCount"] == 10
    assert state["commitOffset"] == 2


async def test_queues_without_their_lock_are_not_read(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer, ordered=True) as member:
        lock = RequestCode.LOCK_BATCH_MQ
        refused = Reply(body=(LockBatchResponseBody().encode(),))
        member.broker.answer(lock, refused, refused, lock_all)
        async with member.consumer as consumer:
            assert consumer.assignment == []
            started = trio.current_time()
            assert await member.take(10) == list(range(10))
            assert 1 <= trio.current_time() - started <= 3, "tried again each second"
            member.broker.answer(lock, refused)
            await trio.sleep(25)
            assert consumer.assignment == [], "a lock that is lost is a queue that is lost"
            assert len(member.committed()) == 1
    assert member.broker.count(RequestCode.UNLOCK_BATCH_MQ) == 0


async def test_locks_are_given_back_on_leaving(peer: Apache | Headrace) -> None:
    async with Member(peer, ordered=True) as member:
        member.broker.answer(RequestCode.LOCK_BATCH_MQ, lock_all)
        async with member.consumer:
            await member.take(1)
    unlocked = LockBatchRequestBody.decode(member.broker.last(RequestCode.UNLOCK_BATCH_MQ).body)
    assert unlocked.mq_set == [MessageQueue("T", "broker-0", 0)]


async def test_a_group_that_cannot_be_looked_up_keeps_its_queues(
    peer: Apache | Headrace, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with Member(peer) as member, member.consumer as consumer:
        await member.take(1)
        busy = Reply(code=ResponseCode.SYSTEM_BUSY)
        member.broker.answer(RequestCode.GET_CONSUMER_LIST_BY_GROUP, busy)
        with caplog.at_level(logging.WARNING):
            await trio.sleep(30)
        assert consumer.assignment == [MessageQueue("T", "broker-0", 0)]
    assert "group g on broker broker-0 is unavailable" in caplog.text


async def test_a_member_that_a_broker_has_forgotten_keeps_its_queues(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    async with Member(peer) as member, member.consumer as consumer:
        await member.take(1)
        nobody = Reply(code=ResponseCode.SYSTEM_ERROR, remark="no consumer for this group")
        member.broker.answer(RequestCode.GET_CONSUMER_LIST_BY_GROUP, nobody, member.log.members)
        heartbeats = member.broker.count(RequestCode.HEART_BEAT)
        await trio.sleep(21)  # one rebalance, and no heartbeat of the regular ones
        assert member.broker.count(RequestCode.HEART_BEAT) == heartbeats + 1
        assert consumer.assignment == [MessageQueue("T", "broker-0", 0)]
        assert all(is_oneway for _, is_oneway in member.committed()), "nothing was released"


async def test_the_replica_that_the_broker_suggests_is_asked(autojump_clock: object) -> None:
    peer = Apache()
    async with Member(peer) as member:
        member.broker.answer(
            peer.pull_code,
            lambda asked: Reply(
                peer.pulled(10, 10, 0, 1), (member.log.pull(asked) or Reply()).body
            ),
            None,
        )
        async with member.consumer:
            # The route knows no replica 1, so the one there is goes on to be asked.
            assert await member.take(10) == list(range(10))
            await trio.testing.wait_all_tasks_blocked()
            assert member.broker.last(peer.pull_code).ext["queueOffset"] == "10"


async def test_a_broker_of_ours_is_asked_for_large_slices_and_others_for_pulls(
    peer: Apache,
) -> None:
    async with Member(peer) as member, member.consumer:
        await member.take(1)
        asked = member.broker.last(peer.pull_code).ext
    assert int(asked["maxMsgBytes"]) == (4 if peer.is_headrace else 1) * 1024 * 1024
    codes = {RequestCode.PULL_MESSAGE, RequestCode.BULK_PULL} - {peer.pull_code}
    assert not any(each.code in codes for each in member.broker.asked)


async def test_a_queues_limit_in_bytes_bounds_what_is_asked_for(peer: Apache) -> None:
    async with Member(peer, queue_bytes_max=500) as member, member.consumer:
        await member.take(1)
        await trio.testing.wait_all_tasks_blocked()
        pulls = [each for each in member.broker.asked if each.code == peer.pull_code]
        assert [int(each.ext["maxMsgBytes"]) for each in pulls if each.ext["topic"] == "T"] == [500]


async def test_offsets_of_a_static_topics_answer_are_moved(autojump_clock: object) -> None:
    peer = Apache()
    async with Member(peer) as member:
        header = peer.pulled(103, 103)
        header.offset_delta = 100
        records = [
            encode_record(topic="T", queue_id=0, body=b"%d" % offset, queue_offset=offset)
            for offset in range(3)
        ]
        member.broker.answer(peer.pull_code, Reply(header, tuple(records)), None)
        async with member.consumer:
            async for batch in member.consumer.batches():
                assert [message.queue_offset for message in batch] == [100, 101, 102]
                break


async def test_a_member_hears_of_queues_whose_locks_ended(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    events: list[str] = []

    def lock_with_an_outage(asked: Asked) -> Reply | None:
        return None if 5 < trio.current_time() < LOCK_TRUST_S + 5 else lock_all(asked)

    async with Member(
        peer,
        ordered=True,
        on_assigned=lambda _: events.append("+"),
        on_revoked=lambda _: events.append("-"),
    ) as member:
        member.broker.answer(RequestCode.LOCK_BATCH_MQ, lock_with_an_outage)
        async with member.consumer:
            await until(lambda: len(events) >= 3)
    assert events == ["+", "-", "+", "-"]


async def test_closing_while_locks_are_asked_for(
    peer: Apache | Headrace, autojump_clock: object
) -> None:
    """The rebalance resumes when all queues are released, and finds them locked no more."""
    held: list[Asked] = []

    def unlock(asked: Asked) -> Reply:
        for each in held:
            none = LockBatchResponseBody(lock_ok_mq_set=[]).encode()
            head = encode_frame(
                0,
                ResponseCode.SUCCESS,
                each.opaque,
                flag=FLAG_RESPONSE,
                fields={},
                body_bytes=len(none),
            )
            each.channel.write(head + none)
        return Reply()

    async with Member(peer, ordered=True) as member:
        member.broker.answer(RequestCode.LOCK_BATCH_MQ, lock_all, held.append)
        member.broker.answer(RequestCode.UNLOCK_BATCH_MQ, unlock)
        async with member.consumer:
            assert await member.take(1) == [0]
            member.push(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
            await until(lambda: len(held) == 1)
        assert member.broker.count(RequestCode.UNLOCK_BATCH_MQ) == 1
