"""COMPACT_TOPIC: compacts or rebuilds a topic, and describes its compaction logs.

Source: docs/protocol.md "Compact a topic"; tests/clients/test_cli_compacted.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.topics.attributes import is_compacted
from headrace_protocol.bodies import CompactedQueueState, CompactedTopicState
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.address import split_address
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import CompactTopicHeader
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.rights.wanted import OWN_CLUSTER
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.compaction.queues import CompactedQueue
    from headrace_broker.compaction.rebuilds import Rebuilds
    from headrace_broker.compaction.schedule import CompactionSchedule
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.serving import Registry, Request


class CompactionRequests:
    """Serves COMPACT_TOPIC."""

    def __init__(
        self,
        topics: TopicTable,
        schedule: CompactionSchedule,
        rebuilds: Rebuilds,
        is_static: Callable[[str], bool],
    ) -> None:
        """is_static: whether a topic is static."""
        self._topics = topics
        self._schedule = schedule
        self._rebuilds = rebuilds
        self._is_static = is_static

    def register(self, registry: Registry) -> None:
        """Route the request."""
        registry.route_long(RequestCode.COMPACT_TOPIC, self.compact)

    async def compact(self, request: Request) -> Reply:
        """Have the queues of a topic compacted or rebuilt if the request says so.

        The answer is their state.
        """
        header = request.header(CompactTopicHeader)
        topic = self._topics.expect(header.topic)
        if not is_compacted(topic):
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"topic {header.topic} is not compacted: create another one with "
                "`headrace topic create TOPIC --compacted`",
            )
        if header.rebuild_from is not None:
            # The broker connects to that address, and shows it who it is.
            request.check(Kind.CLUSTER, OWN_CLUSTER, Action.UPDATE)
            self._rebuild(header.topic, header.rebuild_from)
        if header.start:
            self._schedule.request(header.topic)
        state = CompactedTopicState(
            is_running=self._schedule.is_pending(header.topic),
            is_rebuilding=self._rebuilds.is_pending(header.topic),
            rebuild_problem=self._rebuilds.problem(header.topic),
        )
        for (name, queue_id), queue in sorted(self._schedule.queues.all().items()):
            if name == header.topic:
                state.queues.append(_state(queue_id, queue))
                await take_break()
        return Reply(body=(state.encode(),))

    def _rebuild(self, topic: str, address: str) -> None:
        if self._is_static(topic):
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"topic {topic} is static: no other broker has its physical queues, so they can't "
                "be rebuilt",
            )
        try:
            split_address(address)
        except ValueError as error:
            raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from error
        self._rebuilds.request(topic, address)


def _state(queue_id: int, queue: CompactedQueue) -> CompactedQueueState:
    segments, state = queue.log.segments, queue.state_file.load()
    dirty = [each for each in segments if each.last_queue_offset >= state.position]
    return CompactedQueueState(
        queue_id=queue_id,
        messages=sum(segment.count for segment in segments),
        bytes=sum(segment.log_end for segment in segments),
        dirty_bytes=sum(segment.log_end for segment in dirty),
        last_run_ms=state.last_run_ms,
        run_ms=int(state.last_run_s * 1000),
        bytes_before=state.bytes_before,
        bytes_after=state.bytes_after,
        kept=state.kept_count,
        dropped=state.dropped_count,
    )
