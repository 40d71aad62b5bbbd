"""What is out in Apache's form: all of it at a stop in order, before that what is out for long."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from headrace_broker.inner.writer import InnerMessage, InnerWriter
from headrace_broker.pop.pop_queue import Checkpoint
from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.files.config_file import unsealed
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import StoredMessage, encode_properties
from headrace_protocol.pop.handle import Handle
from headrace_protocol.system_topics import TIMER_TOPIC, revive_log_topic
from tests.support.broker import BrokerUnderTest
from tests.support.pop_broker import BROKER, INVISIBLE_MS, PopBroker, bodies
from tests.support.stores import crash

TOPIC = revive_log_topic("DefaultCluster")
LONG_MS = 30_000


@pytest.fixture
def broker(tmp_path: Path) -> PopBroker:
    return PopBroker(tmp_path, commit_log_file_bytes=1 << 16)


def popped(broker: PopBroker, count: int) -> list[Handle]:
    for number in range(count):
        broker.store_message("T", 0, b"%d" % number)
    return [handle for _, handle in broker.taken(queue_id=0)]


def stopped(broker: PopBroker) -> None:
    """A stop in order."""
    broker.pop_parts.finish()
    broker.offsets.persist()
    broker.store.close()


def restarted(broker: PopBroker, folder: Path) -> PopBroker:
    stopped(broker)
    return again(broker, folder)


def killed(broker: PopBroker, folder: Path) -> PopBroker:
    crash(broker.store)
    broker.pop_parts.log.close()
    return again(broker, folder)


def again(broker: PopBroker, folder: Path) -> PopBroker:
    return PopBroker(folder, clock=broker.clock, commit_log_file_bytes=1 << 16)


def saved(broker: PopBroker) -> int:
    """The offset that other brokers would find."""
    broker.offsets.persist()
    found: int = fastjson.loads(file_of(broker).read_bytes())["offsetTable"]["T@g"][0]
    return found


def file_of(broker: PopBroker) -> Path:
    return broker.store.root / "config/consumerOffset.json"


def written_by_another(path: Path) -> None:
    """As another broker would save it."""
    path.write_bytes(unsealed(path.read_bytes()))


def bodies_of(messages: list[StoredMessage]) -> list[Any]:
    return [json.loads(message.body) for message in messages]


def deliver(broker: PopBroker) -> None:
    """Deliver what waits in the timers, as their service would."""
    write_path, host = broker.store.write_path, broker.store.settings.store_host
    for message in broker.stored(TIMER_TOPIC):
        raw = encode_properties({"TAGS": message.tags or ""})
        delivered = InnerMessage(
            TOPIC,
            int(message.properties["REAL_QID"]),
            message.body,
            raw,
            tags_code_of(raw),
            flag=0,
            sys_flag=0,
            born_timestamp=broker.clock.ms,
            reconsume_times=0,
            born_host=host,
            prepared_transaction_offset=message.physical_offset,
        )
        write_path.begin()
        broker.writer.append_now(delivered)
        write_path.publish()
        broker.clock.ms += 1000
    read(broker)


def read(broker: PopBroker) -> None:
    trio.run(broker.pop_parts.peer_pops.read_all)


def name_old(broker: PopBroker) -> None:
    trio.run(broker.pop_parts.peer_forms.name_old)


def known(broker: PopBroker) -> list[Checkpoint]:
    """All that is out of topic T, or named."""
    return [each for queue in broker.pop_parts.pops if queue.name.topic == "T" for each in queue]


def come_again(broker: PopBroker, after_ms: int) -> list[bytes]:
    broker.clock.ms += after_ms
    broker.revive()
    return bodies(broker.taken())


def test_what_is_out_is_named(tmp_path: Path, broker: PopBroker) -> None:
    first, second, *_ = popped(broker, 4)
    broker.ack(second)
    broker = restarted(broker, tmp_path)
    (checkpoint,) = broker.stored(TIMER_TOPIC)
    deliver_ms = first.pop_time + INVISIBLE_MS - 1000
    properties = checkpoint.properties
    key = f"T@0@0@g@{first.pop_time}@{BROKER}@ck"
    assert (checkpoint.tags, properties["UNIQ_KEY"]) == ("ck", key)
    assert properties["TIMER_DELIVER_MS"] == str(deliver_ms)
    assert int(properties["TIMER_OUT_MS"]) == (deliver_ms - 1) // 1000 * 1000
    assert properties["REAL_TOPIC"] == TOPIC
    assert int(properties["REAL_QID"]) == first.revive_queue_id
    assert bodies_of([checkpoint]) == [
        {
            "so": 0,
            "pt": first.pop_time,
            "it": INVISIBLE_MS,
            "bm": 0b10,
            "n": 4,
            "q": 0,
            "t": "T",
            "c": "g",
            "ro": 0,
            "d": [0, 1, 2, 3],
            "bn": BROKER,
            "sp": False,
        }
    ]
    assert (saved(broker), broker.progress()) == (4, 0)


def test_what_is_due_goes_to_the_revive_topic(tmp_path: Path, broker: PopBroker) -> None:
    (handle,) = popped(broker, 1)
    broker.clock.ms += INVISIBLE_MS
    broker = restarted(broker, tmp_path)
    assert broker.stored(TIMER_TOPIC) == []
    assert len(broker.stored(TOPIC, handle.revive_queue_id)) == 1
    assert come_again(broker, 0) == [b"0"]
    read(broker)
    assert known(broker) == []


def test_bits_are_an_int_of_java(tmp_path: Path, broker: PopBroker) -> None:
    pops = broker.pop_parts.pops
    queue = pops.open("g", "T", 0, 32)
    pops.settle(pops.take(queue, range(32), 0, broker.clock.ms, INVISIBLE_MS, 0), 1 << 31)
    stopped(broker)
    other = BrokerUnderTest(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    assert bodies_of(other.stored(TIMER_TOPIC))[0]["bm"] == -(1 << 31)


@pytest.mark.parametrize("suspend", [False, True])
def test_a_changed_time_has_a_checkpoint_of_its_own(
    tmp_path: Path, broker: PopBroker, suspend: bool
) -> None:
    _, second = popped(broker, 2)
    broker.change(second, 2 * INVISIBLE_MS, suspend=suspend)
    broker = restarted(broker, tmp_path)
    found = bodies_of(broker.stored(TIMER_TOPIC))
    assert [(each["so"], each["n"], each["bm"], each["sp"]) for each in found] == [
        (0, 2, 0b10, False),
        (1, 1, 0, suspend),
    ]


def test_the_next_start_goes_on_with_what_is_out(tmp_path: Path, broker: PopBroker) -> None:
    first, second, *_ = popped(broker, 4)
    broker.ack(first)
    broker = restarted(broker, tmp_path)
    assert (broker.taken(), broker.pop_parts.pops.out_count) == ([], 3)
    broker.ack(second)
    deliver(broker)
    assert (broker.pop_parts.pops.out_count, saved(broker), broker.progress()) == (2, 4, 2)
    assert come_again(broker, INVISIBLE_MS) == [b"2", b"3"]
    read(broker)
    assert known(broker) == []
    assert (saved(broker), broker.progress()) == (4, 4)


def test_what_was_acked_before_its_timer_fires_does_not_come_again(
    tmp_path: Path, broker: PopBroker
) -> None:
    handles = popped(broker, 2)
    broker = restarted(broker, tmp_path)
    for handle in handles:
        broker.ack(handle)
    broker = killed(broker, tmp_path)
    deliver(broker)
    broker = killed(broker, tmp_path)
    read(broker)
    assert come_again(broker, 2 * INVISIBLE_MS) == []
    assert known(broker) == []


def test_the_next_stop_names_what_was_acked_since(tmp_path: Path, broker: PopBroker) -> None:
    first, second, third = popped(broker, 3)
    broker.ack(first)
    broker = restarted(broker, tmp_path)
    broker.ack(second)
    broker.ack(third)
    for _ in range(2):  # the second writes nothing
        broker = restarted(broker, tmp_path)
    _, acks = broker.stored(TIMER_TOPIC)
    assert (acks.tags, acks.properties["TIMER_DELIVER_MS"]) == (
        "bAck",
        str(first.pop_time + INVISIBLE_MS),
    )
    assert bodies_of([acks]) == [
        {
            "ao": 1,
            "so": 0,
            "c": "g",
            "t": "T",
            "q": 0,
            "pt": first.pop_time,
            "bn": BROKER,
            "aol": [1, 2],
        }
    ]


def test_a_timer_that_is_late_keeps_no_message(tmp_path: Path, broker: PopBroker) -> None:
    first, _ = popped(broker, 2)
    broker = restarted(broker, tmp_path)
    broker.ack(first)
    assert come_again(broker, INVISIBLE_MS) == [b"1"]
    deliver(broker)
    assert known(broker) == []
    assert come_again(broker, 0) == []


def test_what_can_not_be_stored_again_is_no_longer_named(
    tmp_path: Path, broker: PopBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    popped(broker, 2)
    broker = restarted(broker, tmp_path)
    deliver(broker)
    broker.clock.ms += INVISIBLE_MS + 1000
    read(broker)
    assert (saved(broker), broker.pop_parts.pops.out_count) == (0, 2)
    broker = killed(broker, tmp_path)
    assert come_again(broker, 0) == [b"0", b"1"]


def test_a_reset_settles_what_its_timers_bring(tmp_path: Path, broker: PopBroker) -> None:
    first, _ = popped(broker, 2)
    broker.ack(first)
    broker = restarted(broker, tmp_path)
    broker.offsets.commit("g", "T", 0, 0)
    taken = broker.taken(queue_id=0)
    assert bodies(taken) == [b"0", b"1"]
    for _, handle in taken:
        broker.ack(handle)
    broker = restarted(broker, tmp_path)
    deliver(broker)
    assert come_again(broker, INVISIBLE_MS) == []
    read(broker)
    assert known(broker) == []


def crashed(broker: PopBroker) -> None:
    broker.offsets.persist()
    crash(broker.store)


@pytest.mark.parametrize("end", [stopped, crashed])
def test_a_store_that_another_broker_wrote_has_the_last_word(
    tmp_path: Path, broker: PopBroker, end: Callable[[PopBroker], None]
) -> None:
    popped(broker, 2)
    broker.clock.ms += LONG_MS
    name_old(broker)
    end(broker)
    written_by_another(file_of(broker))
    broker = again(broker, tmp_path)
    assert broker.pop_parts.pops.out_count == 0
    assert broker.progress() == 2
    deliver(broker)
    assert broker.pop_parts.pops.out_count == 2
    assert come_again(broker, INVISIBLE_MS) == [b"0", b"1"]


def test_a_store_that_takes_no_more_leaves_messages_at_their_offset(
    tmp_path: Path, broker: PopBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoreNotWritable("the disk is full", tmp_path)

    popped(broker, 2)
    monkeypatch.setattr(InnerWriter, "append_now", refuse)
    broker = restarted(broker, tmp_path)
    assert (saved(broker), broker.pop_parts.pops.out_count) == (0, 2)


def test_an_orderly_pop_is_in_a_file_of_its_own(tmp_path: Path, broker: PopBroker) -> None:
    broker.store_message("T", 0)
    broker.taken(queue_id=0, order=True)
    broker = restarted(broker, tmp_path)
    assert (broker.stored(TIMER_TOPIC), saved(broker)) == ([], 0)


# -- what is out for long ---------------------------------------------------------------------


def test_what_is_out_for_long_is_named(tmp_path: Path, broker: PopBroker) -> None:
    first, second, *_ = popped(broker, 3)
    broker.clock.ms += LONG_MS - 1
    name_old(broker)
    assert (broker.stored(TIMER_TOPIC), saved(broker)) == ([], 0)
    broker.ack(first)
    broker.clock.ms += 1
    for _ in range(2):
        name_old(broker)
    (checkpoint,) = broker.stored(TIMER_TOPIC)
    assert [(each["so"], each["bm"]) for each in bodies_of([checkpoint])] == [(0, 1)]
    assert (saved(broker), broker.progress()) == (3, 1)
    broker.ack(second)
    broker = killed(broker, tmp_path)
    assert (saved(broker), broker.progress()) == (3, 2)
    deliver(broker)
    assert come_again(broker, INVISIBLE_MS) == [b"2"]


def test_what_holds_no_offset_back_is_not_named(broker: PopBroker) -> None:
    broker.store_message("T", 0)
    broker.taken(queue_id=0, order=True)  # it does, but is in a file of its own
    for _ in range(2):
        broker.store_message("T", 1)
        broker.taken(queue_id=1, max_msg_nums=1)
        broker.clock.ms += LONG_MS // 2
    name_old(broker)
    assert [(each["q"], each["so"]) for each in bodies_of(broker.stored(TIMER_TOPIC))] == [(1, 0)]


def test_what_is_due_soon_is_not_named(broker: PopBroker) -> None:
    broker.store_message("T", 0)
    broker.taken(queue_id=0, invisible_time=LONG_MS + 5000)
    broker.clock.ms += LONG_MS
    name_old(broker)
    assert broker.stored(TIMER_TOPIC) == []


def test_a_time_that_is_changed_again_and_again_is_as_old_as_its_pop(broker: PopBroker) -> None:
    broker.store_message("T", 0)
    broker.store_message("T", 0)
    ((_, handle), (_, other)) = broker.taken(queue_id=0)
    broker.ack(other)
    for _ in range(2):
        broker.clock.ms += LONG_MS // 2
        changed = broker.change(handle, INVISIBLE_MS).command.ext()
        handle = handle._replace(start_offset=0, pop_time=int(changed["popTime"]))
    assert saved(broker) == 0
    name_old(broker)
    assert saved(broker) == 2
    broker.ack(handle)
    assert known(broker)[0].is_done


def test_a_power_cut_that_took_a_name_leaves_the_offset(tmp_path: Path, broker: PopBroker) -> None:
    popped(broker, 1)
    (checkpoint,) = known(broker)
    broker.pop_parts.pops.name_as(checkpoint, 0, 1 << 40)
    broker.pop_parts.progress.write_out()
    assert saved(broker) == 1
    broker = killed(broker, tmp_path)
    assert saved(broker) == 0


@pytest.mark.parametrize("by_another", [False, True])
def test_a_power_cut_that_took_a_name_leaves_no_acked_message_out(
    tmp_path: Path, broker: PopBroker, *, by_another: bool
) -> None:
    """The log has the checkpoint, and the log of pops does not say so."""
    handles = popped(broker, 3)
    (path,) = (tmp_path / "store/pop").iterdir()
    before = path.read_bytes()
    broker.clock.ms += LONG_MS
    name_old(broker)
    assert saved(broker) == 3
    crash(broker.store)
    broker.pop_parts.log.close()
    path.write_bytes(before)
    if by_another:
        written_by_another(file_of(broker))
    broker = again(broker, tmp_path)
    if not by_another:
        (checkpoint,) = known(broker)
        assert (checkpoint.named, saved(broker)) == (0, 3)
        for handle in handles:
            broker.ack(handle)
    deliver(broker)
    expected = [b"0", b"1", b"2"] if by_another else []
    assert come_again(broker, INVISIBLE_MS + 3100) == expected


def test_what_was_out_of_a_topic_is_not_out_of_its_successor(
    tmp_path: Path, broker: PopBroker
) -> None:
    popped(broker, 3)
    broker = restarted(broker, tmp_path)
    header = DeleteTopicHeader(topic="T")
    assert broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, header).code == ResponseCode.SUCCESS
    broker.create_topic("T")
    for number in range(3):
        broker.store_message("T", 0, b"new %d" % number)
    deliver(broker)
    assert known(broker) == []
    assert come_again(broker, INVISIBLE_MS + 3100) == [b"new 0", b"new 1", b"new 2"]


async def test_a_disk_that_fails_while_pops_are_named_is_an_outage(
    broker: PopBroker, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    popped(broker, 1)
    broker.clock.ms += LONG_MS
    log = broker.pop_parts.log
    lines = []
    with structlog.testing.capture_logs() as logs:
        for problem in ("no space left", ""):
            log.problem = problem
            with trio.move_on_after(16):
                await broker.pop_parts.peer_forms.run()
            lines.append([(each["log_level"], each["event"]) for each in logs])
            logs.clear()
    (((level, line),), (end,)) = lines
    assert (level, "no space left" in line, end[0]) == ("error", True, "warning")
    assert saved(broker) == 1


def test_many_are_named_in_several_turns(broker: PopBroker) -> None:
    for _ in range(40):
        broker.store_message("T", 0)
    while broker.taken(queue_id=0, max_msg_nums=1):
        pass
    broker.clock.ms += LONG_MS
    name_old(broker)
    assert (len(broker.stored(TIMER_TOPIC)), saved(broker)) == (40, 40)


async def test_a_look_comes_every_few_seconds(
    broker: PopBroker, autojump_clock: trio.testing.MockClock
) -> None:
    popped(broker, 1)
    broker.clock.ms += LONG_MS
    with trio.move_on_after(6):
        await broker.pop_parts.peer_forms.run()
    assert saved(broker) == 1


def test_without_timers_nothing_is_named(broker: PopBroker) -> None:
    popped(broker, 1)
    broker.core.config.timer_wheel_enable = False
    broker.clock.ms += LONG_MS
    name_old(broker)
    assert saved(broker) == 0
