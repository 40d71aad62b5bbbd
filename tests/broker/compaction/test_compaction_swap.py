"""Swaps of compaction: kills, power cuts and failures between any two steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.run import Job, Run
from headrace_broker.compaction.run_state import MarkerTimes, RunState, StateFile, own_folder
from headrace_broker.compaction.segments import COMPACTING, Folders
from headrace_broker.compaction.swap import Swap
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.filesystem import Files
from tests.support.compaction_entries import SMALL, TOPIC, Entry, fill, read_entries
from tests.support.faulty_files import FaultyFiles, PowerCut

ENTRIES = [Entry(f"k{number % 7}", b"x" * 150, number) for number in range(90)]
LATER = [Entry("k0", b"later", 90), Entry("new", b"later", 91)]
STATE = RunState(position=90, marker_times=MarkerTimes([90], [5]))


class Queue:
    """A queue's compaction log and swaps in a store."""

    def __init__(self, root: Path, fs: Files | None = None) -> None:
        self.root, self.fs = root, fs or Files()
        self.folders = Folders.of(root, TOPIC, 0)
        self.own_folder = own_folder(root, TOPIC, 0)
        self.swap = Swap(self.folders, self.own_folder, self.fs)
        self.log = QueueLog(self.folders, SMALL, self.fs)

    def start(self) -> None:
        """As after a crash, with all messages synced."""
        self.swap.recover()
        self.log.load(lambda _path: None, is_clean=False)
        self.log.resume(1 << 40, 0)

    def fill(self, entries: Sequence[Entry] = ENTRIES) -> None:
        fill(self.log, entries)
        self.log.roll()
        fill(self.log, LATER)
        self.log.sync()

    def compact(self) -> None:
        self.swap.discard()
        job = Job(0, 5, 10_000, 0, MarkerTimes([], []), 1 << 16)
        sealed = self.log.segments[:-1]
        result = Run(sealed, job, lambda _bytes: None).compact(
            self.folders.below(COMPACTING), SMALL, self.fs
        )
        self.swap.swap(self.log, result.groups, STATE)

    @property
    def entries(self) -> list[Entry]:
        return read_entries(self.log.segments)

    @property
    def state(self) -> RunState:
        return StateFile(self.own_folder, Files()).load()


COMPACTED = [*ENTRIES[-7:], *LATER]
# LATER is in the live segment, which no run reads.
assert {entry.key for entry in COMPACTED} == {entry.key for entry in [*ENTRIES, *LATER]}


def expect_old_or_new(queue: Queue) -> bool:
    """Check that a start has left all or nothing; returns whether the run has had effect."""
    is_new = queue.state == STATE
    assert is_new or queue.state == RunState()
    assert queue.entries == (COMPACTED if is_new else [*ENTRIES, *LATER])
    assert not queue.swap.is_begun
    for folder in queue.folders:
        names = {path.name for path in folder.iterdir()} - {COMPACTING}
        assert names == {f"{segment.base:020d}" for segment in queue.log.segments}
        assert not list((folder / COMPACTING).glob("*"))
    return is_new


def test_a_swap_puts_new_segments_in_place(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.fill()
    queue.compact()
    assert expect_old_or_new(queue)
    assert queue.log.segments[0].base == 0
    again = Queue(tmp_path)
    again.start()
    assert expect_old_or_new(again)
    more = Entry("k1", b"more", 92)
    fill(again.log, [more])
    assert again.entries == [*COMPACTED, more]


def test_a_run_may_leave_nothing(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.fill([Entry("a", b"", number) for number in range(3)])
    base = queue.log.segments[-1].base
    queue.compact()
    job = Job(3, 9, 10_000, 8, MarkerTimes([3], [5]), 1 << 16)
    result = Run(queue.log.segments[:-1], job, lambda _bytes: None).compact(
        queue.folders.below(COMPACTING), SMALL, queue.fs
    )
    queue.swap.swap(queue.log, result.groups, STATE)
    assert [segment.base for segment in queue.log.segments] == [base]
    assert queue.entries == LATER


def operation_count(root: Path) -> int:
    """The file operations of a run and its swap."""
    fs = FaultyFiles(root, Random(0))
    queue = Queue(root, fs)
    queue.fill()
    before = fs.operation_count
    queue.compact()
    return fs.operation_count - before


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [False, True], ids=["kill", "power cut"])
def test_whenever_a_run_ends_the_start_finds_old_or_new(tmp_path: Path, is_cut: bool) -> None:
    count = operation_count(tmp_path / "count")
    outcomes = []
    for number in range(count):
        root = tmp_path / str(number)
        rng = Random(number)
        fs = FaultyFiles(root, rng)
        queue = Queue(root, fs)
        queue.fill()
        fs.end_in(number, is_cut=is_cut)
        with pytest.raises(PowerCut):
            queue.compact()
        if fs.image is not None:
            fs.image.write_to(root)
        outcomes.append(recover_with_crashes(root, rng))
    assert outcomes.index(True) > 10
    assert outcomes == sorted(outcomes), "from some step on the run has effect"


def recover_with_crashes(root: Path, rng: Random) -> bool:
    """Start, killed a few times on the way; returns whether the run has had effect."""
    for _ in range(2):
        fs = FaultyFiles(root, rng)
        fs.kill_after = rng.randrange(12)
        try:
            Queue(root, fs).start()
        except PowerCut:
            continue
        fs.stop()
    queue = Queue(root)
    queue.start()
    outcome = expect_old_or_new(queue)
    Queue(root).start()
    assert expect_old_or_new(queue) == outcome
    return outcome


class FailingOnce(Files):
    """A disk on which one operation fails."""

    countdown = -1

    def rename(self, source: Path, target: Path) -> None:
        self._count(source)
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._count(source)
        super().link(source, target)

    def _count(self, path: Path) -> None:
        self.countdown -= 1
        if not self.countdown:
            raise OSError(5, "failed", str(path))


@pytest.mark.parametrize("number", range(1, 8))
def test_a_swap_that_fails_on_the_way_is_resumed(tmp_path: Path, number: int) -> None:
    fs = FailingOnce()
    queue = Queue(tmp_path, fs)
    queue.fill()
    fs.countdown = number
    try:
        queue.compact()
    except OSError:
        if queue.swap.is_begun:
            queue.swap.resume(queue.log)
        else:
            queue.swap.discard()
    expect_old_or_new(queue)
    assert queue.entries in ([*ENTRIES, *LATER], COMPACTED)


def test_a_damaged_journal_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.fill()
    queue.own_folder.mkdir(parents=True)
    (queue.own_folder / "swap.json").write_text('{"groups":[')
    with pytest.raises(StoreFormatError, match=f"{queue.own_folder}/swap.json: is damaged"):
        Queue(tmp_path).start()


def test_a_damaged_state_counts_as_no_run(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.fill()
    queue.compact()
    for path in queue.own_folder.iterdir():
        path.write_text("{")
    assert queue.state == RunState()


def test_messages_that_are_appended_again_are_dirty_again() -> None:
    assert STATE.cut(91) == STATE
    assert STATE.cut(40).position == 40
    assert STATE.cut(40).marker_times == STATE.marker_times
