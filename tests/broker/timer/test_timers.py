"""Timers: due to the millisecond, kept when they can't be delivered, and once across kills."""

from __future__ import annotations

import bisect
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog.testing
import trio
import trio.testing

from headrace_broker.inner.delivery import REASON
from headrace_broker.inner.writer import DeliverLater, InnerMessage
from headrace_broker.timer.arrivals import TIMER, Arrivals, Topics
from headrace_broker.timer.waiting_timers import RollWindow, WaitingTimers
from headrace_protocol import fastjson
from headrace_protocol.bodies import KVTable, WaitingList
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ListTimersHeader, RecallMessageHeader
from headrace_protocol.message import PROPERTIES_BYTES_MAX, encode_batch, encode_properties
from headrace_protocol.recall_handle import RecallHandle, decode_recall_handle
from headrace_protocol.system_topics import SCHEDULE_TOPIC, TIMER_TOPIC, UNDELIVERED_TOPIC
from headrace_protocol.waiting import at_once
from tests.support.seeds import seeds
from tests.support.stores import crash
from tests.support.waiting_broker import WaitingBroker

_SIZES: dict[str, Any] = {"commit_log_file_bytes": 1 << 18}
NOW_MS = 1_700_000_000_123
_DAY_MS = 86_400_000


class Clockwork(WaitingBroker):
    """A broker whose timers run."""

    def __init__(
        self,
        folder: Path,
        ms: int = NOW_MS,
        sizes: Mapping[str, Any] = _SIZES,
        **settings: Any,
    ) -> None:
        super().__init__(folder, ms, settings, **sizes)
        self.timers = self.broker.timers
        self.loads, self.runs = [self.timers.load], [self.timers.run]

    def send(
        self, body: bytes, topic: str = "T", queue_id: int = 1, **properties: Any
    ) -> tuple[int, str]:
        """Code and remark of the answer to one message."""
        code, remark, _ = self.ask(body, properties, topic, queue_id)
        return code, remark

    def ask(
        self,
        body: bytes,
        properties: Mapping[str, object],
        topic: str = "T",
        queue_id: int = 1,
        **fields: Any,
    ) -> tuple[int, str, dict[str, str]]:
        text = encode_properties({name: str(value) for name, value in properties.items()})
        answer = self.produce(body, b=topic, e=queue_id, i=text.decode(), **fields)
        return answer.code, answer.remark, answer.command.ext()

    async def until_ms(self, ms: int) -> None:
        """Move the clock, and wait until all that is due then is delivered."""
        self.clock.ms = ms
        await self.until(lambda: self.timers.settled_ms >= ms)


@pytest.fixture
def clockwork(tmp_path: Path) -> Clockwork:
    clockwork = Clockwork(tmp_path)
    clockwork.broker.create_topic("T")
    return clockwork


async def test_saving_survives_a_store_that_is_not_writable(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    clockwork.runs = [clockwork.timers.run, clockwork.timers.run_saving]
    async with clockwork.running():
        clockwork.send(b"late", TIMER_DELAY_SEC=60)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        clockwork.broker.store.flusher.stop_writing("a flush failed")
        with structlog.testing.capture_logs() as logs:
            await trio.sleep(60)
    (line,) = [line["event"] for line in logs]
    assert line.startswith("the checkpoint of timers is unavailable, retrying: ")


async def test_no_forged_recall_is_stored_for_a_time_that_no_timer_can_have(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    async with clockwork.running():
        send_for_handle(clockwork, b"late", "A1", TIMER_DELAY_MS=2000)
        assert not clockwork.timers.is_caught_up
        max_ms = clockwork.broker.config.timer_max_delay_sec * 1000
        for delay_ms, code in ((max_ms, 0), (max_ms + 1, ResponseCode.ILLEGAL_OPERATION)):
            handle = RecallHandle("T", "broker-a", NOW_MS + delay_ms, "A9")
            assert recall(clockwork, handle.encode())[0] == code
    assert len(clockwork.stored(TIMER_TOPIC, 0)) == 2


async def test_timers_that_keep_coming_hold_none_up(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    async def keep_sending() -> None:
        for _ in range(2000):
            clockwork.send(b"later", TIMER_DELAY_SEC=3600)
            await trio.lowlevel.checkpoint()
            if clockwork.bodies() == [b"due"]:
                return

    async with clockwork.running():
        clockwork.send(b"due", TIMER_DELAY_SEC=1)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        clockwork.clock.ms += 1000
        await keep_sending()
        assert clockwork.bodies() == [b"due"]


# --- what is delivered ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "wait_ms"),
    [
        ("TIMER_DELAY_SEC", 2, 2000),
        ("TIMER_DELAY_MS", 1377, 1377),
        ("TIMER_DELIVER_MS", NOW_MS + 2500, 2500),
        ("TIMER_DELIVER_MS", 1_700_000_003_000, 2877),
        ("TIMER_DELAY_MS", 1, 1),
    ],
)
async def test_a_timer_comes_at_its_millisecond_as_it_was_sent(
    clockwork: Clockwork,
    autojump_clock: trio.testing.MockClock,
    name: str,
    value: int,
    wait_ms: int,
) -> None:
    async with clockwork.running():
        sent: dict[str, Any] = {"TAGS": "a", "KEYS": "k", "own": "x", name: value}
        assert clockwork.send(b"late", **sent) == (0, "")
        await clockwork.until_ms(NOW_MS + wait_ms - 1)
        assert clockwork.bodies() == []
        await clockwork.until_ms(NOW_MS + wait_ms)
    (message,) = clockwork.stored()
    (waited,) = clockwork.stored(TIMER_TOPIC, 0)
    assert (message.body, message.flag, message.born_timestamp) == (b"late", 5, 17)
    out_ms = (NOW_MS + wait_ms - 1) // 1000 * 1000
    expected = {
        **{key: str(item) for key, item in sent.items()},
        "REAL_TOPIC": "T",
        "REAL_QID": "1",
        "TIMER_OUT_MS": str(out_ms),
    }
    assert expected.items() <= waited.properties.items()
    expected |= {
        "TIMER_ENQUEUE_MS": str(NOW_MS // 1000 * 1000),
        "TIMER_DEQUEUE_MS": str(NOW_MS + wait_ms),
    }
    assert expected.items() <= message.properties.items()
    assert message.store_timestamp == NOW_MS + wait_ms
    assert message.prepared_transaction_offset == waited.physical_offset


async def test_timers_come_in_the_order_of_their_times_then_of_their_arrival(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    chance = random.Random(1)
    sent = [(chance.choice([0, 1, 700, 1900, 90_000, 300_000]), number) for number in range(900)]
    async with clockwork.running():
        for delay_ms, number in sent:
            clockwork.send(b"%d" % number, TIMER_DELIVER_MS=NOW_MS + 1000 + delay_ms)
            if not number % 300:
                await clockwork.until(lambda: clockwork.timers.is_caught_up)
        await clockwork.until_ms(NOW_MS + 1500)
        assert len(clockwork.bodies()) == sum(delay_ms < 2 for delay_ms, _ in sent)
        await clockwork.until_ms(NOW_MS + 400_000)
    assert clockwork.bodies() == [b"%d" % number for _, number in sorted(sent)]


@pytest.mark.parametrize("name", ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
@pytest.mark.parametrize("value", ["-1", "x", "1.5", "0x1", "1 ", "\u0661", "9" * 30])
def test_a_time_that_is_no_number_or_negative_is_refused(
    clockwork: Clockwork, name: str, value: Any
) -> None:
    properties: dict[str, Any] = {name: value}
    code, remark = clockwork.send(b"late", **properties)
    assert code == ResponseCode.MESSAGE_ILLEGAL
    assert f"{name}={value}" in remark
    assert clockwork.broker.store.commit_log.max_offset == 0


@pytest.mark.parametrize(
    ("properties", "is_taken"),
    [
        ({"TIMER_DELAY_SEC": 3 * 86_400}, True),
        ({"TIMER_DELAY_SEC": 3 * 86_400 + 1}, False),
        ({"TIMER_DELAY_MS": 3 * _DAY_MS + 1}, False),
        ({"TIMER_DELAY_MS": "9" * 18}, False),
    ],
)
def test_a_delay_has_a_limit(
    clockwork: Clockwork, properties: dict[str, Any], is_taken: bool
) -> None:
    code, remark = clockwork.send(b"late", **properties)
    if is_taken:
        assert (code, remark) == (0, "")
    else:
        assert code == ResponseCode.MESSAGE_ILLEGAL
        assert "the delay time should not be bigger than the max delay 259200000ms" in remark
    assert len(clockwork.stored(TIMER_TOPIC, 0)) == is_taken


@pytest.mark.parametrize("properties", [{"TIMER_DELIVER_MS": 17}, {"TIMER_DELAY_SEC": 0}])
def test_a_time_that_is_past_is_at_once(clockwork: Clockwork, properties: dict[str, Any]) -> None:
    assert clockwork.send(b"now", **properties) == (0, "")
    (message,) = clockwork.stored()
    assert "TIMER_OUT_MS" not in message.properties


def test_the_first_of_the_three_names_counts(clockwork: Clockwork) -> None:
    clockwork.send(b"late", TIMER_DELIVER_MS=1, TIMER_DELAY_MS=50_000, TIMER_DELAY_SEC=10)
    (message,) = clockwork.stored(TIMER_TOPIC, 0)
    assert message.properties["TIMER_OUT_MS"] == "1700000010000"


def test_a_delay_level_wins_over_a_time(clockwork: Clockwork) -> None:
    assert clockwork.send(b"late", DELAY=1, TIMER_DELAY_SEC=9) == (0, "")
    assert clockwork.stored(TIMER_TOPIC, 0) == []
    (message,) = clockwork.stored(SCHEDULE_TOPIC, 0)
    assert "TIMER_DELAY_SEC" not in message.properties


def test_a_batch_with_a_timer_is_refused_whole(clockwork: Clockwork) -> None:
    late = encode_properties({"UNIQ_KEY": "A2", "TIMER_DELAY_SEC": "9"})
    items = [(0, b"now", encode_properties({"UNIQ_KEY": "A1"})), (0, b"late", late)]
    code, remark, _ = clockwork.ask(encode_batch(items), {}, m="true")
    assert code == ResponseCode.MESSAGE_ILLEGAL
    assert "item 2" in remark
    assert clockwork.broker.store.commit_log.max_offset == 0


def test_clients_can_not_send_to_the_queue_of_timers(clockwork: Clockwork) -> None:
    code, remark = clockwork.send(b"mine", TIMER_TOPIC, 0)
    assert (code, TIMER_TOPIC in remark) == (ResponseCode.NO_PERMISSION, True)


def test_timers_can_be_switched_off(tmp_path: Path) -> None:
    clockwork = Clockwork(tmp_path, timer_wheel_enable=False)
    clockwork.broker.create_topic("T")
    code, remark = clockwork.send(b"late", TIMER_DELAY_SEC=1)
    assert (code, "timerWheelEnable" in remark) == (ResponseCode.MESSAGE_ILLEGAL, True)


async def test_enqueuing_and_delivery_can_be_stopped_meanwhile(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    config = clockwork.broker.config
    async with clockwork.running():
        config.timer_stop_enqueue = True
        clockwork.send(b"1", TIMER_DELAY_MS=5)
        clockwork.clock.ms += 10
        await trio.sleep(3)
        assert clockwork.bodies() == []
        config.timer_stop_dequeue, config.timer_stop_enqueue = True, False
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        await trio.sleep(3)
        assert clockwork.bodies() == []
        config.timer_stop_dequeue = False
        await clockwork.until(lambda: clockwork.bodies() == [b"1"])


# --- what can't be delivered ---------------------------------------------------------------


async def test_what_can_not_go_to_its_topic_is_kept_with_the_reason(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    clockwork.broker.create_topic("U")
    async with clockwork.running():
        clockwork.send(b"lost", TIMER_DELAY_SEC=1)
        clockwork.send(b"next", "U", TIMER_DELAY_SEC=1)
        clockwork.broker.topics.delete("T")
        await clockwork.until_ms(NOW_MS + 1000)
    (message,) = clockwork.stored(UNDELIVERED_TOPIC, 0)
    assert message.body == b"lost"
    assert "topic[T] not exist" in message.properties[REASON]
    assert clockwork.bodies("U") == [b"next"]


async def test_the_largest_message_is_delivered(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    clockwork = Clockwork(tmp_path, sizes={"commit_log_file_bytes": 1 << 24})
    clockwork.broker.create_topic("T")
    body = bytes(clockwork.broker.config.max_message_size)
    code, _ = clockwork.send(body + b"x", TIMER_DELAY_SEC=1)
    assert code == ResponseCode.MESSAGE_ILLEGAL
    lengths = range(PROPERTIES_BYTES_MAX - 400, PROPERTIES_BYTES_MAX)
    too_long = bisect.bisect(
        lengths, 0, key=lambda length: clockwork.send(b"x", long="x" * length, TIMER_DELAY_SEC=9)[0]
    )
    assert 0 < too_long < len(lengths)
    async with clockwork.running():
        longest = "x" * lengths[too_long - 1]
        assert clockwork.send(body, long=longest, TIMER_DELAY_SEC=1)[0] == 0
        assert clockwork.send(b"next", TIMER_DELAY_SEC=1)[0] == 0
        await clockwork.until_ms(NOW_MS + 1000)
    delivered, after = clockwork.stored()
    assert (delivered.body, after.body) == (body, b"next")
    assert delivered.properties["long"] == longest


async def test_a_damaged_record_stops_no_other(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    (clockwork.broker.config.store_path_root_dir / "commitlog").mkdir(exist_ok=True)
    async with clockwork.running():
        for body in (b"first", b"torn", b"last"):
            clockwork.send(body, TIMER_DELAY_SEC=1)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        _, torn, _ = clockwork.stored(TIMER_TOPIC, 0)
        (path,) = (clockwork.broker.config.store_path_root_dir / "commitlog").iterdir()
        with path.open("r+b") as file:
            file.seek(torn.physical_offset + 88)
            file.write(b"\xff" * 4)
        await clockwork.until_ms(NOW_MS + 1000)
    assert clockwork.bodies() == [b"first", b"last"]
    assert clockwork.timers.unreadable == 1


async def test_timers_whose_log_file_is_gone_are_counted_by_topic(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    store = clockwork.broker.store
    async with clockwork.running():
        for topic in ("A", "A", "B"):
            clockwork.broker.create_topic(topic)
            clockwork.send(b"gone", topic=topic, TIMER_DELAY_SEC=1)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        while len(store.commit_log.files.files) < 2:
            clockwork.broker.store_message("T", 0, bytes(1000))
        store.write_path.drain_all()
        assert store.commit_log.files.detach_first(1)
        clockwork.send(b"kept", TIMER_DELAY_SEC=1)
        with structlog.testing.capture_logs() as logs:
            await clockwork.until_ms(clockwork.clock.ms + 1000)
    assert clockwork.bodies() == [b"kept"]
    (line,) = logs
    assert (line["event"], line["count"]) == ("timers can't be read", 3)
    assert line["topics"] == {"A": 2, "B": 1}
    table = KVTable.decode(clockwork.broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
    assert table["timersUnreadable"] == "3"


# --- recalls -------------------------------------------------------------------------------


def recall(clockwork: Clockwork, handle: str, topic: str = "T") -> tuple[int, str]:
    header = RecallMessageHeader(topic=topic, recall_handle=handle, producer_group="g")
    answer = clockwork.broker.ask(RequestCode.RECALL_MESSAGE, header)
    return answer.code, answer.remark


def send_for_handle(clockwork: Clockwork, body: bytes, key: str, **properties: Any) -> str:
    code, _, fields = clockwork.ask(body, {"UNIQ_KEY": key, **properties})
    assert code == 0
    return fields["recallHandle"]


async def test_a_recalled_timer_is_not_delivered(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    async with clockwork.running():
        handle = send_for_handle(clockwork, b"gone", "A1", TIMER_DELAY_MS=2000)
        send_for_handle(clockwork, b"kept", "A2", TIMER_DELAY_MS=2000)
        parts = RecallHandle("T", "broker-a", 1_700_000_002_001, "A1")
        assert decode_recall_handle(handle) == parts
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        assert recall(clockwork, handle) == (0, "")
        for _ in range(2):  # before the recall was read from the queue, and later
            code, remark = recall(clockwork, handle)
            assert (code, "no such message waits" in remark) == (604, True)
            await clockwork.until(lambda: clockwork.timers.is_caught_up)
        await clockwork.until_ms(NOW_MS + 2000)
    assert clockwork.bodies() == [b"kept"]
    *_, record = clockwork.stored(TIMER_TOPIC, 0)
    expected = {
        "TAGS": "_RECALL_TAG_",
        "TIMER_DEL_UNIQKEY": "A1",
        "UNIQ_KEY": "A1",
        "TIMER_DELIVER_MS": "1700000002001",
        "TIMER_OUT_MS": "1700000002000",
        "REAL_TOPIC": "T",
    }
    assert record.body == b"0"
    assert expected.items() <= record.properties.items()
    assert clockwork.timers.waiting.count == 0


async def test_a_recall_holds_across_kills_and_before_its_timer_is_known(
    clockwork: Clockwork, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    handle = send_for_handle(clockwork, b"gone", "A1", TIMER_DELAY_MS=2000)
    assert recall(clockwork, handle) == (0, "")
    crash(clockwork.broker.store)
    again = Clockwork(tmp_path)
    async with again.running():
        assert recall(again, handle)[0] == ResponseCode.ILLEGAL_OPERATION
        await again.until_ms(NOW_MS + 2000)
    assert again.bodies() == []


async def test_a_recall_holds_until_its_slot_is_over(
    clockwork: Clockwork, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with clockwork.running():
        clockwork.send(b"before", TIMER_DELIVER_MS=1_700_000_003_500)
        handle = send_for_handle(clockwork, b"gone", "A1", TIMER_DELIVER_MS=1_700_000_002_900)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        assert recall(clockwork, handle) == (0, "")
        await clockwork.until_ms(1_700_000_002_500)
        await clockwork.timers.save()
    crash(clockwork.broker.store)
    again = Clockwork(tmp_path, 1_700_000_002_500)
    async with again.running():
        await again.until_ms(1_700_000_003_500)
    assert again.bodies() == [b"before"]


async def test_a_timer_that_is_rolled_can_be_recalled(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    clockwork = Clockwork(tmp_path, timer_roll_window_slot=4)
    clockwork.broker.create_topic("T")
    async with clockwork.running():
        handle = send_for_handle(clockwork, b"gone", "A1", TIMER_DELAY_MS=20_000)
        send_for_handle(clockwork, b"kept", "A2", TIMER_DELAY_MS=20_000)
        await clockwork.until_ms(NOW_MS + 6000)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        rolled = [message.properties for message in clockwork.stored(TIMER_TOPIC, 0)[2:]]
        assert [properties["TIMER_ROLL_TIMES"] for properties in rolled[:2]] == ["1", "1"]
        assert recall(clockwork, handle) == (0, "")
        await clockwork.until_ms(NOW_MS + 20_000)
    assert clockwork.bodies() == [b"kept"]
    (message,) = clockwork.stored()
    assert message.store_timestamp == NOW_MS + 20_000


async def test_what_can_not_be_recalled(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    async with clockwork.running():
        handle = send_for_handle(clockwork, b"late", "A1", TIMER_DELAY_MS=2000)
        await clockwork.until_ms(NOW_MS + 2000)
        forged = RecallHandle("T", "broker-a", NOW_MS + 9000, "A9")
        for wrong, topic, reason in (
            (handle, "T", "no such message waits"),
            (forged.encode(), "T", "no such message waits"),
            (forged._replace(time_ms=10**17).encode(), "T", "timerMaxDelaySec"),
            (forged._replace(broker_name="b").encode(), "T", "this is broker-a"),
            (forged.encode(), "TBW102", "topic not match"),
            ("!", "T", "recall handle is invalid"),
            ("djEgVA==", "T", "recall handle is invalid"),
        ):
            code, remark = recall(clockwork, wrong, topic)
            assert (code, reason in remark) == (ResponseCode.ILLEGAL_OPERATION, True), remark
        clockwork.broker.config.recall_message_enable = False
        code, remark = recall(clockwork, handle)
    assert code == ResponseCode.NO_PERMISSION
    assert "recall failed, operation is forbidden" in remark
    assert len(clockwork.stored(TIMER_TOPIC, 0)) == 1


@pytest.mark.parametrize("prefix", ["", "T+"])
async def test_a_message_can_recall_a_timer_before_or_behind_it(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock, prefix: str
) -> None:
    async with clockwork.running():
        for key in ("A1", "A2"):
            clockwork.send(b"gone", UNIQ_KEY=key, TIMER_DELAY_MS=1500)
            recall: dict[str, Any] = {"TIMER_DEL_UNIQKEY": f"{prefix}{key}", "TIMER_DELAY_MS": 1600}
            clockwork.send(b"0", **recall)
            clockwork.send(b"gone", UNIQ_KEY=key, TIMER_DELAY_MS=1700)
        clockwork.send(b"kept", UNIQ_KEY="A3", TIMER_DELAY_MS=1500)
        await clockwork.until_ms(NOW_MS + 2000)
        code, _ = clockwork.send(b"0", TIMER_DEL_UNIQKEY="A3", TIMER_DELIVER_MS=NOW_MS)
    assert code == ResponseCode.MESSAGE_ILLEGAL
    assert clockwork.bodies() == [b"kept"]


def test_only_timers_have_a_handle(clockwork: Clockwork) -> None:
    for properties in ({}, {"TIMER_DELIVER_MS": 1}, {"DELAY": 1}):
        assert "recallHandle" not in clockwork.ask(b"x", properties)[2]


# --- figures -------------------------------------------------------------------------------


async def test_figures_count_what_waits(
    clockwork: Clockwork, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    clockwork.broker.create_topic("U")
    async with clockwork.running():
        for topic, delay_s in (("T", 1), ("T", 9), ("U", 9)):
            clockwork.send(b"x", topic, TIMER_DELAY_SEC=delay_s)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        assert _counts(clockwork) == {"T": 2, "U": 1}
        await clockwork.until_ms(NOW_MS + 1000)
        assert _counts(clockwork) == {"T": 1, "U": 1}
        await clockwork.timers.save()
        await clockwork.until_ms(NOW_MS + 9000)
    crash(clockwork.broker.store)
    again = Clockwork(tmp_path, NOW_MS + 9000)
    async with again.running():
        assert _counts(again) == {"T": 0, "U": 0}
        table = KVTable.decode(again.broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
        assert (table["timerOffsetBehind"], table["timerCongestNum"]) == ("0", "0")
        body = again.broker.ask(RequestCode.GET_TIMER_CHECK_POINT).body
        assert struct.unpack(">7q", body)[2:4] == (3, 3)


async def test_deleted_topics_leave_the_figures(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    clockwork.broker.create_topic("U")
    async with clockwork.running():
        for topic, delay_s in (("T", 1), ("U", 1), ("U", 9)):
            clockwork.send(b"x", topic, TIMER_DELAY_SEC=delay_s)
        await clockwork.until_ms(NOW_MS + 1000)
        assert _counts(clockwork) == {"T": 0, "U": 1}
        clockwork.broker.topics.delete("T")
        clockwork.broker.topics.delete("U")
        assert _counts(clockwork) == {"U": 1}
        await clockwork.until_ms(NOW_MS + 9000)
        assert _counts(clockwork) == {}
    clockwork.timers.finish()
    path = clockwork.broker.config.store_path_root_dir / "config" / "timermetrics"
    assert fastjson.loads(path.read_bytes())["timingCount"] == {}


def _counts(clockwork: Clockwork) -> dict[str, int]:
    body = clockwork.broker.ask(RequestCode.GET_TIMER_METRICS).body
    counts = fastjson.loads(body)["timingCount"]
    return {topic: metric["count"] for topic, metric in counts.items()}


async def test_what_waits_keeps_its_log_files(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    async with clockwork.running():
        unconsumed = clockwork.broker.store.cleaner.unconsumed
        for delay_s in (1, 9):
            clockwork.send(b"x", TIMER_DELAY_SEC=delay_s)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        assert at_once(unconsumed()(TIMER_TOPIC, [0])) == {0: (0, "timers")}
        await clockwork.until_ms(NOW_MS + 1000)
        assert at_once(unconsumed()(TIMER_TOPIC, [0])) == {0: (1, "timers")}


async def test_what_is_being_delivered_counts_as_waiting(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    begun = trio.Event()

    async def deliver(_message: InnerMessage) -> str:
        begun.set()
        raise DeliverLater

    async with clockwork.running():
        clockwork.send(b"late", TIMER_DELAY_SEC=1)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        clockwork.broker.writer.find_target = lambda _topic, _queue_id: deliver
        clockwork.clock.ms += 1000
        await begun.wait()
        assert clockwork.timers.next_offset(0) == 0
        await clockwork.timers.save()
    crash(clockwork.broker.store)
    again = Clockwork(clockwork.broker.config.store_path_root_dir.parent, clockwork.clock.ms)
    async with again.running():
        await again.until(lambda: again.bodies() == [b"late"])


# --- starts --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(16))
async def test_once_across_kills(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, seed: int
) -> None:
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    ms, sent = NOW_MS, 0
    window = chance.choice([172_800, 4])
    for _ in range(6):
        clockwork = Clockwork(tmp_path, ms, timer_roll_window_slot=window)
        if not sent:
            clockwork.broker.create_topic("T")
        async with clockwork.running():
            for _ in range(chance.randrange(40)):
                clockwork.send(b"%d" % sent, TIMER_DELAY_MS=chance.randrange(1, 12_000))
                sent += 1
                clockwork.clock.ms += chance.randrange(400)
                if chance.random() < 0.1:
                    clockwork.clock.ms += chance.choice([-3_000, 3_000])
                if chance.random() < 0.3:
                    await trio.sleep(chance.random() * 2)
                if chance.random() < 0.1:
                    await clockwork.timers.save()
        ms = clockwork.clock.ms
        if chance.random() < 0.7:
            crash(clockwork.broker.store)
        else:
            clockwork.timers.finish()
            clockwork.broker.close()
    clockwork = Clockwork(tmp_path, ms, timer_roll_window_slot=window)
    async with clockwork.running():
        await clockwork.until_ms(ms + 30_000)
    assert sorted(clockwork.bodies(), key=int) == [b"%d" % number for number in range(sent)]
    assert clockwork.timers.waiting.count == 0


# --- what waits ----------------------------------------------------------------------------


def listed(clockwork: Clockwork, **fields: Any) -> tuple[list[tuple[bytes, int]], int]:
    """The bodies and due times that are listed, and how many timers wait."""
    header = ListTimersHeader(**{"max_num": 1000, **fields})
    answer = clockwork.broker.ask(RequestCode.LIST_TIMERS, header)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    found = WaitingList.decode(answer.body)
    bodies = {stored.physical_offset: stored.body for stored in clockwork.stored(TIMER_TOPIC, 0)}
    rows = [(bodies[each.physical_offset], each.due_ms - NOW_MS) for each in found.messages]
    return rows, found.count


async def test_what_waits_is_listed_in_the_order_of_delivery(
    clockwork: Clockwork, autojump_clock: trio.testing.MockClock
) -> None:
    clockwork.broker.create_topic("U")
    async with clockwork.running():
        clockwork.send(b"day", TIMER_DELAY_MS=_DAY_MS)
        clockwork.send(b"soon", TIMER_DELAY_MS=1500)
        clockwork.send(b"other", topic="U", TIMER_DELAY_MS=1400)
        clockwork.send(b"also", TIMER_DELAY_MS=1500)
        await clockwork.until(lambda: clockwork.timers.waiting.count == 4)
        every = [(b"other", 1400), (b"soon", 1500), (b"also", 1500), (b"day", _DAY_MS)]
        assert listed(clockwork) == (every, 4)
        assert listed(clockwork, max_num=2) == (every[:2], 4)
        assert listed(clockwork, topic="U") == (every[:1], 1)
        assert listed(clockwork, until_timestamp=NOW_MS + 1500) == (every[:3], 4)
        assert listed(clockwork, max_num=-1) == ([], 4)
        assert listed(clockwork, topic="none") == ([], 0)
        await clockwork.until_ms(NOW_MS + 1400)
        assert listed(clockwork) == (every[1:], 3)


def test_the_first_of_many_timers_are_found_in_slices() -> None:
    seed = random.randrange(1 << 32)
    count, topics = 20_000, Topics()
    rows = np.zeros(count, TIMER)
    rows["due_ms"] = NOW_MS + np.random.default_rng(seed).integers(1000, 60_000, count)
    rows["queue_offset"] = rows["source"] = np.arange(count)
    rows["topic"] = topics.number(b"T")
    waiting = WaitingTimers(topics, RollWindow(0))
    waiting.add(Arrivals(rows, np.full(count, NOW_MS), np.full(count, -1)))
    for limit in (1, 7, count):
        found = at_once(waiting.first_due([b"T"], NOW_MS * 2, limit))
        assert found["due_ms"].tolist() == sorted(rows["due_ms"].tolist())[:limit], f"seed {seed}"
    assert sum(1 for _ in waiting.first_due([b"T"], NOW_MS * 2, count)) > 2
