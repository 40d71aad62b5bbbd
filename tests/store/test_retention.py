"""The plan of a clean-up, and what it is made from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker.store.disk_room import DiskRoom
from headrace_broker.store.files.filesystem import DiskUsage
from headrace_broker.store.retention.growth import SPAN_MIN_S, WINDOW_S, Growth
from headrace_broker.store.retention.rules import (
    JUMP_MS,
    TRUST_S,
    ClockWatch,
    Facts,
    LogFile,
    plan_clean,
)
from headrace_broker.store.settings import Retention, StoreSettings
from tests.support.stores import FaultyFiles

HOUR_MS = 3_600_000
NOW_MS = 1_700_000_000_000
FILE_BYTES = 100
RETENTION = Retention()


def log_files(*ages_h: float) -> list[LogFile]:
    return [
        LogFile(number * FILE_BYTES, (number + 1) * FILE_BYTES, round(NOW_MS - age_h * HOUR_MS))
        for number, age_h in enumerate(ages_h)
    ]


def facts(*ages_h: float, used: int = 500, **changes: object) -> Facts:
    """used: of a disk of 1000 bytes."""
    plain = Facts(log_files(*ages_h), NOW_MS, 4, DiskUsage(used, 1000 - used), keep_from=1 << 62)
    return plain._replace(**changes)  # type: ignore[arg-type]


def reasons(found: Facts, retention: Retention = RETENTION) -> list[str]:
    return list(plan_clean(found, retention).reasons)


def test_old_files_go_in_their_hour_oldest_first() -> None:
    ages = (100, 72, 71.9, 90, 80)
    assert reasons(facts(*ages)) == ["age", "age"]  # not the fourth: the third is young
    assert reasons(facts(*ages, hour=3)) == reasons(facts(*ages, hour=5)) == []
    twice = replace(RETENTION, delete_hours=frozenset({2, 5}))
    assert reasons(facts(*ages, hour=5), twice) == ["age", "age"]
    assert reasons(facts(*ages, hour=5, is_requested=True)) == ["age", "age"]


def test_the_last_file_stays_and_a_round_is_bounded() -> None:
    assert reasons(facts(100)) == reasons(facts()) == []
    assert reasons(facts(100, used=990)) == []
    assert reasons(facts(*[100] * 30)) == ["age"] * 10
    assert reasons(facts(*[0] * 30, used=1000), replace(RETENTION, files_max=1)) == ["disk"]


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (750, []),
        (751, ["age"]),  # at any hour, but only old ones
        (850, ["age"]),
        (851, ["age"]),  # which is enough
        (951, ["age", "disk"]),
        (1000, ["age", "disk"]),
    ],
)
def test_a_full_disk_hurries(used: int, expected: list[str]) -> None:
    assert reasons(facts(100, 1, 1, 1, used=used, hour=9)) == expected


def test_no_more_young_files_go_than_the_disk_needs() -> None:
    assert reasons(facts(*[1] * 9, used=851)) == ["disk"]
    assert reasons(facts(*[1] * 9, used=950)) == ["disk"]
    assert reasons(facts(*[1] * 9, used=951)) == ["disk"] * 2
    # Those that a reader still holds will give their room back.
    assert reasons(facts(*[1] * 9, used=951, pending_bytes=FILE_BYTES)) == ["disk"]
    assert reasons(facts(*[1] * 9, used=951, pending_bytes=2 * FILE_BYTES)) == []
    assert reasons(facts(*[1] * 9, used=951), replace(RETENTION, removes_young=False)) == []


def test_out_of_room_on_a_disk_that_looks_empty() -> None:
    full = facts(*[1] * 9, used=10, wanted_bytes=FILE_BYTES)
    assert reasons(full) == ["disk"]
    assert reasons(full._replace(pending_bytes=FILE_BYTES)) == []
    assert reasons(full, replace(RETENTION, removes_young=False)) == []


def test_what_must_stay_stays_with_all_that_follows() -> None:
    plan = plan_clean(facts(100, 100, 100, 100, keep_from=100), RETENTION)
    assert (plan.reasons, plan.held_back) == (["age"], 2)
    plan = plan_clean(facts(1, 1, 1, 1, used=1000, keep_from=99), RETENTION)
    assert (plan.reasons, plan.held_back) == ([], 2)


def test_as_much_goes_as_a_file_that_found_no_room_needs() -> None:
    # Above 90 % of 1000 with it.
    assert reasons(facts(*[1] * 9, used=800, wanted_bytes=FILE_BYTES)) == ["disk"]
    assert reasons(facts(*[1] * 9, used=840, wanted_bytes=2 * FILE_BYTES)) == ["disk"] * 2


def test_a_clock_that_is_not_trusted_removes_nothing_by_age() -> None:
    assert reasons(facts(100, 100, 100, is_clock_trusted=False, is_requested=True)) == []
    assert reasons(facts(100, 0, 0, is_clock_trusted=False, used=900)) == ["disk"]


def test_a_disk_of_no_size_is_not_full() -> None:
    assert DiskUsage(0, 0).ratio == 0.0
    plan = plan_clean(facts(0, 0, disk=DiskUsage(0, 0)), RETENTION)
    assert plan.reasons == []


@given(
    ages=st.lists(st.floats(0, 200), max_size=15),
    used=st.integers(0, 1000),
    hour=st.integers(0, 23),
    keep_from=st.integers(0, 2000),
    going=st.integers(0, 500),
    flags=st.tuples(*[st.booleans()] * 3),
)
def test_whatever_the_facts(
    ages: list[float],
    used: int,
    hour: int,
    keep_from: int,
    going: int,
    flags: tuple[bool, bool, bool],
) -> None:
    asked, trusted, out_of_room = flags
    found = facts(
        *ages,
        used=used,
        hour=hour,
        keep_from=keep_from,
        pending_bytes=going,
        is_requested=asked,
        is_clock_trusted=trusted,
        wanted_bytes=FILE_BYTES * out_of_room,
    )
    plan = plan_clean(found, RETENTION)
    count = len(plan.reasons)
    removed = found.files[:count]
    assert count == 0 or (count <= 10 and count < len(found.files))
    assert all(file.end_offset <= keep_from for file in removed)
    for file, reason in zip(removed, plan.reasons, strict=True):
        if reason == "age":
            assert trusted
            assert NOW_MS - file.newest_ms >= 72 * HOUR_MS
            assert asked or hour == 4 or used > 750
        else:
            assert used > 850 or out_of_room


# --- the clock ------------------------------------------------------------------------------


def test_a_clock_that_jumps_is_believed_after_an_hour() -> None:
    watch = ClockWatch()
    assert watch.observe(NOW_MS, 5.0) == 0
    assert watch.observe(NOW_MS + 10_000, 15.0) == 0
    assert watch.is_trusted(15.0)
    year_ms = 365 * 24 * HOUR_MS
    assert watch.observe(NOW_MS + 20_000 + year_ms, 25.0) == year_ms
    assert not watch.is_trusted(25.0 + TRUST_S - 1)
    assert watch.observe(NOW_MS + 30_000 + year_ms, 35.0) == 0
    assert watch.is_trusted(25.0 + TRUST_S)
    assert watch.observe(NOW_MS, 45.0) < -JUMP_MS  # back again: the hour begins anew
    assert not watch.is_trusted(25.0 + TRUST_S)


def test_a_slow_look_is_no_jump() -> None:
    watch = ClockWatch()
    watch.observe(NOW_MS, 0.0)
    assert watch.observe(NOW_MS + 50 * HOUR_MS, 50 * 3600.0) == 0
    assert watch.observe(NOW_MS + 50 * HOUR_MS + JUMP_MS - 1, 50 * 3600.0) == 0


# --- the forecast ---------------------------------------------------------------------------


def test_steady_growth_tells_when_the_disk_is_full() -> None:
    growth = Growth()
    assert growth.full_in_hours(100) is None
    for minute in range(200):
        growth.add(minute * 60.0, 1000 + minute * 60)
    assert growth.bytes_per_s == pytest.approx(1.0)
    assert growth.full_in_hours(1000 + 199 * 60 + 7200) == pytest.approx(2.0)
    assert growth.full_in_hours(1000) == 0.0


def test_what_does_not_grow_is_never_full() -> None:
    growth = Growth()
    growth.add(0.0, 500)
    assert growth.full_in_hours(600) is None
    growth.add(SPAN_MIN_S / 2, 599)  # too soon to say
    assert growth.full_in_hours(600) is None
    growth.add(SPAN_MIN_S, 400)
    assert growth.full_in_hours(600) is None


def test_only_the_last_hour_counts() -> None:
    growth = Growth()
    for second in range(0, int(WINDOW_S), 60):
        growth.add(float(second), second)
    for second in range(int(WINDOW_S), int(3 * WINDOW_S), 60):
        growth.add(float(second), int(WINDOW_S))
    assert growth.bytes_per_s == 0.0


def test_work_that_makes_room_needs_free_bytes_above_the_limits_too(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.disk_usage = partial(use, 990)  # type: ignore[method-assign]
    room = DiskRoom(StoreSettings(root=tmp_path), files)
    room.require_free(10)
    with pytest.raises(OSError, match="11 bytes may be needed, and the disk has 10: make room"):
        room.require_free(11)


def test_a_refusal_above_the_limit_lasts_until_much_is_free(tmp_path: Path) -> None:
    files = FaultyFiles()
    room = DiskRoom(StoreSettings(root=tmp_path, retention=RETENTION), files)
    for used, is_refused in [(900, False), (901, True), (870, True), (850, False), (890, False)]:
        files.disk_usage = partial(use, used)  # type: ignore[method-assign]
        assert (room.problem(0) is not None) is is_refused, used


def test_a_file_that_does_not_fit_is_refused_until_it_does(tmp_path: Path) -> None:
    files = FaultyFiles()
    room = DiskRoom(StoreSettings(root=tmp_path, retention=RETENTION), files)
    made: list[int] = []
    files.disk_usage = partial(use, 890)  # type: ignore[method-assign]
    with pytest.raises(OSError, match=r"89\.0% full, and 11 bytes more would exceed 90%"):
        room.claim(11, lambda: made.append(11))
    assert (room.wanted_bytes, room.is_tight, made) == (11, True, [])
    files.disk_usage = partial(use, 600)  # type: ignore[method-assign]
    room.retry()
    assert (room.wanted_bytes, room.is_tight, made) == (0, False, [11])


def use(used_bytes: int, _path: Path) -> DiskUsage:
    return DiskUsage(used_bytes, 1000 - used_bytes)
