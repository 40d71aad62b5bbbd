"""The timer wheel and the timer log: what an Apache broker finds, and what it leaves."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_broker.store_tools.timer_log import timer_units
from headrace_broker.timer.wheel import SLOT, UNIT, WHEEL_SLOTS
from headrace_protocol.system_topics import TIMER_TOPIC
from tests.broker.timer.test_timers import NOW_MS, Clockwork, recall, send_for_handle
from tests.support.golden import CONFIG, copy_golden_store, golden_settings, golden_store, manifest
from tests.support.stores import crash

_LOG_BYTES = 4096
_SIZES = (
    "commit_log_file_bytes",
    "consume_queue_file_bytes",
    "index_slot_count",
    "index_entry_count",
)
_LOG_UNITS = (_LOG_BYTES - 16) // 52


def _check(root: Path) -> tuple[int, ...]:
    return struct.unpack(">7q", (root / "config" / "timercheck").read_bytes()[:56])


def _unit(root: Path, position: int, log_bytes: int) -> Any:
    path = root / "timerlog" / f"{position // log_bytes * log_bytes:020d}"
    data = path.read_bytes()
    assert len(data) == log_bytes
    return np.frombuffer(data, UNIT, 1, position % log_bytes)[0]


def _slots(root: Path, log_bytes: int = _LOG_BYTES) -> dict[int, list[tuple[int, int]]]:
    """By slot that an Apache broker reads after a start: physical offset and magic, oldest first.

    Units that deliver nothing are left out.
    """
    wheel = np.frombuffer((root / "timerwheel").read_bytes(), SLOT)
    assert len(wheel) == WHEEL_SLOTS
    lasts = {int(slot["time"]): int(slot["last"]) for slot in wheel if slot["time"]}
    lasts |= _lasts_in_log(root, log_bytes)
    found: dict[int, list[tuple[int, int]]] = {}
    for second, last in lasts.items():
        if second * 1000 < _check(root)[0]:
            continue
        units, position = [], last
        while position != -1:
            unit = _unit(root, position, log_bytes)
            assert unit["size"] == UNIT.itemsize
            assert unit["write_ms"] + unit["delay_ms"] == second * 1000
            if unit["topic_hash"]:
                units.append((int(unit["physical_offset"]), int(unit["magic"])))
            position = int(unit["previous"])
        if units:
            found[second] = units[::-1]
    return found


def _lasts_in_log(root: Path, log_bytes: int) -> dict[int, int]:
    """The last unit of each slot in the newest files, which an Apache broker reads at a start."""
    lasts: dict[int, int] = {}
    begin = max(_check(root)[1] - log_bytes, 0) // log_bytes * log_bytes
    for path in sorted((root / "timerlog").iterdir()):
        if int(path.name) < begin:
            continue
        units = np.frombuffer(path.read_bytes(), UNIT, (log_bytes - 16) // UNIT.itemsize)
        for number, unit in enumerate(units[units["size"] == UNIT.itemsize]):
            second = int(unit["write_ms"] + unit["delay_ms"]) // 1000
            lasts[second] = int(path.name) + number * UNIT.itemsize
    return lasts


@pytest.fixture
def clockwork(tmp_path: Path) -> Clockwork:
    clockwork = Clockwork(tmp_path, mapped_file_size_timer_log=_LOG_BYTES)
    clockwork.broker.create_topic("T")
    return clockwork


async def test_each_slot_leads_to_what_waits(
    clockwork: Clockwork, tmp_path: Path, autojump_clock: object
) -> None:
    delays_ms = [2000 + number % 7 * 500 for number in range(3 * _LOG_UNITS)]
    async with clockwork.running():
        for number, delay_ms in enumerate(delays_ms):
            clockwork.send(b"%d" % number, TIMER_DELAY_MS=delay_ms)
            if not number % 100:
                await clockwork.until(lambda: clockwork.timers.is_caught_up)
                await clockwork.timers.save()
        clockwork.send(b"far", TIMER_DELAY_SEC=60 * 3600)
        await clockwork.until_ms(NOW_MS + 2500)
        await clockwork.timers.save()
    clockwork.timers.finish()
    root = clockwork.broker.config.store_path_root_dir
    expected: dict[int, list[tuple[int, int]]] = {}
    for message, delay_ms in zip(clockwork.stored(TIMER_TOPIC, 0), delays_ms, strict=False):
        if delay_ms > 2500:
            slot = int(message.properties["TIMER_OUT_MS"]) // 1000
            expected.setdefault(slot, []).append((message.physical_offset, 1))
    far = clockwork.stored(TIMER_TOPIC, 0)[-1]
    expected[NOW_MS // 1000 + 86_400] = [(far.physical_offset, 3)]
    assert _slots(root) == expected
    assert _check(root)[2:4] == (len(delays_ms) + 1,) * 2


async def test_the_last_unit_is_of_the_last_message(
    clockwork: Clockwork, tmp_path: Path, autojump_clock: object
) -> None:
    async with clockwork.running():
        clockwork.send(b"1", TIMER_DELAY_SEC=60)
        clockwork.send(b"2", TIMER_DELAY_SEC=1)
        await clockwork.until_ms(NOW_MS + 1000)
    crash(clockwork.broker.store)
    again = Clockwork(tmp_path, NOW_MS + 2000, mapped_file_size_timer_log=_LOG_BYTES)
    again.timers.load()
    again.timers.finish()
    root = again.broker.config.store_path_root_dir
    waits, last = again.stored(TIMER_TOPIC, 0)
    assert _unit(root, _check(root)[1] - 52, _LOG_BYTES)["physical_offset"] == last.physical_offset
    assert list(_slots(root).values()) == [[(waits.physical_offset, 1)]]


async def test_a_stop_leaves_no_delivered_timer(
    clockwork: Clockwork, autojump_clock: object
) -> None:
    async with clockwork.running():
        for delay_ms in (1000, 1100, 1700):
            clockwork.send(b"%d" % delay_ms, TIMER_DELAY_MS=delay_ms)
        await clockwork.until_ms(NOW_MS + 1200)
        clockwork.timers.finish()
        root = clockwork.broker.config.store_path_root_dir
        *_, waits = clockwork.stored(TIMER_TOPIC, 0)
        assert list(_slots(root).values()) == [[(waits.physical_offset, 1)]]
        await clockwork.until_ms(NOW_MS + 1800)
        clockwork.timers.finish()
        assert _slots(root) == {}
    kinds = [unit.kind for unit in timer_units(root)]
    assert kinds == ["timer", "timer", "timer", "timer", "end", "end"]


async def test_a_stop_keeps_timers_to_roll_in_the_slot_of_a_delivered_one(
    tmp_path: Path, autojump_clock: object
) -> None:
    clockwork = Clockwork(
        tmp_path, mapped_file_size_timer_log=_LOG_BYTES, timer_roll_window_slot=10
    )
    clockwork.broker.create_topic("T")
    async with clockwork.running():
        clockwork.send(b"rolled in 10 s", TIMER_DELAY_SEC=30)
        await clockwork.until_ms(NOW_MS + 5000)
        clockwork.send(b"due", TIMER_DELAY_MS=5100)
        clockwork.send(b"due later", TIMER_DELAY_MS=5700)
        await clockwork.until_ms(NOW_MS + 10_300)
    clockwork.timers.finish()
    rolled, _, later = clockwork.stored(TIMER_TOPIC, 0)
    units = [(rolled.physical_offset, 3), (later.physical_offset, 1)]
    assert _slots(clockwork.broker.config.store_path_root_dir) == {NOW_MS // 1000 + 10: units}


async def test_an_idle_broker_saves_that_a_slot_with_deliveries_is_over(
    clockwork: Clockwork, autojump_clock: object
) -> None:
    root = clockwork.broker.config.store_path_root_dir
    async with clockwork.running():
        clockwork.send(b"1", TIMER_DELAY_SEC=1)
        await clockwork.until_ms(NOW_MS + 1000)
        await clockwork.timers.save()
        assert len(_slots(root)) == 1
        await clockwork.until_ms(NOW_MS + 2000)
        await clockwork.timers.save()
        assert _slots(root) == {}


async def test_a_slot_leads_to_as_many_recalls_as_timers(
    tmp_path: Path, autojump_clock: object
) -> None:
    clockwork = Clockwork(
        tmp_path, mapped_file_size_timer_log=_LOG_BYTES, timer_roll_window_slot=10
    )
    clockwork.broker.create_topic("T")
    out_s = NOW_MS // 1000 + 12
    async with clockwork.running():
        handle = send_for_handle(clockwork, b"rolled", "A1", TIMER_DELIVER_MS=out_s * 1000 + 1)
        await clockwork.until_ms(NOW_MS + 4000)
        clockwork.send(b"first", TIMER_DELIVER_MS=out_s * 1000 + 2)
        assert recall(clockwork, handle) == (0, "")
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        await clockwork.timers.save()
        root = clockwork.broker.config.store_path_root_dir
        units = [(unit.kind, unit.is_in_wheel) for unit in timer_units(root)]
        assert units == [("rolled", True), ("timer", True), ("recall", True)]
        clockwork.send(b"second", TIMER_DELIVER_MS=out_s * 1000 + 3)
        await clockwork.until(lambda: clockwork.timers.is_caught_up)
        await clockwork.timers.save()
    _, first, recalls, second = clockwork.stored(TIMER_TOPIC, 0)
    expected = zip((first, recalls, second), (1, 5, 1), strict=True)
    assert _slots(root)[out_s] == [(each.physical_offset, magic) for each, magic in expected]


def _remove(root: Path) -> None:
    (root / "timerwheel").unlink()
    shutil.rmtree(root / "timerlog")


def _cut(root: Path) -> None:
    for path in (root / "timerwheel", *(root / "timerlog").iterdir()):
        path.write_bytes(path.read_bytes()[:77])


def _damage(root: Path) -> None:
    for path in (root / "timerwheel", *(root / "timerlog").iterdir()):
        path.write_bytes(b"\xa5" * path.stat().st_size)


def _from_the_future(root: Path) -> None:
    fields = (NOW_MS + 10**9, 10**9, 10**6, 10**6, 0, NOW_MS + 10**9, 9)
    (root / "config" / "timercheck").write_bytes(struct.pack(">7q", *fields).ljust(4096, b"\0"))


def _no_check(root: Path) -> None:
    (root / "config" / "timercheck").write_bytes(b"\xff" * 20)


@pytest.mark.parametrize("harm", [_remove, _cut, _damage, _from_the_future, _no_check])
async def test_files_that_are_missing_or_damaged_are_made_again(
    clockwork: Clockwork, tmp_path: Path, autojump_clock: object, harm: Any
) -> None:
    async with clockwork.running():
        for number in range(5):
            clockwork.send(b"%d" % number, TIMER_DELAY_SEC=1 + number)
        await clockwork.until_ms(NOW_MS + 2000)
    clockwork.timers.finish()
    root = clockwork.broker.config.store_path_root_dir
    before = _slots(root)
    clockwork.broker.close()
    harm(root)
    again = Clockwork(tmp_path, NOW_MS + 2000, mapped_file_size_timer_log=_LOG_BYTES)
    async with again.running():
        await again.until(lambda: again.timers.settled_ms >= NOW_MS + 2000)
        await again.timers.save()
        assert _slots(root) == before
        await again.until_ms(NOW_MS + 9000)
    assert again.bodies() == [b"%d" % number for number in range(5)]


@pytest.mark.parametrize("name", ["clean", "kill9"])
async def test_the_timers_of_an_apache_broker_wait_on(
    tmp_path: Path, autojump_clock: object, name: str
) -> None:
    root = copy_golden_store(name, tmp_path / "store")
    peer = _slots(golden_store(name), 1 << 20)
    wanted = golden_settings(root)
    sizes = {name: getattr(wanted, name) for name in _SIZES}
    stopped_ms = _check(root)[5]
    clockwork = Clockwork(tmp_path, stopped_ms, sizes, mapped_file_size_timer_log=1 << 20, **CONFIG)
    before = [len(clockwork.stored("G_TIMER", queue_id)) for queue_id in range(4)]
    async with clockwork.running():
        assert clockwork.timers.waiting.counts() == {b"G_TIMER": 3}
        await clockwork.until(lambda: clockwork.timers.settled_ms > 0)
        await clockwork.timers.save()
        assert _slots(root, 1 << 20) == peer
        await clockwork.until_ms(stopped_ms + 3 * 86_400_000)
    after = [message for queue_id in range(4) for message in clockwork.stored("G_TIMER", queue_id)]
    assert len(after) - sum(before) == 3
    assert len({message.properties["KEYS"] for message in after}) == len(
        {
            message["properties"]["KEYS"]
            for message in manifest(name)["messages"]
            if message["topic"] in {"G_TIMER", TIMER_TOPIC}
        }
    )
