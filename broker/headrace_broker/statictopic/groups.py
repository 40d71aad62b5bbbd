"""Requests about groups in static topics: resets, copies, times, and units of a queue.

Each broker serves the logic queues that it leads.
Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_groups.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from headrace_broker.consumer.seeks import request_seek
from headrace_broker.host_budget import Host
from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic import offsets
from headrace_broker.statictopic.rows import fields_of, item_ask
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import (
    CloneGroupOffsetHeader,
    QueryConsumeQueueHeader,
    QueryConsumeTimeSpanHeader,
    ResetOffsetHeader,
)
from headrace_protocol.bodies import MessageQueue, QueryConsumeTimeSpanBody, QueueTimeSpan
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.late import check_create
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.serving import Reply
from headrace_protocol.statictopic.mapping import logic_broker_name
from headrace_protocol.statictopic.offsets import end_of, index_of, offset_delta
from headrace_protocol.waiting import drained, take_break

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headrace_broker.consumer.groups import ConsumerManager
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.statictopic.answer import Answer
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_broker.statictopic.positions import StaticPositions
    from headrace_broker.statictopic.work import Workers
    from headrace_protocol.serving import Registry, Request, Work

_LOGIC_BROKER: Final = logic_broker_name()
# Offsets stored per slice, half a millisecond.
_QUEUES_AT_ONCE: Final = 64


class StaticGroups:
    """Serves the requests of static topics that are not about one offset."""

    def __init__(
        self,
        leaders: Leaders,
        workers: Workers,
        positions: StaticPositions,
        groups: SubscriptionGroups,
        consumers: ConsumerManager,
        kept: ConsumerOffsets,
        resets_here: Callable[[], bool],
        wake: Callable[[str, int], None],
    ) -> None:
        """kept: the offsets of all groups. resets_here: whether resets take effect at this broker.

        wake: answers the held pulls of a topic's physical queue.
        """
        self._leaders = leaders
        self._workers = workers
        self._positions = positions
        self._groups = groups
        self._consumers = consumers
        self._kept = kept
        self._resets_here = resets_here
        self._wake = wake

    def add_to(self, registry: Registry) -> None:
        """Stand in front of the processors."""
        guard = self._leaders.guard
        registry.guard(
            guard(ResetOffsetHeader, self._reset), {RequestCode.INVOKE_BROKER_TO_RESET_OFFSET}
        )
        registry.guard(self._guard_clone, {RequestCode.CLONE_GROUP_OFFSET})
        registry.guard(
            guard(QueryConsumeQueueHeader, self._units), {RequestCode.QUERY_CONSUME_QUEUE}
        )
        registry.guard(
            guard(QueryConsumeTimeSpanHeader, self._spans), {RequestCode.QUERY_CONSUME_TIME_SPAN}
        )

    def _is_static(self, topic: str) -> bool:
        return self._leaders.mappings.get(topic) is not None

    # -- INVOKE_BROKER_TO_RESET_OFFSET -------------------------------------------------------------

    async def _reset(self, header: ResetOffsetHeader, request: Request) -> Reply:
        if self._groups.get(header.group) is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Group {header.group} does not exist: see `headrace group list`",
            )
        led = sorted(self._leaders.mappings.led(header.topic))
        table: dict[int, int] = {}
        for queue_id in [header.queue_id] if header.queue_id >= 0 else led:
            table[queue_id] = await self._reset_target(header, queue_id)
        host = Host.of(request.channel)
        self._kept.make_rooms(header.group, header.topic, len(table), host)
        await self._move(header, table)
        written = await fastjson.dumps_sliced(_rows(header.topic, table))
        return Reply(body=fastjson.dumps_parts({"offsetTable": written}))

    async def _reset_target(self, header: ResetOffsetHeader, queue_id: int) -> int:
        chain = self._leaders.chain(header.topic, queue_id)
        fields = {"topic": header.topic, "timestamp": str(header.timestamp)}
        if header.offset is None or header.offset < 0:
            is_end = header.timestamp < 0
            search = offsets.max_offset if is_end else offsets.search_offset
            return _expect(await search(self._workers.ask, chain, fields))
        lowest = _expect(await offsets.min_offset(self._workers.ask, chain, fields))
        highest = _expect(await offsets.max_offset(self._workers.ask, chain, fields))
        if not lowest <= header.offset <= highest:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"Target offset {header.offset} not in consume queue range [{lowest}-{highest}] of "
                f"topic {header.topic} queue {queue_id}",
            )
        return header.offset

    async def _move(self, header: ResetOffsetHeader, table: Mapping[int, int]) -> None:
        """Store the new offsets, and tell the members if they are to seek themselves."""
        topic = header.topic
        for number, (queue_id, offset) in enumerate(table.items(), 1):
            if self._resets_here():
                self._positions.reset(header.group, topic, queue_id, offset)
                physical = self._leaders.mappings.leads(topic, queue_id)
                if physical is not None:
                    self._wake(topic, physical)
            else:
                self._positions.commit(header.group, topic, queue_id, offset)
            if not number % _QUEUES_AT_ONCE:
                await take_break()
        if not self._resets_here():
            members = self._consumers.members(header.group)
            await request_seek(members, header, partial(_rows, topic, table))

    # -- CLONE_GROUP_OFFSET ------------------------------------------------------------------------

    def _guard_clone(self, request: Request) -> Work | None:
        """Take over a copy of positions that includes static topics; see ``Guard``."""
        if self._leaders.mappings.is_empty:
            return None
        header = request.header(CloneGroupOffsetHeader)
        topics = {header.topic} if header.topic else self._kept.topics_of(header.src_group)
        if any(map(self._is_static, topics)):
            return self._clone(header, sorted(topics), request)
        return None

    async def _clone(
        self, header: CloneGroupOffsetHeader, topics: list[str], request: Request
    ) -> Reply:
        for topic in topics:
            request.check(Kind.TOPIC, topic, Action.UPDATE)
        host = Host.of(request.channel)
        before_create = partial(check_create, request, Kind.GROUP, header.dest_group)
        self._groups.get_or_create(header.dest_group, host, before_create)
        here = self._leaders.mappings.broker_name
        named = {"srcGroup": header.src_group, "destGroup": header.dest_group}
        for topic in topics:
            if self._is_static(topic):
                await self._clone_static(header, topic, host)
            else:
                fields = {**named, "topic": topic}
                answer = await self._workers.ask(Ask(here, RequestCode.CLONE_GROUP_OFFSET, fields))
                if answer.code != ResponseCode.SUCCESS:
                    return answer.reply
        return Reply()

    async def _clone_static(self, header: CloneGroupOffsetHeader, topic: str, host: Host) -> None:
        table: dict[int, int] = {}
        fields = {"topic": topic, "consumerGroup": header.src_group, "setZeroIfNotFound": "false"}
        for queue_id in sorted(self._leaders.mappings.led(topic)):
            chain = self._leaders.chain(topic, queue_id)
            answer = await offsets.query_offset(self._workers.ask, chain, fields)
            if answer.code != ResponseCode.QUERY_NOT_FOUND:
                table[queue_id] = _expect(answer)
        self._kept.make_rooms(header.dest_group, topic, len(table), host)
        if self._consumers.group(header.dest_group) is not None:
            reset = ResetOffsetHeader(
                topic=topic, group=header.dest_group, timestamp=-1, is_force=True
            )
            await self._move(reset, table)
            return
        for number, (queue_id, offset) in enumerate(table.items(), 1):
            self._positions.commit(header.dest_group, topic, queue_id, offset)
            if not number % _QUEUES_AT_ONCE:
                await take_break()

    # -- QUERY_CONSUME_QUEUE -----------------------------------------------------------------------

    async def _units(self, header: QueryConsumeQueueHeader, request: Request) -> Reply:
        """The units of the item that holds the index; its range is that of the item."""
        code, fields = RequestCode.QUERY_CONSUME_QUEUE, fields_of(request)
        chain = self._leaders.chain(header.topic, header.queue_id)
        index = index_of(chain, header.index)
        item, end = chain[index], end_of(chain, index)
        delta = offset_delta(item)
        if end is not None:
            fields["count"] = str(min(header.count, max(end - header.index + delta, 0)))
        ask = item_ask(code, fields, item, max(header.index - delta, 0))
        answer = await self._workers.ask(ask)
        if answer.code != ResponseCode.SUCCESS:
            return answer.reply
        body = fastjson.loads(b"".join(answer.body))
        for name in ("maxQueueIndex", "minQueueIndex"):
            body[name] += delta
        return answer._replace(body=(fastjson.dumps(body),)).reply

    # -- QUERY_CONSUME_TIME_SPAN -------------------------------------------------------------------

    async def _spans(self, header: QueryConsumeTimeSpanHeader, _request: Request) -> Reply:
        """One span per logic queue led here, from the spans of its items."""
        topic = header.topic
        chains = {
            queue_id: self._leaders.chain(topic, queue_id)
            for queue_id in sorted(self._leaders.mappings.led(topic))
        }
        brokers = {item.bname for chain in chains.values() for item in chain}
        fields = {"topic": topic, "group": header.group, "lo": "false"}
        parts: dict[tuple[str, int], QueueTimeSpan] = {}
        for broker in sorted(brokers):
            answer = await self._workers.ask(
                Ask(broker, RequestCode.QUERY_CONSUME_TIME_SPAN, fields)
            )
            if answer.code != ResponseCode.SUCCESS:
                return answer.reply
            body = b"".join(answer.body)
            for part in QueryConsumeTimeSpanBody.decode(body).consume_time_span_set:
                parts[broker, part.message_queue.queue_id] = part
        group = {"topic": topic, "consumerGroup": header.group, "setZeroIfNotFound": "false"}
        spans = []
        for queue_id, chain in chains.items():
            answer = await offsets.query_offset(self._workers.ask, chain, group)
            is_known = answer.code == ResponseCode.SUCCESS
            index = index_of(chain, answer.number("offset") if is_known else 0)
            found = [parts.get((item.bname, item.queue_id)) for item in chain]
            queue = MessageQueue(topic, _LOGIC_BROKER, queue_id)
            spans.append(_joined(queue, found[: index + 1], found[index:]))
        written = await fastjson.dumps_list_sliced(drained(spans))
        parts_of_body = fastjson.dumps_parts({"consumeTimeSpanSet": written})
        return Reply(body=parts_of_body)


def _rows(topic: str, table: Mapping[int, int]) -> Iterator[tuple[MessageQueue, int]]:
    """The offsets of a topic's logic queues, as in bodies."""
    for queue_id, offset in table.items():
        yield MessageQueue(topic, _LOGIC_BROKER, queue_id), offset


def _joined(
    queue: MessageQueue, read: list[QueueTimeSpan | None], unread: list[QueueTimeSpan | None]
) -> QueueTimeSpan:
    """The span of a logic queue.

    read, unread: the spans of its items up to, and from, the one at which the group continues.
    """
    before, after = ([span for span in spans if span is not None] for spans in (read, unread))
    return QueueTimeSpan(
        queue,
        min_time_stamp=_first(span.min_time_stamp for span in (*before, *after)),
        max_time_stamp=_first(span.max_time_stamp for span in (*after[::-1], *before[::-1])),
        consume_time_stamp=_first(span.consume_time_stamp for span in before[::-1]),
        delay_time=_first(span.delay_time for span in after),
    )


def _first(times_ms: Iterable[int]) -> int:
    """The first time that is known, otherwise 0."""
    return next((time_ms for time_ms in times_ms if time_ms), 0)


def _expect(answer: Answer) -> int:
    """The offset of an answer. Raises RequestError for an error."""
    if answer.code != ResponseCode.SUCCESS:
        raise RequestError(answer.code, answer.remark or "")
    return answer.number("offset")
