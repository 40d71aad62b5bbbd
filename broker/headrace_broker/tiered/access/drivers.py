"""Drivers of a tier's folder or bucket: metered, within limits of time, and marked."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.tiered.container.location_mark import MARK_FILE, Folder, LocationMark, Marked
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_broker.tiered.driver.metered import Metered, Operations
from headrace_broker.tiered.driver.posix import PosixDriver

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_protocol.tier.time_limits import TimeLimits


class TierDrivers:
    """The drivers of one tier, which share limits and counts.

    open: opens what they have in common; raises ValueError for a bucket that can't be addressed,
    ImportError without the extra ``tier``. mark: of the folder or bucket; None in memory.
    """

    def __init__(
        self,
        settings: TierSettings,
        files: Files,
        mark_file: ConfigFile,
        limits: TimeLimits,
        has_content: Callable[[], bool] = lambda: False,
    ) -> None:
        """files: of the folder. has_content: see ``LocationMark``."""
        self.open: Callable[[], Any] = partial(_open, settings, files)
        self.operations = Operations()
        self.limits = limits
        self.mark: LocationMark | None = None
        if settings.is_lasting:
            folder = None if settings.folder is None else Folder(settings.folder, files)
            self.mark = LocationMark(
                lambda: self.unmarked, limits, settings.home, mark_file, folder, has_content
            )

    @cached_property
    def unmarked(self) -> Metered:
        """The driver that works whatever mark there is. Raises as ``open``."""
        return Metered(self.open(), self.operations, self.limits)

    @property
    def marked(self) -> Metered | Marked:
        """The driver that fails while the mark is missing. Raises as ``open``."""
        return self.unmarked if self.mark is None else Marked(self.unmarked, self.mark)

    @property
    def problem(self) -> str:
        """Reason why the location is not known to be this tier's; "" if it is."""
        return "" if self.mark is None else self.mark.problem

    @property
    def problem_seconds(self) -> float:
        """Seconds for which it has had that problem; 0 without one."""
        return 0.0 if self.mark is None else self.mark.problem_seconds


def mark_file(root: Path, files: Files | None = None) -> ConfigFile:
    """The store's copy of the mark of its tier."""
    return ConfigFile(root / "config" / MARK_FILE, files)


def _open(settings: TierSettings, files: Files) -> Any:
    if settings.bucket is not None:
        # An extra, which only brokers with a bucket need.
        from headrace_protocol.tier.objects import open_objects

        return open_objects(settings.bucket)
    return MemoryDriver() if settings.folder is None else PosixDriver(settings.folder, files)
