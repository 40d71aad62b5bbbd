"""Checks the files that say how far waiting messages are delivered, and the timer wheel and log.

A start of headrace reads the log and bounds all progress, so it loses nothing by damage here.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from headrace_broker.schedule.offsets import DELAY_OFFSETS_FILE
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import unsealed
from headrace_broker.store.files.positions import FOLDER, PositionFile
from headrace_broker.store_tools.directory import is_numbered
from headrace_broker.store_tools.findings import Finding, MoveAside
from headrace_broker.store_tools.queue_check import queue_end
from headrace_broker.store_tools.timer_log import TimerLog
from headrace_broker.timer.checkpoint import CHECK_BYTES, TIMER_CHECK_FILE, TimerCheck
from headrace_broker.timer.wheel import SLOT, WHEEL_SLOTS
from headrace_protocol import fastjson
from headrace_protocol.bodies import ConsumerOffsetSerializeWrapper
from headrace_protocol.system_topics import (
    HALF_TOPIC,
    OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANSACTION_GROUP,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.store_tools.directory import StoreDirectory

_WHEEL_BYTES: Final = WHEEL_SLOTS * SLOT.itemsize
_MADE_ANEW: Final = "the next start of headrace makes wheel and log anew"
_BOUNDED: Final = "the next start of headrace resumes at that end"
_FOUND_IN_LOG: Final = "without this file a start finds in the log what is delivered"
# Whose positions say how far they count the log.
_OWNERS: Final = ("schedule", "timer", "transaction")
# Clocks of two machines may differ so much.
_CLOCK_MARGIN_MS: Final = 60_000


class _Counted(msgspec.Struct, frozen=True, rename="camel"):
    log_offset: int | None


def waiting_findings(directory: StoreDirectory, log_end: int) -> Iterator[Finding]:
    """Progress beyond the end of its queue or of the log, and a damaged wheel or timer log.

    log_end: physical offset just past the last whole record.
    """
    yield from _delay_findings(directory)
    yield from _transaction_findings(directory)
    yield from _mark_findings(directory, log_end)
    check = _timer_check(directory)
    if isinstance(check, Finding):
        yield check
    elif check is not None:
        yield from _check_findings(directory, check)
    for finding in _wheel_findings(directory.root, check):
        # A crash may come between the files.
        yield replace(finding, is_damage=directory.is_clean)


# --- progress in config/ -------------------------------------------------------------------


def read_config(directory: StoreDirectory, name: str) -> tuple[Path, bytes] | None:
    """A file in ``config/``; None if it is missing, or damaged, which another check reports."""
    path = directory.root / "config" / name
    try:
        data = unsealed(path.read_bytes())
        fastjson.loads(data)
    except (FileNotFoundError, ValueError):
        return None
    return path, data


def _end(directory: StoreDirectory, topic: str, queue_id: int) -> int:
    return queue_end(directory, topic, queue_id) or 0


def _delays(directory: StoreDirectory) -> Iterator[tuple[int, int, int]]:
    """Each level with its progress, and the end of its queue."""
    found = read_config(directory, DELAY_OFFSETS_FILE)
    table = fastjson.loads(found[1]).get("offsetTable", {}) if found else {}
    offsets = {int(level): offset for level, offset in table.items()}  # brokers write bare numbers
    levels = range(1, len(directory.settings.delay_levels_ms) + 1)
    for level in sorted({*levels, *offsets}):
        yield level, offsets.get(level, 0), _end(directory, SCHEDULE_TOPIC, level - 1)


def delayed_count(directory: StoreDirectory) -> int:
    """Number of delayed messages that wait."""
    return sum(max(end - offset, 0) for _, offset, end in _delays(directory))


def _delay_findings(directory: StoreDirectory) -> Iterator[Finding]:
    path = directory.root / "config" / DELAY_OFFSETS_FILE
    for level, offset, end in _delays(directory):
        if offset > end:
            problem = f"is at {offset} of level {level}, whose queue ends at {end}: {_BOUNDED}"
            yield Finding(path, problem)


def _transaction_findings(directory: StoreDirectory) -> Iterator[Finding]:
    if (found := read_config(directory, "consumerOffset.json")) is None:
        return
    path, data = found
    table = ConsumerOffsetSerializeWrapper.decode(data).offset_table
    for topic in (HALF_TOPIC, OP_HALF_TOPIC):
        offset = table.get(f"{topic}@{TRANSACTION_GROUP}", {}).get(0, 0)
        end = _end(directory, topic, 0)
        if offset > end:
            problem = f"transactions are at {offset} of {topic}, which ends at {end}: {_BOUNDED}"
            yield Finding(path, problem)


def _mark_findings(directory: StoreDirectory, log_end: int) -> Iterator[Finding]:
    for owner in _OWNERS:
        path = directory.root / FOLDER / f"{owner}.json"
        try:
            counted = PositionFile(path, _Counted, directory.fs).load()
        except StoreFormatError as error:
            yield Finding(path, f"{error}; {_FOUND_IN_LOG}", fix=MoveAside(path))
        else:
            if counted is not None and (counted.log_offset or 0) > log_end:
                problem = (
                    f"counts the log up to {counted.log_offset}, which ends at {log_end};"
                    f" {_FOUND_IN_LOG}"
                )
                yield Finding(path, problem, fix=MoveAside(path))


# --- timers --------------------------------------------------------------------------------


def _timer_check(directory: StoreDirectory) -> TimerCheck | Finding | None:
    path = directory.root / "config" / TIMER_CHECK_FILE
    if not path.exists():
        return None
    data = path.read_bytes()
    if len(data) != CHECK_BYTES:
        problem = f"has {len(data)} bytes, not {CHECK_BYTES}; {_FOUND_IN_LOG}"
        return Finding(path, problem, fix=MoveAside(path))
    return TimerCheck.decode(data)


def _check_findings(directory: StoreDirectory, check: TimerCheck) -> Iterator[Finding]:
    path = directory.root / "config" / TIMER_CHECK_FILE
    end = _end(directory, TIMER_TOPIC, 0)
    now_ms = int(time.time() * 1000) + _CLOCK_MARGIN_MS
    problem = ""
    if min(check) < 0:
        problem = "a value is negative"
    elif check.read_ms > now_ms:
        problem = f"says that timers are delivered up to {check.read_ms} ms, which is to come"
    elif check.queue_offset > end:
        problem = f"is at {check.queue_offset} of {TIMER_TOPIC}, which ends at {end}"
    if problem:
        yield Finding(path, f"{problem}; {_FOUND_IN_LOG}", fix=MoveAside(path))


def _wheel_findings(root: Path, check: TimerCheck | Finding | None) -> Iterator[Finding]:
    wheel, folder = root / "timerwheel", root / "timerlog"
    wheel_bytes = wheel.stat().st_size if wheel.exists() else _WHEEL_BYTES
    if wheel_bytes != _WHEEL_BYTES:
        problem = f"has {wheel_bytes} bytes, not {_WHEEL_BYTES}: {_MADE_ANEW}"
        yield Finding(wheel, problem)
    paths = sorted(path for path in folder.glob("*") if path.is_file())
    lengths = [path.stat().st_size for path in paths]
    stray = [
        Finding(path, f"has {length} bytes, not {max(lengths)} and a name to match: {_MADE_ANEW}")
        for path, length in zip(paths, lengths, strict=True)
        if not is_numbered(path) or length != max(lengths) or int(path.name) % length
    ]
    yield from stray
    is_whole = wheel.exists() and wheel_bytes == _WHEEL_BYTES and paths and not stray
    if is_whole and isinstance(check, TimerCheck):
        yield from _chain_findings(wheel, paths, check)


def _chain_findings(wheel: Path, paths: list[Path], check: TimerCheck) -> Iterator[Finding]:
    """Slots to come that lead to no unit of theirs, and units whose chain is broken."""
    log = TimerLog(paths)
    slots = np.fromfile(wheel, SLOT)
    is_used = slots["time"].astype(np.int64) * 1000 >= max(check.read_ms, 1)
    for number in np.flatnonzero(is_used).tolist():
        slot = slots[number]
        problem = _chain_problem(log, int(slot["time"]), int(slot["first"]), int(slot["last"]))
        if problem or slot["time"] % WHEEL_SLOTS != number:
            problem = problem or "is in another slot's place"
            text = f"the slot of second {slot['time']} {problem}: {_MADE_ANEW}"
            yield Finding(wheel, text, number * SLOT.itemsize)


def _chain_problem(log: TimerLog, second: int, first: int, last: int) -> str:
    """Problem of the chain of a slot, "" if it leads from last to first."""
    position = last
    while (unit := log.at(position)) is not None:
        if unit["write_ms"] + unit["delay_ms"] != second * 1000:
            return f"leads to a unit of another slot at {position} of the timer log"
        if position == first:
            return ""
        if not 0 <= unit["previous"] < position:
            return f"does not lead to its first unit: the chain ends at {position}"
        position = int(unit["previous"])
    return f"leads to {position} of the timer log, where no unit is"
