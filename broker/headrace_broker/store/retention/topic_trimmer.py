"""Expires messages beyond their topic's own limits: the loop's side of ``topic_floors``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.files.positions import Position
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
    """The input that a thread needs to find a topic's floors."""

    queues: dict[int, StoreQueue]
    views: list[QueueView]
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
            views: list[QueueView] = []
            for some in queue_blocks(queues):
                lowest = yield from lowest_unconsumed(topic, some)
                views += (
                    self._view(queue, lowest.get(queue_id)) for queue_id, queue in some.items()
                )
                yield
            self._scans.append(_TopicScan(queues, views, limit, self._counted[topic]))

    def _view(self, queue: StoreQueue, unconsumed: tuple[int, str] | None) -> QueueView:
        consume_queue, number_of = queue.consume_queue, queue.consume_queue.number_of
        first = number_of(consume_queue.min_offset(self._commit_log.min_offset))
        end = consume_queue.end_number
        kept_from = end
        if unconsumed is not None:
            kept_from = min(max(number_of(unconsumed[0]), first), end)
        return QueueView(queue.queue_id, consume_queue.cold_files(), first, kept_from, end)

    def find(self, now_ms: int) -> list[dict[int, Position]]:
        """The floors that rise, by queue id, one dict per topic scanned. Raises OSError.

        Their offsets are numbers of units.
        """
        return [self._rising(scan, now_ms) for scan in self._scans]

    def _rising(self, scan: _TopicScan, now_ms: int) -> dict[int, Position]:
        floors = find_floors(scan.views, self._cold_log, scan.limit, now_ms, scan.counted)
        return {
            view.queue_id: Position(floor, int(before["physical_offset"][0]))
            for view in scan.views
            if (floor := floors[view.queue_id]) > view.first
            and len(before := view.units.units(floor - 1, 1))
        }

    def apply(self, floors_of_topics: list[dict[int, Position]]) -> None:
        """Hide all messages below the floors."""
        for scan, floors in zip(self._scans, floors_of_topics, strict=True):
            for queue_id, floor in floors.items():
                queue = scan.queues[queue_id]
                first = queue.consume_queue.offset_of(floor.queue_offset)
                queue.consume_queue.raise_floor(first)
                self._saved.note(queue, floor._replace(queue_offset=first))

    def save(self) -> None:
        """Save the floors for the next start. Raises OSError."""
        self._saved.save(self._topics)
