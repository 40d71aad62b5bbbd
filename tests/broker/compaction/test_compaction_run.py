"""Runs of compaction beside a dictionary: keys, map, rounds, markers, minimum lag, names."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from headrace_broker.compaction.key_hash import KeyHash
from headrace_broker.compaction.offset_map import SLOT_BYTES, OffsetMap
from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.record_blocks import SegmentDamaged
from headrace_broker.compaction.run import Job, Result, Run
from headrace_broker.compaction.run_state import MarkerTimes
from headrace_broker.compaction.segments import COMPACTING, Folders, Segment
from headrace_broker.store.files.filesystem import Files
from headrace_protocol.blocks import encode_records
from headrace_protocol.columns import RecordColumns
from headrace_protocol.message import decode_properties
from headrace_protocol.record_keys import find_keys
from tests.support.compaction_entries import SMALL, TOPIC, Entry, fill, read_entries
from tests.support.seeds import seeds

NEVER = MarkerTimes([], [])
ROOMY = 1 << 20


def job(
    position: int = 0,
    *,
    now_ms: int = 10_000,
    stored_until_ms: int = 10_000,
    markers_before_ms: int = 0,
    marker_times: MarkerTimes = NEVER,
    map_bytes_max: int = ROOMY,
) -> Job:
    return Job(position, now_ms, stored_until_ms, markers_before_ms, marker_times, map_bytes_max)


class Queue:
    """A compaction log of sealed segments, and runs over it."""

    def __init__(self, root: Path, entries: Sequence[Entry]) -> None:
        self.folders = Folders.of(root, TOPIC, 0)
        self.log = QueueLog(self.folders, SMALL, Files())
        fill(self.log, entries)
        self.log.roll()
        self.log.sync()
        self.paced: list[int] = []

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.log.segments

    def run(self, work: Job) -> tuple[Result, list[Entry]]:
        """The result of a run, and the messages that are left if it is swapped in."""
        below = self.folders.below(COMPACTING)
        result = Run(self.segments, work, self.paced.append).compact(below, SMALL, Files())
        replaced = {base for group in result.groups for base in group.old}
        kept = [segment for segment in self.segments if segment.base not in replaced]
        new = [
            Segment.open(below, file.base, SMALL, Files()).cut(file.record_count)
            for group in result.groups
            for file in group.new
        ]
        for group in result.groups:
            assert all(file.base % SMALL.log_bytes == 0 for file in group.new)
            assert len(group.new) <= len(group.old)
        segments = sorted([*kept, *new], key=lambda segment: segment.base)
        return result, read_entries(segments)


def random_entries(rng: Random, count: int, key_count: int) -> list[Entry]:
    entries, offset = [], 0
    for _ in range(count):
        offset += rng.choice((1, 1, 1, 7))
        key = None if rng.random() < 0.02 else f"key-{rng.randrange(key_count)}"
        body = b"" if rng.random() < 0.1 else rng.randbytes(rng.choice((1, 30, 400)))
        entries.append(Entry(key, body, offset))
    return entries


def expected(entries: Sequence[Entry], begin: int = 0, end: int = 1 << 60) -> list[Entry]:
    """Entries left by a run that enters the messages from ``begin`` to ``end``."""
    newest = {
        entry.key: entry.queue_offset for entry in entries if begin <= entry.queue_offset < end
    }
    return [
        entry
        for entry in entries
        if entry.key is None or newest.get(entry.key, -1) <= entry.queue_offset
    ]


# --- keys -----------------------------------------------------------------------------------------


def records_with(properties: Sequence[bytes]) -> RecordColumns:
    bodies = [bytes(number % 5) for number in range(len(properties))]
    encoded = encode_records(TOPIC, bodies, properties, born_timestamp=1, born_host=bytes(8))
    return RecordColumns.from_records(bytes(encoded.data))


def random_properties(rng: Random) -> bytes:
    names = ["KEYS", "KEYSX", "XKEYS", "KEY", "TAGS", "KEYS KEYS", "a"]
    entries = []
    for _ in range(rng.randrange(6)):
        size = rng.choice((0, 1, 15, 16, 17, 40, 300))
        value = "".join(rng.choices(string.ascii_letters + " é\x01", k=size))
        entries.append(rng.choice(names) + rng.choice(("\x01", "\x01", "")) + value)
    return ("\x02".join(entries) + rng.choice(("\x02", ""))).encode()


@pytest.mark.parametrize("seed", range(10))
def test_the_keys_are_those_of_the_decoded_properties(seed: int) -> None:
    properties = [random_properties(Random(f"{seed} {n}")) for n in range(200)]
    records = records_with(properties)
    starts, sizes = find_keys(records)
    for number, raw in enumerate(properties):
        start, size = int(starts[number]), int(sizes[number])
        key = bytes(records.data[start : start + size]).decode()
        assert key == decode_properties(raw).get("KEYS", ""), raw


def test_a_key_has_one_hash_wherever_it_lies_and_no_other_key_has_it() -> None:
    texts = ["", "a", "b", "a\0", "ab", "ba", "a" * 15, "a" * 16, "a" * 17, "a" * 32000, "é"]
    data = "".join(texts).encode()
    sizes = np.array([len(text.encode()) for text in texts])
    key_hash = KeyHash()
    hashes = key_hash.of_slices(data, np.cumsum(sizes) - sizes, sizes).T
    assert len({tuple(each) for each in hashes.tolist()}) == len(texts)
    turned = "".join(reversed(texts)).encode()
    starts = (np.cumsum(sizes[::-1]) - sizes[::-1])[::-1]
    assert (hashes == key_hash.of_slices(turned, starts, sizes).T).all()
    assert (hashes != KeyHash().of_slices(data, starts, sizes).T)[1:].all()


def test_two_keys_with_the_same_md5_are_two_keys(tmp_path: Path) -> None:
    pair = [
        f"TEXTCOLLBYfGiJUETHQ4h{letters}KgSMd5zYpgqf1YRDhkmxHkhPWptrkoyz28wnI9V0aHeAuaKnak"
        for letters in ("Ac", "Ec")
    ]
    entries = [Entry(key, b"x", number) for number, key in enumerate([*pair, *pair])]
    _, left = Queue(tmp_path, entries).run(job())
    assert left == entries[2:]


# --- the map --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_the_map_knows_the_newest_record_of_each_key(seed: int) -> None:
    rng = Random(seed)
    offset_map = OffsetMap(SLOT_BYTES * 1000, 10_000)
    model: dict[int, int] = {}
    hashes = np.array([rng.getrandbits(64) for _ in range(2 * 700)], np.uint64).reshape(2, -1)
    replaced: list[int] = []
    expected_replaced: list[int] = []
    for first in range(0, 4000, 400):
        keys = [rng.randrange(700) for _ in range(400)]
        count, more = offset_map.put(hashes[:, keys], np.arange(first, first + 400))
        assert count == 400
        replaced += more.tolist()
        for number, key in enumerate(keys, first):
            if key in model:
                expected_replaced.append(model[key])
            model[key] = number
    assert set(replaced) == set(expected_replaced)
    assert offset_map.key_count == len(model)
    assert offset_map.newest(hashes).tolist() == [model.get(key, -1) for key in range(700)]


def test_a_full_map_takes_the_records_before_the_first_key_too_many() -> None:
    offset_map = OffsetMap(SLOT_BYTES * 8, 100)
    assert offset_map.keys_max == 6
    assert offset_map.size_bytes <= 32 * offset_map.keys_max
    hashes = np.arange(2 * 8, dtype=np.uint64).reshape(2, 8) << np.uint64(60)
    keys = [0, 1, 2, 0, 1, 3, 4, 4, 5, 0, 6, 0]
    count, replaced = offset_map.put(hashes[:, keys], np.arange(12))
    assert (count, set(replaced.tolist())) == (10, {0, 1, 3, 6})
    assert offset_map.newest(hashes).tolist() == [9, 4, 2, 5, 7, 8, -1, -1]
    offset_map.clear()
    assert (offset_map.newest(hashes) == -1).all()


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(20))
def test_a_run_leaves_the_newest_message_of_each_key(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    entries = random_entries(rng, rng.randrange(1, 300), rng.choice((1, 10, 1000)))
    queue = Queue(tmp_path, entries)
    keys = rng.choice((3, 10, 1000))
    result, left = queue.run(job(map_bytes_max=SLOT_BYTES * keys * 4 // 3 + SLOT_BYTES))
    assert left == expected(entries)
    assert result.kept_count == len(left)
    assert result.dropped_count == len(entries) - len(left)
    assert result.marker_count == sum(1 for entry in left if entry.key and not entry.body)
    assert result.next_position == entries[-1].queue_offset + 1
    assert sum(queue.paced) == result.bytes_read + result.bytes_written


@pytest.mark.parametrize("seed", range(10))
def test_the_next_run_enters_what_the_last_one_has_not(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    entries = random_entries(rng, 200, 10)
    position = entries[rng.randrange(200)].queue_offset
    compacted = [
        *expected([entry for entry in entries if entry.queue_offset < position]),
        *[entry for entry in entries if entry.queue_offset >= position],
    ]
    result, left = Queue(tmp_path, compacted).run(job(position))
    assert left == expected(compacted, position)
    assert left == expected(entries)
    assert result.key_count == len({e.key for e in entries if e.queue_offset >= position} - {None})


def test_rounds_read_more_and_write_no_more(tmp_path: Path) -> None:
    entries = [Entry(f"k{number % 40}", b"x" * 50, number) for number in range(200)]
    one, left = Queue(tmp_path / "one", entries).run(job())
    many, left_by_many = Queue(tmp_path / "many", entries).run(job(map_bytes_max=SLOT_BYTES * 10))
    assert left == left_by_many
    assert (one.round_count, one.key_count) == (1, 40)
    assert many.round_count > 5
    assert many.bytes_written == one.bytes_written
    assert many.map_bytes <= SLOT_BYTES * 10


def test_messages_younger_than_the_minimum_lag_stay_out(tmp_path: Path) -> None:
    entries = [Entry("a", b"x", number, 1_000 + number) for number in range(10)]
    queue = Queue(tmp_path, entries)
    result, left = queue.run(job(stored_until_ms=1_006))
    assert left == entries[6:]
    assert result.next_position == 7
    result, left = queue.run(job(stored_until_ms=0))
    assert (left, result.groups, result.next_position) == (entries, [], 0)


def test_segments_without_superseded_messages_are_left_as_they_are(tmp_path: Path) -> None:
    entries = [Entry(f"k{number}", b"x" * 600, number) for number in range(40)]
    entries.append(Entry("k39", b"y" * 600, 40))
    queue = Queue(tmp_path, entries)
    result, left = queue.run(job())
    assert left == expected(entries)
    assert len(queue.segments) > 5
    assert result.groups[0].old[0] > 0
    assert result.bytes_written < result.bytes_read / 4


def test_small_segments_are_joined(tmp_path: Path) -> None:
    queue = Queue(tmp_path, [Entry("a", b"1", 0)])
    for number in range(1, 4):
        fill(queue.log, [Entry(f"k{number}", b"1", number)])
        queue.log.roll()
    result, left = queue.run(job())
    assert [len(group.new) for group in result.groups] == [1]
    assert len(left) == 4
    assert result.groups[0].new[0].base == 0


# --- delete markers -------------------------------------------------------------------------------


def test_a_marker_stays_until_its_time_after_the_first_run_is_over(tmp_path: Path) -> None:
    entries = [Entry("a", b"1", 0), Entry("a", b"", 1), Entry("b", b"1", 2), Entry("b", b"", 3)]
    first, left = Queue(tmp_path / "1", entries).run(job(now_ms=5_000, markers_before_ms=4_000))
    assert left == [entries[1], entries[3]]
    assert (first.marker_count, first.marker_times) == (2, MarkerTimes([4], [5_000]))
    left.append(Entry("c", b"", 4))
    second, left = Queue(tmp_path / "2", left).run(
        job(4, now_ms=6_000, markers_before_ms=5_000, marker_times=first.marker_times)
    )
    assert [entry.queue_offset for entry in left] == [1, 3, 4]
    third, left = Queue(tmp_path / "3", left).run(
        job(5, now_ms=6_500, markers_before_ms=5_500, marker_times=second.marker_times)
    )
    assert [entry.queue_offset for entry in left] == [4]
    assert third.marker_count == 1


def test_a_marker_of_unknown_age_counts_from_this_run(tmp_path: Path) -> None:
    entries = [Entry("a", b"", 0)]
    result, left = Queue(tmp_path, entries).run(job(1, markers_before_ms=9_999))
    assert left == entries
    assert result.marker_times == MarkerTimes([1], [10_000])


def test_an_empty_message_without_a_key_is_no_marker(tmp_path: Path) -> None:
    entries = [Entry(None, b"", 0)]
    times = MarkerTimes([1], [1])
    _, left = Queue(tmp_path, entries).run(job(1, markers_before_ms=9_999, marker_times=times))
    assert left == entries


def test_times_of_old_runs_become_one() -> None:
    times = NEVER
    for number in range(1, 6):
        times = times.after_run(10 * number, 100 * number, before_ms=250)
    assert times == MarkerTimes([20, 30, 40, 50], [200, 300, 400, 500])
    is_over = times.is_over(np.array([0, 15, 20, 29, 30, 50]), 350)
    assert is_over.tolist() == [True, True, True, True, False, False]
    assert times.after_run(50, 900, before_ms=0) == times


# --- damage ---------------------------------------------------------------------------------------


def test_a_damaged_record_ends_the_run_and_names_the_file(tmp_path: Path) -> None:
    queue = Queue(tmp_path, [Entry("a", b"x" * 100, number) for number in range(5)])
    segment = queue.segments[0]
    segment.log.write(b"?", int(segment.read_units()["physical_offset"][4]) + 95)
    with pytest.raises(SegmentDamaged, match=str(segment.log.path)):
        queue.run(job())
