"""Compaction logs for tests, and the rules by which Apache's broker loads them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.segments import COMPACTION_FOLDER, LOG_FOLDER, Folders
from headrace_broker.compaction.units import FileSizes
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.queues.queue_blocks import QueueBlock
from headrace_protocol.blocks import encode_records
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import StoredMessage, decode_record, encode_properties

HOST = bytes((127, 0, 0, 1)) + (10911).to_bytes(4, "big")
SIZES = FileSizes(2300, 460)  # nine units, some fifteen small records
FIRST_MS = 1_700_000_000_000
_UNIT = struct.Struct(">qiqqqhii")


def block(
    first: int,
    bodies: Sequence[bytes],
    offsets: Sequence[int] | None = None,
    keys: Sequence[str] | None = None,
) -> QueueBlock:
    """Messages of T/0 as a follower gets them: flushed records with their units.

    Stored 10 ms apart by their queue offsets, with one of three tags.
    """
    count = len(bodies)
    numbers = list(offsets or range(first, first + count))
    names = keys or [f"k{number % 5}" for number in numbers]
    properties = [
        encode_properties({"KEYS": key, "TAGS": f"t{number % 3}"})
        for key, number in zip(names, numbers, strict=True)
    ]
    made = encode_records("T", bodies, properties, born_timestamp=5, born_host=HOST)
    sizes = made.sizes.astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    data = bytearray(made.data)
    units = np.zeros(count, UNIT_DTYPE)
    for index, (start, number) in enumerate(zip(starts.tolist(), numbers, strict=True)):
        struct.pack_into(">qq", data, start + 20, number, 70_000 + start)
        struct.pack_into(">q", data, start + 56, FIRST_MS + 10 * number)
        units[index] = 70_000 + start, sizes[index], tags_code(f"t{number % 3}")
    return QueueBlock(
        "T", 0, first, numbers[-1] + 1, units, RecordColumns(bytes(data), starts, sizes)
    )


def bodies(first: int, count: int, size: int = 60) -> list[bytes]:
    return [f"{number}:".encode().ljust(size, b"x") for number in range(first, first + count)]


def open_log(
    root: Path, *, is_clean: bool = True, fs: Files | None = None, sizes: FileSizes = SIZES
) -> QueueLog:
    log = QueueLog(Folders.of(root, "T", 0), sizes, fs or Files())
    log.load(lambda _path: None, is_clean=is_clean)
    return log


def messages(log: QueueLog) -> Iterator[StoredMessage]:
    """All records, found by their units."""
    for segment in log.segments:
        for unit in segment.units.tolist():
            start = unit[0] - segment.base
            message = decode_record(segment.records(start, start + unit[1]))
            assert message.physical_offset == unit[0]
            assert message.queue_offset == unit[4]
            yield message


def kept(log: QueueLog) -> dict[int, bytes]:
    """Body by queue offset."""
    return {message.queue_offset: message.body for message in messages(log)}


# --- Apache's loader -------------------------------------------------------------------------


def load_as_apache(root: Path, sizes: FileSizes) -> dict[tuple[str, int], list[StoredMessage]]:
    """The messages that Apache's broker finds in each queue; fails where its start would.

    It takes every file in a queue's folder for data, needs all files of one length and in pairs,
    and finds where to append by the last unit of the last file.
    """
    found = {}
    for folder in sorted((root / COMPACTION_FOLDER / LOG_FOLDER).glob("*/*")):
        topic, queue_id = folder.parent.name, int(folder.name)
        folders = Folders.of(root, topic, queue_id)
        logs, units = (_lengths(each) for each in folders)
        assert logs.keys() == units.keys(), "log file mismatch with consumeQueue file"
        assert set(logs.values()) <= {sizes.log_bytes}, "length not matched message store config"
        assert set(units.values()) <= {sizes.units_bytes}, "length not matched"
        found[topic, queue_id] = [
            message for name in sorted(logs) for message in _file_messages(folders, name, sizes)
        ]
    return found


def _lengths(folder: Path) -> dict[str, int]:
    lengths = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    for name in lengths:
        assert len(name) == 20, f"NumberFormatException: {name}"
        assert int(name) >= 0
    return lengths


def _file_messages(folders: Folders, name: str, sizes: FileSizes) -> Iterator[StoredMessage]:
    """The messages between the first unit and the last that is one, as it searches them."""
    assert int(name) % sizes.log_bytes == 0, "a position is found by its remainder"
    units = list(_UNIT.iter_unpack((folders.units / name).read_bytes()))
    used = [unit[0] >= 0 and unit[1] > 0 and unit[4] >= 0 and unit[5] > 0 for unit in units]
    assert any(used), "an empty file at the end hides the queue's end"
    data = (folders.log / name).read_bytes()
    for unit in units[: len(used) - used[::-1].index(True)]:
        start = unit[0] % sizes.log_bytes
        message = decode_record(data[start : start + unit[1]])
        assert (message.physical_offset, message.queue_offset) == (unit[0], unit[4])
        assert unit[0] - start == int(name)
        yield message
