"""The driver of a tier whose broker does not run, and listings of what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.filesystem import Files
from headrace_broker.tiered.access.drivers import TierDrivers, mark_file
from headrace_broker.tiered.container.flat_file import FileAddress
from headrace_broker.tiered.objects.object_tier import CATALOGS, DATA
from headrace_protocol.tier.driver import Failure
from headrace_protocol.tier.paths import (
    FileKind,
    is_segment,
    sizes_by_folder,
)
from headrace_protocol.tier.time_limits import TimeLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.container.metadata import SegmentRow, TierMetadata
    from headrace_protocol.tier.driver import Driver
    from headrace_protocol.tier.operations import Wrapped
    from headrace_protocol.tier.paths import Home

T = TypeVar("T")


def open_driver(settings: TierSettings, *, is_marked: bool = True) -> Wrapped:
    """The driver of a tier, within limits of time.

    is_marked: fail unless the location has the mark that the store expects, if it expects one.

    Raises StoreError for a tier in memory, for a bucket that can't be addressed, and for a location
    without that mark.
    """
    if not settings.is_lasting:
        raise StoreError("tieredBackendServiceProvider=memory: nothing of it outlives its broker")
    file = mark_file(settings.root)
    drivers = TierDrivers(settings, Files(), file, TimeLimits())
    try:
        driver = drivers.unmarked
    except (ValueError, ImportError) as error:
        raise StoreError(str(error)) from error
    if drivers.mark is None or not is_marked or file.load() is None:
        return driver
    require(drivers.mark.check())
    return drivers.marked


def require(found: T | Failure) -> T:
    """The result of an operation. Raises StoreError for a failure."""
    if isinstance(found, Failure):
        raise StoreError(str(found))
    return found


def list_objects(driver: Driver, folder: str) -> dict[str, int]:
    """The objects of a broker by name, with their sizes. Raises StoreError."""
    return {
        entry.path.removeprefix(f"{folder}/"): entry.size
        for kind in (DATA, CATALOGS)
        for entry in require(driver.entries(f"{folder}/{kind}"))
    }


class FileListing:
    """The files of a broker in Apache's layout.

    names: its queues in the metadata. sizes: by folder, as ``sizes_by_folder``. unnamed: files that
    neither the metadata names nor a start would take over.
    """

    def __init__(self, home: Home, metadata: TierMetadata, driver: Driver) -> None:
        """Read the listing. Raises StoreError."""
        self._metadata = metadata
        self._folder = home.cluster_folder
        self._index = home.index_queue
        self.names = [name for name in metadata.queues() if name.broker == home.broker]
        found = require(driver.entries(home.folder))
        self.sizes = sizes_by_folder(found)
        kept = set(self._kept())
        self.unnamed = [
            entry for entry in found if is_segment(entry.path) and entry.path not in kept
        ]

    def files(self) -> Iterator[tuple[FileAddress, list[SegmentRow]]]:
        """Each file in the metadata, with the rows of its segments."""
        for name in self.names:
            for kind in (FileKind.COMMIT_LOG, FileKind.CONSUME_QUEUE):
                yield FileAddress(self._folder, name, kind), self._metadata.segments(name, kind)
        index = FileAddress(self._folder, self._index, FileKind.INDEX)
        yield index, self._metadata.segments(self._index, FileKind.INDEX)

    def _kept(self) -> Iterator[str]:
        for address, rows in self.files():
            for row in rows:
                yield address.segment_path(row.base_offset)
            if address.kind is not FileKind.INDEX:
                # Begun after the metadata was saved.
                end = rows[-1].end if rows else 0
                for base in self.sizes.get(address.path, {}):
                    if base >= end:
                        yield address.segment_path(base)
