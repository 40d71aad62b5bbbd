"""Gives up what is beyond the limits of its topic: the loop's side of ``topic_floors``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.retention.floor_file import Floor, FloorFile
from headrace_broker.store.retention.outlook import queue_blocks
from headrace_broker.store.retention.topic_floors import Counted, QueueView, TopicLimit, find_floors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.retention.outlook import LowestUnconsumed
    from headrace_broker.store.store_queue import StoreQueue


class _TopicLook(NamedTuple):
    """What a thread needs to find a topic's floors."""

    queues: dict[int, StoreQueue]
    views: list[QueueView]
    limit: TopicLimit
    counted: dict[int, Counted]


def highest_place(floors_of_topics: list[dict[int, Floor]]) -> int:
    """Physical offset of the newest record that is to be given up; -1 without any."""
    floors = [floor for floors in floors_of_topics for floor in floors.values()]
    return max((floor.place_before for floor in floors), default=-1)


class TopicTrimmer:
    """``look`` on the loop, ``find`` in any thread, ``apply`` on the loop."""

    def __init__(
        self,
        root: Path,
        commit_log: CommitLog,
        topics: Mapping[str, Mapping[int, StoreQueue]],
    ) -> None:
        self._saved = FloorFile(root, commit_log.files.fs)
        self._commit_log = commit_log
        self._topics = topics
        self._counted: dict[str, dict[int, Counted]] = {}
        self._looks: list[_TopicLook] = []
        self._cold_log = ColdFiles(commit_log.files)

    def load(self) -> None:
        """Give up again what was before the start. Raises StoreFormatError, OSError."""
        self._saved.load(self._topics)

    def look(
        self, limits: Mapping[str, TopicLimit], lowest_unconsumed: LowestUnconsumed
    ) -> Iterator[None]:
        """See how the queues of topics stand; yields after some queues."""
        self._counted = {topic: self._counted.get(topic, {}) for topic in limits}
        self._cold_log = ColdFiles(self._commit_log.files)
        self._looks = []
        for topic, limit in limits.items():
            queues = dict(self._topics.get(topic, {}))
            views: list[QueueView] = []
            for some in queue_blocks(queues):
                lowest = lowest_unconsumed(topic, some)
                views += (
                    self._view(queue, lowest.get(queue_id)) for queue_id, queue in some.items()
                )
                yield
            self._looks.append(_TopicLook(queues, views, limit, self._counted[topic]))

    def _view(self, queue: StoreQueue, unconsumed: tuple[int, str] | None) -> QueueView:
        consume_queue = queue.consume_queue
        first, end = consume_queue.min_offset(self._commit_log.min_offset), consume_queue.max_offset
        kept_from = end if unconsumed is None else min(max(unconsumed[0], first), end)
        return QueueView(queue.queue_id, ColdFiles(consume_queue.files), first, kept_from, end)

    def find(self, now_ms: int) -> list[dict[int, Floor]]:
        """Floors that rise, by queue id, for each topic looked at. Raises OSError."""
        return [self._risen(look, now_ms) for look in self._looks]

    def _risen(self, look: _TopicLook, now_ms: int) -> dict[int, Floor]:
        floors = find_floors(look.views, self._cold_log, look.limit, now_ms, look.counted)
        return {
            view.queue_id: Floor(floor, int(before["physical_offset"][0]))
            for view in look.views
            if (floor := floors[view.queue_id]) > view.first
            and len(before := view.units.units(floor - 1, 1))
        }

    def apply(self, floors_of_topics: list[dict[int, Floor]]) -> None:
        """Show nothing below the floors any more."""
        for look, floors in zip(self._looks, floors_of_topics, strict=True):
            for queue_id, floor in floors.items():
                queue = look.queues[queue_id]
                queue.consume_queue.raise_floor(floor.queue_offset)
                self._saved.note(queue, floor)

    def save(self) -> None:
        """Keep the floors for the next start. Raises OSError."""
        self._saved.save(self._topics)
