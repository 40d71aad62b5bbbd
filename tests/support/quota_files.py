"""A small disk for tests that need no rights: a budget in front of the real file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from headrace_broker.store.files.filesystem import DiskUsage
from tests.support.stores import FaultyFiles


class QuotaFiles(FaultyFiles):
    """Counts what is allocated below ``root``; more than ``capacity_bytes`` is refused.

    others_bytes: what other programs use of the disk.
    """

    def __init__(self, root: Path, capacity_bytes: int) -> None:
        super().__init__()
        self.root = root
        self.capacity_bytes = capacity_bytes
        self.others_bytes = 0

    def used_bytes(self) -> int:
        files = (path for path in self.root.rglob("*") if path.is_file())
        return self.others_bytes + sum(path.stat().st_blocks * 512 for path in files)

    def allocate(self, descriptor: int, position: int, byte_count: int) -> None:
        allocated = os.fstat(descriptor).st_blocks * 512
        more = max(position + byte_count - allocated, 0)
        if self.used_bytes() + more > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(descriptor, position, byte_count)

    def disk_usage(self, path: Path) -> DiskUsage:
        assert path == self.root
        used_bytes = self.used_bytes()
        return DiskUsage(used_bytes, max(self.capacity_bytes - used_bytes, 0))
