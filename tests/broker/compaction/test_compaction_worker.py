"""Runs in a process of their own, and their pace."""

from __future__ import annotations

import os
import resource
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.run import Job
from headrace_broker.compaction.run_state import MarkerTimes
from headrace_broker.compaction.segments import Folders
from headrace_broker.compaction.throttle import RunStopped, Throttle
from headrace_broker.compaction.worker import RunFailed, Task, run_here, run_in_process
from headrace_broker.store.files.filesystem import Files
from tests.support.compaction_entries import SMALL, TOPIC, Entry, fill

ENTRIES = [Entry(f"k{number % 7}", b"x" * 150, number) for number in range(90)]


def make_task(root: Path) -> Task:
    folders = Folders.of(root, TOPIC, 0)
    log = QueueLog(folders, SMALL, Files())
    fill(log, ENTRIES)
    log.roll()
    return Task(
        folders.texts,
        SMALL,
        [(segment.base, segment.count) for segment in log.segments],
        Job(0, 5, 10_000, 0, MarkerTimes([], []), 1 << 16),
    )


@pytest.mark.slow
def test_a_process_does_what_a_thread_does(tmp_path: Path) -> None:
    paced: list[int] = []
    here = run_here(make_task(tmp_path / "here"), paced.append)
    there_paced: list[int] = []
    there = run_in_process(make_task(tmp_path / "there"), there_paced.append)
    assert there == here
    assert here.dropped_count == 83
    assert [count for count in there_paced if count] == paced
    for folder in (tmp_path / "here", tmp_path / "there"):
        assert len([*folder.rglob("compacting/*")]) == 2


@pytest.mark.slow
def test_a_process_runs_beside_a_thousand_connections(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert run_in_process(make_task(tmp_path), lambda _bytes: None).dropped_count == 83


@pytest.mark.slow
def test_a_process_ends_when_the_broker_stops(tmp_path: Path) -> None:
    throttle = Throttle(lambda: 0, lambda: False)
    throttle.stop()
    with pytest.raises(RunStopped):
        run_in_process(make_task(tmp_path), throttle.pace)


@pytest.mark.slow
def test_errors_of_a_process_name_the_file(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    path = tmp_path / "compaction/compactionLog" / TOPIC / "0" / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"??")
    with pytest.raises(RunFailed, match=f"{path}: damaged at 0"):
        run_in_process(task, lambda _bytes: None)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        run_in_process(task, lambda _bytes: None)


@pytest.mark.slow
def test_runs_share_a_rate_and_wait_under_pressure() -> None:
    pressed = [True, True]
    throttle = Throttle(lambda: 1000, lambda: bool(pressed and pressed.pop()))
    begin = time.monotonic()
    throttle.pace(50)
    assert not pressed
    throttle.pace(50)
    throttle.pace(1)
    assert time.monotonic() - begin >= 0.1
    throttle.stop()
    with pytest.raises(RunStopped):
        throttle.pace(1)
    throttle.restart()
    throttle.pace(1)
