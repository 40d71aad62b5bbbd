"""Requests for logic queues, in front of the processors, which know physical queues only.

A guard takes over the requests of static topics. Each becomes requests with lo=false for the items
of the chain, of this broker or of others. Sends and pulls have places of their own instead; see
``places.py``.
Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_offsets.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.host_budget import Host
from headrace_broker.statictopic import offsets
from headrace_broker.statictopic.rows import fields_of, item_ask
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import (
    QueryConsumerOffsetHeader,
    QueueHeader,
    UpdateConsumerOffsetHeader,
)
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from headrace_broker.statictopic.answer import Answer
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_broker.statictopic.offsets import AskBroker
    from headrace_broker.statictopic.positions import Key, StaticPositions
    from headrace_broker.statictopic.work import Workers
    from headrace_protocol.serving import Registry, Request
    from headrace_protocol.statictopic.mapping import Chain

_FIND: Final[
    Mapping[RequestCode, Callable[[AskBroker, Chain, Mapping[str, str]], Awaitable[Answer]]]
] = {
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: offsets.search_offset,
    RequestCode.GET_MAX_OFFSET: offsets.max_offset,
    RequestCode.GET_MIN_OFFSET: offsets.min_offset,
    RequestCode.GET_EARLIEST_MSG_STORETIME: offsets.earliest_time,
}


class StaticRequests:
    """Serves the requests of static topics that name a queue."""

    def __init__(self, leaders: Leaders, workers: Workers, positions: StaticPositions) -> None:
        self._leaders = leaders
        self._workers = workers
        self._positions = positions

    def add_to(self, registry: Registry) -> None:
        """Stand in front of the processors."""
        codes = {RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET}
        registry.guard(self._leaders.guard(QueueHeader, self._serve), {*_FIND, *codes})

    async def _serve(self, named: QueueHeader, request: Request) -> Reply:
        topic, queue_id = named.topic, named.queue_id
        chain = self._leaders.chain(topic, queue_id)
        code, fields = RequestCode(request.command.code), fields_of(request)
        if code == RequestCode.UPDATE_CONSUMER_OFFSET:
            return await self._commit(request, request.header(UpdateConsumerOffsetHeader), fields)
        if code == RequestCode.QUERY_CONSUMER_OFFSET:
            header = request.header(QueryConsumerOffsetHeader)
            answer = await self._query((header.consumer_group, topic, queue_id), chain, fields)
        else:
            answer = await _FIND[code](self._workers.ask, chain, fields)
        return answer.reply

    # -- QUERY_CONSUMER_OFFSET ---------------------------------------------------------------------

    async def _query(self, key: Key, chain: Chain, fields: Mapping[str, str]) -> Answer:
        """The offset of a group. What this leader has known before needs no other broker."""
        answer = await offsets.committed_offset(self._workers.ask, chain, fields)
        if answer.code == ResponseCode.SUCCESS:
            self._positions.learn(key, chain, answer.number("offset"))
            return answer
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return await offsets.first_offset(self._workers.ask, chain, fields)
        known = self._positions.known(key, chain)
        return answer if known is None else offsets.offset_answer(known)

    # -- UPDATE_CONSUMER_OFFSET --------------------------------------------------------------------

    async def _commit(
        self, request: Request, header: UpdateConsumerOffsetHeader, fields: Mapping[str, str]
    ) -> Reply:
        """Store an offset at its item; the answer is that of the item's broker."""
        key = header.consumer_group, header.topic, header.queue_id
        if header.commit_offset < 0:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"commit of group {key[0]}, topic {key[1]}, queue {key[2]}: offset "
                f"{header.commit_offset} must not be negative",
            )
        found = self._positions.locate(header.topic, header.queue_id, header.commit_offset)
        if found is None:
            remark = "the static offsets of this queue are undecided: commit again later"
            return Reply(code=ResponseCode.SYSTEM_BUSY, remark=remark)
        if self._positions.is_reset(key):
            return Reply(remark="Offset has been previously reset")
        chain, index, physical = found
        item, code = chain[index], request.command.code
        if index < len(chain) - 1:
            self._positions.make_room(key, chain, Host.of(request.channel))
        answer = await self._workers.ask(item_ask(code, fields, item, physical))
        if answer.code == ResponseCode.SUCCESS:
            self._positions.note(key, chain, header.commit_offset)
            self._positions.moved(key, chain, index)
        return answer.reply
