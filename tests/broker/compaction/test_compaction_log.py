"""The compaction log of a queue: its files, its appends, its start after a crash."""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from headrace_broker.compaction.log_reader import LogReader
from headrace_broker.compaction.peer_swap import end_peer_swap
from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.segments import Folders, Segment
from headrace_broker.compaction.units import FileSizes
from headrace_broker.store.errors import RecordTooLarge, StoreFormatError
from headrace_broker.store.files.file_seal import FileSeal, StoreDamaged
from headrace_broker.store.files.filesystem import Files, Paged
from headrace_broker.store.files.page_cache import PageCache
from headrace_broker.store.integrity.checkpoint import Checkpoint
from headrace_broker.store.integrity.seal import Seals
from headrace_broker.store.store_source import GetResult, GetStatus
from headrace_protocol.errors import NotReady
from headrace_protocol.message import decode_record, decode_records
from tests.support.bulk import columns_of
from tests.support.compaction import (
    FIRST_MS,
    SIZES,
    block,
    bodies,
    kept,
    load_as_apache,
    messages,
    open_log,
)
from tests.support.faulty_files import FaultRates, FaultyFiles, PowerCut, next_life
from tests.support.golden import golden_store, manifest
from tests.support.stores import ready

# --- sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_setting", "units_setting", "log_bytes", "units_bytes"),
    [
        (104_857_600, 10_485_760, 104_857_460, 10_485_746),  # Apache's defaults
        (262_144, 4600, 262_200, 4600),  # the golden store
        (4_194_304, 460_000, 4_140_000, 460_000),
        (460, 460, 2300, 460),  # five at least
        (4600, 460, 5060, 460),  # no remainder counts as a large one
    ],
)
def test_sizes_are_those_of_apache(
    log_setting: int, units_setting: int, log_bytes: int, units_bytes: int
) -> None:
    assert FileSizes.of(log_setting, units_setting) == (log_bytes, units_bytes)


# --- appends -------------------------------------------------------------------------------


def test_records_are_verbatim_but_for_their_position(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    given = block(3, bodies(3, 4))
    log.append(given)
    for number, message in enumerate(messages(log)):
        expected = given.records.message(number)
        assert message.encode()[:28] == expected.encode()[:28]
        assert message.encode()[36:] == expected.encode()[36:]
    units = log.segments[0].units
    assert units["tags_code"].tolist() == given.units["tags_code"].tolist()
    assert units["store_timestamp"].tolist() == [FIRST_MS + 30 + 10 * n for n in range(4)]
    assert units[["count", "compacted_offset", "reserved"]].tolist() == [(1, -1, 0)] * 4
    assert log.end_offset == 7


def test_files_roll_when_records_or_units_fill_them(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 20, 10)))  # nine units fill a file of units
    log.append(block(20, bodies(20, 20, 300)))  # five records fill a file of the log
    assert kept(log) == dict(enumerate(bodies(0, 20, 10) + bodies(20, 20, 300)))
    assert [segment.base for segment in log.segments] == [
        2300 * number for number in range(len(log.segments))
    ]
    assert log.segments[0].count == 9
    for segment in log.segments[:-1]:
        rest = SIZES.log_bytes - segment.log_end
        assert segment.read_records(segment.log_end, segment.log_end + 8) == struct.pack(
            ">iI", rest, 0xCBD43194
        )
        end = segment.units_file.pread(segment.count * 46, 46)
        assert end == struct.pack(">qiqqqhii", -1, 0, 0, 0, 0, 0, -1, 0)


def test_files_are_sparse_and_of_full_length(tmp_path: Path) -> None:
    log = QueueLog(Folders.of(tmp_path, "T", 0), FileSizes.of(104_857_600, 10_485_760), Files())
    log.append(block(0, bodies(0, 3)))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.stat().st_size for path in files) == [10_485_746, 104_857_460]
    assert sum(path.stat().st_blocks for path in files) * 512 < 64 << 10


def test_a_record_larger_than_a_file_is_an_error_and_leaves_no_files(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(RecordTooLarge, match="more than 2292"):
        log.append(block(0, bodies(0, 1, 3000)))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_early_roll_seals_and_the_next_append_begins_a_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 3)))
    log.roll()
    log.roll()  # nothing more to do
    assert [segment.is_sealed for segment in log.segments] == [True]
    assert open_log(tmp_path).segments[0].is_sealed
    log.append(block(3, bodies(3, 2)))
    assert [segment.base for segment in log.segments] == [0, 2300]
    assert kept(open_log(tmp_path)) == dict(enumerate(bodies(0, 5)))


def test_an_open_log_continues_in_its_last_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 3)))
    log = open_log(tmp_path)
    assert log.resume(3, 0) == 3
    log.append(block(9, bodies(9, 2)))
    assert [segment.base for segment in log.segments] == [0]
    assert list(kept(log)) == [0, 1, 2, 9, 10]


# --- cutting and starts --------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 8, 9, 10, 18, 24, 25])
def test_a_cut_log_is_as_if_it_had_never_been_longer(tmp_path: Path, offset: int) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 25, 10)))
    log.cut(offset)
    assert kept(log) == dict(enumerate(bodies(0, offset, 10)))
    assert kept(open_log(tmp_path)) == kept(log)
    log.append(block(offset, bodies(offset, 30 - offset, 20)))
    assert list(kept(log)) == list(range(30))
    assert kept(open_log(tmp_path)) == kept(log)


def test_a_start_resumes_at_what_the_log_lacks(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 5)))
    assert open_log(tmp_path).resume(9, 0) == 5
    assert open_log(tmp_path).resume(3, 0) == 3
    assert list(kept(open_log(tmp_path))) == [0, 1, 2]


def test_a_misnamed_file_is_named(tmp_path: Path) -> None:
    open_log(tmp_path).append(block(0, bodies(0, 2)))
    path = Folders.of(tmp_path, "T", 0).units / "notes"
    path.write_bytes(b"x")
    with pytest.raises(StoreFormatError, match="notes: no file of a compaction log"):
        open_log(tmp_path)


# --- reads ---------------------------------------------------------------------------------


def reader_of(log: QueueLog) -> LogReader:
    return LogReader(log, PageCache(Files()))


def gappy(root: Path) -> tuple[QueueLog, list[int]]:
    """A log over several segments, with gaps between and inside them."""
    log = open_log(root)
    offsets = [n for n in range(3, 90) if n % 7 in {1, 2, 5}]
    log.append(block(0, bodies(0, len(offsets), 10), offsets))
    assert len(log.segments) > 3
    return log, offsets


@pytest.mark.parametrize("read", ["get", "get_bulk"])
@pytest.mark.parametrize("count_max", [1, 4, 1000])
def test_a_read_passes_gaps_and_begins_at_the_next_message(
    tmp_path: Path, read: str, count_max: int
) -> None:
    log, offsets = gappy(tmp_path)
    reader = reader_of(log)
    for start in range(offsets[-1] + 1):
        found: list[int] = []
        at = start
        while at <= reader.last_offset:
            result = ready(partial(getattr(reader, read), at, count_max, 1 << 20, None, 99))
            assert result.status is GetStatus.FOUND
            assert 1 <= result.count <= count_max
            found += offsets_of(result, is_bulk=read == "get_bulk")
            assert result.next_offset == found[-1] + 1
            at = result.next_offset
        assert found == [offset for offset in offsets if offset >= start]


@pytest.mark.parametrize("read", ["get", "get_bulk"])
def test_a_place_is_forgotten_when_records_are_written_again(tmp_path: Path, read: str) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 6, 10), [1, 3, 5, 7, 9, 11]))
    reader = reader_of(log)
    found = ready(partial(getattr(reader, read), 0, 4, 1 << 20, None, 99))
    assert found.next_offset == 8
    log.cut(3)
    log.append(block(3, bodies(0, 5, 10), [6, 8, 9, 10, 12]))
    found = ready(partial(getattr(reader, read), 8, 4, 1 << 20, None, 99))
    assert offsets_of(found, is_bulk=read == "get_bulk") == [8, 9, 10, 12]


def offsets_of(result: GetResult, *, is_bulk: bool) -> list[int]:
    """Queue offsets as the client of a pull or a bulk pull sees them."""
    data = b"".join(result.buffers)
    if not is_bulk:
        return [message.queue_offset for message in decode_records(data)]
    columns = columns_of(result)
    numbers = range(len(columns))
    assert [columns.message(n).queue_offset for n in numbers] == columns.queue_offset.tolist()
    return list(columns.queue_offset)


def test_a_lookup_finds_the_next_unit_and_the_exact_record(tmp_path: Path) -> None:
    log, offsets = gappy(tmp_path)
    reader = reader_of(log)
    assert reader.min_offset == offsets[0]
    assert reader.record_bytes() == sum(segment.log_end for segment in log.segments)
    for asked in range(offsets[-1] + 3):
        later = [offset for offset in offsets if offset >= asked]
        assert ready(partial(reader.count_from, asked)) == len(later)
        unit = ready(partial(reader.unit, asked))
        record = ready(partial(reader.record, asked))
        assert (unit.queue_offset if unit else None) == (later[0] if later else None)
        assert (record is not None) == (asked in offsets)
        if record is not None:
            assert decode_record(record).queue_offset == asked


def test_a_search_by_time_finds_the_messages_around_it(tmp_path: Path) -> None:
    log, offsets = gappy(tmp_path)
    reader = reader_of(log)
    for asked in range(offsets[-1] + 3):
        for more in (0, 1):
            time_ms = FIRST_MS + 10 * asked + more
            before = [n for n in offsets if 10 * n < 10 * asked + more]
            after = [n for n in offsets if 10 * n >= 10 * asked + more]
            expected = (before[-1] if before else None), (after[0] if after else None)
            assert ready(partial(reader.offsets_around, time_ms)) == expected
    assert ready(lambda: reader.store_time_at(0)) == FIRST_MS + 10 * offsets[0]


def test_an_empty_log_has_nothing(tmp_path: Path) -> None:
    reader = reader_of(open_log(tmp_path))
    assert (reader.min_offset, reader.last_offset, reader.count_from(0)) == (None, -1, 0)
    assert reader.unit(0) is None
    assert reader.offsets_around(5) == (None, None)


# --- rot -----------------------------------------------------------------------------------


def test_rot_in_a_finished_or_open_segment_is_found_when_it_is_read(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 5)))
    log.roll()
    log.append(block(5, bodies(5, 5)))
    log.sync()
    seals = Seals(tmp_path, Files())
    seals.save(Checkpoint(), log.used)
    seals.load()
    paths = [path for path in sorted(tmp_path.rglob("0*")) if path.is_file()]
    assert set(seals.paths) == set(paths)
    for path in paths:
        rotten = bytearray(path.read_bytes())
        rotten[10] ^= 1
        times_ns = (path.stat().st_mtime_ns,) * 2
        path.write_bytes(rotten)
        os.utime(path, ns=times_ns)
        again = QueueLog(Folders.of(tmp_path, "T", 0), SIZES, Files())
        seals.load()
        again.load(seals.find, is_clean=True)
        with pytest.raises(StoreDamaged, match=str(path)):  # noqa: PT012
            for queue_offset in range(10):
                ready(partial(reader_of(again).record, queue_offset))
        rotten[10] ^= 1
        path.write_bytes(rotten)
        os.utime(path, ns=times_ns)


def test_what_apache_has_appended_to_a_sealed_segment_is_kept(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 5)))
    log.roll()
    (_, log_bytes), (units_file, units_bytes) = log.segments[0].used
    assert units_file.seal is not None
    seals = {log.segments[0].units_file.path: units_file.seal}
    # As Apache's broker does: it overwrites the end marks.
    log.segments = (replace(log.segments[0], is_sealed=False),)
    log.append(block(5, bodies(5, 3)))
    assert log.segments[0].used != [(log.segments[0].log, log_bytes), (units_file, units_bytes)]
    again = QueueLog(log.folders, SIZES, Files())
    again.load(seals.get, is_clean=True)
    assert again.resume(8, 8) == 8
    assert kept(again) == dict(enumerate(bodies(0, 8)))


@pytest.mark.parametrize("tree", ["log", "units"])
def test_a_missing_file_is_made_up_for_by_the_log_or_named(tmp_path: Path, tree: str) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 25, 10)))
    path = getattr(log.folders, tree) / f"{2300:020d}"
    path.unlink()
    with pytest.raises(StoreFormatError, match=f"{path} is missing; messages .* 9 on are only"):
        open_log(tmp_path).resume(25, 10)
    log = open_log(tmp_path)
    assert log.resume(25, 9) == 9
    log.append(block(9, bodies(9, 16, 10)))
    assert kept(open_log(tmp_path)) == dict(enumerate(bodies(0, 25, 10)))


@pytest.mark.parametrize("tree", ["log", "units"])
@pytest.mark.parametrize("position", [18, 19])
def test_a_file_alone_at_the_end_is_removed_if_it_was_never_synced(
    tmp_path: Path, tree: str, position: int
) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 20, 10)))
    path = getattr(log.folders, tree) / f"{4600:020d}"
    path.unlink()
    log = open_log(tmp_path, is_clean=False)
    if position == 19:  # 18 was on disk, and the CommitLog does not have it
        with pytest.raises(StoreFormatError, match=f"{path} is missing; messages .* 18 on"):
            log.resume(position, 19)
        return
    assert log.resume(position, 19) == 18
    assert [message.queue_offset for message in load_as_apache(tmp_path, SIZES)["T", 0]] == [
        *range(18)
    ]


def test_a_file_that_has_no_length_yet_is_as_good_as_new(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 9, 10)))
    for folder in log.folders:
        (folder / f"{2300:020d}").touch()
    log = open_log(tmp_path, is_clean=False)
    assert log.resume(9, 0) == 9
    assert len(load_as_apache(tmp_path, SIZES)["T", 0]) == 9


def test_a_file_of_another_length_names_the_setting(tmp_path: Path) -> None:
    open_log(tmp_path).append(block(0, bodies(0, 2)))
    with pytest.raises(StoreFormatError, match="has 460 bytes, but compactionCqMappedFileSize"):
        open_log(tmp_path, sizes=FileSizes(2300, 920))
    with pytest.raises(StoreFormatError, match="has 2300 bytes, but compactionMappedFileSize"):
        open_log(tmp_path, sizes=FileSizes(4600, 460))


def test_units_that_end_elsewhere_than_their_seal_says_are_damaged(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 8)))
    log.roll()
    path = log.segments[0].units_file.path
    seal = FileSeal(8 * 46, [0])
    data = bytearray(path.read_bytes())
    data[3 * 46] = 0xFF  # the fourth unit has a negative position now
    path.write_bytes(data)
    for oldest in (3, 4):
        again = QueueLog(Folders.of(tmp_path, "T", 0), SIZES, Files())
        again.load(lambda found: seal if found == path else None, is_clean=True)
        if oldest == 4:
            with pytest.raises(StoreFormatError, match=f"{path}: its units are damaged from.* 3"):
                again.resume(8, oldest)
        else:
            assert again.resume(8, oldest) == 3
            assert list(kept(again)) == [0, 1, 2]
            path.write_bytes(data)


# --- Apache's files ------------------------------------------------------------------------


def test_the_files_of_apache_are_read(tmp_path: Path) -> None:
    shutil.copytree(golden_store("clean") / "compaction", tmp_path / "compaction")
    expected = [found for found in manifest("clean")["messages"] if found["topic"] == "G_COMPACT"]
    sizes = FileSizes.of(262_144, 4600)
    for queue_id in (0, 1):
        log = QueueLog(Folders.of(tmp_path, "G_COMPACT", queue_id), sizes, Files())
        log.load(lambda _path: None, is_clean=False)
        assert log.resume(10_000, 0) == log.end_offset
        found = [
            (message.queue_offset, message.physical_offset, message.size)
            for message in messages(log)
        ]
        assert found == [
            (message["queueOffset"], message["physicalOffset"], message["storeSize"])
            for message in expected
            if message["queueId"] == queue_id
        ]
        reader = reader_of(log)
        assert reader.min_offset == found[0][0]
        assert offsets_of(ready(partial(reader.get, 0, 3, 1 << 20, None, 99)), is_bulk=False) == [
            offset for offset, *_ in found[:3]
        ]


def test_apache_loads_what_was_written(tmp_path: Path) -> None:
    assert load_as_apache(golden_store("clean"), FileSizes.of(262_144, 4600))  # the rules hold
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 25, 10)))
    log.roll()
    log.append(block(30, bodies(30, 12, 200)))
    log.cut(40)
    found = load_as_apache(tmp_path, SIZES)["T", 0]
    assert [message.queue_offset for message in found] == [*range(25), *range(30, 40)]


def steps_of_a_swap(folders: Folders, old: list[str], new: list[str]) -> list[tuple[Path, Path]]:
    """Renames of Apache's broker in order; a target of /dev/null stands for a removal."""
    steps = []
    for folder in folders:
        deleted = {name: folder / f"{name}.delete" for name in old}
        steps += [(folder / name, deleted[name]) for name in old]
        steps += [(folder / "compacting" / name, folder / name) for name in new]
        steps += [(deleted[name], Path(os.devnull)) for name in old]
    return steps


@pytest.mark.parametrize("done", range(21))
def test_a_swap_that_apache_was_killed_in_is_ended(tmp_path: Path, done: int) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 105, 10)))
    for segment in log.segments[1:8]:  # an earlier run has left a gap between the names
        segment.log.path.unlink()
        segment.units_file.path.unlink()
    log = open_log(tmp_path)
    before = kept(log)
    old = [segment.log.path.name for segment in log.segments[:-1]]
    compacting = QueueLog(log.folders.below("compacting"), SIZES, Files())
    offsets = [1, *range(72, 99, 2)]
    compacting.append(block(0, [before[offset] for offset in offsets], offsets))
    new = [segment.log.path.name for segment in compacting.segments]
    assert set(new) - set(old)
    after = {offset: before[offset] for offset in (*offsets, *range(99, 105))}
    steps = steps_of_a_swap(log.folders, old, new)
    for source, target in steps[:done]:
        if target == Path(os.devnull):
            source.unlink()
        else:
            source.rename(target)
    assert len(steps) == 20
    is_swap = 0 < done < len(steps)
    assert end_peer_swap(log.folders, Files()) == is_swap
    assert not end_peer_swap(log.folders, Files())
    found = kept(open_log(tmp_path))
    assert found == (before if done < len(old) + len(new) else after)


# --- crashes -------------------------------------------------------------------------------


# Four pages of units to a file: a power cut may take one and leave the next.
LARGER = FileSizes(69_000, 13_800)


class Follower:
    """Appends to a log as the follower does; ``position`` is saved once all is on disk."""

    def __init__(self, root: Path, rng: Random, sizes: FileSizes) -> None:
        self.position = 0
        self.root = root
        self.rng = rng
        self.sizes = sizes

    def work(self, fs: FaultyFiles) -> None:
        """Until the power goes."""
        log = open_log(self.root, is_clean=False, fs=fs, sizes=self.sizes)
        at = log.resume(self.position, self.rng.randint(0, self.position))
        assert at == self.position
        assert kept(log) == whole(at)
        while True:
            if self.rng.random() < 0.1:
                log.roll()
            if self.rng.random() < 0.2:
                log.sync()
                self.position = at
            count = self.rng.randint(1, self.sizes.units_max // 2)
            log.append(block(at, text(at, count)))
            at += count


def text(first: int, count: int) -> list[bytes]:
    return [body * (1 + n % 4) for n, body in enumerate(bodies(first, count, 20), first)]


def whole(end: int) -> dict[int, bytes]:
    return dict(enumerate(text(0, end)))


@pytest.mark.parametrize("sizes", [SIZES, LARGER])
@pytest.mark.parametrize("is_cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("seed", range(3))
def test_a_crash_at_any_operation_loses_nothing_that_was_synced(
    seed: int, sizes: FileSizes, tmp_path: Path, *, is_cut: bool
) -> None:
    rng = Random(seed)
    root = tmp_path / "store"
    follower, fs = Follower(root, rng, sizes), FaultyFiles(root, rng)
    for _ in range(20):
        fs.end_in(rng.randrange(60), is_cut=is_cut)
        with pytest.raises(PowerCut):
            follower.work(fs)
        fs = next_life(root, rng, before=fs)
    log = open_log(root, is_clean=False, sizes=sizes)
    log.resume(follower.position, 0)
    assert kept(log) == whole(follower.position)
    if follower.position:
        assert load_as_apache(root, sizes)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_killed_broker_entered_is_brought_to_disk(seed: int, tmp_path: Path) -> None:
    rng, root = Random(seed), tmp_path / "store"
    fs = FaultyFiles(root, rng)
    open_log(root, fs=fs).append(block(0, text(0, 30)))
    fs.kill()
    fs = next_life(root, rng, before=fs)
    log = open_log(root, is_clean=False, fs=fs)
    # A position of 5 was saved before; the CommitLog begins at 25 by now.
    assert log.resume(5, 25) == 25
    log.sync()
    fs.cut_power()
    next_life(root, rng, before=fs)
    assert kept(open_log(root)) == whole(25)


@pytest.mark.parametrize("seed", range(5))
def test_failed_writes_and_syncs_lose_nothing(seed: int, tmp_path: Path) -> None:
    rng, root = Random(seed), tmp_path / "store"
    fs = FaultyFiles(root, rng, FaultRates(write=0.1, sync=0.1))
    log = open_log(root, fs=fs, sizes=LARGER)
    position = at = 0
    for _ in range(150):
        fs.is_full = rng.random() < 0.3
        try:
            count = rng.randint(1, 100)
            log.append(block(at, text(at, count)))
            at += count
            if rng.random() < 0.1:
                log.roll()
            if rng.random() < 0.3:
                log.sync()
                position = at
        except OSError:
            log.cut(position)
            at = position
            assert kept(log) == whole(position)
    assert min(fs.faults[name] for name in ("failed write", "failed sync")) > 0
    fs.cut_power()
    next_life(root, rng, before=fs)
    log = open_log(root, is_clean=False, sizes=LARGER)
    assert log.resume(position, 0) == position
    assert kept(log) == whole(position)


@pytest.mark.parametrize("read", ["get", "get_bulk"])
def test_a_read_while_units_are_written_again_is_repeated(tmp_path: Path, read: str) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 6)))
    log.sync()
    before = log.segments
    log.cut(4)
    log.segments = before  # those that a request has taken just before
    with pytest.raises(NotReady):
        getattr(reader_of(log), read)(1, 32, 1 << 20, None, 99)


class ColdFiles(Files):
    """Nothing is in memory before ``warm`` is set."""

    warm = False

    def is_cached(self, file: Paged, start: int, end: int) -> bool:  # noqa: ARG002
        return self.warm


@pytest.mark.parametrize("read", ["get", "get_bulk"])
def test_a_read_of_old_pages_waits_for_a_thread(tmp_path: Path, read: str) -> None:
    log = open_log(tmp_path, sizes=FileSizes.of(8 << 20, 1 << 20))
    log.append(block(0, bodies(0, 200, 20_000)))
    files = ColdFiles()
    reader = LogReader(log, PageCache(files))
    with pytest.raises(NotReady):
        getattr(reader, read)(1, 32, 1 << 20, None, 200)
    files.warm = True
    assert getattr(reader, read)(1, 32, 1 << 20, None, 200).status is GetStatus.FOUND
    # The end of the file is being written, so it is in memory.
    files.warm = False
    reader = LogReader(log, PageCache(files))
    assert getattr(reader, read)(199, 1, 1 << 20, None, 200).status is GetStatus.FOUND


# --- swaps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_reader_of_replaced_segments_never_sees_the_new_bytes(
    tmp_path: Path, is_mapped: bool
) -> None:
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 18, 10)))
    log.roll()
    old = log.segments
    before = list(messages(log)) if is_mapped else []
    new = QueueLog(log.folders.below("compacting"), SIZES, Files())
    new.append(block(0, [b"new"], [17]))
    for folder, below in zip(log.folders, new.folders, strict=True):
        (below / f"{0:020d}").rename(folder / f"{0:020d}")
        (folder / f"{2300:020d}").unlink()
    log.replace(old, (Segment.open(log.folders, 0, SIZES, Files()),))
    if is_mapped:
        numbers = range(old[0].count)
        units = [old[0].unit(number) for number in numbers]
        assert [unit.queue_offset for unit in units] == [
            message.queue_offset for message in before[: len(units)]
        ]
    log.release_replaced()
    with pytest.raises(NotReady):
        old[0].unit(0)
    with pytest.raises(NotReady):
        old[1].records(0, 10)
    with pytest.raises(FileNotFoundError):
        old[0].read_units()
    assert kept(log) == {17: b"new"}
    assert reader_of(log).min_offset == 17
