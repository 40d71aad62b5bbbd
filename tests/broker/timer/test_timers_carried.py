"""Timers are stored again before their log file goes, and delivered once, at their time."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

from headrace_protocol.system_topics import TIMER_TOPIC
from tests.broker.timer.test_timer_files import _LOG_BYTES, _slots
from tests.broker.timer.test_timers import NOW_MS, Clockwork, recall, send_for_handle
from tests.store.test_cleaner import any_hour
from tests.support.stores import crash

_FILE_BYTES: Final = 1 << 16
_BODY: Final = bytes(1000)


class Aging(Clockwork):
    """Clockwork whose full log files are old enough to go at once."""

    def __init__(self, folder: Path, ms: int = NOW_MS, **settings: Any) -> None:
        # The tests do all rounds of clean-up themselves.
        sizes = {"commit_log_file_bytes": _FILE_BYTES, "clean_interval_ms": 1 << 40}
        settings.setdefault("mapped_file_size_timer_log", _LOG_BYTES)
        super().__init__(folder, ms, sizes, **settings)
        self.store = self.broker.store
        self.seen: dict[int, bytes] = {}  # by queue offset, what clean-up may have removed since
        self.store.cleaner.retention = any_hour(reserved_ms=0)

    def fill(self, file_count: int = 1) -> None:
        """Other messages, until that many files more are full."""
        end = self.store.commit_log.max_offset // _FILE_BYTES + file_count
        while self.store.commit_log.max_offset < end * _FILE_BYTES:
            self.broker.store_message("T", 0, _BODY)

    async def clean(self) -> int:
        """One round, and all that it asks for; returns the first offset of the log."""
        await self.until(lambda: self.timers.is_caught_up)
        for file in self.store.commit_log.files.files:
            os.utime(file.path, (0, NOW_MS / 1000))
        end = self.store.commit_log.max_offset
        await self.until(lambda: self.store.settled_offset() >= end)
        self.seen |= self.delivered()
        await self.store.cleaner.round()
        await self.until(lambda: not len(self.timers.to_carry) and self.timers.is_caught_up)
        return self.store.commit_log.min_offset

    def delivered(self) -> dict[int, bytes]:
        """Bodies of what is in the topic, by queue offset."""
        return {message.queue_offset: message.body for message in self.stored()}

    @property
    def copies(self) -> list[bytes]:
        """Bodies of timers and recalls that were stored again."""
        return [
            message.body
            for message in self.stored(TIMER_TOPIC, 0)
            if message.properties.get("TIMER_ROLL_TIMES")
        ]


@pytest.fixture
def aging(tmp_path: Path) -> Aging:
    aging = Aging(tmp_path)
    aging.broker.create_topic("T")
    return aging


async def test_a_timer_outlives_its_log_file(
    aging: Aging, tmp_path: Path, autojump_clock: object
) -> None:
    async with aging.running():
        aging.send(b"late", TIMER_DELAY_SEC=9000, KEYS="k")
        aging.fill()
        assert await aging.clean() == 0
        assert aging.copies == [b"late"]
        assert await aging.clean() == _FILE_BYTES
    crash(aging.store)
    again = Aging(tmp_path)
    async with again.running():
        await again.until_ms(NOW_MS + 8_999_999)
        assert again.bodies() == []
        await again.until_ms(NOW_MS + 9_000_000)
    (message,) = again.stored()
    assert (message.body, message.properties["KEYS"]) == (b"late", "k")


async def test_one_file_at_a_time_and_some_records_each_round(
    aging: Aging, autojump_clock: object
) -> None:
    aging.timers.carried_bytes = 1500
    async with aging.running():
        for number in range(4):
            aging.send(_BODY, TIMER_DELAY_SEC=9000 + number * 100)
        aging.fill()
        aging.send(b"of the second file", TIMER_DELAY_SEC=9000)
        aging.fill()
        begins = [await aging.clean() for _ in range(5)]
        assert len(aging.copies) == 5
    assert begins == [0, 0, _FILE_BYTES, 2 * _FILE_BYTES, 2 * _FILE_BYTES]


async def test_nothing_is_stored_again_while_something_else_keeps_the_file(
    aging: Aging, autojump_clock: object
) -> None:
    async with aging.running():
        aging.send(b"by level", DELAY=1)
        aging.send(b"late", TIMER_DELAY_SEC=9000)
        aging.fill()
        assert await aging.clean() == 0
        assert aging.copies == []


async def test_delivery_comes_before_storing_again(aging: Aging, autojump_clock: object) -> None:
    async with aging.running():
        for number in range(1000):
            aging.send(b"%d" % number, TIMER_DELAY_SEC=9000)
        aging.send(b"due", TIMER_DELAY_SEC=1)
        await aging.until(lambda: aging.timers.is_caught_up)
        await aging.timers.carry_over(aging.store.commit_log.max_offset)
        aging.clock.ms += 1000
        await aging.until(lambda: len(aging.copies) == 1000)
        (due,), timers = aging.stored(), aging.stored(TIMER_TOPIC, 0)
        assert sum(timer.physical_offset < due.physical_offset for timer in timers) <= 1001 + 256


async def test_a_recall_is_stored_again_too(
    aging: Aging, tmp_path: Path, autojump_clock: object
) -> None:
    async with aging.running():
        handle = send_for_handle(aging, b"gone", "A1", TIMER_DELAY_SEC=9000)
        send_for_handle(aging, b"kept", "A2", TIMER_DELAY_SEC=9000)
        await aging.until(lambda: aging.timers.is_caught_up)
        assert recall(aging, handle) == (0, "")
        aging.fill()
        await aging.clean()
        assert await aging.clean() == _FILE_BYTES
        assert aging.timers.waiting.count == 1
        await aging.until_ms(NOW_MS + 9_001_000)
        assert aging.timers.oldest == 5  # no recall is left
    assert aging.bodies() == [b"kept"]
    crash(aging.store)
    again = Aging(tmp_path, NOW_MS + 9_001_000)
    async with again.running():
        await again.until(lambda: again.timers.is_caught_up)
        assert again.timers.waiting.count == 0


async def test_an_apache_broker_finds_the_copy_only(aging: Aging, autojump_clock: object) -> None:
    async with aging.running():
        aging.send(b"late", TIMER_DELAY_SEC=9000)
        aging.fill()
        await aging.clean()
    aging.timers.finish()
    _, copy = aging.stored(TIMER_TOPIC, 0)
    slot = int(copy.properties["TIMER_OUT_MS"]) // 1000
    root = aging.broker.config.store_path_root_dir
    assert _slots(root) == {slot: [(copy.physical_offset, 1)]}


async def test_once_after_a_kill_when_the_files_of_the_last_save_are_gone(
    aging: Aging, tmp_path: Path, autojump_clock: object
) -> None:
    aging.store.cleaner.retention = any_hour(reserved_ms=0, files_max=1)
    async with aging.running():
        aging.send(b"1", TIMER_DELAY_SEC=1)
        await aging.until_ms(aging.clock.ms + 1000)
        await aging.timers.save()
        aging.fill()
        aging.send(b"2", TIMER_DELAY_SEC=1)
        await aging.until_ms(aging.clock.ms + 1000)
        aging.fill()
        assert await aging.clean() == _FILE_BYTES
        assert aging.bodies() == [b"2"]
    crash(aging.store)
    again = Aging(tmp_path, aging.clock.ms)
    async with again.running():
        await again.until_ms(again.clock.ms + 1000)
    assert again.bodies() == [b"2"]


@pytest.mark.parametrize("seed", [0, 3, 9, 10])
async def test_once_across_kills(tmp_path: Path, autojump_clock: object, seed: int) -> None:
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    ms, kept, sent = NOW_MS, [], 0
    seen: dict[int, bytes] = {}
    for life in range(5):
        aging = Aging(tmp_path, ms, timer_roll_window_slot=chance.choice([172_800, 4]))
        if not life:
            aging.broker.create_topic("T")
        async with aging.running():
            for _ in range(chance.randrange(30)):
                body, key = b"%d" % sent, f"A{sent}"
                handle = send_for_handle(aging, body, key, TIMER_DELAY_MS=chance.randrange(20_000))
                sent += 1
                if chance.random() < 0.2 and recall(aging, handle)[0] == 0:
                    continue
                kept.append(body)
                aging.clock.ms += chance.randrange(400)
                if chance.random() < 0.2:
                    aging.fill()
                if chance.random() < 0.4:
                    await aging.clean()
                if chance.random() < 0.3:
                    await trio.sleep(chance.random() * 2)
        ms = aging.clock.ms
        seen |= aging.seen
        if chance.random() < 0.7:
            crash(aging.store)
        else:
            aging.timers.finish()
            aging.broker.close()
    aging = Aging(tmp_path, ms)
    async with aging.running():
        await aging.until_ms(ms + 30_000)
    seen |= aging.delivered()
    assert sorted(seen.values(), key=int) == kept
