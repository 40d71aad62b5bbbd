"""``headrace tier copy``: copies a tier to another location, in either layout.

A copy that was cut short is run again: each queue continues at its end in the target.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.filesystem import Files
from headrace_broker.tiered.access.saved_tables import SavedTables, read_tables, tables_path
from headrace_broker.tiered.access.tier_access import metadata_path, open_files
from headrace_broker.tiered.container.location_mark import mark_path, mark_text, read_mark
from headrace_broker.tiered.container.metadata import TierMetadata
from headrace_broker.tiered.container.stored_tier import Group
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_broker.tiered.rescue.listing import open_driver, require
from headrace_broker.tiered.rescue.rebuild import locked
from headrace_broker.tiered.rescue.verify import portions, read_queues
from headrace_protocol.tier.driver import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.container.stored_tier import Name, StoredTier, TierQueue

_UNITS_AT_ONCE: Final = 4096
# Appended together: in a bucket an object for each queue would be many small ones.
_TOGETHER_BYTES: Final = 16 << 20


def copy(source: TierSettings, target: TierSettings, now_ms: int) -> int:
    """Copy all messages that the target lacks; returns their number.

    Raises StoreError for a damaged source, a target with other messages, and a location that can't
    be reached; StoreLocked while a broker runs on the store of a target in a folder.
    """
    if (source.folder, source.bucket, source.home) == (target.folder, target.bucket, target.home):
        raise StoreError("source and target are the same tier: name two config files")
    if source.root == target.root and not source.keeps_objects and not target.keeps_objects:
        raise StoreError(
            f"both tiers have their metadata in {source.root}: copy the folder as it is, and set "
            "tieredStoreFilePath to the copy"
        )
    queues = read_queues(source)
    _copy_mark(source, target)
    with _opened(target, now_ms) as tier:
        count = _copy_queues(queues, tier, now_ms)
        tier.sync()
    _copy_tables(source, target)
    return count


@contextmanager
def _opened(settings: TierSettings, now_ms: int) -> Iterator[StoredTier]:
    driver = open_driver(settings)
    if settings.keeps_objects:
        objects = ObjectTier(driver, settings.home)
        require(objects.start(now_ms))
        yield objects
        return
    with locked(settings.root):
        metadata = TierMetadata(metadata_path(settings.root))
        tier = open_files(settings, driver, metadata, Files())
        require(tier.start(now_ms))
        for failure in tier.damaged.values():
            require(failure)
        try:
            yield tier
        finally:
            tier.close()


def _copy_queues(queues: dict[Name, TierQueue], tier: StoredTier, now_ms: int) -> int:
    count = byte_count = 0
    groups: dict[Name, Group] = {}
    for name, queue in sorted(queues.items()):
        if name not in tier.queues:
            require(tier.create([name], now_ms))
        _compare_ends(name, queue, tier.queues[name])
        for group in _groups(queue, tier.queues[name].commit_offset):
            if name in groups or byte_count >= _TOGETHER_BYTES:
                require(tier.append_all(groups, now_ms))
                groups, byte_count = {}, 0
            groups[name] = group
            byte_count += int(group.records.size.sum())
            count += len(group.records)
    require(tier.append_all(groups, now_ms))
    return count


def _compare_ends(name: Name, source: TierQueue, target: TierQueue) -> None:
    """Raise StoreError if the target has other messages than the source."""
    end = target.commit_offset
    if end > source.commit_offset:
        raise StoreError(
            f"queue {name[0]}/{name[1]} ends at {end} in the target and at {source.commit_offset} "
            "in the source: this target has other messages, name an empty one"
        )
    if not source.min_offset < end or target.min_offset == end:
        return
    found = [_size_and_time(queue, end - 1) for queue in (source, target)]
    if found[0] != found[1]:
        raise StoreError(
            f"queue {name[0]}/{name[1]} has another message at {end - 1} in the target than in the "
            "source: name an empty one"
        )


def _size_and_time(queue: TierQueue, queue_offset: int) -> tuple[int, int]:
    units = require(queue.units(queue_offset, 1)).units
    return int(units["size"][0]), require(queue.store_time(queue_offset))


def _groups(queue: TierQueue, queue_offset: int) -> Iterator[Group]:
    """The records from an offset on, each checked. Raises StoreError for a damaged one."""
    at = max(queue_offset, queue.min_offset)
    while at < queue.commit_offset:
        found = require(queue.units(at, _UNITS_AT_ONCE))
        if not len(found.units):
            return
        for begin, end in portions(found.units):
            units = found.units[begin:end]
            offsets = np.arange(found.first + begin, found.first + end)
            records = queue.records(units, offsets, check_bodies=True)
            if isinstance(records, Failure):
                raise StoreError(
                    f"{records}; headrace tier verify --deep names each damaged message"
                )
            yield Group(records, units["tags_code"].astype(np.int64))
        at = found.first + len(found.units)


def _copy_mark(source: TierSettings, target: TierSettings) -> None:
    """Mark the target as the same tier. Raises StoreError if it is that of another one."""
    if target.folder is not None:
        target.folder.mkdir(parents=True, exist_ok=True)
    text = read_mark(open_driver(source), source.home)
    if isinstance(text, Failure):
        return  # of Apache's broker: the first start marks it
    driver = open_driver(target, is_marked=False)
    moved = mark_text(text, target.home)
    found = read_mark(driver, target.home)
    if isinstance(found, Failure):
        require(driver.put(mark_path(target.home), moved))
    elif found != moved:
        raise StoreError("the target has the mark of another tier: name an empty one")


def _copy_tables(source: TierSettings, target: TierSettings) -> None:
    tables = read_tables(open_driver(source), source.home)
    if not isinstance(tables, SavedTables):
        return
    home, driver = target.home, open_driver(target)
    moved = msgspec.structs.replace(tables, cluster=home.cluster, broker=home.broker)
    etag = driver.etag(tables_path(home))
    replaces = etag if isinstance(etag, str) else ""
    require(driver.put(tables_path(home), msgspec.json.encode(moved), replaces))
