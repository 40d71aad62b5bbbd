"""Requests by which dashboards and mqadmin look at groups and producers: 225, 308, 328, 343 to 353.

Source: docs/protocol.md "Broker"; tests/broker/processors/test_dashboard.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from headrace_broker.persistence import saved
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import (
    GroupHeader,
    GroupOfTopicHeader,
    QueryCorrectionOffsetHeader,
)
from headrace_protocol.bodies import ProducerInfo, SubscriptionGroupList
from headrace_protocol.bounds import check_items
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.late import visible_topics
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from headrace_broker.clock import Clock
    from headrace_broker.consumer.groups import ConsumerManager, Member, ProducerManager
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.serving import Registry, Request

_GROUPS_MAX: Final = 1000
_AT_ONCE: Final = 256
_LONG_MAX: Final = 2**63 - 1


class DashboardProcessor:
    """Serves what only tools ask about groups and producers."""

    def __init__(
        self,
        topics: TopicTable,
        groups: SubscriptionGroups,
        consumers: ConsumerManager,
        producers: ProducerManager,
        offsets: ConsumerOffsets,
        clock: Clock,
        changes: HostLog,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._producers = producers
        self._offsets = offsets
        self._clock = clock
        self._changes = changes

    def register(self, registry: Registry) -> None:
        """Route the requests."""
        registry.route(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, self.update_and_create_list
        )
        registry.route(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, self.group_config)
        registry.route(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, self.forbidden)
        registry.route_long(RequestCode.QUERY_TOPICS_BY_CONSUMER, self.topics_of_group)
        registry.route(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, self.subscription)
        registry.route_long(RequestCode.QUERY_CORRECTION_OFFSET, self.correction_offsets)
        registry.route_long(RequestCode.GET_ALL_PRODUCER_INFO, self.all_producers)

    # -- settings ----------------------------------------------------------------------------------

    async def update_and_create_list(self, request: Request) -> Reply:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: groups from the body, all or none."""
        groups = SubscriptionGroupList.decode(request.body).group_config_list
        check_items("groups", groups, _GROUPS_MAX)
        self._groups.put_all(groups)
        for group in groups:
            self._topics.grow_retry_topic(group.group_name, group.retry_queue_nums)
        names = [group.group_name for group in groups]
        self._changes.info(request.channel.address, "groups created or changed", groups=names)
        await saved(self._groups.saved.when_saved)
        return Reply()

    def group_config(self, request: Request) -> Reply:
        """GET_SUBSCRIPTIONGROUP_CONFIG: the settings of one group."""
        name = request.header(GroupHeader).group
        group = self._groups.get(name)
        if group is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"No group in this broker. group: {name}"
            )
        return Reply(body=(group.encode(),))

    async def forbidden(self, request: Request) -> Reply:
        """UPDATE_AND_GET_GROUP_FORBIDDEN: whether a group may read a topic."""
        header = request.header(GroupOfTopicHeader)
        if header.readable is not None:
            self._topics.expect(header.topic)
            self._groups.set_readable(header.group, header.topic, readable=header.readable)
            self._changes.info(
                request.channel.address,
                "reading permitted" if header.readable else "reading forbidden",
                group=header.group,
                topic=header.topic,
            )
            await saved(self._groups.saved.when_saved)
        body = {
            "group": header.group,
            "readable": self._groups.is_readable(header.group, header.topic),
            "topic": header.topic,
        }
        return Reply(body=(fastjson.dumps(body),))

    # -- groups ------------------------------------------------------------------------------------

    async def topics_of_group(self, request: Request) -> Reply:
        """QUERY_TOPICS_BY_CONSUMER: topics in which a group has committed something."""
        name = request.header(GroupHeader).group
        topics = await visible_topics(request, sorted(self._offsets.topics_of(name)), str)
        return Reply(body=fastjson.dumps_parts({"topicList": list(topics)}))

    def subscription(self, request: Request) -> Reply:
        """QUERY_SUBSCRIPTION_BY_CONSUMER: what the members of a group want of a topic."""
        header = request.header(GroupOfTopicHeader)
        group = self._consumers.group(header.group)
        subscription = group.subscriptions.get(header.topic) if group else None
        body = {
            "group": header.group,
            "subscriptionData": subscription,
            "topic": header.topic,
        }
        return Reply(body=(fastjson.dumps(body),))

    async def correction_offsets(self, request: Request) -> Reply:
        """QUERY_CORRECTION_OFFSET: by queue, the least progress of all groups but some.

        Where the compared group is behind that, it is the largest number instead.
        """
        header = request.header(QueryCorrectionOffsetHeader)
        topic = self._topics.expect(header.topic)
        left_out = set((header.filter_groups or "").split(","))
        least: dict[int, int] = {}
        for group in sorted(self._offsets.groups_of(header.topic) - left_out):
            await take_break()
            committed = self._offsets.offsets_of(group, header.topic)
            for number, (queue_id, offset) in enumerate(committed.items(), 1):
                if queue_id < topic.read_queue_nums:
                    least[queue_id] = min(least.get(queue_id, _LONG_MAX), offset)
                if not number % _AT_ONCE:
                    await take_break()
        for number, (queue_id, offset) in enumerate(least.items()):
            compared = self._offsets.query(header.compare_group, header.topic, queue_id)
            if compared is not None and offset > compared:
                least[queue_id] = _LONG_MAX
            if not number % _AT_ONCE:
                await take_break()
        return Reply(body=fastjson.dumps_parts({"correctionOffsets": least}))

    # -- producers ---------------------------------------------------------------------------------

    async def all_producers(self, _request: Request) -> Reply:
        """GET_ALL_PRODUCER_INFO: the members of all producer groups."""
        table = {}
        for name in self._producers.names():
            rows = map(partial(self._producer, name), self._producers.members(name))
            table[name] = await fastjson.dumps_list_sliced(rows)
        return Reply(body=fastjson.dumps_parts({"data": table}))

    def _producer(self, group: str, member: Member) -> ProducerInfo:
        age_ms = self._clock.steady_ms() - self._producers.heard_ms(group, member.channel)
        return ProducerInfo(
            client_id=member.client_id,
            remote_ip=member.channel.address,
            language=member.language,
            version=member.version,
            last_update_timestamp=self._clock.now_ms() - age_ms,
        )
