"""Saves transactions: their checkpoint, and what Apache's brokers read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from headrace_broker.transaction.rebuild import Checkpoint
from headrace_protocol.system_topics import HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_GROUP

if TYPE_CHECKING:
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.inner.topic_counts import TopicCounts
    from headrace_broker.store.files.positions import PositionFile

log = structlog.get_logger("headrace.broker")


class TransactionFiles:
    """The checkpoint, the offsets of the group of transactions, and the counts by topic."""

    def __init__(
        self, position: PositionFile[Checkpoint], offsets: ConsumerOffsets, counts: TopicCounts
    ) -> None:
        self.position = position
        self._offsets = offsets
        self.counts = counts

    def load(self) -> Checkpoint:
        """Our own checkpoint, unless the group's offsets are ahead of it: another broker's."""
        half, op = (
            self._offsets.query(TRANSACTION_GROUP, topic, 0) or 0
            for topic in (HALF_TOPIC, OP_HALF_TOPIC)
        )
        own = self.position.load()
        if own is None or half > own.half or op > own.op:
            return Checkpoint(half, op, None)
        return own

    def commit(self, saved: Checkpoint) -> None:
        """Set the offsets of the group, once the checkpoint is on disk."""
        for topic, offset in ((HALF_TOPIC, saved.half), (OP_HALF_TOPIC, saved.op)):
            if not self._offsets.commit(TRANSACTION_GROUP, topic, 0, offset):
                log.error(
                    "checkpoint not saved, a reset is pending",
                    group=TRANSACTION_GROUP,
                    topic=topic,
                    offset=offset,
                )
