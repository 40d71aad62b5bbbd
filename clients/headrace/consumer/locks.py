"""Queue locks: only the member that holds a queue's lock processes the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.tasks import gather
from headrace_protocol.bodies import LockBatchRequestBody, LockBatchResponseBody
from headrace_protocol.codes import RequestCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.instance import ClientInstance
    from headrace_protocol.bodies import MessageQueue


class QueueLockClient:
    """Locks queues at their brokers, which drop a lock that is not renewed for 60 s."""

    def __init__(self, instance: ClientInstance, group: str) -> None:
        self._instance = instance
        self._group = group

    async def lock(
        self, queues: Iterable[MessageQueue], failures: dict[str, HeadraceError]
    ) -> set[MessageQueue]:
        """Take or renew locks; return the queues that this member now holds.

        failures: receives the error of each broker that fails, by broker name.
        """
        by_broker = await self._instance.by_address(queues, failures)
        locked: set[MessageQueue] = set()
        outcomes = await gather(self._lock_at, by_broker)
        for (_, part), outcome in zip(by_broker, outcomes, strict=True):
            if isinstance(outcome, HeadraceError):
                failures |= dict.fromkeys(map(self._instance.broker_of, part), outcome)
            else:
                # Ignore queues that were not in the request.
                locked.update(set(part).intersection(outcome))
        return locked

    async def _lock_at(self, part: tuple[str, list[MessageQueue]]) -> list[MessageQueue]:
        address, queues = part
        response = await self._instance.request(
            address, RequestCode.LOCK_BATCH_MQ, None, self._body(queues)
        )
        return response.expect().decode(LockBatchResponseBody).lock_ok_mq_set

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Release locks at all brokers. Raises the error of the first broker that fails."""
        await self._instance.at_each_broker(queues, self._unlock_at)

    async def _unlock_at(self, part: tuple[str, list[MessageQueue]]) -> None:
        address, queues = part
        response = await self._instance.request(
            address, RequestCode.UNLOCK_BATCH_MQ, None, self._body(queues)
        )
        response.expect()

    def _body(self, queues: list[MessageQueue]) -> bytes:
        return LockBatchRequestBody(
            consumer_group=self._group, client_id=self._instance.client_id, mq_set=queues
        ).encode()
