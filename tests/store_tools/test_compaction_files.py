"""The store tools and compaction logs: what fsck finds, stat counts, dump prints and copy keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from headrace_broker.compaction.checkpoint import PositionCheckpoint
from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store_tools.compaction_check import compaction_findings
from headrace_broker.store_tools.copy import copy_topics
from headrace_broker.store_tools.directory import StoreDirectory, TopicNotFound, open_directory
from headrace_broker.store_tools.dump import Wanted, dump_compacted
from headrace_broker.store_tools.fsck import check
from headrace_broker.store_tools.log_reader import LogDamage
from headrace_broker.store_tools.stat import topic_stats
from headrace_protocol.message import StoredMessage
from tests.support.compaction import block, bodies, open_log
from tests.support.damage import quiet
from tests.support.golden import copy_golden_store, golden_settings, golden_store, manifest
from tests.support.stores import small_settings


def found(root: Path) -> list[tuple[str, str, int | None]]:
    """Path, problem and position of all findings."""
    directory = StoreDirectory(small_settings(root), Files())
    return [
        (str(finding.path.relative_to(root / "compaction")), finding.problem, finding.position)
        for finding in compaction_findings(directory)
    ]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three segments, the second with a gap behind it."""
    log = open_log(tmp_path)
    log.append(block(0, bodies(0, 18, 10)))
    log.append(block(30, bodies(30, 5, 200)))
    assert len(log.segments) == 3
    return tmp_path


def golden() -> StoreDirectory:
    return StoreDirectory(golden_settings(golden_store("clean")), Files())


def of_compacted() -> list[tuple[int, int, int]]:
    """Queue, queue offset and position of the messages that Apache's client read."""
    fields = ("queueId", "queueOffset", "physicalOffset")
    messages = [found for found in manifest("clean")["messages"] if found["topic"] == "G_COMPACT"]
    return sorted(tuple(message[field] for field in fields) for message in messages)


def dumped(directory: StoreDirectory, wanted: Wanted) -> list[tuple[int, int, int]]:
    messages = dump_compacted(directory, wanted)
    return [
        (message.queue_id, message.queue_offset, message.physical_offset)
        for message in messages
        if isinstance(message, StoredMessage)
    ]


def test_dump_prints_the_records_of_compaction_logs() -> None:
    assert dumped(golden(), Wanted()) == of_compacted()
    assert dumped(golden(), Wanted("G_COMPACT", 0, 524_400)) == of_compacted()[7:13]
    with pytest.raises(TopicNotFound, match="no queue of topic G_TAGS"):
        dumped(golden(), Wanted("G_TAGS"))


def test_dump_reports_damage_and_continues_with_the_next_segment(store: Path) -> None:
    path = store / "compaction" / "compactionLog" / "T" / "0" / f"{2300:020d}"
    data = bytearray(path.read_bytes())
    data[90] ^= 0xFF  # in the first body
    path.write_bytes(data)
    directory = StoreDirectory(small_settings(store), Files())
    found = list(dump_compacted(directory, Wanted("T")))
    damage = [each for each in found if isinstance(each, LogDamage)]
    assert [each.start for each in damage] == [2300]
    offsets = [each.queue_offset for each in found if isinstance(each, StoredMessage)]
    assert offsets == [*range(9), *range(30, 35)]


def test_stat_counts_the_messages_of_compaction_logs() -> None:
    (found,) = [topic for topic in topic_stats(golden(), quiet) if topic.topic == "G_COMPACT"]
    messages = [each for each in manifest("clean")["messages"] if each["topic"] == "G_COMPACT"]
    assert found.compacted_messages == len(messages)
    assert found.compacted_bytes == sum(message["storeSize"] for message in messages)


def test_a_copy_has_the_compaction_log(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copy_topics(golden(), target, ["G_COMPACT"], quiet)
    with open_directory(target, golden_settings(target)) as copied:
        assert dumped(copied, Wanted()) == of_compacted()
        assert check(copied, quiet).findings == []
    positions = PositionCheckpoint(target, Files())
    positions.load()
    assert positions.get("G_COMPACT", 0, 100) == 35
    without = tmp_path / "without"
    copy_topics(golden(), without, ["G_TAGS"], quiet)
    assert not (without / "compaction").exists()


def test_a_swap_that_is_not_finished_is_not_copied(tmp_path: Path) -> None:
    root = copy_golden_store("clean", tmp_path / "store")
    path = root / "compaction" / "compactionLog" / "G_COMPACT" / "0" / f"{0:020d}"
    path.rename(f"{path}.delete")
    source = StoreDirectory(golden_settings(root), Files())
    with pytest.raises(StoreError, match=f"{path.parent}: a broker was killed while it swapped"):
        copy_topics(source, tmp_path / "copy", ["G_COMPACT"], quiet)
    copy_topics(source, tmp_path / "copy", ["G_TAGS"], quiet)


def test_nothing_is_found_in_a_good_log(store: Path) -> None:
    assert found(store) == []
    assert list(compaction_findings(golden())) == []


def test_any_changed_byte_that_matters_is_found(store: Path) -> None:
    rng = Random(7)
    properties = 0
    for path in sorted(store.rglob("0*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        is_units = "compactionCq" in str(path)
        for _ in range(30):
            at = rng.randrange(len(data.rstrip(b"\0")))
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
            # Seals cover the rest: properties and most of a record's head. The last bytes of a
            # unit are constants that nobody reads.
            if is_units:
                assert found(store) or at % 46 >= 36 or at >= 8 * 46, at
            properties += not found(store)
        path.write_bytes(data)
    assert found(store) == []
    assert properties > 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: path.rename(path.with_name("x")), "does not belong to a compaction log"),
        (lambda path: path.rename(f"{path}.delete"), "Apache's broker was killed in a swap"),
        (lambda path: path.write_bytes(bytes(5)), "has 5 bytes instead of"),
        (lambda path: path.unlink(), "lacks the other file of its name"),
    ],
)
@pytest.mark.parametrize("tree", ["compactionLog", "compactionCq"])
def test_a_wrong_file_is_named(
    store: Path, tree: str, change: Callable[[Path], object], problem: str
) -> None:
    change(store / "compaction" / tree / "T" / "0" / f"{2300:020d}")
    assert any(found_problem.startswith(problem) for _, found_problem, _ in found(store))


def test_unfinished_work_and_torn_positions_are_notes(store: Path) -> None:
    work = store / "compaction" / "compactionLog" / "T" / "0" / "compacting"
    work.mkdir()
    (work / f"{0:020d}").touch()
    (store / "compaction" / "position-checkpoint").write_bytes(b"{")
    own = store / "compaction" / "headrace" / "T" / "0"
    own.mkdir(parents=True)
    (own / "swap.json").touch()
    findings = list(compaction_findings(StoreDirectory(small_settings(store), Files())))
    assert [(finding.path.name, finding.is_damage) for finding in findings] == [
        ("swap.json", False),
        ("compacting", False),
        ("position-checkpoint", False),
    ]
