"""The tier of a broker, opened in a thread; until then it has no queues."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker.tiered.access.drivers import TierDrivers, mark_file
from headrace_broker.tiered.access.standings import Standings
from headrace_broker.tiered.container.metadata import TierMetadata
from headrace_broker.tiered.container.tier import Tier
from headrace_broker.tiered.container.tier_index import TierIndex
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_broker.tiered.objects.sizes import SIZES
from headrace_protocol.tier.time_limits import TimeLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.tiered.access.lives import Lives
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.container.metadata import TopicRow
    from headrace_broker.tiered.container.stored_tier import StoredTier, TierQueue
    from headrace_protocol.tier.driver import AppendDriver, Failure

log = structlog.get_logger("headrace.broker")


class TierAccess:
    """Opens the tier once, and names its queues.

    writing: held by whoever appends, deletes or expires. is_open: True once all queues are known.
    drivers: of its folder or bucket. object_sizes: of a tier of objects. lives: of the topics that
    it has. standings: of its queues.
    """

    object_sizes = SIZES

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
        limits = TimeLimits(start=_start_thread)
        self.drivers = TierDrivers(
            settings,
            files.apart(),
            mark_file(settings.root, files),
            limits,
            has_content=lambda: self._has_segments,
        )
        # The metadata names bytes in the folder.
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
                _start_thread(partial(self._open_for, opening))
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
        failure = self._check_mark() or tier.start(now_ms)
        if failure is not None:
            raise OSError(str(failure))
        self.end_old_lives()
        self.is_open = True

    def _check_mark(self) -> Failure | None:
        mark = self.drivers.mark
        return None if mark is None else mark.check()

    def _new_tier(self) -> StoredTier:
        settings, driver = self._settings, self.drivers.marked
        if settings.keeps_objects:
            return ObjectTier(driver, settings.home, self.object_sizes)
        metadata = TierMetadata(metadata_path(settings.root), self._files)
        self._has_segments = metadata.has_segments
        return open_files(settings, driver, metadata, self._files)

    def look(self, wait_s: float) -> None:
        """Look for the mark of the location; open the tier if it is not. Raises OSError.

        wait_s: as in ``open``. Raises StoreFormatError as well.
        """
        if not self.is_open:
            self.open(wait_s)
        elif (failure := self._check_mark()) is not None:
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

    def location(self) -> tuple[str, str, str] | None:
        """URL, endpoint and region of the folder or bucket, without secrets; None in memory."""
        bucket, folder = self._settings.bucket, self._settings.folder
        if bucket is not None:
            return bucket.url, bucket.endpoint, bucket.region
        # Not resolved: the folder may hang.
        return (folder.absolute().as_uri(), "", "") if folder is not None else None

    def topics(self) -> list[TopicRow]:
        """The ids of topics in index files; none before the tier is open, and none of objects."""
        tier = self._tier
        return tier.metadata.topics() if isinstance(tier, Tier) else []

    def close(self) -> None:
        """Release local files, and ask nothing more of the drivers."""
        self.drivers.limits.end_by(monotonic())
        opening = self._opening
        if opening is not None:
            opening.exception()
        tier, self._tier, self.is_open = self._tier, None, False
        if tier is not None:
            tier.close()


def _start_thread(work: Callable[[], None]) -> None:
    """Run something in a thread; trio keeps threads for reuse."""
    trio.lowlevel.start_thread_soon(work, lambda _: None)


def metadata_path(root: Path) -> Path:
    """The metadata of a tier in Apache's layout, in the store's directory."""
    return root / "config" / "tieredStoreMetadata.json"


def open_files(
    settings: TierSettings, driver: AppendDriver, metadata: TierMetadata, files: Files
) -> Tier:
    """A tier in Apache's layout, not started yet. Raises StoreFormatError, OSError."""
    home, size = settings.home, settings.index_size
    index = TierIndex(settings.root, driver, metadata, home, files, size)
    return Tier(driver, home, metadata, settings.limits, index)
