"""Topics: created, listed, described, altered, compacted, purged and deleted."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import msgspec

from headrace.admin.chains import ranges_in
from headrace.admin.groups import GroupAdmin
from headrace.admin.shrink import UnreadMessages, unread_from
from headrace.admin.statictopic import Found, StaticTopicAdmin, UnchangedTopic, is_compacted
from headrace.errors import ConfigurationError, HeadraceError, NotEverywhere
from headrace.names import check_topic
from headrace.tasks import gather, gather_or_raise
from headrace_protocol.admin_headers import (
    CreateTopicHeader,
    DeleteTopicHeader,
    GetAllTopicConfigHeader,
)
from headrace_protocol.bodies import (
    PERM_READ,
    PERM_WRITE,
    CompactedTopicState,
    MessageQueue,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
    TopicOffset,
    TopicStatsTable,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import CompactTopicHeader
from headrace_protocol.nameserver_headers import TopicInNamesrvHeader
from headrace_protocol.system_topics import DEFAULT_TOPIC, user_topics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.admin.requests import BrokerProblem


class TopicTotals(msgspec.Struct, frozen=True):
    """A topic over all brokers that answer.

    record_bytes: bytes of its records, estimated for long queues; None if a broker of Apache's has
        some of them.
    last_timestamp_ms: 0 if it has no messages.
    """

    topic: str
    queues: int = 0
    messages: int = 0
    record_bytes: int | None = 0
    last_timestamp_ms: int = 0

    def plus(self, queue: TopicOffset) -> TopicTotals:
        """These totals with one more queue."""
        byte_count = None
        if self.record_bytes is not None and queue.record_bytes is not None:
            byte_count = self.record_bytes + queue.record_bytes
        return TopicTotals(
            self.topic,
            self.queues + 1,
            self.messages + queue.message_count,
            byte_count,
            max(self.last_timestamp_ms, queue.last_update_timestamp),
        )


class TopicExists(HeadraceError):
    """A topic cannot be created because it exists.

    configs: its settings by broker name.
    """

    def __init__(self, topic: str, configs: Mapping[str, TopicConfig]) -> None:
        found = "; ".join(f"{_described(each)} on {name}" for name, each in configs.items())
        super().__init__(
            f"topic {topic} exists, with {found}; `headrace topic alter {topic}` changes it"
        )
        self.topic = topic
        self.configs = configs


class TopicAdmin(StaticTopicAdmin, GroupAdmin):
    """The methods of Admin for topics."""

    async def create_topic(
        self,
        topic: str,
        *,
        queues: int = 4,
        read_queues: int | None = None,
        perm: int = PERM_READ | PERM_WRITE,
        attributes: Mapping[str, str] | None = None,
        broker: str | None = None,
        if_not_exists: bool = False,
    ) -> None:
        """Create a topic.

        queues: number of write queues on each broker. read_queues: number of read queues; the same
        by default.
        attributes: e.g. ``{"cleanup.policy": "COMPACTION"}``. A compacted topic on several brokers
        is a static one, with ``queues`` on all of them together, unless ``broker`` is named.
        if_not_exists: accept a topic that already has these settings.
        Raises TopicExists if a broker has the topic, with other settings if ``if_not_exists``, and
        StaticTopicError for a static one with other settings.
        """
        check_topic(topic)
        wanted = TopicConfig(
            topic_name=topic,
            read_queue_nums=queues if read_queues is None else read_queues,
            write_queue_nums=queues,
            perm=perm,
            attributes=dict(attributes or {}),
        )
        if broker is None and is_compacted(wanted.attributes) and await self.becomes_static(topic):
            await self._create_compacted(wanted, if_not_exists=if_not_exists)
            return
        masters = await self._masters(broker)
        existing = await self._configs(topic, masters, [])
        if existing and not (
            if_not_exists and all(_is_like(config, wanted) for config in existing.values())
        ):
            raise TopicExists(topic, existing)
        missing = {name: at for name, at in masters.items() if name not in existing}
        await self._put_topics(missing, dict.fromkeys(missing, wanted))
        await self._instance.wait_for_route(topic)

    async def _create_compacted(self, wanted: TopicConfig, *, if_not_exists: bool) -> None:
        """Create a static topic with the settings of a plain one."""
        topic, queues = wanted.topic_name, wanted.write_queue_nums
        if wanted.perm != PERM_READ | PERM_WRITE or wanted.read_queue_nums != queues:
            raise ConfigurationError(
                f"topic {topic} is compacted, and on several brokers it is a static one, which is "
                f"created with perm={PERM_READ | PERM_WRITE} and as many read as write queues; "
                "change them with alter_topic, or name a broker"
            )
        existing = await self._configs(topic, await self._masters(), [])
        if existing and not if_not_exists:
            raise TopicExists(topic, existing)
        with suppress(UnchangedTopic):
            await self.create_static_topic(topic, queues, attributes=wanted.attributes)

    async def alter_topic(
        self,
        topic: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        perm: int | None = None,
        attributes: Mapping[str, str] | None = None,
        broker: str | None = None,
        force: bool = False,
    ) -> list[str]:
        """Change a topic; omitted settings and attributes stay as they are.

        queues: number of write and read queues. Fewer are refused while one of the others holds
        messages that a group has not consumed.
        read_queues: number of read queues, if it is to differ. Messages in the others become
        unreadable.
        force: change the number of queues also of a compacted topic, whose keys then move.
        Returns the brokers' warnings. Raises RouteNotFound, UnreadMessages, ConfigurationError if
        ``broker`` does not have the topic, or without ``broker`` NotEverywhere, with nothing done,
        if brokers left with a part of it.
        """
        if broker is None:
            await self.require_everywhere(topic, "altered")
        configs = await self.topic(topic, problems=None if broker is None else [])
        if broker is not None:
            configs = {name: each for name, each in configs.items() if name == broker}
            if not configs:
                raise ConfigurationError(f"broker {broker} does not have topic {topic}")
        given = {"write_queue_nums": queues, "read_queue_nums": read_queues, "perm": perm}
        changes = {name: value for name, value in given.items() if value is not None}
        masters = await self._topic_masters(topic)

        async def put(changes: Mapping[str, int]) -> list[str]:
            wanted = {name: _changed(each, changes, attributes) for name, each in configs.items()}
            return await self._put_topics(masters, wanted, force=force)

        if queues is None or read_queues is not None:
            return await put(changes)
        if any(config.read_queue_nums > queues for config in configs.values()):
            await self._check_consumed(topic, queues, broker)
            # Without write queues, the others get no messages after the second check.
            await put(changes)
            await self._check_consumed(topic, queues, broker)
        return await put(changes | {"read_queue_nums": queues})

    async def require_everywhere(self, topic: str, change: str) -> None:
        """Raise NotEverywhere if a change of a topic would not reach all brokers that have it.

        change: a participle, for the error.
        """
        if missing := await self._left_with(topic):
            raise NotEverywhere(
                f"topic {topic} is not {change}, since brokers left with a part of it",
                missing,
                "Start them",
            )

    async def _check_consumed(self, topic: str, queues: int, broker: str | None) -> None:
        """Raise UnreadMessages if a queue from number ``queues`` on is not consumed."""
        stats = await self.topic_stats(topic)
        if unread := await unread_from(self, topic, stats, queues, broker):
            remedy = (
                f"once they are consumed, or discarded with `headrace topic purge {topic}`, "
                "lower the number of queues"
            )
            raise UnreadMessages(topic, unread, remedy)

    async def _put_topics(
        self, masters: Mapping[str, str], topics: Mapping[str, TopicConfig], *, force: bool = False
    ) -> list[str]:
        """Send each broker its settings of a topic; returns the brokers' warnings."""
        headers = {masters[name]: _topic_header(config, force) for name, config in topics.items()}

        async def ask(address: str) -> str | None:
            code = RequestCode.UPDATE_AND_CREATE_TOPIC
            return (await self._ask(address, code, headers[address])).command.remark

        try:
            remarks = await self._gather({name: masters[name] for name in topics}, ask, None)
        finally:
            for topic in topics.values():
                self._instance.invalidate_route(topic.topic_name)
        return [remark for remark in remarks.values() if remark]

    async def compact_topic(
        self,
        topic: str,
        *,
        start: bool = True,
        problems: list[BrokerProblem] | None = None,
    ) -> dict[str, CompactedTopicState]:
        """Begin to compact a topic; returns the state of its queues by broker name.

        start: False only asks for the state. Raises RouteNotFound.
        """
        header = CompactTopicHeader(topic=topic, start=start)
        ask = self._asking(RequestCode.COMPACT_TOPIC, CompactedTopicState, header)
        return await self._ask_topic(topic, ask, problems)

    async def rebuild_topic(
        self, topic: str, source: str, *, broker: str | None = None, start: bool = True
    ) -> dict[str, CompactedTopicState]:
        """Have a broker pull the older messages of a compacted topic from another one.

        source: HOST:PORT of the other one. broker: name of the one to rebuild, None for the only
        one that has the topic. start: False only asks for the state.
        Returns the state of the queues by broker name; ``is_rebuilding`` until it has ended.
        Raises RouteNotFound, ConfigurationError.
        """
        masters = await self._topic_masters(topic)
        if (broker is None and len(masters) != 1) or (broker is not None and broker not in masters):
            raise ConfigurationError(
                f"topic {topic} is on the brokers {', '.join(sorted(masters))}: "
                "name the one to rebuild with --broker"
            )
        header = CompactTopicHeader(topic=topic, rebuild_from=source if start else None)
        name = broker or next(iter(masters))
        answer = await self._ask(masters[name], RequestCode.COMPACT_TOPIC, header)
        return {name: answer.decode(CompactedTopicState)}

    async def purge_topic(self, topic: str) -> None:
        """Delete a topic's messages and the progress of its groups, but keep its settings.

        It is deleted and created again. A static topic keeps its number of queues, and the brokers
        that lead them.
        Raises RouteNotFound, StaticTopicError for a static topic that is not whole, and
        NotEverywhere, with nothing done, if brokers left with a part of it.
        """
        await self.require_everywhere(topic, "purged")
        if await self.is_static(topic):
            await self._purge_static(topic)
            return
        configs = await self.topic(topic)
        masters = await self._topic_masters(topic)
        with anyio.CancelScope(shield=True):  # requests have time limits of their own
            await self.delete_topic(topic)
            await self._put_topics(masters, configs)
        await self._instance.wait_for_route(topic)

    async def _purge_static(self, topic: str) -> None:
        found, leaders = await self.static_leaders(topic)
        with anyio.CancelScope(shield=True):  # requests have time limits of their own
            await self.delete_topic(topic)
            await self.create_static_topic(
                topic,
                len(leaders),
                attributes=found.attributes,
                brokers=sorted(set(leaders.values())),
            )
            await self._restore_settings(topic, found)

    async def _restore_settings(self, topic: str, before: Found) -> None:
        """Give a topic that was created again the settings that it had on each broker."""
        settings = {
            name: msgspec.structs.replace(
                before.configs[name],
                read_queue_nums=created.read_queue_nums,
                write_queue_nums=created.write_queue_nums,
                # Without those that the topic was created with, which may not be changeable.
                attributes={
                    key: value
                    for key, value in before.configs[name].attributes.items()
                    if created.attributes.get(key) != value
                },
            )
            for name, created in (await self.topic(topic)).items()
            if name in before.configs
        }
        await self._put_topics(before.masters, settings)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its messages on all brokers.

        Raises RouteNotFound if it is missing, and NotEverywhere, after the rest is done, if brokers
        left with a part of it: they still have it.
        """
        self._instance.check_open("Admin")
        await self._instance.fetch_route(topic)
        missing = await self._left_with(topic)
        header = DeleteTopicHeader(topic=topic)
        await self._ask_all(await self._masters(), RequestCode.DELETE_TOPIC_IN_BROKER, header)
        if not missing:
            # It forgets what departed brokers have of the topic, too.
            for nameserver in self._instance.nameservers:
                in_nameserver = TopicInNamesrvHeader(topic=topic)
                await self._ask(nameserver, RequestCode.DELETE_TOPIC_IN_NAMESRV, in_nameserver)
        self._instance.invalidate_route(topic)
        if missing:
            raise NotEverywhere(
                f"topic {topic} is deleted on the brokers that are there, not on those that left",
                missing,
                "It is back with them: delete it again then",
            )

    async def topics(self, *, system: bool = False) -> list[str]:
        """Names of all topics, sorted; ``system`` includes the brokers' own topics."""
        self._instance.check_open("Admin")
        code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        names = (await self._instance.ask_nameserver(code)).expect().decode(TopicList).topic_list
        if system:
            return sorted(names)
        nodes = await self.cluster()
        clusters_and_brokers = {name for node in nodes for name in (node.cluster, node.broker_name)}
        return sorted(user_topics(names, clusters_and_brokers))

    async def static_topics(self) -> list[str]:
        """Names of all static topics, sorted."""
        names = await self.topics()
        found = await gather(self.read_static_topic, names)
        return [
            name
            for name, each in zip(names, found, strict=True)
            if isinstance(each, Found) and any(each.brokers()[b].mapping for b in each.masters)
        ]

    async def topic_totals(
        self, *, system: bool = False, problems: list[BrokerProblem] | None = None
    ) -> list[TopicTotals]:
        """Queues, messages and last time of all topics, sorted by name; see ``topics``."""
        names = await self.topics(system=system)
        masters = await self._masters()
        await self._note_departed("the list of topics", problems)
        static: dict[str, int] = {}
        # A topic may be deleted meanwhile.
        gone = ResponseCode.TOPIC_NOT_EXIST
        stats = {name: self._asking_stats(name, with_bytes=True, absent=gone) for name in names}

        async def ask(address: str) -> list[TopicStatsTable]:
            code = RequestCode.GET_ALL_TOPIC_CONFIG
            response = await self._ask(address, code, GetAllTopicConfigHeader())
            wrapper = response.decode(TopicConfigSerializeWrapper)
            for name, mapping in wrapper.topic_queue_mapping_detail_map.items():
                static[name] = max(static.get(name, 0), mapping.total_queues)
            found = await gather_or_raise(
                lambda name: stats[name](address),
                [name for name in names if name in wrapper.topic_config_table],
            )
            return [each for each in found if each is not None]

        answers = await self._gather(masters, ask, problems)
        totals = {name: TopicTotals(name) for name in names}
        for table in (each for tables in answers.values() for each in tables):
            for queue, at in table.offset_table.items():
                totals[queue.topic] = totals[queue.topic].plus(at)
        return [
            msgspec.structs.replace(each, queues=static.get(name, each.queues))
            for name, each in totals.items()
        ]

    async def topic_stats(
        self, topic: str, *, problems: list[BrokerProblem] | None = None
    ) -> dict[MessageQueue, TopicOffset]:
        """Minimum and maximum offset of each queue, sorted by queue. Raises RouteNotFound."""
        if await self.is_static(topic):
            await self._note_missing(topic, problems)
            queues = await self.logic_queues(topic, problems=problems)
            return {each.queue: each.offsets for each in queues}
        tables = await self._ask_topic(topic, self._asking_stats(topic), problems)
        return dict(sorted(ranges_in(tables).items()))


def _changed(
    config: TopicConfig, changes: Mapping[str, int], attributes: Mapping[str, str] | None
) -> TopicConfig:
    """A topic's settings with changes; brokers keep the attributes that are not named."""
    known = {name: getattr(config, name) for name in TopicConfig.__struct_fields__}
    return TopicConfig(**{**known, "attributes": dict(attributes or {}), **changes})


def _topic_header(config: TopicConfig, force: bool) -> CreateTopicHeader:
    return CreateTopicHeader(
        topic=config.topic_name,
        default_topic=DEFAULT_TOPIC,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm,
        topic_filter_type=config.topic_filter_type,
        topic_sys_flag=config.topic_sys_flag,
        order=config.order,
        # Only those named change.
        attributes=",".join(f"+{name}={value}" for name, value in config.attributes.items()),
        force=force or None,
    )


def _is_like(config: TopicConfig, wanted: TopicConfig) -> bool:
    """True if a topic has the settings of ``wanted``; it may have more attributes."""
    return (
        config.write_queue_nums == wanted.write_queue_nums
        and config.read_queue_nums == wanted.read_queue_nums
        and config.perm == wanted.perm
        and wanted.attributes.items() <= config.attributes.items()
    )


def _described(config: TopicConfig) -> str:
    """A topic's settings in words."""
    queues = f"{config.write_queue_nums} queues"
    if config.read_queue_nums != config.write_queue_nums:
        queues = f"{config.write_queue_nums} write queues, {config.read_queue_nums} read queues"
    attributes = "".join(f", {name}={value}" for name, value in sorted(config.attributes.items()))
    return f"{queues}, perm {perm_text(config.perm)}{attributes}"


def perm_text(perm: int) -> str:
    """A topic's permission as ``rw``, ``r``, ``w`` or ``none``."""
    letters = (("r", PERM_READ), ("w", PERM_WRITE))
    return "".join(letter for letter, bit in letters if perm & bit) or "none"
