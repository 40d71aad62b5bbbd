"""The place of a tier: its driver, and what it has beside what the tier names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.filesystem import Files
from headrace_broker.tiered.access.tier_access import open_place, place_file
from headrace_broker.tiered.container.flat_file import Place
from headrace_broker.tiered.container.place_mark import Marked, PlaceMark
from headrace_broker.tiered.driver.metered import Metered, Operations
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_broker.tiered.objects.object_tier import CATALOGS, DATA
from headrace_protocol.tier.driver import Failure
from headrace_protocol.tier.paths import (
    FileKind,
    cluster_folder,
    index_queue,
    is_segment,
    sizes_by_folder,
)
from headrace_protocol.tier.time_limits import TimeLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.container.metadata import SegmentRow, TierMetadata
    from headrace_broker.tiered.container.tier import Home
    from headrace_protocol.tier.driver import AppendDriver, Driver, Entry, PutDriver


def open_folder(settings: TierSettings) -> AppendDriver:
    """The driver of a tier in Apache's layout, within limits of time.

    Raises StoreError for one in memory, and for a place that lacks the store's mark.
    """
    if settings.folder is None:
        raise StoreError("tieredBackendServiceProvider=memory: nothing of it outlives its broker")
    limits = TimeLimits()
    driver = Metered(PosixDriver(settings.folder), Operations(), limits)
    mark = _mark(settings, limits)
    return driver if mark is None else Marked(driver, mark)


def open_objects(settings: TierSettings) -> PutDriver:
    """The driver that puts objects into the place of a tier, within limits of time.

    Raises StoreError for a bucket that can't be addressed, and as ``open_folder``.
    """
    limits = TimeLimits()
    driver, mark = open_unmarked(settings, limits), _mark(settings, limits)
    return driver if mark is None else Marked(driver, mark)


def open_unmarked(settings: TierSettings, limits: TimeLimits | None = None) -> PutDriver:
    """As ``open_objects``, whether or not the place has the store's mark."""
    try:
        return Metered(open_place(settings, Files()), Operations(), limits or TimeLimits())
    except (ValueError, ImportError) as error:
        raise StoreError(str(error)) from error


def _mark(settings: TierSettings, limits: TimeLimits) -> PlaceMark | None:
    """The mark that the place must have; None for a store without one."""
    file = place_file(settings.root)
    if file.load() is None:
        return None
    mark = PlaceMark(
        lambda: open_unmarked(settings, limits),
        settings.home,
        file,
        limits,
        root=settings.folder,
        files=Files(),
    )
    expect(mark.check())
    return mark


def entries(driver: Driver, folder: str) -> list[Entry]:
    """All that is below a folder. Raises StoreError if the place can't be reached."""
    found = driver.entries(folder)
    if isinstance(found, Failure):
        raise StoreError(str(found))
    return found


def expect(failure: Failure | None) -> None:
    """Raise StoreError for a failure."""
    if failure is not None:
        raise StoreError(str(failure))


def list_objects(driver: Driver, folder: str) -> dict[str, int]:
    """The objects of a broker by name, with their sizes. Raises StoreError."""
    return {
        entry.path.removeprefix(f"{folder}/"): entry.size
        for kind in (DATA, CATALOGS)
        for entry in entries(driver, f"{folder}/{kind}")
    }


class FileListing:
    """The files of a broker in Apache's layout.

    names: its queues in the metadata. sizes: by folder, as ``sizes_by_folder``. unnamed: files that
    neither the metadata names nor a start would take over.
    """

    def __init__(self, home: Home, metadata: TierMetadata, driver: Driver) -> None:
        """Read the listing. Raises StoreError."""
        self._metadata = metadata
        self._folder = cluster_folder(home.cluster)
        self._index = index_queue(home.broker)
        self.names = [name for name in metadata.queues() if name.broker == home.broker]
        found = entries(driver, f"{self._folder}/{home.broker}")
        self.sizes = sizes_by_folder(found)
        kept = set(self._kept())
        self.unnamed = [
            entry for entry in found if is_segment(entry.path) and entry.path not in kept
        ]

    def files(self) -> Iterator[tuple[Place, list[SegmentRow]]]:
        """Each file in the metadata, with the rows of its segments."""
        for name in self.names:
            for kind in (FileKind.COMMIT_LOG, FileKind.CONSUME_QUEUE):
                yield Place(self._folder, name, kind), self._metadata.segments(name, kind)
        index = Place(self._folder, self._index, FileKind.INDEX)
        yield index, self._metadata.segments(self._index, FileKind.INDEX)

    def _kept(self) -> Iterator[str]:
        for place, rows in self.files():
            for row in rows:
                yield place.segment_path(row.base_offset)
            if place.kind is not FileKind.INDEX:
                # Begun after the metadata was saved.
                end = rows[-1].end if rows else 0
                for base in self.sizes.get(place.path, {}):
                    if base >= end:
                        yield place.segment_path(base)
