"""What members say about messages that are out: acks, and other times."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.pop.batch_ack import BatchAck, BatchAckBody
from headrace_protocol.pop.handle import Handle, TopicKind
from tests.support.broker import Answer
from tests.support.pop_broker import BROKER, INVISIBLE_MS, PopBroker, bodies


def handles(broker: PopBroker, count: int = 4) -> list[Handle]:
    """The handles of messages 0, 1 ... of queue 0, which are out."""
    for number in range(count):
        broker.store_message("T", 0, b"%d" % number)
    return [handle for _, handle in broker.taken(queue_id=0)]


def ack_all(broker: PopBroker, *acks: BatchAck) -> Answer:
    body = BatchAckBody(acks=list(acks), broker_name=BROKER)
    return broker.ask(RequestCode.BATCH_ACK_MESSAGE, body=body.encode())


def test_the_group_goes_on_behind_what_is_acked_without_a_gap(broker: PopBroker) -> None:
    first, second, third, _ = handles(broker)
    progress = []
    for handle in (second, first, third):
        assert broker.ack(handle).code == ResponseCode.SUCCESS
        progress.append(broker.progress())
    assert progress == [0, 2, 3]
    assert broker.pop_parts.pops.out_count == 1


def test_a_second_ack_has_no_effect(broker: PopBroker) -> None:
    first, *_ = handles(broker)
    for _ in range(2):
        assert broker.ack(first).code == ResponseCode.SUCCESS
    assert broker.pop_parts.pops.out_count == 3


@pytest.mark.parametrize(
    ("parts", "fields", "code"),
    [
        ({"broker_name": "broker-b"}, {}, ResponseCode.MESSAGE_ILLEGAL),
        ({"queue_id": 1}, {"queue_id": 0}, ResponseCode.MESSAGE_ILLEGAL),
        ({"queue_id": 1, "queue_offset": 3}, {}, ResponseCode.NO_MESSAGE),
        ({"queue_id": 7}, {"queue_id": 7}, ResponseCode.MESSAGE_ILLEGAL),
        ({"queue_offset": 9}, {}, ResponseCode.NO_MESSAGE),
        ({"queue_offset": 2}, {"offset": 1}, ResponseCode.MESSAGE_ILLEGAL),
        ({}, {"topic": "missing"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"kind": TopicKind.RETRY_V1}, {}, ResponseCode.TOPIC_NOT_EXIST),
        ({}, {"extra_info": "1 2 3"}, ResponseCode.INVALID_PARAMETER),
        ({}, {"extra_info": "x" * 10_000}, ResponseCode.INVALID_PARAMETER),
        ({}, {"extra_info": "-1 2 3 4 0 broker-a 0 1"}, ResponseCode.INVALID_PARAMETER),
        ({}, {"offset": -1}, ResponseCode.MESSAGE_ILLEGAL),
        ({"start_offset": 1}, {}, ResponseCode.SUCCESS),
        ({"pop_time": 1}, {}, ResponseCode.SUCCESS),
        # Of an orderly POP, which there was none.
        ({"revive_queue_id": 999}, {}, ResponseCode.SUCCESS),
        ({}, {"consumer_group": "other"}, ResponseCode.SUCCESS),
    ],
)
def test_a_forged_handle_changes_nothing(
    broker: PopBroker, parts: dict[str, Any], fields: dict[str, Any], code: int
) -> None:
    """Not by an ack, which is no error if it names nothing, nor by another time."""
    first, *_ = handles(broker)
    forged = first._replace(**parts)
    answer = broker.ack(forged, **fields)
    assert answer.code == code, answer.remark
    answer = broker.change(forged, 5000, **fields)
    assert answer.code in {code, ResponseCode.NO_MESSAGE} - {ResponseCode.SUCCESS}
    pops = broker.pop_parts.pops
    assert pops.out_count == 4
    assert {each.due_ms for queue in pops for each in queue} == {first.visible_time}


def test_messages_of_several_pops_are_acked_together(broker: PopBroker) -> None:
    first, second, third, _ = handles(broker)
    broker.store_message("T", 1)
    ((_, other),) = broker.taken()
    acks = BatchAck.of("T", "g", first, [0, 2]), BatchAck.of("T", "g", other, [0])
    for _ in range(2):
        assert ack_all(broker, *acks).code == ResponseCode.SUCCESS
        assert broker.pop_parts.pops.out_count == 2
    assert ack_all(broker, acks[0], BatchAck.of("T", "g", second, [1])).code == ResponseCode.SUCCESS
    assert (broker.progress(), broker.progress(1)) == (3, 1)
    assert ack_all(broker, BatchAck.of("T", "g", third, [])).code == ResponseCode.SUCCESS


def test_acks_of_all_come_twice(broker: PopBroker) -> None:
    first, *_ = handles(broker)
    for _ in range(2):
        every = BatchAck.of("T", "g", first, range(4))
        assert ack_all(broker, every, every).code == ResponseCode.SUCCESS
        assert (broker.pop_parts.pops.out_count, broker.progress()) == (0, 4)


def test_acks_of_which_one_is_wrong_change_nothing(broker: PopBroker) -> None:
    first, *_ = handles(broker)
    wrong = BatchAck.of("T", "g", first._replace(queue_id=9), [0])
    answer = ack_all(broker, BatchAck.of("T", "g", first, [0]), wrong)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    far = BatchAck.of("T", "g", first, [0, 60_000])
    assert ack_all(broker, far).code == ResponseCode.NO_MESSAGE
    assert broker.pop_parts.pops.out_count == 4


# -- other times ------------------------------------------------------------------------------


def test_a_message_gets_another_time_and_handle(broker: PopBroker) -> None:
    _, second, *_ = handles(broker)
    ext = broker.change(second, 5000).command.ext()
    new = second._replace(
        start_offset=1, pop_time=int(ext["popTime"]), invisible_time=int(ext["invisibleTime"])
    )
    assert (new.pop_time, new.invisible_time) == (second.pop_time + 1, 5000)
    assert ext["reviveQid"] == str(second.revive_queue_id)
    assert broker.ack(second).code == ResponseCode.SUCCESS  # it names nothing any more
    assert broker.pop_parts.pops.out_count == 4
    assert broker.ack(new).code == ResponseCode.SUCCESS
    assert broker.pop_parts.pops.out_count == 3


@pytest.mark.parametrize("invisible_ms", [-1, 2**63 - 1])
def test_an_impossible_time_is_refused(broker: PopBroker, invisible_ms: int) -> None:
    first, *_ = handles(broker)
    assert broker.change(first, invisible_ms).code == ResponseCode.INVALID_PARAMETER
    assert broker.ack(first).code == ResponseCode.SUCCESS


def test_a_message_that_is_out_no_more_gets_no_other_time(broker: PopBroker) -> None:
    first, *_ = handles(broker)
    broker.ack(first)
    assert broker.change(first, 5000).code == ResponseCode.NO_MESSAGE


def test_the_group_waits_for_a_message_with_another_time(broker: PopBroker) -> None:
    first, second, third, fourth = handles(broker)
    broker.change(second, 5000)
    for handle in (first, third, fourth):
        broker.ack(handle)
    assert broker.progress() == 1


def test_many_changes_leave_nothing_behind(broker: PopBroker) -> None:
    first, *rest = handles(broker)
    for handle in rest:
        broker.ack(handle)
    for _ in range(300):
        ext = broker.change(first, INVISIBLE_MS).command.ext()
        first = first._replace(start_offset=0, pop_time=int(ext["popTime"]))
    assert broker.ack(first).code == ResponseCode.SUCCESS
    assert (broker.progress(), len(broker.pop_parts.pops.due)) == (4, 0)


# -- progress ---------------------------------------------------------------------------------


def test_a_reset_is_where_the_group_goes_on(broker: PopBroker) -> None:
    first, *_ = handles(broker)
    broker.offsets.reset("g", "T", 0, 2)
    assert broker.pop_parts.pops.out_count == 0
    assert bodies(broker.taken(queue_id=0)) == [b"2", b"3"]
    broker.ack(first)
    assert broker.progress() == 2


@pytest.mark.parametrize("kind", ["topic", "group", "offset"])
def test_what_is_deleted_is_forgotten(broker: PopBroker, kind: str) -> None:
    handles(broker)
    deletions = {
        "topic": lambda: [*broker.offsets.delete_topic("T")],
        "group": lambda: [*broker.offsets.delete_group("g")],
        "offset": lambda: broker.offsets.withdraw("g", "T", 0),
    }
    deletions[kind]()
    pops = broker.pop_parts.pops
    assert (pops.out_count, len(pops.due), pops.find("g", "T", 0)) == (0, 0, None)
