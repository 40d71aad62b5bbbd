"""Locks of logic queues: while a queue moves, its old and its new leader must both grant them.

A client that has the lock of the old leader may read until it expires. So for 60 s after a move the
new leader grants only what the old one grants too; and a broker that no longer leads a queue asks
the leader. Requests between brokers are marked, and answered from the table of locks alone.
Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_locks.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace_broker.consumer.locks import LOCK_LIFE_MS
from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic.rows import FORWARDED
from headrace_protocol import fastjson
from headrace_protocol.bodies import LockBatchRequestBody, LockBatchResponseBody
from headrace_protocol.bounds import check_items
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import LockBatchHeader
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.persistence import NowMs
    from headrace_broker.statictopic.answer import Answer
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_broker.statictopic.work import Workers
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.serving import Registry, Request, Work


class StaticLocks:
    """Serves requests for locks that two brokers must grant."""

    def __init__(self, leaders: Leaders, workers: Workers, steady_ms: NowMs) -> None:
        self._leaders = leaders
        self._workers = workers
        self._steady_ms = steady_ms
        # Topic -> logic queue -> the gen of its leader, and since when it is known here.
        self._known: dict[str, dict[int, tuple[int, int]]] = {}
        leaders.mappings.subscribe(self._forget_deleted)

    def add_to(self, registry: Registry) -> None:
        """Stand in front of the processor."""
        registry.guard(self.guard, {RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ})

    def guard(self, request: Request) -> Work | None:
        """Take over a request that another broker must grant too; see ``Guard``."""
        if self._leaders.mappings.is_empty or request.header(LockBatchHeader).forwarded:
            return None
        body = LockBatchRequestBody.decode(request.body)
        check_items("queues to lock", body.mq_set)
        others: dict[str, list[MessageQueue]] = {}
        for queue in body.mq_set:
            if (other := self._other(queue)) is not None:
                others.setdefault(other, []).append(queue)
        if others:
            is_lock = request.command.code == RequestCode.LOCK_BATCH_MQ
            return self._lock(body, others) if is_lock else self._unlock(body, others)
        return None

    def _forget_deleted(self) -> None:
        mappings = self._leaders.mappings
        for topic in [topic for topic in self._known if mappings.get(topic) is None]:
            del self._known[topic]

    def _other(self, queue: MessageQueue) -> str | None:
        """The broker that must grant a lock besides this one; None if there is none."""
        mapping = self._leaders.mappings.get(queue.topic)
        chain = mapping.chain(queue.queue_id) if mapping is not None else None
        if mapping is None or chain is None:
            return None
        leader = chain[-1]
        if leader.bname != mapping.bname:
            return leader.bname
        known, now_ms = self._known.setdefault(queue.topic, {}), self._steady_ms()
        gen, since_ms = known.get(queue.queue_id, (-1, 0))
        if gen != leader.gen:
            since_ms = now_ms
            known[queue.queue_id] = leader.gen, now_ms
        has_moved = len(chain) > 1 and now_ms - since_ms <= LOCK_LIFE_MS
        before = chain[-2].bname if has_moved else mapping.bname
        return before if before != mapping.bname else None

    async def _lock(
        self, body: LockBatchRequestBody, others: dict[str, list[MessageQueue]]
    ) -> Reply:
        here = self._leaders.mappings.broker_name
        answer = await self._workers.ask(_ask(here, RequestCode.LOCK_BATCH_MQ, body, body.mq_set))
        if answer.code != ResponseCode.SUCCESS:
            return answer.reply
        held = _locked(answer)
        for broker, queues in others.items():
            mine = held.intersection(queues)
            if mine:
                answer = await self._workers.ask(
                    _ask(broker, RequestCode.LOCK_BATCH_MQ, body, mine)
                )
                refused = mine - _locked(answer)
                if refused:
                    held -= refused
                    await self._workers.ask(_ask(here, RequestCode.UNLOCK_BATCH_MQ, body, refused))
        written = fastjson.dumps({"lockOKMQSet": sorted(held)})
        return Reply(body=(written,))

    async def _unlock(
        self, body: LockBatchRequestBody, others: dict[str, list[MessageQueue]]
    ) -> Reply:
        for broker, queues in others.items():
            await self._workers.ask(_ask(broker, RequestCode.UNLOCK_BATCH_MQ, body, queues))
        here = self._leaders.mappings.broker_name
        answer = await self._workers.ask(_ask(here, RequestCode.UNLOCK_BATCH_MQ, body, body.mq_set))
        return answer.reply


def _ask(broker: str, code: int, body: LockBatchRequestBody, queues: Iterable[MessageQueue]) -> Ask:
    part = msgspec.structs.replace(body, mq_set=sorted(queues))
    return Ask(broker, code, {FORWARDED: "true", "bname": broker}, part.encode())


def _locked(answer: Answer) -> set[MessageQueue]:
    """The queues that a broker has locked; none if it did not answer."""
    if answer.code != ResponseCode.SUCCESS:
        return set()
    try:
        return set(LockBatchResponseBody.decode(b"".join(answer.body)).lock_ok_mq_set)
    except msgspec.MsgspecError:
        return set()
