"""Answers about this broker's physical queues, for services that know no logic ones.

Source: docs/static-topics.md "Compacted topics", "Offsets"; tests/broker/test_static_compaction.py,
tests/broker/test_unconsumed.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container

    from headrace_broker.statictopic.table import MappingTable


_ALL: Final = range(1 << 31)


class OwnQueues:
    """See ``LogicQueues`` of ``compaction/keys.py``, and ``UnconsumedOffsets``."""

    def __init__(self, mappings: MappingTable) -> None:
        self._mappings = mappings

    def is_static(self, topic: str) -> bool:
        """Whether a topic is static, also one whose mapping is lost."""
        return self._mappings.is_static(topic)

    def of_keys(self, topic: str, queue_id: int, queue_count: int) -> tuple[int, int]:
        """The number of a queue among those that producers choose from, and the number of these."""
        mapping = self._mappings.get(topic)
        if mapping is None:
            return queue_id, queue_count
        queue = mapping.logic_queue_of(queue_id)
        return (-1 if queue is None else queue), mapping.total_queues

    def has_older(self, topic: str, queue_id: int) -> bool:
        """Whether older items of the chain may have messages; True while that is not known."""
        mapping = self._mappings.get(topic)
        if mapping is None:
            return self._mappings.is_static(topic)
        queue = mapping.logic_queue_of(queue_id)
        chain = None if queue is None else mapping.chain(queue)
        if chain is None:
            return True
        return (chain[0].bname, chain[0].queue_id) != (mapping.bname, queue_id)

    def later(self, topic: str) -> Container[int]:
        """The queues that continue others; all of them while that is not known.

        They stay later ones when clean-up has dropped the items before them: the leader may still
        have to move groups on from there.
        """
        mapping = self._mappings.get(topic)
        if mapping is None:
            return _ALL if self._mappings.is_static(topic) else ()
        return mapping.later_queues()
