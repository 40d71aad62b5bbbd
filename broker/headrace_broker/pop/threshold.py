"""Stops POPs of queues of which a group has too many messages out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.config import BrokerConfig
    from headrace_broker.pop.pop_queue import PopQueue
    from headrace_broker.pop.pops import Pops

logger = structlog.get_logger("headrace.broker")


class Threshold:
    """Looks at ``popInflightMessageThreshold``; a queue that is stopped is logged."""

    def __init__(self, config: BrokerConfig, pops: Pops) -> None:
        self._config = config
        self._pops = pops
        self._outages = Outages(logger.warning)

    def is_full(self, queue: PopQueue) -> bool:
        """True if a group must acknowledge messages before it gets more of a queue.

        A batch that is out in order does not count: the POP that follows takes it again.
        """
        config = self._config
        most = config.pop_inflight_message_threshold
        if not config.enable_pop_message_threshold or queue.batch is not None:
            return False
        if queue.out_count <= most:
            return False
        queue.resumes_at = most
        self._outages.failed(
            _name(queue),
            f"{queue.out_count} messages are not acknowledged, popInflightMessageThreshold={most}",
        )
        return True

    def resumed(self) -> Iterator[PopQueue]:
        """The queues that POPs get messages of again since the last call."""
        for queue in self._pops.take_resumed():
            self._outages.worked(_name(queue))
            yield queue


def _name(queue: PopQueue) -> str:
    group, topic, queue_id = queue.name
    return f"POP of {topic} queue {queue_id} for group {group}"
