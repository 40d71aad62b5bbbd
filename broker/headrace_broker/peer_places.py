"""Places and sources of topics that are kept for Apache RocketMQ.

Sends are rejected. Inner batches can't be read; the other kinds can, as far as the log has what
Apache's broker would serve. Source: docs/store-format.md "Stores of Apache RocketMQ";
tests/broker/test_peer_topics.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.queue_directory import Use
from headrace_broker.store.store_source import GetResult, GetStatus, StoreSource
from headrace_broker.topics.peer import PeerKind, kind_of

if TYPE_CHECKING:
    from headrace_broker.queue_directory import Lookup, QueueDirectory
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.errors import RequestError


def peer_place(_directory: QueueDirectory, lookup: Lookup) -> RequestError | None:
    """A rejection of requests that only Apache's broker can serve."""
    kind, name = kind_of(lookup.topic), lookup.topic.topic_name
    if kind is None:
        return None
    if lookup.use is Use.SEND:
        return kind.rejection(name, "a message that is stored here would not reach its readers")
    if kind is PeerKind.INNER_BATCH:
        return kind.rejection(name, "its batch queues are not read here")
    return None


def peer_source(commit_log: CommitLog, lookup: Lookup, queue: StoreQueue) -> CompleteSource | None:
    """The source for reads of compacted topics; their statistics come from the log."""
    is_read = lookup.use in {Use.PULL, Use.READ, Use.BEGIN}
    if is_read and kind_of(lookup.topic) is PeerKind.COMPACTED:
        return CompleteSource(queue, commit_log)
    return None


class CompleteSource(StoreSource):
    """A queue of a compacted topic, readable from its beginning while the log has all of it.

    Each read also raises RequestError once the log lacks some of the messages that are kept.
    """

    __slots__ = ("_topic",)

    def __init__(self, queue: StoreQueue, commit_log: CommitLog) -> None:
        super().__init__(queue, commit_log)
        self._topic = queue.topic

    def get(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``Source``."""
        return self._complete(super().get(queue_offset, count_max, bytes_max, tags))

    def get_bulk(
        self, queue_offset: int, count_max: int, bytes_max: int, tags: frozenset[int] | None
    ) -> GetResult:
        """See ``Source``."""
        return self._complete(super().get_bulk(queue_offset, count_max, bytes_max, tags))

    def min_offset(self) -> int:
        """0. Raises RequestError if the log no longer begins there."""
        min_offset = super().min_offset()
        self._check(min_offset)
        return min_offset

    def _complete(self, result: GetResult) -> GetResult:
        if result.status is GetStatus.OFFSET_TOO_SMALL:
            self._check(result.min_offset)
        return result

    def _check(self, min_offset: int) -> None:
        if min_offset:
            raise PeerKind.COMPACTED.rejection(
                self._topic,
                f"the log begins at queue offset {min_offset}, and older messages are only in the "
                "compaction log, which is not read here",
            )
