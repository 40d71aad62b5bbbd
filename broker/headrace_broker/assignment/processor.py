"""QUERY_ASSIGNMENT, SET_MESSAGE_REQUEST_MODE and GET_ALL_MESSAGE_REQUEST_MODE.

Source: docs/protocol.md "Assignment".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.persistence import saved
from headrace_protocol.bodies import (
    MessageQueueAssignment,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SetMessageRequestModeRequestBody,
)
from headrace_protocol.bounds import check_group, check_topic
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.pop.shares import SHARES, popped_queues
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_broker.assignment.request_modes import RequestModes
    from headrace_broker.assignment.topic_queues import TopicQueues
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.serving import Registry, Request


class AssignmentProcessor:
    """Serves the requests. members: client ids of a group's members. changes: logs changes."""

    def __init__(
        self,
        modes: RequestModes,
        queues: TopicQueues,
        members: Callable[[str], Sequence[str]],
        changes: HostLog,
    ) -> None:
        self._modes = modes
        self._queues = queues
        self._members = members
        self._changes = changes

    def register(self, registry: Registry) -> None:
        """Route the requests."""
        registry.route(RequestCode.QUERY_ASSIGNMENT, self.query)
        registry.route(RequestCode.SET_MESSAGE_REQUEST_MODE, self.set_mode)
        registry.route(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, self.all_modes)

    async def query(self, request: Request) -> Reply:
        """The queues of one member. Without a list, the member keeps what it has."""
        body = QueryAssignmentRequestBody.decode(request.body)
        check_topic(body.topic)
        check_group(body.consumer_group)
        queues = await self._queues.of(body.topic)
        assigned = self._assigned(body, queues) if queues else None
        answer = QueryAssignmentResponseBody(message_queue_assignments=assigned)
        return Reply(body=(answer.encode(),))

    def _assigned(
        self, body: QueryAssignmentRequestBody, queues: Sequence[MessageQueue]
    ) -> list[MessageQueueAssignment] | None:
        mode = self._modes.get(body.topic, body.consumer_group)
        if body.message_model == "BROADCASTING":
            return [MessageQueueAssignment(message_queue=queue) for queue in queues]
        share = SHARES.get(body.strategy_name)
        if share is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"strategy {body.strategy_name[:40]!r} is unknown: use {' or '.join(SHARES)}",
            )
        client_ids = sorted(self._members(body.consumer_group))
        if body.client_id not in client_ids:
            # Its heartbeat is still to come.
            return None
        if mode.mode == "POP":
            num = mode.pop_share_queue_num
            mine = popped_queues(share, queues, client_ids, body.client_id, num)
        else:
            mine = [*share(queues, client_ids, body.client_id)]
        return [MessageQueueAssignment(message_queue=each, mode=mode.mode) for each in mine]

    async def set_mode(self, request: Request) -> Reply:
        """Set whether a group pulls or pops a topic."""
        mode = SetMessageRequestModeRequestBody.decode(request.body)
        check_topic(mode.topic)
        check_group(mode.consumer_group)
        self._modes.put(mode)
        await saved(self._modes.saved.when_saved)
        self._changes.info(
            request.channel.address,
            "request mode set",
            topic=mode.topic,
            group=mode.consumer_group,
            mode=mode.mode,
        )
        return Reply()

    def all_modes(self, _request: Request) -> Reply:
        """All modes that were set."""
        return Reply(body=(self._modes.text(),))
