"""Warm-up after a start: the kernel reads the newest files before a request needs them."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.files.mapped_file import MappedFile

    Used = tuple[MappedFile, int]

WARM_FILES: Final = 3
_STEP_BYTES: Final = 8 << 20


def newest_files(log: Sequence[Used], queues: Iterable[Sequence[Used]]) -> list[tuple[Path, int]]:
    """Paths and used bytes of the last three files of the log and of each queue.

    The newest log file comes first, then the queues, then the older log files: consumers mostly
    read the end of the log, by way of the queues.
    """
    of_log = log[-WARM_FILES:][::-1]
    newest = chain(of_log[:1], *(used[-WARM_FILES:] for used in queues), of_log[1:])
    return [(file.path, used_bytes) for file, used_bytes in newest if used_bytes]


def warm(files: list[tuple[Path, int]], fs: Files, check_cancelled: Callable[[], None]) -> None:
    """Read ahead files up to a quarter of the machine's memory; in a thread.

    check_cancelled: called before each step; an exception that it raises ends the work.
    """
    left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    for path, used_bytes in files:
        left -= used_bytes
        if left < 0:
            return
        with suppress(OSError):  # a deleted file, or a file system without the call
            _warm_file(path, used_bytes, fs, check_cancelled)


def _warm_file(path: Path, used_bytes: int, fs: Files, check_cancelled: Callable[[], None]) -> None:
    descriptor = fs.open(path, os.O_RDONLY)
    try:
        # Backwards, the newest bytes first.
        for end in range(used_bytes, 0, -_STEP_BYTES):
            check_cancelled()
            start = max(end - _STEP_BYTES, 0)
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_WILLNEED)
    finally:
        fs.close(descriptor)
