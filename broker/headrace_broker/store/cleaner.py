"""Removing what has expired: log files by age, then the queues and index that led to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.store.commit_log import CommitLog
    from headrace_broker.store.index_file import IndexFiles
    from headrace_broker.store.mapped_file import MappedFile
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
        """Clean at intervals; removing a large file takes its time, so a thread does it."""
        while True:
            await trio.sleep(self.settings.clean_interval_ms / 1000)
            expired = self.detach_expired()
            if expired:
                await trio.to_thread.run_sync(delete_files, expired)

    def detach_expired(self) -> list[MappedFile]:
        """Let go of expired log files, oldest first and a bounded number, and what led to them."""
        files = self.commit_log.files.detach_first(self._expired_count())
        if files:
            log_min_offset = self.commit_log.min_offset
            for queue in self.queues:
                files += queue.consume_queue.detach_below(log_min_offset)
            files += self.index_files.detach_below(log_min_offset)
        return files

    def _expired_count(self) -> int:
        limit_ms = self.commit_log.clock.now_ms() - self.settings.retention_ms
        files = self.commit_log.files.files
        count = 0
        for file in files[:-1][: self.settings.clean_files_max]:
            if file.path.stat().st_mtime * 1000 > limit_ms:
                break
            count += 1
        return count


def delete_files(files: list[MappedFile]) -> None:
    """Remove files that the store has let go of. Raises OSError."""
    for file in files:
        file.delete()
