"""A bound on the number of mapped ConsumeQueues."""

from __future__ import annotations

import resource
from collections import deque
from typing import Final, Protocol

# Below Linux's default limit of 65,530 mappings per process (vm.max_map_count).
MAPS_MAX: Final = 30_000
_TRIES_MAX: Final = 8


class Mapped(Protocol):
    """A queue whose map can be released and made again."""

    @property
    def max_offset(self) -> int:
        """One past the last unit; grows with each write."""

    def unmap(self) -> None:
        """Release the map until it is needed again."""


def maps_max(open_files_max: int) -> int:
    """The number of maps to allow by the limit of open files."""
    is_unlimited = open_files_max == resource.RLIM_INFINITY
    return MAPS_MAX if is_unlimited else min(open_files_max // 2, MAPS_MAX)


class MapBudget:
    """Limits maps: each takes a descriptor, which clients need too, and one of Linux's mappings.

    Queues get at most half of the descriptors. The queue mapped longest ago and not written since
    is unmapped first; mapping it again takes about 20 us.
    """

    def __init__(self, maps_max: int | None = None) -> None:
        """maps_max: by default derived from the limit of open files, at the first use."""
        self._maps_max = maps_max
        self._mapped: deque[tuple[Mapped, int]] = deque()

    def mapped(self, queue: Mapped) -> None:
        """Record that a queue is being mapped; this may unmap another one."""
        if len(self._mapped) >= self._limit():
            self._unmap_one()
        self._mapped.append((queue, queue.max_offset))

    def forget(self, queue: Mapped) -> None:
        """Remove a deleted queue from the budget."""
        self._mapped = deque(each for each in self._mapped if each[0] is not queue)

    def _limit(self) -> int:
        if self._maps_max is None:
            self._maps_max = maps_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return self._maps_max

    def _unmap_one(self) -> None:
        for _ in range(_TRIES_MAX):
            queue, max_offset = self._mapped.popleft()
            if queue.max_offset == max_offset:
                break
            self._mapped.append((queue, queue.max_offset))
        else:
            queue, _ = self._mapped.popleft()
        queue.unmap()
