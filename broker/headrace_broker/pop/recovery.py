"""Brings the pops of the log in line with the store at a start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace_broker.pop.peer_forms import CHECKPOINT_TAG, checkpoint_name
from headrace_broker.pop.revive_topic import saved_behind
from headrace_broker.queue_directory import Use
from headrace_protocol.errors import NotReady
from headrace_protocol.message import TAGS, UNIQ_KEY, property_number, property_value
from headrace_protocol.system_topics import TIMER_TOPIC

if TYPE_CHECKING:
    from collections.abc import Collection

    from headrace_broker.core import Tables
    from headrace_broker.pop.pop_queue import PopQueue
    from headrace_broker.pop.pops import Pops
    from headrace_broker.queue_directory import QueueDirectory, Source
    from headrace_protocol.columns import RecordColumns


# Property of a message that is stored again: its former physical offset.
SOURCE: Final = b"POP_SOURCE"
_UNIQ_KEY: Final = UNIQ_KEY.encode()
_TAGS: Final = TAGS.encode()
_CHECKPOINT: Final = CHECKPOINT_TAG.encode()


class LogTail:
    """Records of the CommitLog whose events a power cut may have taken.

    sources: physical offsets of messages that were stored again. names: of checkpoints that were
    stored in Apache's form.
    """

    def __init__(self, revive_topic: str) -> None:
        self._of_names = {TIMER_TOPIC.encode(), revive_topic.encode()}
        self.sources: set[int] = set()
        self.names: set[bytes] = set()

    def take(self, records: RecordColumns) -> None:
        """Note what some records say."""
        names, topics = records.topics
        is_retry = np.array([name.startswith((b"%RETRY%", b"%DLQ%")) for name in names])[topics]
        if is_retry.any():
            texts = records.select(np.flatnonzero(is_retry)).properties()
            self.sources.update(property_number(text, SOURCE, -1) for text in texts)
        has_name = np.array([name in self._of_names for name in names])[topics]
        if has_name.any():
            texts = records.select(np.flatnonzero(has_name)).properties()
            self.names.update(
                property_value(text, _UNIQ_KEY)
                for text in texts
                if property_value(text, _TAGS) == _CHECKPOINT
            )


def name_again(pops: Pops, names: Collection[bytes], broker: str, log_end: int) -> None:
    """Note the checkpoints that the log has in Apache's form, up to its end.

    Otherwise those that are done before their timers fire would be out again.
    """
    if not names:
        return
    for checkpoint in [each for queue in pops for each in queue if not each.is_named]:
        if checkpoint_name(checkpoint, broker).encode() in names:
            pops.name_as(checkpoint, checkpoint.settled, log_end)


def bring_in_line(
    pops: Pops, tables: Tables, directory: QueueDirectory, stored_again: Collection[int]
) -> None:
    """Forget what is gone, stored again or newer than the store.

    A power cut may have taken messages that were out. Another broker that has written the store may
    have deleted a topic or made it anew. What its offsets count is acked, or out in its own form,
    whatever the log of pops says; ours also count what is named. stored_again: physical offsets.
    """
    topics, _, _, offsets = tables
    if not offsets.is_ours:
        _forget_named(pops)
    for queue in list(pops):
        group, topic, queue_id = queue.name
        place = directory.find(topic, queue_id, Use.INSPECT) if topics.get(topic) else None
        if place is None:
            pops.forget(queue)
            continue
        first = topics.incarnations.created_at(topic)
        saved = None if offsets.is_ours else offsets.query(group, topic, queue_id)
        low = 0 if saved is None else saved + saved_behind(group)
        line = _Line(place.source, low, place.source.max_offset(), first, stored_again)
        line.settle(pops, queue)


def _forget_named(pops: Pops) -> None:
    """Forget what is in the form of other brokers: they have read it, or it is read here later."""
    for checkpoint in [each for queue in pops for each in queue if each.is_named]:
        pops.settle(checkpoint, checkpoint.bits)
        pops.unname(checkpoint)


class _Line(NamedTuple):
    """Offsets of a queue that may be out: ``low`` to before ``end``, popped after ``made_at``."""

    source: Source
    low: int
    end: int
    made_at: int
    stored_again: Collection[int]

    def settle(self, pops: Pops, queue: PopQueue) -> None:
        """Settle all else, and continue within the queue."""
        for checkpoint in list(queue):
            is_old = checkpoint.physical_offset < self.made_at
            bits = sum(
                bit for offset, bit in checkpoint.out() if is_old or not self._may_be_out(offset)
            )
            if bits:
                pops.settle(checkpoint, bits)
        next_offset = min(max(queue.next_offset, self.low), self.end)
        if next_offset != queue.next_offset:
            pops.move(queue, next_offset)

    def _may_be_out(self, offset: int) -> bool:
        if not self.low <= offset < self.end:
            return False
        return not self.stored_again or self._physical_offset(offset) not in self.stored_again

    def _physical_offset(self, offset: int) -> int:
        while True:
            try:
                return self.source.unit(offset)[0]
            except NotReady as away:
                away.fetch()
            except LookupError:
                return -1
