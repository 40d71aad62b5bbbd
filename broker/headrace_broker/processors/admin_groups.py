"""Requests about consumer and producer groups: settings, members, positions and resets.

Source: docs/protocol.md "Groups"; tests/broker/processors/test_admin_groups.py.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from headrace_broker.consumer.filtered import passing_offsets
from headrace_broker.consumer.seeks import request_seek
from headrace_broker.host_budget import Host
from headrace_broker.persistence import saved
from headrace_broker.queue_directory import Here, Use
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import (
    CloneGroupOffsetHeader,
    DeleteSubscriptionGroupHeader,
    GetAllSubscriptionGroupHeader,
    GetAllSubscriptionGroupResponseHeader,
    GetBrokerConsumeStatsHeader,
    GetConsumeStatsHeader,
    GetProducerConnectionListHeader,
    QueryConsumeQueueHeader,
    QueryConsumeTimeSpanHeader,
    QueryTopicConsumeByWhoHeader,
    ResetOffsetHeader,
)
from headrace_protocol.bodies import (
    ClientConnection,
    ConsumeQueueData,
    MessageQueue,
    OffsetWrapper,
    QueueTimeSpan,
    SubscriptionGroupConfig,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import ConsumerGroupHeader
from headrace_protocol.rights.late import check_create, visible_groups, visible_topics
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.serving import Reply
from headrace_protocol.system_topics import GROUP_PREFIXES
from headrace_protocol.waiting import drained, ready, sliced, take_break

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator

    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.filter_table import FilterTable
    from headrace_broker.consumer.filters import Filter
    from headrace_broker.consumer.groups import ConsumerManager, Member, ProducerManager
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.persistence import NowMs
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.serving import Registry, Request

_UNITS_MAX = 10_000
# Resets per slice, half a millisecond.
_QUEUES_AT_ONCE = 256
# The language of headrace's clients.
_HEADRACE = "PYTHON"
# Resets listed in the log.
_LOGGED_MAX = 16


class AdminGroupsProcessor:
    """Serves requests about groups."""

    def __init__(
        self,
        config: BrokerConfig,
        topics: TopicTable,
        directory: QueueDirectory,
        groups: SubscriptionGroups,
        consumers: ConsumerManager,
        producers: ProducerManager,
        offsets: ConsumerOffsets,
        long_polling: LongPolling,
        statistics: BrokerStatistics,
        now_ms: NowMs,
        changes: HostLog,
        filters: FilterTable,
    ) -> None:
        self._changes = changes
        self._filters = filters
        self._long_polling = long_polling
        self._config = config
        self._topics = topics
        self._directory = directory
        self._groups = groups
        self._consumers = consumers
        self._producers = producers
        self._offsets = offsets
        self._statistics = statistics
        self._now_ms = now_ms

    def register(self, registry: Registry) -> None:
        """Route the requests about groups."""
        registry.route(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, self.update_and_create)
        registry.route_long(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, self.all_configs)
        registry.route(RequestCode.DELETE_SUBSCRIPTIONGROUP, self.delete)
        registry.route_long(RequestCode.GET_CONSUMER_CONNECTION_LIST, self.consumer_connections)
        registry.route_long(RequestCode.GET_PRODUCER_CONNECTION_LIST, self.producer_connections)
        registry.route_long(RequestCode.GET_CONSUME_STATS, self.consume_stats)
        registry.route_long(RequestCode.GET_BROKER_CONSUME_STATS, self.broker_consume_stats)
        registry.route_long(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, self.groups_of_topic)
        registry.route_long(RequestCode.QUERY_CONSUME_TIME_SPAN, self.time_spans)
        registry.route_long(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, self.reset_offset)
        registry.route_long(RequestCode.CLONE_GROUP_OFFSET, self.clone_offset)
        registry.route_long(RequestCode.QUERY_CONSUME_QUEUE, self.consume_queue)

    # -- settings ----------------------------------------------------------------------------------

    async def update_and_create(self, request: Request) -> Reply:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: one group, from the body."""
        group = SubscriptionGroupConfig.decode(request.body)
        self._groups.put(group)
        self._topics.grow_retry_topic(group.group_name, group.retry_queue_nums)
        self._changes.info(
            request.channel.address, "group created or changed", group=group.group_name
        )
        await saved(self._groups.saved.when_saved)
        return Reply()

    async def all_configs(self, request: Request) -> Reply:
        """GET_ALL_SUBSCRIPTIONGROUP_CONFIG: all groups, or a range of them."""
        header = request.header(GetAllSubscriptionGroupHeader)
        wrapper = self._groups.wrapper()
        everything = list(wrapper.subscription_group_table.items())
        forbidden = list(wrapper.forbidden_table.items())
        groups = list(await visible_groups(request, everything, itemgetter(0)))
        start = header.group_seq or 0
        end = start + header.max_group_num if header.max_group_num else None
        body = {
            "dataVersion": wrapper.data_version,
            "forbiddenTable": dict(await visible_groups(request, forbidden, itemgetter(0))),
            "subscriptionGroupTable": await fastjson.dumps_sliced(groups[start:end]),
        }
        total = GetAllSubscriptionGroupResponseHeader(total_group_num=len(groups))
        return Reply(total, fastjson.dumps_parts(body))

    async def delete(self, request: Request) -> Reply:
        """DELETE_SUBSCRIPTIONGROUP: the settings and, on request, the positions."""
        header = request.header(DeleteSubscriptionGroupHeader)
        self._groups.delete(header.group_name)
        self._statistics.group_deleted(header.group_name)
        if header.clean_offset:
            await sliced(self._offsets.delete_group(header.group_name))
        self._changes.info(request.channel.address, "group deleted", group=header.group_name)
        await saved(self._groups.saved.when_saved)
        return Reply()

    # -- members -----------------------------------------------------------------------------------

    async def consumer_connections(self, request: Request) -> Reply:
        """GET_CONSUMER_CONNECTION_LIST: members and subscriptions of a consumer group."""
        name = request.header(ConsumerGroupHeader).consumer_group
        group = self._consumers.group(name)
        if group is None:
            raise RequestError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online"
            )
        members = self._consumers.members(name)
        body = {
            "connectionSet": await fastjson.dumps_list_sliced(map(_connection, members)),
            "consumeFromWhere": group.data.consume_from_where,
            "consumeType": group.data.consume_type,
            "messageModel": group.data.message_model,
            "subscriptionTable": (await fastjson.dumps_sliced(list(group.subscriptions.items()))),
        }
        return Reply(body=fastjson.dumps_parts(body))

    async def producer_connections(self, request: Request) -> Reply:
        """GET_PRODUCER_CONNECTION_LIST: members of a producer group."""
        name = request.header(GetProducerConnectionListHeader).producer_group
        members = self._producers.members(name)
        if not members:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"the producer group[{name}] not exist: no member has sent a heartbeat",
            )
        connections = await fastjson.dumps_list_sliced(map(_connection, members))
        return Reply(body=fastjson.dumps_parts({"connectionSet": connections}))

    # -- positions ---------------------------------------------------------------------------------

    async def consume_stats(self, request: Request) -> Reply:
        """GET_CONSUME_STATS: positions of a group, by queue."""
        header = request.header(GetConsumeStatsHeader)
        group = header.consumer_group
        names = {header.topic} if header.topic else self._offsets.topics_of(group)
        topics = [
            topic
            for name in sorted(await visible_topics(request, names, str))
            if (topic := self._topics.get(name)) and self._is_subscribed(group, name)
        ]
        rows = [row for topic in topics for row in await self._rows_of(group, topic)]
        table = await fastjson.dumps_sliced(drained(rows))
        consume_tps = sum(self._statistics.group_rate(group, t.topic_name) for t in topics)
        return Reply(
            body=fastjson.dumps_parts({"consumeTps": float(consume_tps), "offsetTable": table})
        )

    async def broker_consume_stats(self, request: Request) -> Reply:
        """GET_BROKER_CONSUME_STATS: positions of all groups, by group and topic."""
        is_ordered = request.header(GetBrokerConsumeStatsHeader).is_order
        found, total, out = [], 0, 0
        groups = sorted(each.group_name for each in self._groups.all())
        for group in await visible_groups(request, groups, str):
            stats = []
            for name in sorted(await visible_topics(request, self._offsets.topics_of(group), str)):
                topic = self._topics.get(name)
                if topic is not None and topic.order is is_ordered:
                    rows = await self._rows_of(group, topic)
                    total += sum(each.broker_offset - each.consumer_offset for _, each in rows)
                    out += sum(each.out_count or 0 for _, each in rows)
                    rate = float(self._statistics.group_rate(group, name))
                    table = await fastjson.dumps_sliced(drained(rows))
                    stats.append({"consumeTps": rate, "offsetTable": table})
            if stats:
                found.append({group: stats})
            await take_break()
        body = {"consumeStatsList": found, "totalDiff": total, "totalInflightDiff": out}
        return Reply(body=fastjson.dumps_parts(body))

    async def _rows_of(
        self, group: str, topic: TopicConfig
    ) -> list[tuple[MessageQueue, OffsetWrapper]]:
        rows = [
            await ready(partial(self._positions, group, topic, queue_id))
            for queue_id in range(topic.read_queue_nums)
        ]
        return [row for row in rows if row is not None]

    def _is_subscribed(self, group: str, topic: str) -> bool:
        """True if a group reads a topic, or its subscriptions are unknown."""
        online = self._consumers.group(group)
        return online is None or online.may_read(topic)

    def _positions(
        self, group: str, topic: TopicConfig, queue_id: int
    ) -> tuple[MessageQueue, OffsetWrapper] | None:
        name = topic.topic_name
        place = self._directory.resolve(name, queue_id, Use.LIST)
        if not isinstance(place, Here):
            return None
        consumed = self._offsets.query(group, name, queue_id)
        missing_count = place.source.missing_from(max(consumed or 0, 0))
        out_count = self._offsets.count_out(group, name, queue_id)
        pulled = max(consumed or 0, self._offsets.query_pull(group, name, queue_id) or 0)
        return self._queue_key(name, queue_id), OffsetWrapper(
            broker_offset=place.source.max_offset(),
            consumer_offset=place.no_position if consumed is None else consumed,
            # Clients of Apache RocketMQ show how far it is ahead of the consumer's offset.
            pull_offset=pulled + (out_count or 0),
            last_timestamp=place.source.store_time_at((consumed or 0) - 1) or 0,
            missing_count=missing_count or None,
            out_count=out_count,
        )

    async def groups_of_topic(self, request: Request) -> Reply:
        """QUERY_TOPIC_CONSUME_BY_WHO: groups that read a topic now or have read it."""
        header = request.header(QueryTopicConsumeByWhoHeader)
        groups = self._offsets.groups_of(header.topic)
        if header.logical is not False:
            groups |= self._consumers.groups_of_topic(header.topic)
        visible = await visible_groups(request, groups, str)
        written = await fastjson.dumps_list_sliced(sorted(visible))
        return Reply(body=fastjson.dumps_parts({"groupList": written}))

    async def time_spans(self, request: Request) -> Reply:
        """QUERY_CONSUME_TIME_SPAN: positions of a group in store times, by queue."""
        header = request.header(QueryConsumeTimeSpanHeader)
        topic = self._topics.expect(header.topic)
        spans = [
            await ready(partial(self._time_span, header.group, topic, queue_id))
            for queue_id in range(topic.write_queue_nums)
        ]
        written = await fastjson.dumps_list_sliced(
            span for span in drained(spans) if span is not None
        )
        return Reply(body=fastjson.dumps_parts({"consumeTimeSpanSet": written}))

    def _time_span(self, group: str, topic: TopicConfig, queue_id: int) -> QueueTimeSpan | None:
        name = topic.topic_name
        source = self._directory.source_to_list(name, queue_id)
        if source is None:
            return None
        min_offset, max_offset = source.min_offset(), source.max_offset()
        consumed = self._offsets.query(group, name, queue_id)
        if consumed is None:
            consumed = min_offset
        next_ms = source.store_time_at(consumed)
        return QueueTimeSpan(
            message_queue=self._queue_key(name, queue_id),
            min_time_stamp=source.store_time_at(min_offset) or 0,
            max_time_stamp=source.store_time_at(max_offset - 1) or 0,
            consume_time_stamp=source.store_time_at(consumed - 1) or 0,
            delay_time=max(0, self._now_ms() - next_ms) if next_ms else 0,
        )

    # -- resets ------------------------------------------------------------------------------------

    async def reset_offset(self, request: Request) -> Reply:
        """INVOKE_BROKER_TO_RESET_OFFSET: takes effect at the next or held pull of each queue.

        Resets one queue or all to a time (-1: the end), or one queue to an offset. headrace's
        members are requested to seek, since a busy one may not pull for long. Without
        useServerSideResetOffset, all members are, instead of by their pulls.
        """
        header = request.header(ResetOffsetHeader)
        topic = self._topics.expect(header.topic)
        host = Host.of(request.channel)
        if self._groups.get(header.group) is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Group {header.group} does not exist: see `headrace group list`",
            )
        if header.queue_id >= 0:
            queue_ids = range(header.queue_id, header.queue_id + 1)
            offsets = [await ready(partial(self._reset_target, header))]
            self._offsets.make_room(header.group, header.topic, header.queue_id, host)
        else:
            queue_ids = range(topic.read_queue_nums)
            offsets = [
                await ready(
                    partial(self._offset_by_time, topic.topic_name, queue_id, header.timestamp)
                )
                for queue_id in queue_ids
            ]
            self._offsets.make_rooms(header.group, header.topic, len(queue_ids), host)
        for number, (queue_id, offset) in enumerate(zip(queue_ids, offsets, strict=True), 1):
            self._reset(header.group, header.topic, queue_id, offset)
            if not number % _QUEUES_AT_ONCE:
                await take_break()
        await self._request_seek(header, queue_ids, offsets)
        self._changes.info(
            request.channel.address,
            "offsets reset",
            group=header.group,
            topic=header.topic,
            queues=len(queue_ids),
            offsets=dict(islice(zip(queue_ids, offsets, strict=True), _LOGGED_MAX)),
        )
        written = await fastjson.dumps_sliced(self._rows(header.topic, queue_ids, offsets))
        return Reply(body=fastjson.dumps_parts({"offsetTable": written}))

    def _reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        if not self._config.use_server_side_reset_offset:
            self._offsets.commit(group, topic, queue_id, offset)
            return
        self._offsets.reset(group, topic, queue_id, offset)
        place = self._directory.find(topic, queue_id, Use.INSPECT)
        if place is not None and place.queue is not None:
            self._long_polling.arrived((place.queue,))

    async def _request_seek(
        self, header: ResetOffsetHeader, queue_ids: Collection[int], offsets: Collection[int]
    ) -> None:
        """Send RESET_CONSUMER_CLIENT_OFFSET to headrace's members, or to all.

        Java's members stop for 10 s when they get it, so it is their last resort.
        """
        is_for_all = not self._config.use_server_side_reset_offset
        members = [
            member
            for member in self._consumers.members(header.group)
            if is_for_all or member.language == _HEADRACE
        ]
        rows = partial(self._rows, header.topic, queue_ids, offsets)
        await request_seek(members, header, rows)

    def _rows(
        self, topic: str, queue_ids: Collection[int], offsets: Collection[int]
    ) -> Iterator[tuple[MessageQueue, int]]:
        """The offsets of a topic's queues, as in bodies."""
        for queue_id, offset in zip(queue_ids, offsets, strict=True):
            yield self._queue_key(topic, queue_id), offset

    def _reset_target(self, header: ResetOffsetHeader) -> int:
        if header.offset is None or header.offset < 0:
            return self._offset_by_time(header.topic, header.queue_id, header.timestamp)
        source = self._directory.serve(header.topic, header.queue_id, Use.INSPECT).source
        min_offset, max_offset = source.min_offset(), source.max_offset()
        if not min_offset <= header.offset <= max_offset:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"Target offset {header.offset} not in consume queue range "
                f"[{min_offset}-{max_offset}] of topic {header.topic} queue {header.queue_id}",
            )
        return header.offset

    def _offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        if timestamp_ms < 0:
            return self._directory.serve(topic, queue_id, Use.INSPECT).source.max_offset()
        return self._directory.serve(topic, queue_id, Use.BEGIN).source.offset_by_time(timestamp_ms)

    async def clone_offset(self, request: Request) -> Reply:
        """CLONE_GROUP_OFFSET: copy the positions of one group to another.

        If that has members, it is reset to it.
        """
        header = request.header(CloneGroupOffsetHeader)
        source, target = header.src_group, header.dest_group
        topics = {header.topic} if header.topic else self._offsets.topics_of(source)
        topics -= {topic for topic in topics if topic.startswith(GROUP_PREFIXES)}
        for topic in topics:
            request.check(Kind.TOPIC, topic, Action.UPDATE)
        host = Host.of(request.channel)
        before_create = partial(check_create, request, Kind.GROUP, target)
        self._groups.get_or_create(target, host, before_create)
        for topic in topics:
            self._offsets.make_rooms(target, topic, self._offsets.count(source, topic), host)
        for topic in topics:
            if self._consumers.group(target) is None:
                await sliced(self._offsets.clone(source, target, topic))
            else:
                await self._move_members(source, target, topic)
            await take_break()
        self._changes.info(
            request.channel.address,
            "offsets cloned",
            group=target,
            source=source,
            topics=len(topics),
        )
        return Reply()

    async def _move_members(self, source: str, target: str, topic: str) -> None:
        table = self._offsets.offsets_of(source, topic)
        for queue_id, offset in table.items():
            self._reset(target, topic, queue_id, offset)
            await take_break()
        header = ResetOffsetHeader(topic=topic, group=target, timestamp=-1, is_force=True)
        await self._request_seek(header, table.keys(), table.values())

    # -- queues ------------------------------------------------------------------------------------

    async def consume_queue(self, request: Request) -> Reply:
        """QUERY_CONSUME_QUEUE: units of a queue, and which of them pass the filter of a group."""
        header = request.header(QueryConsumeQueueHeader)
        place = self._directory.find(header.topic, header.queue_id, Use.INSPECT)
        if place is None or place.queue is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"{header.queue_id}@{header.topic} is not exist! Nothing was written to it yet",
            )
        source = place.source
        min_offset = await ready(source.min_offset)
        max_offset = source.max_offset()
        start = max(header.index, min_offset)
        end = min(header.index + min(header.count, _UNITS_MAX), max_offset)
        units = [
            await ready(partial(source.unit, queue_offset)) for queue_offset in range(start, end)
        ]
        about, wanted = self._subscription(header)
        passing: Container[int] = ()
        if wanted is not None:
            passing = await passing_offsets(source, wanted, self._config, start, end)
        queue_data = [
            ConsumeQueueData(
                physic_offset=physical_offset,
                physic_size=size,
                tags_code=tags_code,
                eval=queue_offset in passing,
            )
            for queue_offset, (physical_offset, size, tags_code) in enumerate(units, start)
        ]
        body = {
            **about,
            "maxQueueIndex": max_offset,
            "minQueueIndex": min_offset,
            "queueData": await fastjson.dumps_list_sliced(queue_data),
        }
        return Reply(body=fastjson.dumps_parts(body))

    def _subscription(
        self, header: QueryConsumeQueueHeader
    ) -> tuple[dict[str, Any], Filter | None]:
        """The group's subscription for an answer, and its filter if it can be applied."""
        topic, name = header.topic, header.consumer_group
        if not name:
            return {}, None
        group = self._consumers.group(name)
        subscription = group.subscriptions.get(topic) if group else None
        if subscription is None:
            return {"filterData": f"{name}@{topic} is not online!"}, None
        about = {"subscriptionData": subscription, "filterData": self._filters.shown(name, topic)}
        try:
            return about, self._filters.of_group(name, subscription, subscription.sub_version)
        except RequestError as error:
            return {**about, "filterData": error.remark}, None

    def _queue_key(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self._config.broker_name, queue_id)


def _connection(member: Member) -> ClientConnection:
    return ClientConnection(
        client_id=member.client_id,
        client_addr=member.channel.address,
        language=member.language,
        version=member.version,
    )
