"""The queues that a member pops, as brokers share them out (QUERY_ASSIGNMENT)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from headrace.errors import HeadraceError
from headrace_protocol.bodies import (
    MessageQueue,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
)
from headrace_protocol.codes import RequestCode
from headrace_protocol.pop.headers import ANY_QUEUE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.instance import ClientInstance

# RocketMQ's interval.
_KEPT_S: Final = 20.0
_STRATEGY: Final = "AVG"


class _Share(NamedTuple):
    """The queues of a topic, until a loop time."""

    queues: Sequence[MessageQueue]
    until: float


class Shares:
    """Asks brokers for a member's share of each topic, and keeps it for a while.

    A group pops all queues of each broker, unless brokers are set to share them out.
    """

    def __init__(self, instance: ClientInstance, group: str) -> None:
        self._instance = instance
        self._group = group
        self._shares: dict[str, _Share] = {}

    def forget(self) -> None:
        """Ask again: the group has changed."""
        # An answer that is under way may be from before the change.
        self._shares = {}

    async def of(self, topic: str, brokers: Sequence[str]) -> Sequence[MessageQueue]:
        """The queues to pop of a topic on these brokers; queue id -1 is all of a broker."""
        now, shares = anyio.current_time(), self._shares
        share = shares.get(topic)
        if share is None or share.until <= now:
            share = shares[topic] = _Share(await self._asked(topic, brokers), now + _KEPT_S)
        return [queue for queue in share.queues if queue.broker_name in brokers]

    async def _asked(self, topic: str, brokers: Sequence[str]) -> Sequence[MessageQueue]:
        """The share that the first broker gives that answers; all if none does."""
        body = QueryAssignmentRequestBody(
            topic=topic,
            consumer_group=self._group,
            client_id=self._instance.client_id,
            strategy_name=_STRATEGY,
        ).encode()
        for name in brokers:
            try:
                address = await self._instance.broker_address(topic, name)
                response = await self._instance.request(
                    address, RequestCode.QUERY_ASSIGNMENT, None, body
                )
                answer = response.expect().decode(QueryAssignmentResponseBody)
            except HeadraceError:
                continue
            given = answer.message_queue_assignments or ()
            # Without a list the broker does not know this member yet; pulls nobody asked for.
            if given and all(each.mode == "POP" for each in given):
                return [each.message_queue for each in given if each.message_queue.topic == topic]
            break
        return [MessageQueue(topic, name, ANY_QUEUE) for name in brokers]
