"""Runs, and the entering of many keys, in a process of their own, as a rule at a low priority.

In a thread they hold the interpreter lock often enough to delay the broker's loop by 10 ms and
more. The process only reads segments and writes to ``compacting/``, or to a key index that is not
open. It asks before each block by a line on its standard output and waits for a line on its
standard input, so the broker sets its pace, and it ends with the broker.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.compaction.key_hash import KeyHash
from headrace_broker.compaction.key_index import KeyIndex
from headrace_broker.compaction.key_index_build import enter_all
from headrace_broker.compaction.record_blocks import SegmentDamaged
from headrace_broker.compaction.run import Job, Merge, Result, Run
from headrace_broker.compaction.segments import COMPACTING, Folders, Segment
from headrace_broker.compaction.units import FileSizes  # noqa: TC001 - msgspec decodes it
from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.page_cache import PageCache

if TYPE_CHECKING:
    from collections.abc import Callable

    Pace = Callable[[int], None]

_LESS_PRIORITY: Final = 10
_BROKER_ENDED: Final = "a compaction was given up: the broker has ended"
_LOOK_MS: Final = 200


class Older(msgspec.Struct, frozen=True):
    """A master's segments, to be merged with the queue's own; see ``Merge``."""

    folders: tuple[str, str]
    segments: list[tuple[int, int]]
    hides_from: int


class Task(msgspec.Struct, frozen=True, tag=True):
    """A run as another process gets it.

    segments: name and number of records of each sealed segment.
    """

    folders: tuple[str, str]
    sizes: FileSizes
    segments: list[tuple[int, int]]
    job: Job
    older: Older | None = None


class IndexTask(msgspec.Struct, frozen=True, tag=True):
    """The messages that a key index lacks, as another process gets them.

    segments: as of ``Task``, also the one that is appended to. end: queue offset after them.
    keys_folder, seed, trusts_count: of the ``KeyIndex``. is_wanted: clients wait for it, so it gets
    the broker's priority.
    """

    folders: tuple[str, str]
    sizes: FileSizes
    segments: list[tuple[int, int]]
    end: int
    keys_folder: str
    seed: bytes
    trusts_count: bool
    is_wanted: bool


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the process: bytes that it is about to read or write, or how its work ended."""

    next_bytes: int = 0
    is_done: bool = False
    result: Result | None = None
    error: str = ""
    error_number: int = 0


class RunFailed(StoreError):
    """The work of a process has ended with an error that it reported."""


def run_here(task: Task, pace: Pace, fs: Files | None = None) -> Result:
    """Run in this process. Raises OSError, SegmentDamaged."""
    files = fs or Files()
    segments, merge = _open(task.folders, task.segments, task.sizes, files), None
    if (older := task.older) is not None:
        segments = [*_open(older.folders, older.segments, task.sizes, files), *segments]
        merge = Merge(len(older.segments), older.hides_from)
    target = Folders(*map(Path, task.folders)).below(COMPACTING)
    return Run(segments, task.job, pace, merge).compact(target, task.sizes, files)


def _open(
    texts: tuple[str, str], segments: list[tuple[int, int]], sizes: FileSizes, files: Files
) -> list[Segment]:
    folders = Folders(*map(Path, texts))
    return [Segment.open(folders, base, sizes, files).cut(count) for base, count in segments]


def index_here(task: IndexTask, pace: Pace) -> None:
    """Enter messages in this process. Raises OSError, SegmentDamaged.

    pace: also called once the segments are open. From then on a file that a run has replaced is an
    error.
    """
    files = Files()
    segments = _open(task.folders, task.segments, task.sizes, files)
    pace(0)
    keys = Path(task.keys_folder)
    index = KeyIndex(
        keys, files, KeyHash(task.seed), PageCache(files), trusts_count=task.trusts_count
    )
    enter_all(index, segments, task.end, pace)
    index.sync()


def run_in_process(task: Task, pace: Pace) -> Result:
    """Run in a new process and wait for it; what ``pace`` raises ends the process.

    Raises OSError, RunFailed.
    """
    result = _in_process(task, pace).result
    assert result is not None
    return result


def index_in_process(task: IndexTask, pace: Pace) -> None:
    """Enter messages in a new process, as ``run_in_process``. Raises OSError, RunFailed."""
    _in_process(task, pace)


def _in_process(task: Task | IndexTask, pace: Pace) -> Answer:
    with subprocess.Popen(  # noqa: S603 - this very program
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        try:
            return _supervise(process, task, pace)
        finally:
            process.kill()


def _supervise(process: subprocess.Popen[bytes], task: Task | IndexTask, pace: Pace) -> Answer:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(task) + b"\n")
    process.stdin.flush()
    # Not select(), which takes no descriptor from 1,024 on: a broker has one for each connection.
    answers = select.poll()
    answers.register(process.stdout, select.POLLIN)
    while True:
        while not answers.poll(_LOOK_MS):
            pace(0)
        line = process.stdout.readline()
        if not line:
            raise RunFailed(f"the process has ended with status {process.wait()}")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.is_done:
            return answer
        if answer.error_number:
            raise OSError(answer.error_number, answer.error)
        if answer.error:
            raise RunFailed(answer.error)
        pace(answer.next_bytes)
        process.stdin.write(b"\n")
        process.stdin.flush()


def main() -> None:
    """Do the task on standard input."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        raise SystemExit(_BROKER_ENDED)
    task = msgspec.json.decode(line, type=Task | IndexTask)
    if isinstance(task, Task) or not task.is_wanted:
        os.nice(_LESS_PRIORITY)
    try:
        result = None
        if isinstance(task, Task):
            result = run_here(task, _ask)
        else:
            index_here(task, _ask)
        _say(Answer(is_done=True, result=result))
    except SegmentDamaged as error:
        _say(Answer(error=str(error)))
    except OSError as error:
        _say(Answer(error=str(error), error_number=error.errno or 0))


def _ask(byte_count: int) -> None:
    _say(Answer(next_bytes=byte_count))
    if not sys.stdin.buffer.readline():
        raise SystemExit(_BROKER_ENDED)


def _say(answer: Answer) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # At its end the interpreter would flush what is left and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_BROKER_ENDED) from None


if __name__ == "__main__":
    main()
