"""Requests for logic queues, in front of the processors, which know physical queues only.

A guard takes over the requests of static topics. Each becomes requests with lo=false for the items
of the chain, of this broker or of others. Sends and pulls have places of their own instead; see
``places.py``.
Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_offsets.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from headrace_broker.host_budget import Host
from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic import offsets
from headrace_broker.statictopic.forward import reply_with
from headrace_broker.statictopic.rows import ROWS, physical_fields
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import (
    QueryConsumerOffsetHeader,
    QueueHeader,
    UpdateConsumerOffsetHeader,
)
from headrace_protocol.serving import Reply, ServedElsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace_broker.statictopic.answer import Answer
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_broker.statictopic.progress import Key, StaticProgress
    from headrace_broker.statictopic.work import Work, Workers
    from headrace_protocol.serving import Registry, Request
    from headrace_protocol.statictopic.mapping import Chain

_WORKS: Final[Mapping[RequestCode, Callable[[Chain, Mapping[str, str]], Work]]] = {
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: offsets.search_offset,
    RequestCode.GET_MAX_OFFSET: offsets.max_offset,
    RequestCode.GET_MIN_OFFSET: offsets.min_offset,
    RequestCode.GET_EARLIEST_MSG_STORETIME: offsets.earliest_time,
}


class StaticRequests:
    """Serves the requests of static topics that name a queue."""

    def __init__(self, leaders: Leaders, workers: Workers, progress: StaticProgress) -> None:
        self._leaders = leaders
        self._workers = workers
        self._progress = progress

    def add_to(self, registry: Registry) -> None:
        """Stand in front of the processors."""
        codes = {RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET}
        registry.guard(self.guard, {*_WORKS, *codes})

    def guard(self, request: Request) -> None:
        """Take over a request for a logic queue; see ``Guard``."""
        mappings = self._leaders.mappings
        if not mappings.is_empty:
            header = request.header(QueueHeader)
            if header.logical is not False and mappings.get(header.topic) is not None:
                raise ServedElsewhere(
                    ResponseCode.NOT_LEADER_FOR_QUEUE,
                    f"topic[{header.topic}] is static",
                    partial(self._serve, header.topic, header.queue_id),
                )

    def _serve(self, topic: str, queue_id: int, request: Request) -> None:
        chain = self._leaders.chain(topic, queue_id)
        fields = request.command.ext()
        if request.command.code == RequestCode.UPDATE_CONSUMER_OFFSET:
            self._commit(request, request.header(UpdateConsumerOffsetHeader), fields)
            return
        if request.command.code == RequestCode.QUERY_CONSUMER_OFFSET:
            header = request.header(QueryConsumerOffsetHeader)
            work = self._query((header.consumer_group, topic, queue_id), chain, fields)
        else:
            work = _WORKS[RequestCode(request.command.code)](chain, fields)
        self._workers.serve(work, request)

    # -- QUERY_CONSUMER_OFFSET ---------------------------------------------------------------------

    def _query(self, key: Key, chain: Chain, fields: Mapping[str, str]) -> Work:
        """The offset of a group. What this leader has known before needs no other broker."""
        answer = yield from offsets.committed_offset(chain, fields)
        if answer.code == ResponseCode.SUCCESS:
            self._progress.learn(key, chain, answer.number("offset"))
            return answer
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return (yield from offsets.first_offset(chain, fields))
        known = self._progress.known(key, chain)
        return answer if known is None else offsets.offset_answer(known)

    # -- UPDATE_CONSUMER_OFFSET --------------------------------------------------------------------

    def _commit(
        self, request: Request, header: UpdateConsumerOffsetHeader, fields: Mapping[str, str]
    ) -> None:
        """Store an offset at its item; the answer is that of the item's broker."""
        key = header.consumer_group, header.topic, header.queue_id
        if header.commit_offset < 0:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"commit of group {key[0]}, topic {key[1]}, queue {key[2]}: offset "
                f"{header.commit_offset} must not be negative",
            )
        found = self._progress.place(header.topic, header.queue_id, header.commit_offset)
        if found is None:
            remark = "the static offsets of this queue are undecided: commit again later"
            request.reply(Reply(code=ResponseCode.SYSTEM_BUSY, remark=remark))
        elif self._progress.is_reset(key):
            request.reply(Reply(remark="Offset has been previously reset"))
        else:
            chain, index, physical = found
            item, code = chain[index], request.command.code
            if index < len(chain) - 1:
                self._progress.make_room(key, chain, Host.of(request.channel))
            asked = physical_fields(ROWS[code], fields, item.bname, item.queue_id, physical)

            def answered(answer: Answer) -> None:
                if answer.code == ResponseCode.SUCCESS:
                    self._progress.note(key, chain, header.commit_offset)
                    self._progress.moved(key, chain, index)
                reply_with(request, answer)

            self._workers.ask(Ask(item.bname, code, asked), request, answered)
