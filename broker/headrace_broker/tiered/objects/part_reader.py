"""Reads of parts: a small one is fetched whole and kept, of a large one only what is asked for."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Final

from headrace_protocol.tier.driver import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.tier.driver import Buffer, Driver, Range

_KEPT_BYTES: Final = 8 << 20


class PartReader:
    """Reads regions of objects, for all threads."""

    def __init__(self, driver: Driver, folder: str, whole_bytes: int) -> None:
        """whole_bytes: most bytes of a region that is read as a whole."""
        self._driver = driver
        self._folder = folder
        self._whole_bytes = whole_bytes
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, Range], Buffer] = OrderedDict()
        self._kept_bytes = 0

    def path(self, name: str) -> str:
        """The path of an object."""
        return f"{self._folder}/{name}"

    def read(self, name: str, region: Range, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """Ranges of an object, all of them in one region. Fails as ``Driver.read``."""
        start, stop = region
        if stop - start > self._whole_bytes:
            return self._driver.read(self.path(name), ranges)
        data = self._whole(name, region)
        if isinstance(data, Failure):
            return data
        view = memoryview(data)
        return [view[begin - start : end - start] for begin, end in ranges]

    def _whole(self, name: str, region: Range) -> Buffer | Failure:
        key = name, region
        with self._lock:
            data = self._kept.get(key)
            if data is not None:
                self._kept.move_to_end(key)
                return data
        read = self._driver.read(self.path(name), [region])
        if isinstance(read, Failure):
            return read
        with self._lock:
            if key not in self._kept:
                self._kept[key] = read[0]
                self._kept_bytes += len(read[0])
            while self._kept_bytes > _KEPT_BYTES:
                _, dropped = self._kept.popitem(last=False)
                self._kept_bytes -= len(dropped)
        return read[0]
