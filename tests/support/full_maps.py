"""Writes mapped files on a full disk; a program, since a write without room ends its process.

``python -m tests.support.full_maps FOLDER KIND WRITTEN`` prints how many writes were made after
WRITTEN ones that had room.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.index.index_file import IndexFiles
from headrace_broker.store.queues.consume_queue import ConsumeQueue
from headrace_broker.store.settings import StoreSettings
from headrace_broker.tiered.container.index_file import ITEM, IndexSize, OpenIndex
from tests.support.own_disk import Filler

# Slots end within a page.
SLOT_COUNT = 20_000


def queue_writer(root: Path) -> Callable[[], object]:
    queue = ConsumeQueue(root / "consumequeue" / "T" / "0", 1 << 20, Files())
    queue.load(True, 0)
    return lambda: queue.put(queue.max_offset, queue.max_offset, 1, 0)


def index_writer(root: Path) -> Callable[[], object]:
    settings = StoreSettings(root=root, index_slot_count=SLOT_COUNT, index_entry_count=80_000)
    index = IndexFiles(settings, Files())
    index.load()
    numbers = count()

    def write() -> None:
        one = np.array([next(numbers)])
        index.put(one.astype(np.int32) * 7919, one, one, 1)

    return write


def tier_index_writer(root: Path) -> Callable[[], object]:
    Files().make_directories(root / "tier")
    index = OpenIndex(root / "tier" / "1000", IndexSize(SLOT_COUNT, 80_000), Files())
    numbers = count()

    def write() -> None:
        item = np.zeros(1, ITEM)
        item["key_hash"] = next(numbers) * 7919
        index.add(item, np.array([1000]))

    return write


# How many writes reach all kinds of pages.
WRITES = {"queue": 14_000, "index": 100, "tier index": 100}
WRITERS = {"queue": queue_writer, "index": index_writer, "tier index": tier_index_writer}


def read_as_a_backup_does(root: Path) -> None:
    """From the disk, in order: the kernel reads ahead, and keeps many pages as one."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while file.read(4096):
                    pass


def write_until_full(write: Callable[[], object], most: int) -> int:
    for done in range(most):
        try:
            write()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return done
    return most


def run(folder: Path, kind: str, written: int) -> str:
    root = folder / "store"
    write = WRITERS[kind](root)
    for _ in range(written):
        write()
    del write
    read_as_a_backup_does(root)
    Filler(folder / "filler", takes_inodes=False).fill()
    most = WRITES[kind]
    return f"{write_until_full(WRITERS[kind](root), most)} of {most}"


if __name__ == "__main__":
    sys.stdout.write(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
