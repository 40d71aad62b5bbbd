"""Messages that were not acknowledged in time: they come again, and end as dead letters."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from headrace_broker.store.errors import StoreBusy, StoreError
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import decode_records
from headrace_protocol.pop.handle import Handle, TopicKind
from tests.support.broker import broker_config
from tests.support.pop_broker import INVISIBLE_MS, PopBroker, answers, bodies, damage, messages_of

RETRY, DEAD = "%RETRY%g_T", "%DLQ%g"


def take(broker: PopBroker, *texts: bytes, **properties: str) -> list[Handle]:
    for text in texts:
        broker.store_message("T", 0, text, **properties)
    return [handle for _, handle in broker.taken(queue_id=0)]


def wait(broker: PopBroker, ms: int = INVISIBLE_MS) -> None:
    """Let time pass, and revive what is due."""
    broker.clock.ms += ms
    broker.revive()


def test_a_message_comes_again_when_its_time_is_over_and_not_before(broker: PopBroker) -> None:
    take(broker, b"a", b"b", TAGS="x", KEYS="k")
    popped_ms = broker.clock.ms
    wait(broker, INVISIBLE_MS - 1)
    assert broker.taken() == []
    wait(broker, 20)
    taken = broker.taken()
    assert bodies(taken) == [b"a", b"b"]
    message, handle = taken[0]
    assert (message.topic, message.reconsume_times, message.queue_id) == ("T", 1, 0)
    assert (message.properties["TAGS"], message.properties["KEYS"]) == ("x", "k")
    assert message.properties["1ST_POP_TIME"] == str(popped_ms)
    assert (handle.kind, handle.broker_name) == (TopicKind.RETRY_V1, "broker-a")
    assert broker.progress() == 2


def test_messages_come_again_at_the_end_of_their_step(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path, broker_config(tmp_path, revive_interval=5000))
    take(broker, b"a")
    due_ms = broker.clock.ms + INVISIBLE_MS
    broker.clock.ms = due_ms + -due_ms % 5000 - 1
    wait(broker, 0)
    assert broker.taken() == []
    wait(broker, 1)
    assert bodies(broker.taken()) == [b"a"]


def test_what_is_acked_does_not_come_again(broker: PopBroker) -> None:
    first, second, third = take(broker, b"a", b"b", b"c")
    broker.ack(second)
    wait(broker)
    broker.ack(first)  # too late
    assert bodies(broker.taken()) == [b"a", b"c"]
    assert third.queue_offset == 2


def test_a_message_to_retry_is_acked_by_its_own_handle(broker: PopBroker) -> None:
    take(broker, b"a")
    wait(broker)
    ((_, handle),) = broker.taken()
    assert broker.ack(handle, topic="T").code == ResponseCode.SUCCESS
    assert broker.progress(0, RETRY) == 1
    wait(broker)
    assert broker.taken() == []


def test_a_message_is_tried_as_often_as_its_group_says(broker: PopBroker) -> None:
    broker.groups.put(SubscriptionGroupConfig(group_name="g", retry_max_times=2))
    take(broker, b"a")
    times, first_pops = [], set()
    for _ in range(3):
        wait(broker)
        for message, _ in broker.taken():
            times.append(message.reconsume_times)
            first_pops.add(message.properties["1ST_POP_TIME"])
    assert (times, len(first_pops)) == ([1, 2], 1)
    (dead,) = broker.stored(DEAD)
    assert dead.body == b"a"
    assert dead.properties["RETRY_TOPIC"] == "T"
    assert "POP_CK" not in dead.properties
    assert broker.pop_parts.runtime_info()["popMessagesBuried"] == "1"


@pytest.mark.parametrize(("is_suspended", "times"), [(True, 0), (False, 1)])
def test_what_is_given_back_counts_no_attempt(
    broker: PopBroker, is_suspended: bool, times: int
) -> None:
    (handle,) = take(broker, b"a")
    assert broker.change(handle, 0, suspend=is_suspended).code == ResponseCode.SUCCESS
    wait(broker, 20)
    ((message, _),) = broker.taken()
    assert message.reconsume_times == times


def test_a_message_with_more_time_comes_later(broker: PopBroker) -> None:
    (handle,) = take(broker, b"a")
    broker.change(handle, 2 * INVISIBLE_MS)
    wait(broker)
    assert broker.taken() == []
    wait(broker, INVISIBLE_MS + 20)
    assert bodies(broker.taken()) == [b"a"]


@pytest.mark.parametrize(("reads_v1", "expected"), [(True, [b"a", b"b"]), (False, [b"b"])])
def test_both_kinds_of_retry_topics_are_read(
    tmp_path: Path, reads_v1: bool, expected: list[bytes]
) -> None:
    broker = PopBroker(
        tmp_path, broker_config(tmp_path, retrieve_message_from_pop_retry_topic_v1=reads_v1)
    )
    take(broker, b"a")
    wait(broker)
    broker.config.enable_retry_topic_v2 = True
    take(broker, b"b")
    wait(broker)
    taken = broker.taken()
    assert bodies(taken) == expected
    assert {handle.topic("T", "g") for _, handle in taken} <= {RETRY, "%RETRY%g+T"}
    for _, handle in taken:
        assert broker.ack(handle).code == ResponseCode.SUCCESS
    assert broker.pop_parts.pops.out_count == 0


def test_retries_may_name_their_own_topic(tmp_path: Path) -> None:
    broker = PopBroker(
        tmp_path, broker_config(tmp_path, pop_response_return_actual_retry_topic=True)
    )
    take(broker, b"a")
    wait(broker)
    (message,) = decode_records(broker.pop().body)
    assert (message.topic, "POP_CK" in message.properties) == (RETRY, False)


async def test_a_message_to_retry_wakes_who_waits(broker: PopBroker) -> None:
    """Also if its retry topic is made only now."""
    for _ in range(2):
        broker.store_message("T", 0)
        broker.taken(queue_id=0)
    channels = [broker.hold(), broker.hold()]
    broker.clock.ms += INVISIBLE_MS
    await broker.pop_parts.revive.revive_due()
    got = [
        message for each in channels for answer in answers(each) for message in messages_of(answer)
    ]
    assert len(got) + len(broker.taken()) == 2
    assert got


async def test_who_waits_does_so_for_later_retries_too(broker: PopBroker) -> None:
    broker.store_message("T", 0)
    broker.taken(queue_id=0)
    first, second = broker.hold(), broker.hold()
    broker.clock.ms += INVISIBLE_MS
    await broker.pop_parts.revive.revive_due()
    broker.clock.ms += INVISIBLE_MS
    await broker.pop_parts.revive.revive_due()
    assert [len(answers(each)) for each in (first, second)] == [1, 1]


# -- what is not there --------------------------------------------------------------------------


def test_messages_that_the_store_has_no_more_are_let_go(broker: PopBroker) -> None:
    take(broker, b"a")
    broker.topics.incarnations.assign("T", "ffffffff-new")
    wait(broker)
    assert (broker.taken(), broker.pop_parts.pops.out_count) == ([], 0)


def test_the_messages_of_a_deleted_topic_do_not_come_again(broker: PopBroker) -> None:
    take(broker, b"a")
    for _ in broker.offsets.delete_topic("T"):
        pass
    broker.topics.delete("T")
    wait(broker)
    assert broker.topics.get(RETRY) is None


def test_a_retry_topic_that_was_deleted_is_made_again(broker: PopBroker) -> None:
    """What was in it is gone; what is out of its topic comes again."""
    take(broker, b"gone")
    wait(broker, INVISIBLE_MS + 20)
    ((_, handle),) = broker.taken()
    take(broker, b"a")
    header = DeleteTopicHeader(topic=RETRY)
    assert broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, header).code == ResponseCode.SUCCESS
    assert broker.ack(handle).code == ResponseCode.TOPIC_NOT_EXIST
    wait(broker, INVISIBLE_MS + 20)
    assert bodies(broker.taken()) == [b"a"]
    assert broker.pop_parts.pops.out_count == 1


# -- failures ---------------------------------------------------------------------------------


def fail(error: Exception) -> Callable[..., Any]:
    def failing(*_args: object) -> Any:
        raise error

    return failing


def test_a_failure_is_repeated_with_pauses_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = PopBroker(tmp_path, broker_config(tmp_path, pop_revive_max_attempt_times=3))
    take(broker, b"a", b"b")
    monkeypatch.setattr(broker.topics, "create_retry_topic", fail(OSError(errno.EIO, "broken")))
    pauses = []
    pops = broker.pop_parts.pops
    wait(broker)
    while pops.out_count:
        due_ms = pops.due.next_ms
        assert due_ms is not None
        pauses.append(round((due_ms - broker.clock.ms) / 1000))
        wait(broker, due_ms - broker.clock.ms)
    assert (pauses, broker.pop_parts.revive.given_up) == ([10, 20], 2)


def test_a_damaged_message_holds_up_no_other(tmp_path: Path) -> None:
    """Neither of its own pop nor of a later one."""
    config = broker_config(tmp_path, pop_revive_max_attempt_times=2)
    broker = PopBroker(tmp_path, config, commit_log_file_bytes=1 << 16)
    take(broker, b"a", b"damaged", b"c")
    take(broker, b"d")
    damage(broker, b"damaged")
    pops, revive = broker.pop_parts.pops, broker.pop_parts.revive
    wait(broker)
    assert bodies(broker.taken()) == [b"a", b"c", b"d"]
    assert (pops.out_count, revive.given_up, broker.progress()) == (4, 0, 1)
    wait(broker, 10_000)
    assert (pops.out_count, revive.given_up, broker.progress()) == (3, 1, 4)


async def test_pops_that_can_not_be_written_are_waited_for(
    broker: PopBroker, autojump_clock: trio.testing.MockClock
) -> None:
    """That counts as no failure, however long it lasts."""
    first, _ = take(broker, b"a", b"b")
    broker.disk.is_unwritable = True
    broker.ack(first)
    broker.disk.is_unwritable = False
    broker.clock.ms += INVISIBLE_MS
    with trio.move_on_after(10_000):
        await broker.pop_parts.revive.revive_due()
    (checkpoint,) = [each for queue in broker.pop_parts.pops for each in queue]
    assert checkpoint.failures == 0
    broker.pop_parts.progress.write_out()
    await broker.pop_parts.revive.revive_due()
    assert bodies(broker.taken()) == [b"b"]


def test_a_retry_topic_that_is_not_saved_gets_no_message(
    broker: PopBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut would take the topic, and with it the message."""
    broker.store_message("T", 0)
    broker.taken()
    broker.clock.ms += INVISIBLE_MS
    with monkeypatch.context() as patch:
        patch.setattr(broker.topics, "when_saved", lambda then: then(OSError("full")))
        for _ in range(2):
            broker.revive()
            broker.clock.ms += 10_000
            assert broker.stored(RETRY) == []
    broker.clock.ms += 20_000
    broker.revive()
    assert len(broker.stored(RETRY)) == 1


def test_a_message_that_no_queue_takes_is_tried_again(
    broker: PopBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(broker, b"a")
    with monkeypatch.context() as patch:
        patch.setattr(broker.writer, "append_now", fail(StoreError("damaged")))
        wait(broker)
    assert broker.taken() == []
    wait(broker, 10_000)
    assert bodies(broker.taken()) == [b"a"]


async def test_a_store_that_takes_nothing_is_waited_for(
    broker: PopBroker, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    (first, second) = take(broker, b"a", b"b")
    broker.clock.ms += INVISIBLE_MS
    with monkeypatch.context() as patch:
        patch.setattr(broker.writer, "append_now", fail(StoreBusy("full")))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broker.pop_parts.revive.revive_due)
            await trio.testing.wait_all_tasks_blocked()
            assert broker.ack(first).code == ResponseCode.SUCCESS
            patch.undo()
    assert bodies(broker.taken()) == [b"b"]
    assert second.queue_offset == 1


async def test_a_revive_that_is_cancelled_goes_on_later(
    broker: PopBroker, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    take(broker, b"a")
    broker.clock.ms += INVISIBLE_MS
    with monkeypatch.context() as patch, trio.move_on_after(5):
        patch.setattr(broker.writer, "append_now", fail(StoreBusy("full")))
        await broker.pop_parts.revive.revive_due()
    await broker.pop_parts.revive.revive_due()
    assert bodies(broker.taken()) == [b"a"]


async def test_the_service_revives_in_time(
    broker: PopBroker, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_ms = broker.clock.ms
    broker.store_message("T", 0)
    with monkeypatch.context() as patch:
        patch.setattr(broker.clock, "now_ms", lambda: start_ms + round(trio.current_time() * 1000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broker.pop_parts.run)
            broker.pop(invisible_time=500, born_time=broker.clock.now_ms())
            await trio.sleep(0.49)
            assert broker.pop_parts.pops.out_count == 1
            await trio.sleep(0.1)
            assert broker.pop_parts.pops.out_count == 0
            nursery.cancel_scope.cancel()
