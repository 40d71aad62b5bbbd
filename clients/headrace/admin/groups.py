"""An operator's view of consumer groups: settings, members, queues and progress."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.admin.chains import ChainAdmin
from headrace.admin.requests import BrokerProblem
from headrace.consumer.offset_store import OffsetStore
from headrace.consumer.start import Start, check_start, timestamp_ms
from headrace.errors import (
    BrokerError,
    ConfigurationError,
    GroupNotFound,
    HeadraceError,
    NotEverywhere,
    RequestTimeout,
    RouteNotFound,
)
from headrace.names import check_group
from headrace.tasks import gather
from headrace_protocol.admin_headers import (
    CloneGroupOffsetHeader,
    DeleteSubscriptionGroupHeader,
    GetAllSubscriptionGroupHeader,
    GetConsumeStatsHeader,
    QueryTopicConsumeByWhoHeader,
    ResetOffsetHeader,
)
from headrace_protocol.bodies import (
    ClientConnection,
    ConsumerConnection,
    ConsumerRunningInfo,
    ConsumeStats,
    GroupDescription,
    GroupList,
    GroupQueue,
    MessageQueue,
    OffsetWrapper,
    ResetOffsetBody,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ConsumerGroupHeader, GetConsumerRunningInfoHeader
from headrace_protocol.statictopic.mapping import logic_broker_name
from headrace_protocol.system_topics import GROUP_PREFIXES, READER_GROUP, RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping


_MEMBER_TIMEOUT_MS = 2000
_SYSTEM_GROUPS = ("CID_ONSAPI_", "CID_RMQ_SYS_", "CID_SYS_")
_SYSTEM_GROUP_NAMES = frozenset(
    {
        "CID_ONS-HTTP-PROXY",
        "FILTERSRV_CONSUMER",
        READER_GROUP,
        "SELF_TEST_C_GROUP",
        "TOOLS_CONSUMER",
    }
)


class QueueLag(msgspec.Struct, frozen=True, order=True):
    """A group's lag in one queue.

    committed_offset: -1 if the group has committed nothing there. last_timestamp_ms: store time of
    the last consumed message; 0 if unknown. missing: number of offsets after the committed one
    without a message: those of a static topic's queue may jump, those of a compacted one have gaps.
    out: number of messages that members have taken out and not acknowledged, which the lag counts
    too; None if the group does not pop the queue, or another broker does not say.
    """

    queue: MessageQueue
    committed_offset: int
    max_offset: int
    last_timestamp_ms: int
    missing: int = 0
    out: int | None = None

    @property
    def lag(self) -> int:
        """Number of messages that are not consumed yet."""
        return self.max_offset - max(self.committed_offset, 0) - self.missing


class QueueOfGroup(msgspec.Struct, frozen=True, order=True):
    """A queue of a group, as its broker sees it.

    owner: client id of the last pull, or the client's address if it is not a member; None before
    the first pull. pulled_s_ago: in steps of 10 s. lock_owner: client id; None without a lock.
    is_idle: whether it should be pulled, and was not for 30 s.
    """

    queue: MessageQueue
    owner: str | None
    pulled_s_ago: int
    lock_owner: str | None
    lock_s_left: int
    is_idle: bool


class MemberReport(NamedTuple):
    """A connected member, and its report about itself, or why there is none."""

    client: ClientConnection
    report: ConsumerRunningInfo | HeadraceError


def member_ids(members: Mapping[str, ConsumerConnection]) -> list[str]:
    """The client ids of members at all brokers, sorted."""
    return sorted({each.client_id for found in members.values() for each in found.connection_set})


class GroupHasMembers(HeadraceError):
    """A group cannot be deleted because it has connected members."""

    def __init__(self, group: str, members: list[str]) -> None:
        others = " and the others" if len(members) > 1 else ""
        super().__init__(
            f"group {group} has connected members, which would create it again; stop "
            f"{members[0]}{others}"
        )
        self.group = group
        self.members = members


class GroupAdmin(ChainAdmin):
    """The methods of Admin for consumer groups."""

    async def create_group(self, config: SubscriptionGroupConfig) -> None:
        """Create a consumer group, or change an existing one."""
        check_group(config.group_name)
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await self._ask_all(await self._masters(), code, None, config.encode())

    async def delete_group(self, group: str) -> None:
        """Delete a consumer group and its progress.

        Raises GroupNotFound, GroupHasMembers for a group with connected members, which would create
        it again, and NotEverywhere, after the rest is done, if brokers left that know the group.
        """
        await self.group(group, problems=[])
        if members := member_ids(await self.members(group)):
            raise GroupHasMembers(group, members)
        # A broker that left and knew the group had its retry topic.
        missing = await self._left_with(f"{RETRY_PREFIX}{group}")
        header = DeleteSubscriptionGroupHeader(group_name=group, clean_offset=True)
        await self._ask_all(await self._masters(), RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
        if missing:
            raise NotEverywhere(
                f"group {group} is deleted on the brokers that are there, not on those that left",
                missing,
                "It is back with them: delete it again then",
            )

    async def groups(
        self, *, system: bool = False, problems: list[BrokerProblem] | None = None
    ) -> list[SubscriptionGroupConfig]:
        """All consumer groups, sorted by name; ``system`` includes the brokers' own groups."""
        ask = self._asking(
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            SubscriptionGroupWrapper,
            GetAllSubscriptionGroupHeader(),
        )
        groups: dict[str, SubscriptionGroupConfig] = {}
        for found in (await self._gather(await self._masters(), ask, problems)).values():
            groups |= found.subscription_group_table
        return [
            group for name, group in sorted(groups.items()) if system or not _is_system_group(name)
        ]

    async def group(
        self, name: str, *, problems: list[BrokerProblem] | None = None
    ) -> SubscriptionGroupConfig:
        """A group's settings. Raises GroupNotFound."""
        for config in await self.groups(system=True, problems=problems):
            if config.group_name == name:
                return config
        raise GroupNotFound(name)

    async def topic_groups(
        self, topic: str, *, problems: list[BrokerProblem] | None = None
    ) -> list[str]:
        """Names of the groups that have consumed a topic, sorted."""
        header = QueryTopicConsumeByWhoHeader(topic=topic)
        ask = self._asking(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, GroupList, header)
        found = await self._ask_topic(topic, ask, problems)
        return sorted({name for groups in found.values() for name in groups.group_list})

    async def lag(
        self, group: str, topic: str | None = None, *, problems: list[BrokerProblem] | None = None
    ) -> list[QueueLag]:
        """A group's lag in each queue where it has a position, sorted."""
        rows = await self._progress(group, topic, problems)
        topics = {queue.topic for queue in rows}
        # A broker that left and knew the group had its retry topic.
        own = [topic or f"{RETRY_PREFIX}{group}"]
        for name in dict.fromkeys([*sorted(topics, key=_is_retry), *own]):
            with suppress(RouteNotFound):
                await self._note_missing(name, problems)
        static = [name for name in topics if await self.is_static(name)]
        lags = [
            QueueLag(
                queue,
                offset.consumer_offset,
                offset.broker_offset,
                offset.last_timestamp,
                offset.missing_count or 0,
                offset.out_count,
            )
            for queue, offset in rows.items()
            if queue.topic not in static
        ]
        for name in static:
            # Also of brokers at which the group has no progress.
            found = rows if topic else await self._progress(group, name, problems)
            lags += await self._static_lags(group, name, found, problems)
        return sorted(lags)

    async def _progress(
        self, group: str, topic: str | None, problems: list[BrokerProblem] | None
    ) -> dict[MessageQueue, OffsetWrapper]:
        """A group's progress in each physical queue, of one topic or of all that it has read."""
        header = GetConsumeStatsHeader(consumer_group=group, topic=topic)
        ask = self._asking(RequestCode.GET_CONSUME_STATS, ConsumeStats, header)
        found = await self._gather(await self._masters(), ask, problems)
        return {queue: row for each in found.values() for queue, row in each.offset_table.items()}

    async def _static_lags(
        self,
        group: str,
        topic: str,
        rows: Mapping[MessageQueue, OffsetWrapper],
        problems: list[BrokerProblem] | None,
    ) -> list[QueueLag]:
        """The lag in the queues of a static topic. rows: the progress in each physical queue."""
        offsets = OffsetStore(self._instance)
        lags = []
        queues = await self.logic_queues(topic, problems=problems)
        away = {problem.broker_name for problem in problems or ()}
        for each in queues:
            if each.leader in away:
                continue
            try:
                committed = await offsets.committed(group, each.queue)
            except HeadraceError as error:
                if problems is None:
                    raise
                address = self._instance.known_address(topic, each.leader)
                problems.append(BrokerProblem(each.leader, address, error))
                continue
            start = -1 if committed is None else committed
            last = rows.get(each.physical(start - 1))
            unread = [rows.get(queue) for queue in each.physical_from(max(start, 0))]
            compacted = sum(row.missing_count or 0 for row in unread if row)
            lags.append(
                QueueLag(
                    each.queue,
                    start,
                    each.offsets.max_offset,
                    last.last_timestamp if last else 0,
                    each.missing(max(start, 0)) + compacted,
                )
            )
        return lags

    async def reset_offsets(
        self, group: str, topic: str, to: Start, *, queue: MessageQueue | None = None
    ) -> dict[MessageQueue, int]:
        """Move a group to "earliest", "latest", a datetime or milliseconds since 1970.

        queue: the only one to move. Running members of headrace continue from there at once, others
        with their next pull. Returns the new offsets.
        """
        check_start(to)
        points = {"earliest": 0, "latest": -1}
        timestamp = points[to] if isinstance(to, str) else timestamp_ms(to)
        header = ResetOffsetHeader(topic=topic, group=group, timestamp=timestamp, is_force=True)
        if queue is not None:
            header.queue_id = queue.queue_id
        return await self._reset(header, queue)

    async def reset_queue(
        self, group: str, queue: MessageQueue, offset: int
    ) -> dict[MessageQueue, int]:
        """Move a group to an offset in one queue; see ``reset_offsets``.

        Raises BrokerError for an offset that the queue does not have.
        """
        header = ResetOffsetHeader(
            topic=queue.topic,
            group=group,
            timestamp=-1,
            is_force=True,
            queue_id=queue.queue_id,
            offset=offset,
        )
        return await self._reset(header, queue)

    async def _reset(
        self, header: ResetOffsetHeader, queue: MessageQueue | None
    ) -> dict[MessageQueue, int]:
        masters = await self._topic_masters(header.topic)
        if queue is None:
            await self._note_missing(header.topic, None)
        else:
            leader = (await self._instance.route(header.topic)).broker_of(queue)
            masters = {name: at for name, at in masters.items() if name == leader}
            for address in masters.values():
                await self._check_resets_queues(address)
        offsets: dict[MessageQueue, int] = {}
        for response in await self._ask_all(
            masters, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header
        ):
            offsets |= response.decode(ResetOffsetBody).offset_table
        if await self.is_static(header.topic):
            name = logic_broker_name()
            offsets = {
                MessageQueue(header.topic, name, reset.queue_id): at
                for reset, at in offsets.items()
            }
        return dict(sorted(offsets.items()))

    async def _check_resets_queues(self, address: str) -> None:
        """Raise ConfigurationError for a broker that would reset all queues in place of one."""
        if await self._is_headrace(address):
            return
        settings = await self.broker_config(address)
        if settings.get("useServerSideResetOffset") != "true":
            raise ConfigurationError(
                f"the broker at {address} resets only whole topics; set its "
                "useServerSideResetOffset=true, or leave out the queue"
            )

    async def clone_offsets(self, source: str, target: str, topic: str | None = None) -> None:
        """Move ``target`` to the progress of the group ``source``, in one topic or in all.

        Running members continue from there, as after ``reset_offsets``.
        Raises GroupNotFound for the source, and ConfigurationError for a bad name of the target, or
        that of the source.
        """
        check_group(target)
        if source == target:
            raise ConfigurationError(f"group {source} cannot be cloned to itself")
        await self.group(source, problems=[])
        masters = await self._masters()
        # Apache's brokers do nothing without a topic.
        topics = {topic} if topic else {lag.queue.topic for lag in await self.lag(source)}
        for name in sorted(topics):
            if not name.startswith(GROUP_PREFIXES):
                header = CloneGroupOffsetHeader(src_group=source, dest_group=target, topic=name)
                await self._ask_all(masters, RequestCode.CLONE_GROUP_OFFSET, header)

    async def members(
        self, group: str, *, problems: list[BrokerProblem] | None = None
    ) -> dict[str, ConsumerConnection]:
        """The connected consumers of a group, by broker name; empty if there are none."""
        ask = self._asking(
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            ConsumerConnection,
            ConsumerGroupHeader(consumer_group=group),
            absent=ResponseCode.CONSUMER_NOT_ONLINE,
        )
        return await self._gather(await self._masters(), ask, problems)

    async def running_info(
        self, group: str, client_id: str, broker: str
    ) -> ConsumerRunningInfo | None:
        """The report of a connected member about itself; None if it does not answer.

        broker: name of a broker that it is connected to.
        """
        try:
            return await self._report(group, client_id, broker)
        except (RequestTimeout, BrokerError):
            return None

    async def member_reports(
        self, group: str, members: Mapping[str, ConsumerConnection]
    ) -> list[MemberReport]:
        """The report of each member about itself, sorted by client id.

        members: the result of the method of this name.
        """
        found = {
            client.client_id: (broker, client)
            for broker, connections in members.items()
            for client in connections.connection_set
        }
        names = sorted(found)

        async def ask(client_id: str) -> ConsumerRunningInfo:
            return await self._report(group, client_id, found[client_id][0])

        outcomes = await gather(ask, names)
        return [
            MemberReport(found[name][1], outcome)
            for name, outcome in zip(names, outcomes, strict=True)
        ]

    async def _report(self, group: str, client_id: str, broker: str) -> ConsumerRunningInfo:
        (address,) = (await self._masters(broker)).values()
        header = GetConsumerRunningInfoHeader(consumer_group=group, client_id=client_id)
        code = RequestCode.GET_CONSUMER_RUNNING_INFO
        response = await self._instance.request(
            address, code, header, timeout_ms=_MEMBER_TIMEOUT_MS
        )
        return response.expect().decode(ConsumerRunningInfo)

    async def group_queues(
        self, group: str, *, problems: list[BrokerProblem] | None = None
    ) -> tuple[list[QueueOfGroup], list[str]]:
        """The queues of a connected group, sorted, and its conflicts of subscriptions, as texts.

        Only headrace's brokers know them.
        """
        header = ConsumerGroupHeader(consumer_group=group)
        describe = self._asking(RequestCode.DESCRIBE_GROUP, GroupDescription, header)

        async def ask(address: str) -> GroupDescription | None:
            return await describe(address) if await self._is_headrace(address) else None

        found = await self._gather(await self._masters(), ask, problems)
        queues = [
            _queue_of_group(row, broker)
            for broker, description in found.items()
            for row in description.queues
        ]
        conflicts = {each.conflict for each in found.values() if each.conflict}
        return sorted(queues, key=lambda row: row.queue), sorted(conflicts)


def _is_retry(topic: str) -> bool:
    return topic.startswith(RETRY_PREFIX)


def _queue_of_group(row: GroupQueue, broker: str) -> QueueOfGroup:
    return QueueOfGroup(
        MessageQueue(row.topic, broker, row.queue_id),
        row.owner or None,
        row.pulled_ms_ago // 1000,
        row.lock_owner or None,
        row.lock_ms_left // 1000,
        row.is_idle,
    )


def _is_system_group(group: str) -> bool:
    return group in _SYSTEM_GROUP_NAMES or group.startswith(_SYSTEM_GROUPS)
