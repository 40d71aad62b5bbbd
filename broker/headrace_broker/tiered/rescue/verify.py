"""``headrace tier verify``: compares what a tier names with what is stored."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.store.errors import StoreError, StoreFormatError
from headrace_broker.tiered.access.tier_access import metadata_path
from headrace_broker.tiered.container.flat_queue import FlatQueue
from headrace_broker.tiered.container.metadata import TierMetadata
from headrace_broker.tiered.container.recovery import tags_codes
from headrace_broker.tiered.objects.batch import object_bytes_min, read_directory
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_broker.tiered.rescue.listing import (
    FileListing,
    list_objects,
    open_driver,
    require,
)
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.paths import FileKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.container.metadata import SegmentRow
    from headrace_broker.tiered.container.stored_tier import Name, TierQueue
    from headrace_protocol.columns import Array
    from headrace_protocol.tier.driver import AppendDriver, PutDriver
    from headrace_protocol.tier.paths import Home

_REBUILD: Final = "headrace tier rebuild writes it anew"
_UNNAMED: Final = "is not named; headrace tier sweep deletes such leftovers"
_UNITS_AT_ONCE: Final = 4096
_BYTES_AT_ONCE: Final = 4 << 20


class Problem(NamedTuple):
    """Something that is not as it should be. is_damage: false for what a start puts right."""

    path: str
    problem: str
    is_damage: bool = True


class Report(NamedTuple):
    """The result of a check. message_count: in the ranges of all queues, gaps included."""

    queue_count: int
    message_count: int
    problems: list[Problem]


def verify(settings: TierSettings, *, deep: bool) -> Report:
    """Compare names and sizes; with ``deep`` read and check each record. Changes nothing.

    Raises StoreError if the location can't be reached.
    """
    driver = open_driver(settings)
    if settings.keeps_objects:
        return _verify_objects(settings.home, driver, deep)
    return _verify_files(settings, driver, deep)


# -- Apache's layout -------------------------------------------------------------------------------


def _verify_files(settings: TierSettings, driver: AppendDriver, deep: bool) -> Report:
    path = metadata_path(settings.root)
    try:
        metadata = TierMetadata(path)
    except StoreFormatError as error:
        return Report(0, 0, [Problem(str(path), f"can't be read ({error}); {_REBUILD}")])
    listing = FileListing(settings.home, metadata, driver)
    problems = [*_alien_queues(settings, metadata), *_files(listing)]
    if not listing.names and listing.unnamed:
        problems.insert(
            0, Problem(str(path), f"names no queue, but the tier has messages; {_REBUILD}")
        )
    queues = _flat_queues(settings, driver, metadata)
    if deep:
        for queue in queues.values():
            problems += _records(queue)
    return _report(queues.values(), problems)


def read_queues(settings: TierSettings) -> dict[Name, TierQueue]:
    """All queues that a tier names, to be read only. Raises StoreError, StoreFormatError."""
    if settings.keeps_objects:
        tier = ObjectTier(open_driver(settings), settings.home)
        require(tier.look())
        return dict(tier.queues)
    metadata = TierMetadata(metadata_path(settings.root))
    return dict(_flat_queues(settings, open_driver(settings), metadata))


def _flat_queues(
    settings: TierSettings, driver: AppendDriver, metadata: TierMetadata
) -> dict[Name, FlatQueue]:
    queues = {}
    folder = settings.home.cluster_folder
    for name in metadata.queues():
        if name.broker == settings.home.broker:
            queue = FlatQueue(driver, folder, name, metadata, settings.limits)
            row = metadata.queue(name)
            queue.min_offset = row.min_offset if row is not None else 0
            queues[name.topic, name.queue_id] = queue
    return queues


def _alien_queues(settings: TierSettings, metadata: TierMetadata) -> Iterator[Problem]:
    for name in metadata.queues():
        if name.broker != settings.home.broker:
            yield Problem(
                name.path,
                f"belongs to another broker than {settings.home.broker}, so it is not read",
            )


def _files(listing: FileListing) -> Iterator[Problem]:
    for address, rows in listing.files():
        sizes = listing.sizes.get(address.path, {})
        for row in rows:
            path = address.segment_path(row.base_offset)
            yield from _size_problems(path, row, sizes.get(row.base_offset), row is rows[-1])
        if address.kind is FileKind.COMMIT_LOG:
            for one, other in pairwise(rows):
                if one.end != other.base_offset:
                    problem = f"follows {one.end} with a gap: messages are lost"
                    yield Problem(address.segment_path(other.base_offset), problem)
    for entry in listing.unnamed:
        yield Problem(entry.path, _UNNAMED, is_damage=False)


def _size_problems(
    path: str, row: SegmentRow, size: int | None, is_last: bool
) -> Iterator[Problem]:
    """size: of the file; None without one. is_last: the segment still grows."""
    if size is None:
        if row.size:
            yield Problem(path, f"is missing; the metadata says {row.size} bytes")
    elif size < row.size:
        yield Problem(path, f"has {size} bytes, the metadata says {row.size}")
    elif size > row.size:
        problem = f"has {size - row.size} bytes more than the metadata says"
        yield Problem(path, problem, is_damage=not is_last)


# -- object layout ---------------------------------------------------------------------------------


def _verify_objects(home: Home, driver: PutDriver, deep: bool) -> Report:
    tier = ObjectTier(driver, home)
    failure = tier.look()
    sizes = list_objects(driver, tier.folder)
    if failure is not None:
        if failure.kind is FailureKind.UNREACHABLE:
            raise StoreError(str(failure))
        is_new = failure.kind is FailureKind.MISSING and not sizes
        problem = f"{failure.reason}; {_REBUILD}"
        return Report(0, 0, [] if is_new else [Problem(failure.path, problem)])
    problems = list(_objects(tier, sizes))
    old = tier.check_age(tier.manifest, [tier.reader.path(name) for name in sizes])
    problems += [] if old is None else [_of(old)]
    for queue in tier.queues.values():
        for one, other in pairwise(piece.part for piece in queue.state.pieces):
            if one.end > other.first or one.log_end != other.log_base:
                problem = f"queue offsets {one.first} and {other.first} are not in one log"
                problems.append(Problem(queue.name.path, problem))
    if deep:
        for name in tier.inventory.objects.keys() & sizes.keys():
            row = read_directory(driver, tier.reader.path(name))
            if isinstance(row, Failure):
                problems.append(_of(row))
        for queue in tier.queues.values():
            problems += _records(queue)
    return _report(tier.queues.values(), problems)


def _objects(tier: ObjectTier, sizes: dict[str, int]) -> Iterator[Problem]:
    for name, size_min in _named_sizes(tier).items():
        size = sizes.get(name)
        path = tier.reader.path(name)
        if size is None:
            yield Problem(path, "is missing")
        elif size < size_min:
            yield Problem(path, f"has {size} bytes, at least {size_min} are named")
    for name in sorted(sizes.keys() - tier.named()):
        yield Problem(tier.reader.path(name), _UNNAMED, is_damage=False)


def _named_sizes(tier: ObjectTier) -> dict[str, int]:
    """The least size of each object that the manifest names."""
    found = {each.name: object_bytes_min(each.row()) for each in tier.inventory.objects.values()}
    for named in [*tier.manifest.manifest.tail, *tier.manifest.manifest.catalogs]:
        found[named.name] = max(found.get(named.name, 0), named.stop)
    return found


# -- records ---------------------------------------------------------------------------------------


def _report(queues: Collection[TierQueue], problems: list[Problem]) -> Report:
    count = sum(queue.commit_offset - queue.min_offset for queue in queues)
    return Report(len(queues), count, problems)


def _of(failure: Failure) -> Problem:
    if failure.kind is FailureKind.UNREACHABLE:
        raise StoreError(str(failure))
    return Problem(failure.path, failure.reason)


def _records(queue: TierQueue) -> Iterator[Problem]:
    """Check all records: length, magic, offsets, CRC of the body, tags in the unit."""
    at = queue.min_offset
    while at < queue.commit_offset:
        found = queue.units(at, _UNITS_AT_ONCE)
        if isinstance(found, Failure):
            problem = _of(found)
            where = f"units from queue offset {at} on, which are not checked"
            yield problem._replace(problem=f"{where}: {problem.problem}")
            return
        if not len(found.units):
            return
        for begin, end in portions(found.units):
            yield from _check(queue, found.units[begin:end], found.first + begin)
        at = found.first + len(found.units)


def portions(units: Array) -> Iterator[tuple[int, int]]:
    """Ranges of units whose records take some MiB together."""
    totals = np.cumsum(np.maximum(units["size"].astype(np.int64), 0))
    begin = 0
    while begin < len(units):
        before = int(totals[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(totals, before + _BYTES_AT_ONCE, "right")), begin + 1)
        yield begin, end
        begin = end


def _check(queue: TierQueue, units: Array, first: int) -> list[Problem]:
    """Check records; of damaged ones each is named."""
    records = queue.records(units, np.arange(first, first + len(units)), check_bodies=True)
    if isinstance(records, Failure):
        problem = _of(records)
        if len(units) > 1:
            middle = len(units) // 2
            parts = (
                _check(queue, units[:middle], first),
                _check(queue, units[middle:], first + middle),
            )
            if found := parts[0] + parts[1]:
                return found
        return [problem._replace(problem=f"queue offset {first}: {problem.problem}")]
    others = np.flatnonzero(units["tags_code"] != tags_codes(records))
    return [
        Problem(queue.name.path, f"queue offset {first + number}: its unit has other tags")
        for number in others.tolist()
    ]
