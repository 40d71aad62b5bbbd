"""Expires messages beyond their topic's own limits: the loop's side of ``topic_floors``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.files.positions import Position
from headrace_broker.store.queues.cold_queue import ColdQueue
from headrace_broker.store.retention.disk_forecast import queue_blocks
from headrace_broker.store.retention.floor_file import FloorFile
from headrace_broker.store.retention.topic_floors import Counted, QueueView, TopicLimit, find_floors

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_broker.store.store_queue import StoreQueue


class _TopicScan(NamedTuple):
    """The input that a thread needs to find a topic's floors.

    unconsumed: by queue id, the lowest queue offset that must be kept.
    """

    queues: dict[int, StoreQueue]
    cold: dict[int, ColdQueue]
    unconsumed: dict[int, int]
    limit: TopicLimit
    counted: dict[int, Counted]


def newest_physical_offset(floors_of_topics: list[dict[int, Position]]) -> int:
    """Physical offset of the newest record below the floors; -1 without floors."""
    floors = [floor for floors in floors_of_topics for floor in floors.values()]
    return max((floor.physical_offset_before for floor in floors), default=-1)


class TopicTrimmer:
    """Raises floors: ``scan`` on the loop, ``find`` in any thread, ``apply`` on the loop."""

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
        self._scans: list[_TopicScan] = []
        self._cold_log = ColdFiles(commit_log.files)

    def load(self) -> None:
        """Restore the floors saved before the start. Raises StoreFormatError, OSError."""
        self._saved.load(self._topics)

    def scan(
        self, limits: Mapping[str, TopicLimit], lowest_unconsumed: LowestUnconsumed
    ) -> Generator[None, None, None]:
        """Collect the offsets of the topics' queues; yields after some queues."""
        self._counted = {topic: self._counted.get(topic, {}) for topic in limits}
        self._cold_log = ColdFiles(self._commit_log.files)
        self._scans = []
        for topic, limit in limits.items():
            queues = dict(self._topics.get(topic, {}))
            cold: dict[int, ColdQueue] = {}
            unconsumed: dict[int, int] = {}
            for some in queue_blocks(queues):
                lowest = yield from lowest_unconsumed(topic, some)
                unconsumed |= {queue_id: offset for queue_id, (offset, _) in lowest.items()}
                cold |= {
                    queue_id: ColdQueue(queue.consume_queue) for queue_id, queue in some.items()
                }
                yield
            self._scans.append(_TopicScan(queues, cold, unconsumed, limit, self._counted[topic]))

    def find(self, now_ms: int) -> list[dict[int, Position]]:
        """The floors that rise, by queue id, one dict per topic scanned. Raises OSError."""
        return [self._rising(scan, now_ms) for scan in self._scans]

    def _rising(self, scan: _TopicScan, now_ms: int) -> dict[int, Position]:
        views = [
            self._view(queue_id, queue, scan.unconsumed.get(queue_id))
            for queue_id, queue in scan.cold.items()
        ]
        floors = find_floors(views, self._cold_log, scan.limit, now_ms, scan.counted)
        return {
            view.queue_id: Position(
                scan.cold[view.queue_id].offset_of(floor), int(before["physical_offset"][0])
            )
            for view in views
            if (floor := floors[view.queue_id]) > view.first
            and len(before := view.units.units(floor - 1, 1))
        }

    def _view(self, queue_id: int, queue: ColdQueue, unconsumed: int | None) -> QueueView:
        first, end = queue.first_visible(self._commit_log.min_offset), queue.end
        kept_from = end if unconsumed is None else queue.number_of(unconsumed)
        return QueueView(queue_id, queue.units, first, min(max(kept_from, first), end), end)

    def apply(self, floors_of_topics: list[dict[int, Position]]) -> None:
        """Hide all messages below the floors."""
        for scan, floors in zip(self._scans, floors_of_topics, strict=True):
            for queue_id, floor in floors.items():
                queue = scan.queues[queue_id]
                queue.consume_queue.raise_floor(floor.queue_offset)
                self._saved.note(queue, floor)

    def save(self) -> None:
        """Save the floors for the next start. Raises OSError."""
        self._saved.save(self._topics)
