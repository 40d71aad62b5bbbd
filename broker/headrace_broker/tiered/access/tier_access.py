"""The tier of a broker, opened in a thread; until then it has no queues."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.tiered.access.standings import Standings
from headrace_broker.tiered.container.metadata import TierMetadata
from headrace_broker.tiered.container.place_mark import (
    PLACE_FILE,
    Marked,
    PlaceMark,
)
from headrace_broker.tiered.container.tier import Tier
from headrace_broker.tiered.container.tier_index import TierIndex
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_broker.tiered.driver.metered import Metered, Operations
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_protocol.tier.paths import cluster_folder
from headrace_protocol.tier.time_limits import TimeLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.tiered.access.lives import Lives
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.container.metadata import TopicRow
    from headrace_broker.tiered.container.stored_tier import StoredTier, TierQueue
    from headrace_protocol.tier.driver import AppendDriver, PutDriver

log = structlog.get_logger("headrace.broker")


class TierAccess:
    """Opens the tier once, and names its queues.

    writing: held by whoever appends, deletes or expires. is_open: whether all queues are known.
    operations: what was asked of its place. limits: how long that may take. lives: which life of a
    topic its queues are of. standings: whether its queues have the log's messages.
    """

    def __init__(
        self,
        settings: TierSettings,
        files: Files,
        now_ms: Callable[[], int],
        lives: Lives,
    ) -> None:
        self.writing = Lock()
        self.is_open = False
        self.standings = Standings(now_ms)
        self.now_ms = now_ms
        self.lives = lives
        self._settings = settings
        self._files = files
        self._place_files = files.apart()
        self.operations = Operations()
        # trio keeps threads for reuse.
        self.limits = TimeLimits(
            start=lambda work: trio.lowlevel.start_thread_soon(work, lambda _: None)
        )
        self._folder = _new_driver(settings, self._place_files)
        self.mark: PlaceMark | None = None
        if settings.is_lasting:
            self.mark = PlaceMark(
                self._open_unmarked,
                settings.home,
                place_file(settings.root, files),
                self.limits,
                root=settings.folder,
                files=self._place_files,
                has_content=lambda: self._has_segments,
            )
        # Whether the metadata names bytes in the place.
        self._has_segments = False
        self._lock = Lock()
        self._opening: Future[None] | None = None
        self._tier: StoredTier | None = None

    @property
    def tier(self) -> StoredTier:
        """The tier, which must be open."""
        assert self._tier is not None
        return self._tier

    def open(self, wait_s: float | None = None) -> None:
        """Open all queues unless that is done; one thread does it for all that wait.

        wait_s: how long to wait for it; it continues afterwards.

        Raises OSError if the store can't be reached in time, StoreFormatError if the metadata or an
        index file can't be read.
        """
        if self.is_open:
            return
        with self._lock:
            opening = self._opening
            if opening is None:
                opening = self._opening = Future()
                trio.lowlevel.start_thread_soon(partial(self._open_for, opening), lambda _: None)
        try:
            opening.result(wait_s)
        except TimeoutError as error:
            raise OSError(str(error) or "its queues are still being opened") from None

    def _open_for(self, opening: Future[None]) -> None:
        problem: BaseException | None = None
        try:
            self._open()
        except BaseException as error:  # noqa: BLE001 - raised by those that wait
            problem = error
        with self._lock:
            self._opening = None
        if problem is None:
            opening.set_result(None)
        else:
            opening.set_exception(problem)

    def _open(self) -> None:
        if self.is_open:
            return
        if self._tier is None:
            self._tier = self._new_tier()
        tier, now_ms = self._tier, self.now_ms()
        failure = (self.mark.check() if self.mark is not None else None) or tier.start(now_ms)
        if failure is not None:
            raise OSError(str(failure))
        self.end_old_lives()
        self.is_open = True

    def open_place(self) -> PutDriver:
        """The driver that puts objects into the place, within the same limits of time.

        Raises ValueError for a bucket that can't be addressed.
        """
        driver = Metered(
            open_place(self._settings, self._place_files), self.operations, self.limits
        )
        return Marked(driver, self.mark) if self.mark is not None else driver

    def _open_unmarked(self) -> PutDriver:
        is_folder = not self._settings.keeps_objects
        place = self._folder if is_folder else open_place(self._settings, self._place_files)
        return Metered(place, self.operations, self.limits)

    def _new_tier(self) -> StoredTier:
        settings = self._settings
        if settings.keeps_objects:
            return ObjectTier(self.open_place(), settings.home)
        metadata = TierMetadata(metadata_path(settings.root), self._files)
        self._has_segments = metadata.has_segments
        driver: AppendDriver = Metered(self._folder, self.operations, self.limits)
        if self.mark is not None:
            driver = Marked(driver, self.mark)
        return open_files(settings, driver, metadata, self._files)

    def look(self, wait_s: float) -> None:
        """Look for the mark of the place; open the tier if it is not. Raises OSError.

        wait_s: as in ``open``. Raises StoreFormatError as well.
        """
        if not self.is_open:
            self.open(wait_s)
        elif self.mark is not None and (failure := self.mark.check()) is not None:
            raise OSError(str(failure))

    def end_old_lives(self) -> None:
        """Delete the queues of topics that were deleted or made again. Raises OSError.

        Once the tier is open, whoever calls this holds ``writing``.
        """
        over = self.lives.over()
        if not over:
            return
        tier = self.tier
        for name in [*tier.queues, *tier.damaged]:
            if name[0] in over:
                self.delete(*name)
        tier.sync()
        # Files that a crash has left would be taken for queues if the metadata was lost. The ids
        # are forgotten last: until then this is repeated.
        failures = tier.clean_up(None, self.now_ms())
        if failures:
            raise OSError(str(failures[0]))
        self.lives.forget(over)

    def delete(self, topic: str, queue_id: int) -> None:
        """Delete a queue. Raises OSError."""
        failure = self.tier.delete(topic, queue_id)
        if failure is not None:  # the clean-up removes what is left
            log.warning("files of a deleted queue are left in the tier", reason=str(failure))

    def queue(self, topic: str, queue_id: int) -> TierQueue | None:
        """A queue that has messages; None also before the tier is open.

        Of a topic that was made again, None until the tier has a queue of the present life.
        """
        if self._tier is None or self.lives.is_over(topic):
            return None
        queue = self._tier.queues.get((topic, queue_id))
        return queue if queue is not None and queue.commit_offset else None

    def place(self) -> tuple[str, str, str] | None:
        """URL, endpoint and region of the place, without secrets; None in memory."""
        place, folder = self._settings.place, self._settings.folder
        if place is not None:
            return place.url, place.endpoint, place.region
        # Not resolved: the folder may hang.
        return (folder.absolute().as_uri(), "", "") if folder is not None else None

    def topics(self) -> list[TopicRow]:
        """The ids of topics in index files; none before the tier is open, and none of objects."""
        tier = self._tier
        return tier.metadata.topics() if isinstance(tier, Tier) else []

    def close(self) -> None:
        """Release local files, and ask nothing more of the place."""
        self.limits.end_by(monotonic())
        opening = self._opening
        if opening is not None:
            opening.exception()
        tier, self._tier, self.is_open = self._tier, None, False
        if tier is not None:
            tier.close()


def place_file(root: Path, files: Files | None = None) -> ConfigFile:
    """The store's copy of the mark of its tier's place."""
    return ConfigFile(root / "config" / PLACE_FILE, files)


def metadata_path(root: Path) -> Path:
    """The metadata of a tier in Apache's layout, in the store's directory."""
    return root / "config" / "tieredStoreMetadata.json"


def open_files(
    settings: TierSettings, driver: AppendDriver, metadata: TierMetadata, files: Files
) -> Tier:
    """A tier in Apache's layout, not started yet. Raises StoreFormatError, OSError."""
    home = settings.home
    folder = cluster_folder(home.cluster)
    size = settings.index_size
    index = TierIndex(settings.root, driver, metadata, folder, home.broker, files, size)
    index.open(is_clean=False)
    return Tier(driver, home, metadata, settings.limits, index)


def open_place(settings: TierSettings, files: Files) -> PutDriver:
    """The driver that puts objects into the place that the settings name.

    Raises ValueError for a bucket that can't be addressed, ImportError without the extra ``tier``.
    """
    is_put = settings.keeps_objects
    return _open_objects(settings, files) if is_put else _new_driver(settings, files)


def _open_objects(settings: TierSettings, files: Files) -> PutDriver:
    if settings.place is None:
        assert settings.folder is not None
        return PosixDriver(settings.folder, files)
    # An extra, which only brokers with a bucket need.
    from headrace_protocol.tier.objects import open_objects

    return open_objects(settings.place)


def _new_driver(settings: TierSettings, files: Files) -> PosixDriver | MemoryDriver:
    return MemoryDriver() if settings.folder is None else PosixDriver(settings.folder, files)
