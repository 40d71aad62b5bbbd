"""Places and sources of topics that are kept for Apache RocketMQ.

Nothing is sent to them. Inner batches are not read; the other kinds are, as far as the log has what
Apache's broker would serve. Source: docs/store-format.md "Stores of Apache RocketMQ";
tests/broker/test_peer_topics.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.queue_directory import Use
from headrace_broker.store.store_source import GetResult, GetStatus, StoreSource
from headrace_broker.topics.peer import PeerKind

if TYPE_CHECKING:
    from headrace_broker.queue_directory import Asked, QueueDirectory
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.errors import RequestError


def peer_place(topics: TopicTable, _directory: QueueDirectory, asked: Asked) -> RequestError | None:
    """A refusal of what only Apache's broker can serve."""
    kind, name = topics.kind(asked.topic), asked.topic.topic_name
    if kind is None:
        return None
    if asked.use is Use.SEND:
        return kind.refusal(name, "a message that is stored here would not reach its readers")
    if kind is PeerKind.INNER_BATCH:
        return kind.refusal(name, "its batch queues are not read here")
    return None


def peer_source(
    topics: TopicTable, commit_log: CommitLog, asked: Asked, queue: StoreQueue
) -> CompleteSource | None:
    """Reads of compacted topics; their statistics are those of the log."""
    is_read = asked.use in {Use.PULL, Use.BEGIN}
    if is_read and topics.kind(asked.topic) is PeerKind.COMPACTED:
        return CompleteSource(queue, commit_log)
    return None


class CompleteSource(StoreSource):
    """A queue of a compacted topic, readable from its beginning while the log has all of it.

    Each read raises RequestError too when the log has no more all that is kept.
    """

    __slots__ = ("_topic",)

    def __init__(self, queue: StoreQueue, commit_log: CommitLog) -> None:
        super().__init__(queue, commit_log)
        self._topic = queue.topic

    def get(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """As of any queue."""
        return self._complete(super().get(queue_offset, count_max, bytes_max, tags))

    def get_bulk(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """As of any queue."""
        return self._complete(super().get_bulk(queue_offset, count_max, bytes_max, tags))

    def min_offset(self) -> int:
        """0, the beginning."""
        min_offset = super().min_offset()
        self._check(min_offset)
        return min_offset

    def _complete(self, result: GetResult) -> GetResult:
        if result.status is GetStatus.OFFSET_TOO_SMALL:
            self._check(result.min_offset)
        return result

    def _check(self, min_offset: int) -> None:
        if min_offset:
            raise PeerKind.COMPACTED.refusal(
                self._topic,
                f"the log begins at queue offset {min_offset}, and what is kept of the messages "
                "before is in the compaction log, which is not read here",
            )
