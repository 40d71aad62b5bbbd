"""Files for Apache's brokers are followed only where they are ahead of headrace's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_broker.schedule.offsets import DelayOffsets, DeliveredLevels
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.positions import PositionFile
from headrace_broker.store.recovery import NOTHING
from headrace_broker.timer.checkpoint import (
    TimerCheck,
    TimerCheckFile,
    TimerCheckpoint,
    TimerPosition,
)
from headrace_broker.transaction.rebuild import Checkpoint
from headrace_protocol import fastjson
from headrace_protocol.system_topics import HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_GROUP
from tests.support.broker import BrokerUnderTest


@pytest.mark.parametrize(
    ("exported", "levels", "log_offset"),
    [
        (None, {1: 3, 2: 5}, 100),
        ({}, {1: 3, 2: 5}, 100),
        ({1: 2, 2: 5}, {1: 3, 2: 5}, 100),
        ({1: 3, 2: 5}, {1: 3, 2: 5}, 100),
        ({1: 4}, {1: 4, 2: 5}, None),
        ({3: 1}, {1: 3, 2: 5, 3: 1}, None),
    ],
)
def test_delay_offsets(
    exported: dict[int, int] | None,
    levels: dict[int, int],
    log_offset: int | None,
    tmp_path: Path,
) -> None:
    position = PositionFile(tmp_path / "schedule.json", DeliveredLevels, Files())
    position.save(DeliveredLevels({1: 3, 2: 5}, 100))
    export = ConfigFile(tmp_path / "delayOffset.json")
    if exported is not None:
        export.save(fastjson.dumps({"offsetTable": exported}))
    found = DelayOffsets(export, position, lambda: 0)
    assert (found.saved, found.log_offset) == (levels, log_offset)


@pytest.mark.parametrize(
    ("version", "is_ahead"),
    [(None, False), ((9, 9), False), ((10, 3), False), ((10, 4), True), ((11, 1), True)],
)
def test_timercheck(version: tuple[int, int] | None, is_ahead: bool, tmp_path: Path) -> None:
    position = PositionFile(tmp_path / "timer.json", TimerCheckpoint, Files())
    position.save(TimerCheckpoint(1, 2, 3, 4, timestamp=10, counter=3))
    path = tmp_path / "timercheck"
    if version is not None:
        path.write_bytes(TimerCheck(timestamp=version[0], counter=version[1]).encode())
    found = TimerCheckFile(path, Files(), position)
    assert found.position == (None if is_ahead else TimerPosition(1, 2, 3, 4))


@pytest.mark.parametrize(
    ("half", "op", "log_offset"),
    [(0, 0, 100), (3, 4, 100), (2, 4, 100), (4, 4, NOTHING), (3, 5, NOTHING)],
)
def test_offsets_of_transactions(half: int, op: int, log_offset: int, tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.core.position("transaction", Checkpoint).save(Checkpoint(3, 4, 100))
    for topic, offset in ((HALF_TOPIC, half), (OP_HALF_TOPIC, op)):
        broker.offsets.commit(TRANSACTION_GROUP, topic, 0, offset)
    assert broker.transactions.scan.begin() == log_offset
