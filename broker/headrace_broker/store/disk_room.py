"""The room on the disk: every writer of new data asks here before it allocates."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from headrace_broker.store.files.filesystem import NO_ROOM, RESERVE_BYTES_MAX
from headrace_protocol.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.files.filesystem import DiskUsage, Files
    from headrace_broker.store.settings import StoreSettings

# More than a new name in a folder takes, beside the reserve, which may just be lent.
_NAME_BYTES_MAX: Final = 2 * RESERVE_BYTES_MAX


class DiskRoom:
    """The limits of the disk, and what found no room within them.

    retention: may be replaced at any time.
    """

    def __init__(self, settings: StoreSettings, fs: Files) -> None:
        self.retention = settings.retention
        self._root = settings.root
        self._fs = fs
        self._is_over = False
        self._unmet: tuple[int, Callable[[], None]] | None = None

    def usage(self) -> DiskUsage:
        """Usage of the store's file system. Raises OSError."""
        return self._fs.disk_usage(self._root)

    @property
    def wanted_bytes(self) -> int:
        """Size of what found no room last; 0 if nothing waits for room."""
        unmet = self._unmet
        return unmet[0] if unmet else 0

    @property
    def is_tight(self) -> bool:
        """True if a clean-up may have something to free."""
        if self._unmet is not None:
            return True
        with suppress(OSError):
            return self.usage().ratio > min(self.retention.clean_ratio, self.retention.force_ratio)
        return False

    def problem(self, more_bytes: int) -> str | None:
        """The reason why nothing more may be written, None if ``more_bytes`` may.

        Once usage is above ``refuse_ratio``, until it is down to ``force_ratio``. A file system
        that does not tell its usage has no such limit.
        """
        limits = self.retention
        try:
            disk = self.usage()
        except OSError:
            return None
        limit = limits.force_ratio if self._is_over else limits.refuse_ratio
        self._is_over = disk.ratio > limit
        if self._is_over:
            return (
                f"the disk is {disk.ratio:.1%} full and messages are refused above "
                f"{limits.refuse_ratio:.0%}, until usage is down to {limits.force_ratio:.0%}: "
                "make room"
            )
        if more_bytes and disk.excess_bytes(limits.refuse_ratio) + more_bytes > 0:
            return (
                f"the disk is {disk.ratio:.1%} full, and {more_bytes} bytes more would exceed "
                f"{limits.refuse_ratio:.0%}: make room"
            )
        return None

    def reason(self, error: OSError) -> str:
        """Name what is used up: the kernel says the same of bytes and of inodes."""
        reason = reason_of(error)
        if error.errno == errno.EDQUOT:
            return f"the quota of the disk is used up ({reason}): raise it, or make room"
        with suppress(OSError):
            if error.errno == errno.ENOSPC and self._lacks_inodes(error):
                return f"the disk has no free inodes ({reason}): remove files, or make more inodes"
        return reason

    def _lacks_inodes(self, error: OSError) -> bool:
        """True if none is free, or if a file found none: another may have been removed since."""
        disk, is_of_name = self.usage(), error.filename is not None
        if disk.usable_inodes is None:
            return False
        return not disk.usable_inodes or (is_of_name and disk.usable_bytes >= _NAME_BYTES_MAX)

    def claim(self, byte_count: int, allocate: Callable[[], None]) -> None:
        """Allocate ``byte_count`` more; remember it for ``retry`` if it finds no room.

        Raises OSError.
        """
        try:
            self._require(byte_count)
            allocate()
        except OSError as error:
            if error.errno in NO_ROOM:
                self._unmet = byte_count, allocate
            raise
        self._unmet = None

    def _require(self, byte_count: int) -> None:
        problem = self.problem(byte_count)
        if problem is not None:
            raise OSError(errno.ENOSPC, problem)

    def require_free(self, byte_count: int) -> None:
        """Raise OSError unless so much is free, above the limits too: for work that makes room."""
        usable_bytes = self.usage().usable_bytes
        if usable_bytes < byte_count:
            reason = f"{byte_count} bytes may be needed, and the disk has {usable_bytes}: make room"
            raise OSError(errno.ENOSPC, reason)

    def retry(self) -> None:
        """Allocate what found no room; in any thread. Raises OSError."""
        unmet = self._unmet  # another thread may succeed meanwhile
        if unmet is not None:
            self.claim(*unmet)
