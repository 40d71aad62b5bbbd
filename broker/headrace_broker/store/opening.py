"""Opens a store: loads its files, verifies them, and recovers what a crash has left."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.filesystem import RESERVE_BYTES_MAX
from headrace_broker.store.files.positions import FOLDER
from headrace_broker.store.followers.follower_work import POSITIONS_FOLDER
from headrace_broker.store.index.index_file import HEADER_BYTES
from headrace_broker.store.integrity.checkpoint import Checkpoint
from headrace_broker.store.log.log_rows import LogRows
from headrace_broker.store.old_positions import replace_old_positions
from headrace_broker.store.queues.batch_queue import QUEUE_KINDS
from headrace_broker.store.queues.queue_table import queue_folders
from headrace_broker.store.recovery import (
    LoadStage,
    Recovery,
    RecoveryReport,
    Scan,
    first_records,
    index_durable_offset,
    log_durable_offset,
    plan_recovery,
    queues_durable_offset,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.store.parts import StoreParts
    from headrace_broker.store.recovery import OnProgress, RecoveryPlan
    from headrace_broker.store.store_queue import StoreQueue

# How often a long recovery brings its results to disk, so that an interrupted one can resume.
SAVE_PROGRESS_MS = 60_000


class Opening:
    """One start of a store whose directory is locked."""

    def __init__(self, store: StoreParts, on_progress: OnProgress) -> None:
        self._store = store
        self._on_progress = on_progress

    def load(self) -> None:
        """Load the files. Raises StoreFormatError, OSError."""
        store = self._store
        abort = store.root / "abort"
        is_clean = not abort.exists()
        store.flusher.checkpoint = Checkpoint.load(store.flusher.checkpoint_path)
        store.commit_log.files.load(is_clean=is_clean)
        replace_old_positions(store.root, store.fs)
        store.dispatcher.deletions.load()
        self._load_queues(is_clean=is_clean)
        store.index_files.load(is_clean=is_clean)
        self._check_seals(is_clean=is_clean)
        store.fs.reserve.open(store.root)
        # On disk before anything else changes, else a power cut would look like a clean stop.
        try:
            store.fs.replace(abort, str(os.getpid()).encode())
        except OSError:
            if is_clean:
                raise
            # The killed process left one; a full disk may have no room to replace it.
        store.was_clean = is_clean
        if store.disk_usage().usable_bytes < RESERVE_BYTES_MAX:
            store.fs.reserve.release()  # what recovery writes again may need it

    def recover(self, scans: Sequence[Scan]) -> RecoveryReport:
        """Bring queues and index in line with the log. Raises StoreFormatError, OSError."""
        store = self._store
        for queue in store.queues:
            if store.has_batches(queue.topic) and not queue.consume_queue.is_batch:
                raise _two_kinds(queue)
        report = self._recover(scans, is_clean=store.was_clean)
        store.fs.reserve.fill()
        store.cleaner.trimmer.load()
        for queue in store.queues:
            queue.consume_queue.loaded()
        store.write_path.begin()
        store.commit_log.accept()
        return report

    def _check_seals(self, *, is_clean: bool) -> None:
        """Attach the seals, and verify what a clean start relies on.

        The rest is verified when it is first read. Raises StoreDamaged.
        """
        store = self._store
        store.seals.load()
        log_files = store.commit_log.files.files
        for file in log_files:
            file.seal = store.seals.find(file.path)
        if not is_clean or not store.seals.is_of(store.flusher.checkpoint):
            return
        newest_unit = -1
        for queue in store.queues:
            newest_unit = max(newest_unit, queue.consume_queue.attach_seals(store.seals))
        for index_file in store.index_files.files:
            index_file.file.seal = store.seals.find(index_file.file.path)
            index_file.file.require(0, HEADER_BYTES)
        for file in log_files:
            if file.end_offset > newest_unit:
                file.require(max(newest_unit - file.start_offset, 0), file.file_bytes)

    def _load_queues(self, *, is_clean: bool) -> None:
        store = self._store
        folders = [
            (kind, topic, name)
            for kind in QUEUE_KINDS
            for topic, name in queue_folders(store.root / kind.folder)
        ]
        for number, (kind, topic, name) in enumerate(folders, 1):
            if not name.isdigit():
                raise StoreFormatError(
                    store.root / kind.folder / topic / name,
                    "is not named like a queue id",
                    "move it out of the store's directory",
                )
            self._load_queue(topic, int(name), is_clean=is_clean, is_batch=kind.is_batch)
            self._on_progress(LoadStage.QUEUES, number, len(folders))

    def _load_queue(self, topic: str, queue_id: int, *, is_clean: bool, is_batch: bool) -> None:
        store = self._store
        if (other := store.find_queue(topic, queue_id)) is not None:
            raise _two_kinds(other)
        queue = store.add_queue(topic, queue_id, is_batch=is_batch)
        queue.consume_queue.load(is_clean, store.flusher.checkpoint.logics_physical_offset)
        ends = store.dispatcher.deletions.ends
        if 0 <= queue.consume_queue.last_physical_offset < ends.get(topic, 0):
            # Of a deleted topic: a power cut has undone its removal.
            store.forget_queue(queue)
            queue.consume_queue.delete()
        elif is_batch:
            store.batch_topics.add(topic)
        queue.next_offset = queue.consume_queue.max_offset

    def _recover(self, scans: Sequence[Scan], *, is_clean: bool) -> RecoveryReport:
        store = self._store
        plan = self._plan_recovery(is_clean=is_clean)
        recovery = Recovery(
            store.commit_log,
            store.takers,
            LogRows(
                store.queue,
                store.settings.delay_levels_ms,
                store.dispatcher.deletions.ends,
            ),
            scans,
        )
        saved_ms = store.clock.now_ms()
        # The log is synced in a thread while recovery reads on, which leaves less to the end.
        syncs = store.use_threads and not is_clean
        sync: Future[None] | None = None

        def save_and_report(stage: LoadStage, done: int, bound: int) -> None:
            nonlocal saved_ms, sync
            if syncs and recovery.newest and (sync is None or sync.done()):
                _raise_failure(sync)
                file = store.commit_log.files.find(recovery.newest[0])
                sync = pool.submit(file.sync) if file else None
            if store.clock.now_ms() - saved_ms >= SAVE_PROGRESS_MS:
                self._save_progress(recovery, plan)
                saved_ms = store.clock.now_ms()
            self._on_progress(stage, done, bound)

        with ThreadPoolExecutor(1) as pool:
            report = recovery.run(plan, is_clean=is_clean, on_progress=save_and_report)
        _raise_failure(sync)
        self._note_recovered(recovery)
        store.dispatcher.deletions.settle(store.commit_log.min_offset, report.log_end)
        if not is_clean:
            # The bytes that a killed process wrote may still be only in the page cache.
            store.commit_log.flushed_offset = report.scanned_from
            self._mark_names_unsynced()
            store.flusher.flush_recovered()
        return report

    def _plan_recovery(self, *, is_clean: bool) -> RecoveryPlan:
        store = self._store
        checkpoint = store.flusher.checkpoint
        if not is_clean:
            store.index_files.recover(checkpoint.index_msg_timestamp)
        newest_units = [queue.consume_queue.last_physical_offset for queue in store.queues]
        newest_unit = max(newest_units, default=-1)
        files = first_records(store.commit_log.files.files)
        queues_durable = queues_durable_offset(
            is_clean=is_clean, files=files, newest_unit=newest_unit, checkpoint=checkpoint
        )
        index_durable = index_durable_offset(
            is_clean=is_clean,
            index_end=store.index_files.end_physical_offset,
            queues_durable=queues_durable,
        )
        rewrite_from = log_durable_offset(is_clean=is_clean, files=files, checkpoint=checkpoint)
        store.dispatcher.loaded(newest_unit, queues_durable)
        store.indexer.loaded(index_durable)
        if newest_unit < 0:
            store.flusher.reset_queue_checkpoint()
        durable_offsets = {taker.name: taker.durable_offset() for taker in store.takers}
        return plan_recovery(files, newest_unit, durable_offsets, rewrite_from)

    def _note_recovered(self, recovery: Recovery) -> None:
        """Hand the recovered data to the takers' next flush, which moves the checkpoint."""
        for taker in self._store.takers:
            taker.recovered(recovery.newest)

    def _save_progress(self, recovery: Recovery, plan: RecoveryPlan) -> None:
        """Bring the results of recovery so far to disk, where an interrupted start resumes."""
        store = self._store
        assert recovery.newest is not None
        newest_offset, _ = recovery.newest
        # The log too: the bytes that a killed process wrote may still be only in the page cache.
        for file in store.commit_log.files.files:
            if plan.scan_from < file.end_offset and file.start_offset <= newest_offset:
                file.sync()
        self._note_recovered(recovery)
        self._mark_names_unsynced()
        store.flusher.flush_recovered()

    def _mark_names_unsynced(self) -> None:
        """Have the next flush sync all folders that may have new files since the checkpoint.

        Tables and positions too: what they say is acted on, so a power cut must not bring back
        those that a killed process was about to replace.
        """
        store = self._store
        queue_folders = {queue.files.directory for queue in store.dispatcher.dirty}
        for folder in (
            store.root,
            store.root / "config",
            store.root / POSITIONS_FOLDER,
            store.root / FOLDER,
            store.commit_log.files.directory,
            store.index_files.directory,
            *(store.root / kind.folder for kind in QUEUE_KINDS),
            *queue_folders,
            *(folder.parent for folder in queue_folders),
        ):
            store.fs.mark_names_unsynced(folder)


def _two_kinds(queue: StoreQueue) -> StoreFormatError:
    return StoreFormatError(
        queue.consume_queue.files.directory,
        "is a queue that has batches elsewhere in the store, in batchconsumequeue",
        "Apache RocketMQ does not open such a store either: move away the folder whose kind the "
        "topic does not have (queue.type in config/topics.json)",
    )


def _raise_failure(sync: Future[None] | None) -> None:
    if sync is not None:
        sync.result()
