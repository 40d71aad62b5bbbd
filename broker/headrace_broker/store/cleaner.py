"""Removing what has expired: log files by age, then the queues and index that led to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.store.commit_log import CommitLog
    from headrace_broker.store.index_file import IndexFiles
    from headrace_broker.store.settings import StoreSettings
    from headrace_broker.store.store_queue import StoreQueue


class Cleaner:
    """Readers keep what they hold: a deleted file's map lives as long as a view of it."""

    def __init__(
        self,
        settings: StoreSettings,
        commit_log: CommitLog,
        index_files: IndexFiles,
        queues: Iterable[StoreQueue],
    ) -> None:
        self.settings = settings
        self.commit_log = commit_log
        self.index_files = index_files
        self.queues = queues

    async def run(self) -> None:
        """Clean at intervals."""
        while True:
            await trio.sleep(self.settings.clean_interval_ms / 1000)
            self.clean()

    def clean(self) -> int:
        """Remove expired log files, oldest first and a bounded number; returns how many."""
        count = self._expired_count()
        if count:
            self.commit_log.files.delete_first(count)
            log_min_offset = self.commit_log.min_offset
            for queue in self.queues:
                queue.consume_queue.delete_files_below(log_min_offset)
            self.index_files.delete_below(log_min_offset)
        return count

    def _expired_count(self) -> int:
        limit_ms = self.commit_log.clock.now_ms() - self.settings.retention_ms
        files = self.commit_log.files.files
        count = 0
        for file in files[:-1][: self.settings.clean_files_max]:
            if file.path.stat().st_mtime * 1000 > limit_ms:
                break
            count += 1
        return count
