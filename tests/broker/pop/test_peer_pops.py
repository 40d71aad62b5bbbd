"""Pops that Apache's broker left in its revive topic: what was acked there stays acked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from headrace_broker.pop.feature import Pop
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.system_topics import REVIVE_GROUP, revive_log_topic
from tests.support.inner_batches import batch_items
from tests.support.pop_broker import INVISIBLE_MS, PopBroker, bodies, damage
from tests.support.stores import crash
from tests.support.wire import send_header

TOPIC = revive_log_topic("DefaultCluster")


@pytest.fixture
def broker(broker: PopBroker) -> PopBroker:
    """One that has messages 0 to 4, and an offset that Apache's broker left behind them."""
    for number in range(5):
        broker.store_message("T", 0, b"%d" % number)
    broker.offsets.commit("g", "T", 0, 5)
    return broker


def left(broker: PopBroker, tag: str, queue_id: int = 0, **fields: Any) -> None:
    """A message of Apache's broker in the revive topic."""
    body = {"so": 0, "pt": broker.clock.ms, "q": 0, "t": "T", "c": "g", "bn": "broker-a", **fields}
    broker.store_message(TOPIC, queue_id, json.dumps(body).encode(), TAGS=tag)


def left_checkpoint(broker: PopBroker, **fields: Any) -> int:
    """The time of the pop."""
    pop_time = broker.clock.ms
    both = {"it": INVISIBLE_MS, "n": 5, "bm": 0, "d": None, "ro": 0, "rp": None, "pt": pop_time}
    left(broker, "ck", **{**both, **fields})
    return pop_time


def read(broker: PopBroker) -> None:
    trio.run(broker.pop_parts.peer_pops.read_all)


def come_again(broker: PopBroker) -> list[bytes]:
    broker.clock.ms += INVISIBLE_MS + 3100
    broker.revive()
    return bodies(broker.taken())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, b"01234"),
        ({"bm": 0b101}, b"134"),
        ({"n": 3, "d": [0, 2, 4]}, b"024"),
        ({"n": 2, "d": [1, 3]}, b"13"),
        ({"n": 2, "d": [1, 3], "bm": 0b10}, b"1"),
        ({"so": 2, "n": 2}, b"23"),
        ({"bm": 0b11111}, b""),
    ],
)
def test_what_was_out_comes_again(
    broker: PopBroker, fields: dict[str, Any], expected: bytes
) -> None:
    left_checkpoint(broker, **fields)
    read(broker)
    assert broker.taken() == []
    assert come_again(broker) == [expected[at : at + 1] for at in range(len(expected))]
    assert broker.offsets.query(REVIVE_GROUP, TOPIC, 0) == 0  # the last that was read


def test_what_was_acked_does_not(broker: PopBroker) -> None:
    pop_time = left_checkpoint(broker)
    read(broker)
    left(broker, "ack", 0, ao=1, pt=pop_time)
    left(broker, "bAck", 0, aol=[3, 4], pt=pop_time)
    left(broker, "ack", 0, ao=1, pt=1)
    read(broker)
    assert come_again(broker) == [b"0", b"2"]
    assert broker.progress() == 5


def test_reading_begins_behind_the_last_message_that_the_other_broker_read(
    broker: PopBroker,
) -> None:
    left_checkpoint(broker)
    left_checkpoint(broker, so=3, n=1)
    broker.offsets.commit(REVIVE_GROUP, TOPIC, 0, 0)
    read(broker)
    assert come_again(broker) == [b"3"]
    assert broker.offsets.query(REVIVE_GROUP, TOPIC, 0) == 1


def test_a_kill_does_not_read_it_again(tmp_path: Path, broker: PopBroker) -> None:
    left_checkpoint(broker, n=2)
    read(broker)
    assert come_again(broker) == [b"0", b"1"]
    crash(broker.store)
    broker = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    read(broker)
    assert broker.pop_parts.pops.out_count == 2  # of the retry topic
    assert broker.progress() == 5


def test_a_checkpoint_counts_once(broker: PopBroker) -> None:
    pop_time = left_checkpoint(broker)
    left_checkpoint(broker, pt=pop_time)
    read(broker)
    assert broker.pop_parts.pops.out_count == 5


def test_an_ack_names_where_its_pop_began(broker: PopBroker) -> None:
    """A filter may have passed the message there."""
    pop_time = left_checkpoint(broker, n=2, d=[1, 3])
    left(broker, "ack", 0, ao=3, pt=pop_time)
    read(broker)
    assert come_again(broker) == [b"1"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": 1000},
        {"so": -1},
        {"so": 2**63},
        {"so": 10**400},
        {"pt": 2**63},
        {"it": -1},
        {"it": 2**63},
        {"bm": 2**80},
        {"q": -1},
        {"q": 2**31},
        {"c": "g" * 256},
        {"n": 2, "d": [0]},
        {"n": 2, "d": [1, 0]},
        {"n": 2, "d": [1, 1]},
        {"n": 2, "d": [-1, 1]},
        {"n": 2, "d": [0, 2**63]},
        {"n": 65, "d": list(range(65))},
    ],
)
def test_what_says_nothing_is_left_out(broker: PopBroker, fields: dict[str, Any]) -> None:
    left_checkpoint(broker, **fields)
    left_checkpoint(broker)
    read(broker)
    assert (broker.pop_parts.peer_pops.unreadable, broker.pop_parts.pops.out_count) == (1, 5)


@pytest.mark.parametrize("aol", [[-1], [2**63], list(range(65))])
def test_an_ack_that_says_nothing_is_left_out(broker: PopBroker, aol: list[int]) -> None:
    pop_time = left_checkpoint(broker)
    left(broker, "bAck", 0, aol=aol, pt=pop_time)
    read(broker)
    assert (broker.pop_parts.peer_pops.unreadable, broker.pop_parts.pops.out_count) == (1, 5)


def test_a_damaged_message_holds_up_no_other(broker: PopBroker) -> None:
    left_checkpoint(broker, n=1)
    left_checkpoint(broker, so=1, n=1, bn="damaged")
    left_checkpoint(broker, so=2, n=1)
    damage(broker, b"damaged")
    read(broker)
    assert (broker.pop_parts.peer_pops.unreadable, broker.pop_parts.pops.out_count) == (1, 2)
    assert broker.offsets.query(REVIVE_GROUP, TOPIC, 0) == 2


def test_what_can_not_be_written_counts_later(broker: PopBroker) -> None:
    left_checkpoint(broker)
    broker.disk.is_unwritable = True
    read(broker)
    assert broker.offsets.query(REVIVE_GROUP, TOPIC, 0) is None
    broker.disk.is_unwritable = False
    broker.pop_parts.progress.write_out()
    read(broker)
    assert broker.offsets.query(REVIVE_GROUP, TOPIC, 0) == 0
    assert broker.pop_parts.pops.out_count == 5


def test_a_topic_that_is_gone_has_nothing_out(broker: PopBroker) -> None:
    left_checkpoint(broker, t="missing")
    read(broker)
    assert broker.pop_parts.pops.out_count == 0


def test_a_group_without_an_offset_begins_behind_what_is_out(broker: PopBroker) -> None:
    left_checkpoint(broker, c="other", n=2)
    read(broker)
    queue = broker.pop_parts.pops.find("other", "T", 0)
    assert queue is not None
    assert queue.next_offset == 2


async def test_what_timers_deliver_is_found(
    broker: PopBroker, autojump_clock: trio.testing.MockClock
) -> None:
    pop = broker.part(Pop)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pop.run)
        await trio.sleep(5)
        assert pop.parts is None
        left_checkpoint(broker)
        await trio.sleep(5)
        assert pop.parts is not None
        assert pop.parts.pops.out_count == 5
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_acked", [False, True])
def test_a_batch_that_was_out_as_one_message_comes_again_singly(
    broker: PopBroker, is_acked: bool
) -> None:
    """Where pulls of the group find it: there are no POPs of such a topic here."""
    broker.create_topic("B", attributes={"queue.type": "BatchCQ"})
    header = send_header(batch=True, topic="B", properties="UNIQ_KEY\x01B0\x02")
    answer = broker.ask(RequestCode.SEND_BATCH_MESSAGE, header, batch_items(0, 3))
    assert answer.code == ResponseCode.SUCCESS
    pop_time = left_checkpoint(broker, t="B", n=1)
    if is_acked:
        left(broker, "ack", t="B", ao=0, pt=pop_time)
    read(broker)
    broker.clock.ms += INVISIBLE_MS + 3100
    broker.revive()
    assert broker.pop_parts.pops.out_count == 0
    found = broker.stored("%RETRY%g")
    assert [message.body for message in found] == ([] if is_acked else [b"0", b"1", b"2"])
    assert all(message.properties["RETRY_TOPIC"] == "B" for message in found)
    assert {(message.sys_flag, message.reconsume_times) for message in found} <= {(0, 1)}
    assert broker.pop_parts.runtime_info()["popMessagesRevived"] == str(len(found))
