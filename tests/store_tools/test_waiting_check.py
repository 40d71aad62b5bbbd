"""fsck names damage to the files of messages that wait, and a start makes up for it."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_broker.store.errors import StoreError
from headrace_broker.store_tools.copy import copy_topics
from headrace_broker.store_tools.directory import open_directory
from headrace_broker.store_tools.findings import Finding
from headrace_broker.store_tools.fsck import check, repair
from headrace_broker.store_tools.stat import store_stat
from headrace_broker.store_tools.timer_log import timer_units
from headrace_broker.timer.wheel import SLOT, UNIT, WHEEL_SLOTS
from headrace_protocol import fastjson
from headrace_protocol.system_topics import HALF_TOPIC, OP_HALF_TOPIC, TIMER_TOPIC
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.cli import headrace
from tests.support.damage import quiet
from tests.support.stores import small_settings

FIRST_MS = 1_700_000_600_000
TIMERS = 5


def broker(folder: Path) -> BrokerUnderTest:
    return BrokerUnderTest(folder, broker_config(folder, mapped_file_size_timer_log=4096))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with some timers, of a broker that stopped in order."""
    ours = broker(tmp_path)
    ours.create_topic("T")
    for number in range(TIMERS):
        out_ms = FIRST_MS + number // 2 * 1000
        ours.store_message(
            TIMER_TOPIC,
            0,
            REAL_TOPIC="T",
            REAL_QID="0",
            TIMER_OUT_MS=str(out_ms),
            TIMER_DELIVER_MS=str(out_ms + 1),
        )
    ours.timers.load()
    ours.timers.finish()
    ours.close()
    return ours.config.store_path_root_dir


def damage(root: Path) -> list[Finding]:
    with open_directory(root, small_settings(root)) as directory:
        return check(directory, quiet).damage


def test_what_a_broker_leaves_is_sound(root: Path) -> None:
    assert (root / "timerwheel").exists()
    assert damage(root) == []


def test_the_timer_log_is_printed(root: Path) -> None:
    def dump(*options: str) -> list[list[str]]:
        printed = headrace("store", "dump", str(root), *options).stdout
        return [line.split("\t") for line in printed.splitlines()]

    first, second, *_ = units = dump("--timers")
    assert [row[0] for row in units] == [str(n * UNIT.itemsize) for n in range(TIMERS)]
    assert {row[1] for row in units} == {"timer"}
    seconds = [f"2023-11-14T22:23:{20 + number // 2}.000Z" for number in range(TIMERS)]
    assert [row[2] for row in units] == seconds
    assert first[-1] == second[-1] == "in wheel"
    (record,) = dump("--from", first[4], "--max", "1")
    assert record[:3] == [first[4], first[5], f"{TIMER_TOPIC}/0"]
    later = headrace("store", "dump", str(root), "--timers", "--from", "52", "--max", "1", "--json")
    assert later.json_lines()[0]["position"] == 52
    wrong = headrace("store", "dump", str(root), "--timers", "--topic", "T")
    assert (wrong.exit_code, "--timers goes with none of" in wrong.stderr) == (2, True)


def test_units_that_the_wheel_does_not_reach_are_told_apart(root: Path) -> None:
    with (root / "timerwheel").open("r+b") as file:
        file.seek(FIRST_MS // 1000 % WHEEL_SLOTS * SLOT.itemsize)
        file.write(bytes(SLOT.itemsize))
    units = list(timer_units(root))
    assert [unit.is_in_wheel for unit in units] == [False, False, True, True, True]
    assert [unit.previous for unit in units] == [-1, 0, -1, 2 * UNIT.itemsize, -1]
    (root / "timerwheel").unlink()
    assert not any(unit.is_in_wheel for unit in timer_units(root))


# --- wheel and log -------------------------------------------------------------------------


def _wheel_of_wrong_length(root: Path) -> None:
    (root / "timerwheel").write_bytes(b"\0" * 320)


def _log_cut_in_a_unit(root: Path) -> None:
    (path,) = (root / "timerlog").iterdir()
    path.write_bytes(path.read_bytes()[: 2 * UNIT.itemsize + 20])


def _no_unit(root: Path) -> None:
    _put(root, 0, bytes(UNIT.itemsize))


def _unit_of_another_slot(root: Path) -> None:
    _put(root, 16, struct.pack(">q", 1000))


def _put(root: Path, position: int, data: bytes) -> None:
    (path,) = (root / "timerlog").iterdir()
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def _slot_in_another_place(root: Path) -> None:
    slot_bytes, place = SLOT.itemsize, FIRST_MS // 1000 % WHEEL_SLOTS
    with (root / "timerwheel").open("r+b") as file:
        file.seek(place * slot_bytes)
        slot = file.read(slot_bytes)
        file.seek((place + 9) * slot_bytes)
        file.write(slot)


@pytest.mark.parametrize(
    ("harm", "name", "problem"),
    [
        (_wheel_of_wrong_length, "timerwheel", "has 320 bytes, not 38707200"),
        (_log_cut_in_a_unit, "timerwheel", "where no unit is"),
        (_no_unit, "timerwheel", "leads to 0 of the timer log, where no unit is"),
        (_unit_of_another_slot, "timerwheel", "leads to a unit of another slot at 0"),
        (_slot_in_another_place, "timerwheel", "is in another slot's place"),
    ],
)
async def test_damaged_wheels_are_named_and_made_anew_by_a_start(
    root: Path, tmp_path: Path, harm: Callable[[Path], None], name: str, problem: str
) -> None:
    harm(root)
    found = damage(root)
    assert {each.path.name for each in found} == {name}
    assert problem in found[0].problem
    assert "the next start of headrace makes wheel and log anew" in found[0].problem
    again = broker(tmp_path)
    again.timers.load()
    assert again.timers.waiting.count == TIMERS
    again.timers.finish()
    again.close()
    assert damage(root) == []


def test_after_a_crash_the_wheel_is_only_a_note(root: Path) -> None:
    (root / "abort").touch()
    _no_unit(root)
    assert damage(root) == []
    with open_directory(root, small_settings(root)) as directory:
        names = {finding.path.name for finding in check(directory, quiet).findings}
    assert names == {"abort", "timerwheel"}


def test_a_log_file_of_another_length_is_named(root: Path) -> None:
    (root / "timerlog" / f"{4096:020d}").write_bytes(b"\0" * 100)
    (found,) = damage(root)
    assert found.path.name == f"{4096:020d}"
    assert "has 100 bytes, not 4096" in found.problem


# --- copies and figures --------------------------------------------------------------------


def test_stat_counts_what_waits(root: Path) -> None:
    with open_directory(root, small_settings(root)) as directory:
        before = store_stat(directory)
        _change_json(root, "transactionMetrics", {"transactionCount": {"T": {"count": 3}}})
        after = store_stat(directory)
    assert (before.delayed_messages, before.timers, before.open_transactions) == (0, TIMERS, 0)
    assert after.open_transactions == 3


def test_a_copy_of_timers_delivers_only_those_that_wait(root: Path, tmp_path: Path) -> None:
    path = root / "config" / "timercheck"
    path.write_bytes(struct.pack(">q", FIRST_MS + 1000) + path.read_bytes()[8:])
    target = tmp_path / "copy" / "store"
    with open_directory(root, small_settings(root)) as directory:
        copy_topics(directory, target, [TIMER_TOPIC], quiet)
    assert damage(target) == []
    ours = broker(tmp_path / "copy")
    ours.clock.ms = FIRST_MS + 1000
    ours.store_message("T", 0)  # a time of delivery counts up to the newest record
    ours.close()
    again = broker(tmp_path / "copy")
    again.timers.load()
    assert again.timers.waiting.count == TIMERS - 2
    again.close()


def test_transactions_are_copied_with_their_decisions(root: Path, tmp_path: Path) -> None:
    ours = broker(tmp_path)
    ours.store_message(HALF_TOPIC, 0)
    ours.close()
    with (
        open_directory(root, small_settings(root)) as directory,
        pytest.raises(StoreError, match=f"copy both, with --topic {OP_HALF_TOPIC}"),
    ):
        copy_topics(directory, tmp_path / "copy", [HALF_TOPIC], quiet)


# --- progress ------------------------------------------------------------------------------


def _check_from_the_future(root: Path) -> None:
    path = root / "config" / "timercheck"
    later_ms = int(time.time() * 1000) + 3_600_000
    path.write_bytes(struct.pack(">q", later_ms) + path.read_bytes()[8:])


def _check_beyond_the_queue(root: Path) -> None:
    path = root / "config" / "timercheck"
    data = path.read_bytes()
    path.write_bytes(data[:16] + struct.pack(">q", TIMERS + 1) + data[24:])


def _short_check(root: Path) -> None:
    (root / "config" / "timercheck").write_bytes(b"\0" * 20)


def _change_json(root: Path, name: str, fields: dict[str, object]) -> None:
    (root / "config" / name).write_bytes(fastjson.dumps(fields))


def _delays_beyond(root: Path) -> None:
    (root / "config" / "delayOffset.json").write_bytes(b'{"offsetTable":{1:9}}')  # as brokers do


def _mark_beyond(root: Path) -> None:
    _change_json(root, "../positions/schedule.json", {"levels": {"1": 0}, "logOffset": 1 << 40})


def _mark_of_nothing(root: Path) -> None:
    _change_json(root, "../positions/schedule.json", {})


def _transactions_beyond(root: Path) -> None:
    table = {"RMQ_SYS_TRANS_HALF_TOPIC@CID_RMQ_SYS_TRANS": {"0": 7}}
    _change_json(root, "consumerOffset.json", {"offsetTable": table})


@pytest.mark.parametrize(
    ("harm", "name", "problem", "is_repaired"),
    [
        (_check_from_the_future, "timercheck", "which is to come", True),
        (_check_beyond_the_queue, "timercheck", f"which ends at {TIMERS}", True),
        (_short_check, "timercheck", "has 20 bytes, not 4096", True),
        (_delays_beyond, "delayOffset.json", "is at 9 of level 1, whose queue ends at 0", False),
        (_mark_beyond, "schedule.json", f"counts the log up to {1 << 40}", True),
        (_mark_of_nothing, "schedule.json", "logOffset", True),
        (_transactions_beyond, "consumerOffset.json", "transactions are at 7 of", False),
    ],
)
def test_progress_that_can_not_be_right_is_named(
    root: Path, harm: Callable[[Path], None], name: str, problem: str, *, is_repaired: bool
) -> None:
    harm(root)
    (found,) = damage(root)
    assert found.path.name == name
    assert problem in found.problem
    assert "start" in found.problem
    with open_directory(root, small_settings(root)) as directory:
        repair(directory, check(directory, quiet).findings, quiet)
    assert (damage(root) == []) is is_repaired
