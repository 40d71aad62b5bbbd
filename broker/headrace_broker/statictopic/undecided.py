"""Queues whose newest item has no logicOffset: they take messages that nobody can read yet.

That lasts for moments of a change; longer if its tool has died.
Source: docs/static-topics.md "Failures"; tests/broker/statictopic/test_static_undecided.py.
"""

from __future__ import annotations

from heapq import nsmallest
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_daemon.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headrace_broker.statictopic.table import MappingTable
    from headrace_broker.topics.table import TopicTable

log = structlog.get_logger("headrace.broker")

_LOOK_S: Final = 1.0
_WARN_MS: Final = 10_000
_NAMED_MAX: Final = 10
_QUEUES_AT_ONCE: Final = 1024


class UndecidedQueues:
    """Warns of queues that stay undecided."""

    def __init__(self, table: MappingTable, topics: TopicTable, now_ms: Callable[[], int]) -> None:
        self._table = table
        self._topics = topics
        self._now_ms = now_ms
        self._warned: set[tuple[str, int]] = set()

    def runtime_info(self) -> dict[str, str]:
        """For GET_BROKER_RUNTIME_INFO: the undecided queues with their ages, oldest first."""
        now_ms = self._now_ms()
        undecided = self._table.undecided
        oldest = nsmallest(_NAMED_MAX, undecided.items(), key=itemgetter(1))
        ages = [
            f"{topic}/{queue} for {(now_ms - since) // 1000} s" for (topic, queue), since in oldest
        ]
        return {
            "staticQueuesUndecidedCount": str(len(undecided)),
            "staticQueuesUndecided": ", ".join(ages),
        }

    async def run(self) -> None:
        """Look at intervals until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            await in_slices(self.look())

    def look(self) -> Generator[None, None, None]:
        """Log each queue once that is undecided for ten seconds; end what is claimed too long."""
        if self._table.expire_claims():
            self._topics.registration_changed()
        late: set[tuple[str, int]] = set()
        by_topic: dict[str, list[int]] = {}
        now_ms = self._now_ms()
        for number, (key, since) in enumerate(list(self._table.undecided.items()), 1):
            if now_ms - since >= _WARN_MS:
                late.add(key)
                if key not in self._warned:
                    by_topic.setdefault(key[0], []).append(key[1])
            if not number % _QUEUES_AT_ONCE:
                yield
        for topic, queues in sorted(by_topic.items()):
            log.warning(
                "the offsets of a static topic's queues are undecided, so what was written to them "
                "since their move is not readable",
                topic=topic,
                queues=nsmallest(_NAMED_MAX, queues),
                count=len(queues),
                remedy=f"if no tool is moving them, run: headrace topic repair {topic}",
            )
        self._warned = late
