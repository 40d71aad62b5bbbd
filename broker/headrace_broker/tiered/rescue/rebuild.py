"""``headrace tier rebuild``: rebuilds the metadata or the manifest of a tier from its objects.

No object is deleted, and what is replaced is kept as ``.bak``.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from shutil import rmtree
from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import BACKUP_SUFFIX, DAMAGED_SUFFIX
from headrace_broker.store.files.filesystem import Files, make_private
from headrace_broker.store.integrity.lock import StoreLock
from headrace_broker.tiered.access.saved_tables import read_tables
from headrace_broker.tiered.access.tier_access import metadata_path, open_files
from headrace_broker.tiered.container.metadata import TierMetadata
from headrace_broker.tiered.container.tier_index import FOLDER
from headrace_broker.tiered.objects.batch import read_directory
from headrace_broker.tiered.objects.object_tier import DATA, ObjectTier, epoch_and_number
from headrace_broker.tiered.rescue.choice import choose
from headrace_broker.tiered.rescue.listing import open_driver, require
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.paths import FileKind, sizes_by_folder
from headrace_protocol.tier.stored_queue import RecordHead

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.container.metadata import TopicRow
    from headrace_broker.tiered.container.stored_tier import StoredTier, TierQueue
    from headrace_broker.tiered.container.tier import Tier
    from headrace_protocol.tier.driver import AppendDriver, PutDriver
    from headrace_protocol.tier.rows import ObjectRow

_NEW_SUFFIX = ".new"


class Rebuilt(NamedTuple):
    """The tier as it is named now. problems: queues and objects that are left out."""

    tier: StoredTier
    problems: list[str]


def rebuild(settings: TierSettings, now_ms: int) -> Rebuilt:
    """Find all queues by the objects alone. Raises StoreError, StoreLocked, OSError."""
    driver = open_driver(settings)
    if settings.keeps_objects:
        return rebuild_objects(driver, settings, now_ms)
    with locked(settings.root):
        return rebuild_files(driver, settings, now_ms)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep brokers off a store, which is made if it is missing. Raises StoreLocked."""
    make_private(root)
    lock = StoreLock(root)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


# -- Apache's layout -------------------------------------------------------------------------------


def rebuild_files(driver: AppendDriver, settings: TierSettings, now_ms: int) -> Rebuilt:
    """As ``rebuild``; the caller has the store's lock."""
    path = metadata_path(settings.root)
    new_path = path.with_name(path.name + _NEW_SUFFIX)
    new_backup = new_path.with_name(new_path.name + BACKUP_SUFFIX)
    for left in (new_path, new_backup):
        left.unlink(missing_ok=True)
    is_readable, topics = _known_topics(driver, settings)
    metadata = TierMetadata(new_path)
    metadata.adopt_topics(topics)
    _put_aside(settings.root / FOLDER)
    tier = open_files(settings, driver, metadata, Files())
    require(tier.rebuild(now_ms))
    _index(driver, settings, tier, now_ms, has_ids=bool(topics))
    tier.sync()
    tier.close()
    suffix = BACKUP_SUFFIX if is_readable else DAMAGED_SUFFIX
    Files().replace(path, new_path.read_bytes(), path.with_name(path.name + suffix))
    for left in (new_path, new_backup):
        left.unlink(missing_ok=True)
    return Rebuilt(tier, [str(failure) for failure in tier.damaged.values()])


def _known_topics(driver: AppendDriver, settings: TierSettings) -> tuple[bool, list[TopicRow]]:
    """True if the old metadata is readable, and the ids of topics: its own, or those saved."""
    with suppress(StoreFormatError):
        topics = TierMetadata(metadata_path(settings.root)).topics()
        if topics:
            return True, topics
    saved = read_tables(driver, settings.home)
    return False, [] if isinstance(saved, Failure) else saved.topics


def _put_aside(folder: Path) -> None:
    if folder.exists():
        backup = folder.with_name(folder.name + BACKUP_SUFFIX)
        if backup.exists():
            rmtree(backup)
        Files().rename(folder, backup)


def _index(
    driver: AppendDriver, settings: TierSettings, tier: Tier, now_ms: int, *, has_ids: bool
) -> None:
    """Name the index files in the tier, and index what they may lack: all, without their ids."""
    name = settings.home.index_queue
    folder = f"{settings.home.cluster_folder}/{name.path}"
    sizes = sizes_by_folder(require(driver.entries(folder)))
    finished = sizes.get(f"{folder}/{FileKind.INDEX.name}", {}) if has_ids else {}
    rows = require(tier.index.adopt(finished, now_ms))
    if rows and _has_older(tier, rows[0].begin_timestamp):
        require(tier.index.adopt({}, now_ms))
    log_offsets = require(tier.index.last_log_offsets())
    for (topic, queue_id), queue in tier.queues.items():
        at = _offset_at(queue, log_offsets.get((topic, queue_id)))
        failure = tier.index_again(topic, queue_id, at, now_ms)
        # Damaged records can't be found by key, and must not keep the others from being read.
        if failure is not None and failure.kind is FailureKind.UNREACHABLE:
            require(failure)


def _offset_at(queue: TierQueue, log_offset: int | None) -> int:
    """The queue offset of the record at an offset of the log: the next file may have its keys."""
    head = queue.head(log_offset) if log_offset is not None else None
    return head.queue_offset if isinstance(head, RecordHead) else queue.min_offset


def _has_older(tier: Tier, begin_ms: int) -> bool:
    """True if there is a message that was stored before a time."""
    used = [queue for queue in tier.queues.values() if queue.min_offset < queue.commit_offset]
    times = [queue.store_time(queue.min_offset) for queue in used]
    return any(isinstance(ms, int) and ms < begin_ms for ms in times)


# -- object layout ---------------------------------------------------------------------------------


def rebuild_objects(driver: PutDriver, settings: TierSettings, now_ms: int) -> Rebuilt:
    """As ``rebuild``. A broker that runs sees that its epoch has ended, and uploads no more."""
    tier = ObjectTier(driver, settings.home)
    _keep_backup(driver, f"{tier.folder}/manifest.json")
    old = tier.look()
    if old is not None and old.kind is FailureKind.UNREACHABLE:
        require(old)
    manifest = tier.new_manifest()
    is_readable = manifest.look() is None
    if is_readable:
        manifest = tier.new_manifest()
        require(manifest.take())
    names = [entry.path for entry in require(driver.entries(f"{tier.folder}/{DATA}"))]
    rows, problems = _directories(driver, tier.folder, names)
    if not is_readable:
        epochs = [epoch_and_number(row.name)[0] for row in rows]
        require(manifest.take_anew(max(epochs, default=0) + 1))
    require(tier.adopt(manifest, choose(rows), now_ms))
    return Rebuilt(tier, problems)


def _keep_backup(driver: PutDriver, path: str) -> None:
    size = driver.size(path)
    if isinstance(size, Failure) and size.kind is FailureKind.MISSING:
        return
    (data,) = require(driver.read(path, [(0, require(size))]))
    backup = path + BACKUP_SUFFIX
    etag = driver.etag(backup)
    require(driver.put(backup, data, etag if isinstance(etag, str) else ""))


def _directories(
    driver: PutDriver, folder: str, paths: list[str]
) -> tuple[list[ObjectRow], list[str]]:
    rows, problems = [], []
    for path in paths:
        row = read_directory(driver, path)
        if not isinstance(row, Failure):
            # Its own name, whatever it says: objects may have been copied.
            name = path.removeprefix(f"{folder}/")
            if row.name == name:
                rows.append(row)
            else:
                problems.append(f"{path}: is a copy of {row.name}")
        elif row.kind is FailureKind.UNREACHABLE:
            require(row)
        else:
            problems.append(str(row))
    return rows, problems
