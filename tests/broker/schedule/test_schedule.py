"""Delayed messages: each is delivered once, when it is due, whatever happens meanwhile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from headrace_broker.inner.delivered import Delivered
from headrace_broker.inner.delivery import REASON
from headrace_broker.inner.waiting import WaitingQueue
from headrace_broker.inner.writer import DeliverLater, InnerMessage
from headrace_broker.schedule.offsets import DeliveredLevels
from headrace_broker.store.recovery import read_log
from headrace_broker.topics.table import TopicTable
from headrace_daemon.host_log import LINES_MAX
from headrace_protocol import fastjson
from headrace_protocol.bodies import KVTable
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import encode_batch, encode_properties
from headrace_protocol.system_topics import HALF_TOPIC, SCHEDULE_TOPIC, UNDELIVERED_TOPIC
from headrace_protocol.waiting import at_once
from tests.support.seeds import seeds
from tests.support.stores import crash
from tests.support.waiting_broker import WaitingBroker

LEVELS_MS = (1000, 5000, 10_000)


class Delays(WaitingBroker):
    """A broker whose schedule runs."""

    def __init__(self, folder: Path, ms: int | None = None, **store: Any) -> None:
        super().__init__(folder, ms, **store)
        self.schedule = self.broker.schedule
        self.loads, self.runs = [self.schedule.load], [self.schedule.run]

    def send(
        self, body: bytes, delay: object, topic: str = "T", queue_id: int = 1, **properties: str
    ) -> tuple[int, str]:
        """Code and remark of the answer to one message."""
        text = encode_properties({**properties, "DELAY": str(delay)}).decode()
        return self.send_raw(body, text, topic, queue_id)

    def send_raw(
        self, body: bytes, properties: str, topic: str = "T", queue_id: int = 1, **fields: Any
    ) -> tuple[int, str]:
        answer = self.produce(body, b=topic, e=queue_id, i=properties, **fields)
        return answer.code, answer.remark

    async def idle(self) -> None:
        """Until the schedule has looked at the clock twice and does nothing."""
        await trio.sleep(2.1)


@pytest.fixture
def delays(tmp_path: Path) -> Delays:
    delays = Delays(tmp_path)
    delays.broker.create_topic("T")
    return delays


# --- what is delivered ---------------------------------------------------------------------


async def test_a_message_comes_when_it_is_due_as_it_was_sent(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    async with delays.running():
        sent_ms = delays.clock.ms
        assert delays.send(b"late", 2, TAGS="a", KEYS="k", own="x") == (0, "")
        delays.clock.ms = sent_ms + 4999
        await delays.idle()
        assert delays.bodies() == []
        delays.clock.ms = sent_ms + 5000
        await delays.until(lambda: bool(delays.bodies()))
    (message,) = delays.stored()
    (waited,) = delays.stored(SCHEDULE_TOPIC, 1)
    assert (message.body, message.topic, message.queue_id) == (b"late", "T", 1)
    expected = {"TAGS": "a", "KEYS": "k", "own": "x", "DELAY": "2"}
    assert expected.items() <= message.properties.items()
    assert (message.properties["REAL_TOPIC"], message.properties["REAL_QID"]) == ("T", "1")
    assert (message.flag, message.born_timestamp) == (5, 17)
    assert message.store_timestamp == sent_ms + 5000
    assert message.prepared_transaction_offset == waited.physical_offset
    source = delays.broker.store.source(delays.broker.store.queue("T", 1))
    assert source.unit(0)[2] == tags_code("a")


async def test_each_level_keeps_its_order_and_none_waits_for_another(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    async with delays.running():
        for number in range(600):  # more than are delivered at once
            delays.send(b"%d" % number, 1)
        delays.send(b"later", 3)
        delays.clock.ms += 1000
        await delays.until(lambda: len(delays.bodies()) == 600)
        assert delays.bodies() == [b"%d" % number for number in range(600)]
        delays.clock.ms += 9000
        await delays.until(lambda: delays.bodies()[600:] == [b"later"])


@pytest.mark.parametrize(
    ("delay", "queue_id"), [("18", 17), ("19", 17), ("2147483647", 17), ("+1", 0)]
)
def test_a_level_above_the_last_counts_as_the_last(
    delays: Delays, delay: str, queue_id: int
) -> None:
    assert delays.send(b"late", delay) == (0, "")
    (message,) = delays.stored(SCHEDULE_TOPIC, queue_id)
    assert message.properties["DELAY"] == str(queue_id + 1)


@pytest.mark.parametrize("delay", ["0", "-1", "-0", ""])
def test_a_level_of_nothing_is_stored_at_once(delays: Delays, delay: str) -> None:
    assert delays.send_raw(b"now", f"a\x01b\x02DELAY\x01{delay}\x02") == (0, "")
    assert delays.bodies() == [b"now"]


@pytest.mark.parametrize("delay", ["x", "1.5", "0x1", "1 ", "\u0661", "9" * 30])
def test_a_level_that_is_no_number_is_refused(delays: Delays, delay: str) -> None:
    code, remark = delays.send(b"late", delay)
    assert code == ResponseCode.MESSAGE_ILLEGAL
    assert f"DELAY={delay}" in remark
    assert delays.broker.store.commit_log.max_offset == 0


def test_names_that_a_producer_forges_are_replaced(delays: Delays) -> None:
    forged = {"REAL_TOPIC": HALF_TOPIC, "REAL_QID": "7", "TIMER_DELAY_SEC": "9", "DELAY": "1"}
    assert delays.send_raw(b"late", encode_properties(forged).decode()) == (0, "")
    (message,) = delays.stored(SCHEDULE_TOPIC, 0)
    assert (message.properties["REAL_TOPIC"], message.properties["REAL_QID"]) == ("T", "1")
    assert "TIMER_DELAY_SEC" not in message.properties


def test_the_delay_begins_at_the_store_time(delays: Delays) -> None:
    delays.clock.now_ms = itertools.count(delays.clock.ms + 7).__next__
    delays.send(b"x", 1)
    (message,) = delays.stored(SCHEDULE_TOPIC, 0)
    (unit,) = WaitingQueue(delays.broker.store, SCHEDULE_TOPIC, 0).units_now(0, 1)
    # As recovery and fsck compute it.
    assert unit["tags_code"] == message.store_timestamp + 1000


def test_a_batch_with_a_delayed_item_is_refused_whole(delays: Delays) -> None:
    late = encode_properties({"UNIQ_KEY": "A2", "DELAY": "1"})
    for properties in (late, late.rstrip(b"\x02")):
        items = [(0, b"now", encode_properties({"UNIQ_KEY": "A1"})), (0, b"late", properties)]
        code, remark = delays.send_raw(encode_batch(items), "", m="true")
        assert code == ResponseCode.MESSAGE_ILLEGAL
        assert "item 2" in remark
        assert "DELAY=1" in remark
    assert delays.broker.store.commit_log.max_offset == 0


def test_a_body_that_looks_like_a_delay_may_be_in_a_batch(delays: Delays) -> None:
    items = [(0, b"\x02DELAY\x011\x02", encode_properties({"UNIQ_KEY": "A1", "XDELAY": "1"}))] * 9
    assert delays.send_raw(encode_batch(items), "", m="true")[0] == 0
    assert len(delays.bodies()) == 9


# --- what can't be delivered ---------------------------------------------------------------


def _delete(topics: TopicTable) -> None:
    topics.delete("T")


def _make_anew(topics: TopicTable) -> None:
    config = topics.expect("T")
    topics.delete("T")
    topics.put(config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_delete, "topic[T] not exist"),
        (_make_anew, "made anew"),
    ],
)
async def test_what_can_not_go_to_its_topic_is_kept_with_the_reason(
    delays: Delays,
    autojump_clock: trio.testing.MockClock,
    change: Callable[[TopicTable], None],
    reason: str,
) -> None:
    delays.broker.create_topic("U")
    async with delays.running():
        delays.send(b"lost", 1)
        delays.send(b"next", 1, topic="U")
        delays.clock.ms += 1000
        change(delays.broker.topics)
        await delays.until(lambda: bool(delays.bodies("U")))
    (message,) = delays.stored(UNDELIVERED_TOPIC, 0)
    assert message.body == b"lost"
    assert reason in message.properties[REASON]
    assert message.properties["REAL_TOPIC"] == "T"
    assert delays.bodies() == []
    code, remark = delays.send_raw(b"mine", "", UNDELIVERED_TOPIC, 0)
    assert (code, UNDELIVERED_TOPIC in remark) == (ResponseCode.NO_PERMISSION, True)


async def test_undelivered_messages_are_counted_when_they_are_stored(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    writer = delays.broker.writer
    find_target = writer.find_target
    for number in range(LINES_MAX + 5):
        delays.send(b"%d" % number, 1)
    delays.broker.topics.delete("T")
    delays.clock.ms += 1000
    with structlog.testing.capture_logs() as logs:
        writer.find_target = lambda _topic, _queue_id: refused
        for _ in range(3):  # a delivery that is interrupted, and repeated
            async with delays.running():
                await delays.idle()
        writer.find_target = find_target
        assert logs == []
        async with delays.running():
            await delays.until(lambda: bool(delays.stored(UNDELIVERED_TOPIC, 0)))
    assert [line["event"] for line in logs] == ["message not delivered"] * LINES_MAX
    table = KVTable.decode(delays.broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
    assert table["messagesUndelivered"] == str(LINES_MAX + 5)


async def refused(_message: InnerMessage) -> str:
    raise DeliverLater


async def test_a_damaged_record_stops_no_other(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    async with delays.running():
        for body in (b"first", b"torn", b"last"):
            delays.send(body, 1)
        _, torn, _ = delays.stored(SCHEDULE_TOPIC, 0)
        (path,) = (delays.broker.config.store_path_root_dir / "commitlog").iterdir()
        with path.open("r+b") as file:
            file.seek(torn.physical_offset + 100)
            file.write(b"\xff" * 8)
        delays.clock.ms += 1000
        with structlog.testing.capture_logs() as logs:
            await delays.until(lambda: len(delays.bodies()) == 2)
    assert delays.bodies() == [b"first", b"last"]
    (line,) = logs
    assert (line["event"], line["level"], line["count"]) == ("delayed messages can't be read", 1, 1)
    table = KVTable.decode(delays.broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
    assert (table["delayedUnreadable"], table["delayedDropped"]) == ("1", "0")


# --- clocks --------------------------------------------------------------------------------


async def test_a_clock_that_went_back_delays_by_the_level_at_most(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    delays.runs = []  # the first look must be at the time to which the clock went back
    async with delays.running():
        for number in range(3):
            delays.send(b"%d" % number, 2)
        back_ms = delays.clock.ms - 3_600_000
        delays.clock.ms = back_ms
        await delays.schedule.deliver_due()
        delays.send(b"3", 2)
        delays.clock.ms = back_ms + 4999
        await delays.schedule.deliver_due()
        assert delays.bodies() == []
        delays.clock.ms = back_ms + 5000
        while not await delays.schedule.deliver_due():
            pass
    assert delays.bodies() == [b"0", b"1", b"2", b"3"]


async def test_a_message_that_comes_during_a_delivery_is_not_early(
    delays: Delays, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_units = WaitingQueue.units

    async def slow_units(queue: WaitingQueue, first: int) -> Any:
        if queue.queue_id == 0 and not first:
            delays.clock.ms += 600
            delays.send(b"meanwhile", 2)
        return await read_units(queue, first)

    monkeypatch.setattr(WaitingQueue, "units", slow_units)
    async with delays.running():
        delays.send(b"first", 1)
        await delays.until(lambda: bool(delays.stored(SCHEDULE_TOPIC, 1)))
        delays.clock.ms += LEVELS_MS[1] - 1
        await delays.until(lambda: bool(delays.bodies()))
        await delays.idle()
        assert delays.bodies() == [b"first"]
        delays.clock.ms += 1
        await delays.until(lambda: delays.bodies() == [b"first", b"meanwhile"])


async def test_a_clock_that_jumps_ahead_delivers_what_is_due_then(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    async with delays.running():
        delays.send(b"late", 18)
        delays.clock.ms += 8 * 86_400_000
        await delays.until(lambda: delays.bodies() == [b"late"])


# --- starts --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(12))
async def test_once_across_kills(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, seed: int
) -> None:
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    ms, sent = 1_700_000_000_000, 0
    for _ in range(6):
        delays = Delays(tmp_path, ms)
        if not sent:
            delays.broker.create_topic("T")
        async with delays.running():
            for _ in range(chance.randrange(40)):
                delays.send(b"%d" % sent, chance.randrange(1, 4))
                sent += 1
                delays.clock.ms += chance.randrange(400)
                if chance.random() < 0.2:
                    await trio.sleep(chance.random() * 2)
                if chance.random() < 0.1:
                    await delays.schedule.save()
        ms = delays.clock.ms
        if chance.random() < 0.7:
            crash(delays.broker.store)
        else:
            delays.schedule.finish()
            delays.broker.close()
    delays = Delays(tmp_path, ms)
    async with delays.running():
        delays.clock.ms += 10_000
        await delays.until(lambda: len(delays.bodies()) >= sent)
        await delays.idle()
    assert sorted(delays.bodies(), key=int) == [b"%d" % number for number in range(sent)]


async def test_what_apache_delivered_before_its_crash_is_not_delivered_again(
    delays: Delays, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with delays.running():
        for number in range(4):
            delays.send(b"%d" % number, 1, UNIQ_KEY=f"A{number % 3}")
    # Apache's deliveries name no record, and its progress lags: the file is not ours.
    store = delays.broker.store
    delays.clock.ms += 1000
    store.write_path.begin()
    for message in delays.stored(SCHEDULE_TOPIC, 0)[:2]:
        raw = encode_properties(message.properties)
        store.write_path.append(
            (store.queue("T", 1), message.body, raw, 0, 5, 0, 17, 0), b"\x7f\0\0\1\0\0\0\1"
        )
    store.write_path.publish()
    path = delays.broker.config.store_path_root_dir / "config" / "delayOffset.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b'{"dataVersion":{"counter":1},"offsetTable":{1:0}}')
    crash(store)
    again = Delays(tmp_path, delays.clock.ms)
    async with again.running():
        await again.until(lambda: len(again.bodies()) >= 4)
        await again.idle()
    assert again.bodies() == [b"0", b"1", b"2", b"3"]


async def test_how_far_the_log_is_counted_is_saved_while_nothing_is_delivered(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    """Else a start after a kill would read the log from the last delivery on."""
    delays.schedule.uncounted_bytes_max = 1000
    position = delays.broker.core.position("schedule", DeliveredLevels)
    counted = []
    async with delays.running():
        delays.send(b"a", 1)
        delays.clock.ms += 1000
        await delays.until(lambda: bool(delays.bodies()))
        for body in (b"", b"few", bytes(1000)):
            if body:
                delays.produce(body)
            await delays.schedule.save()
            counted.append(position.load())
    store = delays.broker.store
    assert counted[0] == counted[1] != counted[2]
    assert counted[2] == DeliveredLevels({1: 1}, store.commit_log.max_offset)


async def test_the_interval_of_saves_may_change(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    delays.runs = [delays.schedule.run, delays.schedule.run_saving]
    delays.broker.config.flush_delay_offset_interval = 1_000_000
    position = delays.broker.core.position("schedule", DeliveredLevels)
    async with delays.running():
        delays.send(b"a", 1)
        delays.clock.ms += 1000
        await delays.until(lambda: bool(delays.bodies()))
        await trio.sleep(500)
        assert position.load() is None
        delays.broker.config.flush_delay_offset_interval = 1000
        await trio.sleep(600)
        await delays.until(lambda: position.load() is not None)


async def test_offsets_are_saved_behind_the_flush_and_read_back(
    delays: Delays, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with delays.running():
        delays.send(b"a", 1)
        delays.send(b"b", 3)
        delays.clock.ms += 1000
        await delays.until(lambda: bool(delays.bodies()))
        await delays.schedule.save()
        store = delays.broker.store
        assert store.commit_log.flushed_offset == store.commit_log.max_offset
    config = delays.broker.config.store_path_root_dir / "config"
    saved = fastjson.loads((config / "delayOffset.json").read_bytes())
    assert saved["offsetTable"] == {1: 1}
    delays.broker.close()
    again = Delays(tmp_path, delays.clock.ms)
    table = KVTable.decode(again.broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
    again.schedule.load()
    table = KVTable.decode(again.broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
    assert (table["scheduleMessageOffset_1"], table["scheduleMessageOffset_3"]) == ("1,1", "0,1")
    body = fastjson.loads(again.broker.ask(RequestCode.GET_ALL_DELAY_OFFSET).body)
    assert body["offsetTable"] == {1: 1}


async def test_a_scan_from_the_end_of_the_log_finds_nothing(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    async with delays.running():
        delays.send(b"a", 1)
        delays.clock.ms += 1000
        await delays.until(lambda: bool(delays.bodies()))
    store = delays.broker.store
    found = {}
    for offset in (0, store.commit_log.max_offset):
        delivered = Delivered(SCHEDULE_TOPIC, b"DELAY")
        read_log(delivered.take, store.commit_log, offset)
        found[offset] = len(delivered)
    assert found == {0: 1, store.commit_log.max_offset: 0}


async def test_what_waits_keeps_its_log_files(
    delays: Delays, autojump_clock: trio.testing.MockClock
) -> None:
    async with delays.running():
        unconsumed = delays.broker.store.cleaner.unconsumed
        delays.send(b"a", 1)
        delays.send(b"b", 1)
        assert at_once(unconsumed()(SCHEDULE_TOPIC, [0, 1])) == {
            0: (0, "delayed messages"),
            1: (0, "delayed messages"),
        }
        delays.clock.ms += 1000
        await delays.until(lambda: len(delays.bodies()) == 2)
        assert at_once(unconsumed()(SCHEDULE_TOPIC, [0, 99])) == {0: (2, "delayed messages")}
