"""Orderly POPs: of each queue one batch is out, and what is not acked comes again in its place."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.pop.batch_ack import BatchAck, BatchAckBody
from headrace_protocol.pop.handle import Handle
from headrace_protocol.pop.headers import NotificationHeader
from headrace_protocol.pop.infos import parse_order_counts
from tests.support.broker import Answer
from tests.support.channel import MemoryChannel
from tests.support.pop_broker import (
    INVISIBLE_MS,
    PopBroker,
    answers,
    bodies,
    messages_of,
    restarted,
)
from tests.support.seeds import seeds


@pytest.fixture
def broker(broker: PopBroker) -> PopBroker:
    """One with messages 0 to 4 in a queue."""
    for number in range(5):
        broker.store_message("T", 0, b"%d" % number)
    return broker


def taken(broker: PopBroker, count: int = 3, **fields: Any) -> list[Handle]:
    return [handle for _, handle in broker.taken(order=True, max_msg_nums=count, **fields)]


def offsets(handles: list[Handle]) -> list[int | None]:
    return [handle.queue_offset for handle in handles]


def counts(answer: Answer) -> dict[int | None, int]:
    """The earlier attempts of messages; None: of the queue."""
    info = answer.command.ext()["orderCountInfo"]
    return {each.offset: each.times for each in parse_order_counts(info)}


# -- the lock -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_queue_is_locked_until_its_batch_is_acked(broker: PopBroker, is_ordered: bool) -> None:
    first, second, third = taken(broker)
    assert {each.revive_queue_id for each in (first, second, third)} == {999}
    for handle in (second, first):
        broker.ack(handle)
        assert broker.taken(order=is_ordered) == []
    broker.ack(third)
    assert bodies(broker.taken(order=is_ordered)) == [b"3", b"4"]


def test_queues_are_locked_one_by_one(broker: PopBroker) -> None:
    taken(broker)
    broker.store_message("T", 1, b"other")
    assert bodies(broker.taken(order=True)) == [b"other"]
    assert broker.taken(order=True) == []
    assert bodies(broker.taken(order=True, consumer_group="h")) == [
        b"0",
        b"1",
        b"2",
        b"3",
        b"4",
        b"other",
    ]


def test_nothing_goes_out_in_order_while_others_are_out_without(broker: PopBroker) -> None:
    ((_, handle),) = broker.taken(max_msg_nums=1)
    assert broker.taken(order=True) == []
    broker.ack(handle)
    assert offsets(taken(broker)) == [1, 2, 3]


def test_what_is_not_acked_comes_again_in_its_place(broker: PopBroker) -> None:
    first, _, third = taken(broker)
    broker.ack(first)
    broker.ack(third)
    broker.clock.ms += INVISIBLE_MS
    broker.revive()
    assert broker.topics.get("%RETRY%g_T") is None
    assert offsets(taken(broker)) == [1, 2, 3]
    assert broker.ack(third).code == ResponseCode.SUCCESS  # of a batch that is out no more
    assert broker.pop_parts.pops.out_count == 3


def test_the_offset_moves_only_over_what_is_acked_without_a_gap(broker: PopBroker) -> None:
    handles = taken(broker)
    seen = []
    for handle in (handles[2], handles[0], handles[1]):
        broker.ack(handle)
        seen.append(broker.progress())
    assert seen == [0, 1, 3]


def test_others_go_on_where_a_batch_was_given_up(broker: PopBroker) -> None:
    """A group that changes its mind; its messages are revived from then on."""
    handle, *_ = taken(broker)
    broker.ack(handle)
    broker.clock.ms += INVISIBLE_MS
    assert bodies(broker.taken()) == [b"1", b"2", b"3", b"4"]
    broker.clock.ms += INVISIBLE_MS
    broker.revive()
    assert bodies(broker.taken()) == [b"1", b"2", b"3", b"4"]


def test_a_batch_whose_messages_are_unwanted_now_is_passed(broker: PopBroker) -> None:
    taken(broker)
    broker.clock.ms += INVISIBLE_MS
    assert broker.taken(order=True, exp="none") == []
    queue = broker.pop_parts.pops.find("g", "T", 0)
    assert queue is not None
    assert (queue.batch, queue.next_offset, queue.settled_offset) == (None, 5, 5)


def test_acks_of_a_batch_come_together(broker: PopBroker) -> None:
    first, *_ = taken(broker)
    ack = BatchAck.of("T", "g", first, [0, 1, 2])
    body = BatchAckBody(acks=[ack], broker_name="broker-a").encode()
    assert broker.ask(RequestCode.BATCH_ACK_MESSAGE, None, body=body).code == ResponseCode.SUCCESS
    assert offsets(taken(broker)) == [3, 4]


@pytest.mark.parametrize(("start", "bits"), [(3, [4]), (1, [1]), (0, [4])])
def test_a_forged_handle_of_a_batch_acks_nothing_else(
    broker: PopBroker, start: int, bits: list[int]
) -> None:
    first, *_ = taken(broker)
    ack = BatchAck.of("T", "g", first._replace(start_offset=start), bits)
    body = BatchAckBody(acks=[ack], broker_name="broker-a").encode()
    assert broker.ask(RequestCode.BATCH_ACK_MESSAGE, None, body=body).code == ResponseCode.SUCCESS
    acked = {bit for bit in bits if bit < 3}
    assert broker.pop_parts.pops.out_count == 3 - len(acked)


# -- attempts -------------------------------------------------------------------------------------


def test_an_attempt_gets_its_batch_again_and_counts_once(broker: PopBroker) -> None:
    def pop(attempt_id: str | None) -> Answer:
        return broker.pop(order=True, max_msg_nums=2, attempt_id=attempt_id)

    assert counts(pop("a")) == {None: 0}
    again = pop("a")
    assert offsets([handle for _, handle in messages_of(again)]) == [0, 1]
    assert counts(again) == {None: 0}
    assert pop("b").code == pop(None).code == ResponseCode.POLLING_TIMEOUT
    broker.clock.ms += INVISIBLE_MS
    assert counts(pop("b")) == {0: 1, 1: 1, None: 1}
    assert counts(pop("b")) == {0: 1, 1: 1, None: 1}
    broker.ack(messages_of(pop("b"))[0][1])
    broker.clock.ms += INVISIBLE_MS
    assert counts(pop(None)) == {1: 2, None: 0}
    assert pop(None).code == ResponseCode.POLLING_TIMEOUT


def test_a_long_attempt_is_refused(broker: PopBroker) -> None:
    answer = broker.pop(order=True, attempt_id="a" * 1_000_000)
    assert (answer.code, "attemptId" in answer.remark) == (ResponseCode.INVALID_PARAMETER, True)
    assert look(broker, attempt_id="a" * 256).code == ResponseCode.INVALID_PARAMETER


# -- another time ---------------------------------------------------------------------------------


def test_another_time_locks_the_queue_as_long(broker: PopBroker) -> None:
    first, second, _ = taken(broker)
    broker.clock.ms += 1000
    ext = broker.change(second, 2 * INVISIBLE_MS).command.ext()
    assert (ext["popTime"], ext["reviveQid"]) == (str(second.pop_time), "999")
    assert int(ext["popTime"]) + int(ext["invisibleTime"]) == broker.clock.ms + 2 * INVISIBLE_MS
    broker.clock.ms += INVISIBLE_MS
    assert taken(broker) == []
    # As clients make it: it begins at its own message.
    broker.ack(second._replace(start_offset=1, invisible_time=int(ext["invisibleTime"])))
    assert offsets(taken(broker)) == [0, 1, 2]
    assert broker.change(first, 1000).code == ResponseCode.NO_MESSAGE


def test_a_batch_that_is_given_back_comes_at_once(broker: PopBroker) -> None:
    for handle in taken(broker):
        broker.change(handle, 0, suspend=True)
    assert offsets(taken(broker)) == [0, 1, 2]


# -- waiting --------------------------------------------------------------------------------------


def look(broker: PopBroker, channel: MemoryChannel | None = None, **fields: Any) -> Answer:
    header = {
        "consumer_group": "g",
        "topic": "T",
        "queue_id": -1,
        "poll_time": 0,
        "born_time": broker.clock.ms,
        "order": True,
    }
    return broker.ask(RequestCode.NOTIFICATION, NotificationHeader(**{**header, **fields}))


def has_message(answer: Answer) -> bool:
    return answer.command.ext()["hasMsg"] == "true"


def test_a_notification_says_nothing_while_the_queue_is_locked(broker: PopBroker) -> None:
    assert has_message(look(broker))
    handles = taken(broker, attempt_id="a")
    assert not has_message(look(broker))
    assert not has_message(look(broker, order=False))
    assert has_message(look(broker, attempt_id="a"))
    broker.clock.ms += INVISIBLE_MS
    assert has_message(look(broker))
    for handle in handles:
        broker.ack(handle)
    assert has_message(look(broker))


async def test_who_waits_gets_what_follows_an_acked_batch(broker: PopBroker) -> None:
    handles = taken(broker)
    channel = broker.hold(order=True)
    for handle in handles:
        assert answers(channel) == []
        broker.ack(handle)
    await broker.pop_parts.revive.revive_due()
    (answer,) = answers(channel)
    assert bodies(messages_of(answer)) == [b"3", b"4"]


async def test_who_waits_gets_a_batch_again_at_its_time(broker: PopBroker) -> None:
    first, *_ = taken(broker)
    broker.change(first, INVISIBLE_MS + 1000)
    channel = broker.hold(order=True, max_msg_nums=3)
    for wait_ms, came in ((INVISIBLE_MS, []), (1000, [b"0", b"1", b"2"])):
        broker.clock.ms += wait_ms
        await broker.pop_parts.revive.revive_due()
        got = [message for each in answers(channel) for message in messages_of(each)]
        assert bodies(got) == came


# -- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lives", [1, 2])
def test_a_kill_changes_nothing(tmp_path: Path, broker: PopBroker, lives: int) -> None:
    taken(broker, attempt_id="a")
    broker.clock.ms += INVISIBLE_MS
    first, second, third = taken(broker, attempt_id="b")
    broker.ack(first)
    broker.ack(third)
    broker.change(second, 2 * INVISIBLE_MS)
    for _ in range(lives):
        broker = restarted(broker, tmp_path)
    assert broker.progress() == 1
    broker.clock.ms += INVISIBLE_MS
    assert taken(broker) == []
    again = broker.pop(order=True, max_msg_nums=3, attempt_id="b")
    assert counts(again) == {1: 1, 2: 1, None: 0}
    assert offsets([handle for _, handle in messages_of(again)]) == [1, 2, 3]
    broker = restarted(broker, tmp_path)
    for _, handle in messages_of(again):
        broker.ack(handle)
    broker = restarted(broker, tmp_path)
    assert offsets(taken(broker)) == [4]


def test_a_time_that_was_changed_survives_the_next_kill_too(
    tmp_path: Path, broker: PopBroker
) -> None:
    """Its event comes after one that a start has written again."""
    handle, *_ = taken(broker, 1)
    broker = restarted(broker, tmp_path)
    broker.change(handle, 2 * INVISIBLE_MS)
    broker = restarted(broker, tmp_path)
    broker.clock.ms += INVISIBLE_MS
    assert taken(broker) == []
    broker.clock.ms += INVISIBLE_MS
    assert offsets(taken(broker)) == [0, 1, 2]


def test_a_reset_unlocks_a_queue(tmp_path: Path, broker: PopBroker) -> None:
    taken(broker)
    broker.offsets.commit("g", "T", 0, 1)
    assert offsets(taken(broker)) == [1, 2, 3]
    broker = restarted(broker, tmp_path)
    assert taken(broker) == []


# -- a model --------------------------------------------------------------------------------------


class Member:
    """A group's members at random, and what they must be told of queue 0."""

    def __init__(self, broker: PopBroker, folder: Path, rng: random.Random) -> None:
        self.broker = broker
        self.folder = folder
        self.rng = rng
        self.sent = 5
        self.first = 0
        self.acked: set[int] = set()
        self.out: dict[int, Handle] = {}
        self.visible_ms: dict[int, int] = {}
        self.times: dict[int, int] = {}
        self.attempt_id: str | None = None

    def send(self) -> None:
        self.broker.store_message("T", 0, b"%d" % self.sent)
        self.sent += 1

    def pass_time(self) -> None:
        self.broker.clock.ms += self.rng.choice((1, INVISIBLE_MS // 2, INVISIBLE_MS))

    def kill(self) -> None:
        self.broker = restarted(self.broker, self.folder)

    def pop(self) -> None:
        attempt_id, count = self.rng.choice(("a", "b", None)), self.rng.randrange(1, 5)
        answer = self.broker.pop(order=True, max_msg_nums=count, attempt_id=attempt_id)
        is_same = attempt_id is not None and attempt_id == self.attempt_id
        left = self.out.keys() - self.acked
        is_locked = any(self.visible_ms[each] > self.broker.clock.ms for each in left)
        if self.first == self.sent or (is_locked and not is_same):
            assert answer.code == ResponseCode.POLLING_TIMEOUT
            return
        due = range(self.first, min(self.first + count, self.sent))
        got = {handle.queue_offset or 0: handle for _, handle in messages_of(answer)}
        assert list(got) == [*due]
        before = self.times if left else {}
        again = {each: before[each] + (not is_same) for each in due if each in before}
        self.times = {each: again.get(each, 0) for each in due}
        expected: dict[int | None, int] = {each: times for each, times in again.items() if times}
        expected[None] = min(self.times.values())
        assert counts(answer) == expected
        self.out, self.acked, self.attempt_id = got, set(), attempt_id
        self.visible_ms = dict.fromkeys(due, self.broker.clock.ms + INVISIBLE_MS)

    def ack(self) -> None:
        if left := sorted(self.out.keys() - self.acked):
            offset = self.rng.choice(left)
            assert self.broker.ack(self.out[offset]).code == ResponseCode.SUCCESS
            self.acked.add(offset)
            self.first = min(self.out.keys() - self.acked, default=max(self.out) + 1)
            assert self.broker.progress() == self.first
            if not self.out.keys() - self.acked:
                self.out, self.attempt_id = {}, None

    def change(self) -> None:
        if left := sorted(self.out.keys() - self.acked):
            offset, invisible_ms = self.rng.choice(left), self.rng.choice((0, 2 * INVISIBLE_MS))
            answer = self.broker.change(self.out[offset], invisible_ms)
            assert answer.code == ResponseCode.SUCCESS
            self.visible_ms[offset] = self.broker.clock.ms + invisible_ms


@pytest.mark.parametrize("seed", seeds(100))
def test_members_are_told_what_a_model_says(tmp_path: Path, broker: PopBroker, seed: int) -> None:
    rng = random.Random(seed)
    member = Member(broker, tmp_path, rng)
    steps = [member.send, *[member.pass_time] * 2, *[member.pop] * 3, *[member.ack] * 3]
    for _ in range(40):
        rng.choice([*steps, member.change, member.kill])()
    member.broker.pop_parts.log.close()
