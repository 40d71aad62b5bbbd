"""How many ConsumeQueues are mapped at a time."""

from __future__ import annotations

import resource
from collections import deque
from typing import Final, Protocol

# Linux grants a process 65,530 mappings (vm.max_map_count) unless told otherwise.
MAPS_MAX: Final = 30_000
_TRIES_MAX: Final = 8


class Mapped(Protocol):
    """A queue that has a map and can do without."""

    @property
    def max_offset(self) -> int:
        """One past the last unit: grows when it is written."""

    def unmap(self) -> None:
        """Give the map up until it is needed again."""


class MapBudget:
    """Each map takes a descriptor, which clients need too, and one of the system's mappings.

    So queues may have half of what is granted; whoever was mapped longest ago and not written
    since goes first, and is mapped again, in some 20 us, when it is used.
    """

    def __init__(self, maps_max: int | None = None) -> None:
        """maps_max: by default what the process's limit of open files says when it matters."""
        self._maps_max = maps_max
        self._mapped: deque[tuple[Mapped, int]] = deque()

    def mapped(self, queue: Mapped) -> None:
        """A queue gets a map now, which may cost another one its own."""
        if len(self._mapped) >= self._limit():
            self._unmap_one()
        self._mapped.append((queue, queue.max_offset))

    def forget(self, queue: Mapped) -> None:
        """A queue is gone."""
        self._mapped = deque(each for each in self._mapped if each[0] is not queue)

    def _limit(self) -> int:
        if self._maps_max is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            is_unlimited = soft == resource.RLIM_INFINITY
            self._maps_max = MAPS_MAX if is_unlimited else min(soft // 2, MAPS_MAX)
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
