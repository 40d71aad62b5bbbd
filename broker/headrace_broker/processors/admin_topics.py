"""Requests to create, read and delete topics.

Source: docs/protocol.md "Topics"; tests/broker/processors/test_admin_topics.py.
"""

from __future__ import annotations

import functools
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace_broker.persistence import save_error, saved
from headrace_broker.queue_directory import Use
from headrace_broker.topics.attributes import (
    apply_changes,
    check_queue_nums_of_keys,
    is_batched,
    parse_changes,
)
from headrace_broker.topics.table import check_config, unread_warning
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import (
    CreateTopicHeader,
    DeleteTopicHeader,
    GetAllTopicConfigHeader,
    GetAllTopicConfigResponseHeader,
    GetTopicConfigHeader,
    GetTopicStatsHeader,
    TopicConfigResponseHeader,
)
from headrace_protocol.bodies import (
    CreateTopicListRequestBody,
    MessageQueue,
    TopicConfig,
    TopicOffset,
)
from headrace_protocol.bounds import check_items, check_marks
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.late import visible_topics
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import Until, drained, ready, sliced, take_break

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.bodies import DataVersion
    from headrace_protocol.serving import Registry, Request

_FILTER_TYPES = ("SINGLE_TAG", "MULTI_TAG")
# Topics, warnings and groups named in an answer or in the log.
_NAMED_MAX = 10
# Lookups per slice, less than half a millisecond.
_QUEUES_AT_ONCE = 256


class Mappings(Protocol):
    """The mappings of static topics, for requests about topics."""

    data_version: DataVersion

    def detail(self, topic: str) -> fastjson.Written | None:
        """The encoded mapping of a topic; None without one."""

    async def details(self, topics: Iterable[str]) -> fastjson.Written:
        """The encoded mappings of topics, in slices."""


class Deletion(Protocol):
    """The parts of other features that are deleted with a topic."""

    async def before_delete(self, topic: str) -> None:
        """Runs before the topic is deleted. Raises RequestError."""

    def after_delete(self, topic: str, then: Callable[[Exception | None], None]) -> None:
        """Runs when the deletion is on disk; calls back at its end, or with its error."""


class AdminTopicsProcessor:
    """Serves requests about topics."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        topics: TopicTable,
        directory: QueueDirectory,
        offsets: ConsumerOffsets,
        long_polling: LongPolling,
        statistics: BrokerStatistics,
        changes: HostLog,
        when_registered: Callable[[Callable[[], None]], None],
        mappings: Mappings,
        deletion: Deletion,
    ) -> None:
        """when_registered: calls back once all changes so far are registered at the nameservers."""
        self._mappings = mappings
        self._deletion = deletion
        self._changes = changes
        self._when_registered = when_registered
        self._config = config
        self._store = store
        self._topics = topics
        self._directory = directory
        self._offsets = offsets
        self._long_polling = long_polling
        self._statistics = statistics

    def register(self, registry: Registry) -> None:
        """Route the requests about topics."""
        registry.route(RequestCode.UPDATE_AND_CREATE_TOPIC, self.update_and_create)
        registry.route(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, self.update_and_create_list)
        registry.route(RequestCode.DELETE_TOPIC_IN_BROKER, self.delete)
        registry.route_long(RequestCode.GET_ALL_TOPIC_CONFIG, self.all_configs)
        registry.route(RequestCode.GET_TOPIC_CONFIG, self.config)
        registry.route_long(RequestCode.GET_TOPIC_STATS_INFO, self.stats)

    # -- changes -----------------------------------------------------------------------------------

    async def update_and_create(self, request: Request) -> Reply | None:
        """UPDATE_AND_CREATE_TOPIC: one topic, from the header."""
        header = request.header(CreateTopicHeader)
        topic = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=bool(header.order),
            attributes=parse_changes(header.attributes or ""),
        )
        if not header.force:
            check_queue_nums_of_keys(self._topics.get(topic.topic_name), topic)
        return await self._put([topic], request)

    async def update_and_create_list(self, request: Request) -> Reply | None:
        """UPDATE_AND_CREATE_TOPIC_LIST: all or none, from the body."""
        check_marks("topics", request.body, b"{", 2)  # one of the two for the attributes
        topics = CreateTopicListRequestBody.decode(request.body).topic_config_list
        check_items("topics", topics)
        if not topics:
            raise RequestError(ResponseCode.INVALID_PARAMETER, "topicConfigList is empty")
        for topic in topics:
            check_queue_nums_of_keys(self._topics.get(topic.topic_name), topic)
        return await self._put(topics, request)

    async def _put(self, topics: list[TopicConfig], request: Request) -> Reply | None:
        merged, warnings = [], []
        for topic in topics:
            merged.append(self._merged(topic))
            warnings += await self._warnings(topic)
            await take_break()
        self._topics.put_all(merged)
        self._log_put(merged, warnings, request.channel.address)
        await saved(self._topics.when_saved)
        await self._registered()
        return Reply(remark="; ".join(warnings[:_NAMED_MAX]) or None)

    def _log_put(self, topics: list[TopicConfig], warnings: list[str], client: str) -> None:
        for topic in topics[:_NAMED_MAX]:
            self._changes.info(
                client,
                "topic created or changed",
                topic=topic.topic_name,
                read_queues=topic.read_queue_nums,
                write_queues=topic.write_queue_nums,
                perm=topic.perm,
            )
        if len(topics) > _NAMED_MAX:
            self._changes.info(
                client, "more topics created or changed", count=len(topics) - _NAMED_MAX
            )
        for warning in warnings[:_NAMED_MAX]:
            self._changes.warning(client, "topic has unreachable messages", reason=warning)

    async def _registered(self) -> None:
        """Wait until all changes so far are registered at the nameservers."""
        await Until("the registration", lambda run: self._when_registered(run.resume))

    def _merged(self, topic: TopicConfig) -> TopicConfig:
        """A topic with its attribute changes applied. Raises RequestError if it is invalid."""
        check_config(topic)
        name = topic.topic_name
        self._topics.check_puttable(name)
        self._topics.check_changeable(name, topic)
        if topic.topic_filter_type not in _FILTER_TYPES:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"topicFilterType {topic.topic_filter_type!r}: expected SINGLE_TAG or MULTI_TAG",
            )
        known = self._topics.get(name)
        attributes = apply_changes(
            known.attributes if known else {}, topic.attributes, is_new=known is None
        )
        merged = msgspec.structs.replace(topic, attributes=attributes)
        if is_batched(merged):
            self._check_queues(name)
        return merged

    def _check_queues(self, topic: str) -> None:
        """Raise RequestError if a topic of batch queues has plain ones in the store."""
        if not all(queue.consume_queue.is_batch for queue in self._store.queues_of(topic)):
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"topic {topic} can't have queue.type=BatchCQ: the store has queues of it with "
                "single messages; delete the topic first, or use another name",
            )

    async def _warnings(self, topic: TopicConfig) -> list[str]:
        warnings = [unread_warning(topic)]
        known = self._topics.get(topic.topic_name)
        if known and topic.read_queue_nums < known.read_queue_nums:
            warnings.append(await self._unconsumed_warning(topic, known.read_queue_nums))
        return [warning for warning in warnings if warning]

    async def _unconsumed_warning(self, topic: TopicConfig, old_queue_nums: int) -> str | None:
        """A warning about messages that become unreachable with fewer read queues, if any."""
        name = topic.topic_name
        groups = sorted(self._offsets.groups_of(name))
        lost_queues: list[int] = []
        lagging_groups: dict[str, None] = {}
        for queue_id in range(topic.read_queue_nums, old_queue_nums):
            group = await self._lagging_group(name, queue_id, groups)
            if group is not None:
                lost_queues.append(queue_id)
                lagging_groups[group] = None
            if not queue_id % _QUEUES_AT_ONCE:
                await take_break()
        if not lost_queues:
            return None
        return (
            f"queues {_ranges(lost_queues)} of topic {name} hold messages that "
            f"{_named(sorted(lagging_groups))} has not consumed and can no longer reach: set the "
            f"read queues back to {old_queue_nums} until they are consumed"
        )

    async def _lagging_group(self, topic: str, queue_id: int, groups: list[str]) -> str | None:
        """The first group that has not consumed all of a queue."""
        place = self._directory.find(topic, queue_id, Use.LIST)
        if place is None or not place.source.max_offset():
            return None
        source = place.source
        min_offset = await ready(source.min_offset)
        for number, group in enumerate(groups, 1):
            consumed = self._offsets.query(group, topic, queue_id) or 0
            if max(consumed, min_offset) < source.max_offset():
                return group
            if not number % _QUEUES_AT_ONCE:
                await take_break()
        return None

    async def delete(self, request: Request) -> Reply | None:
        """DELETE_TOPIC_IN_BROKER: the topic, its queues and the groups' progress in it."""
        name = request.header(DeleteTopicHeader).topic
        if not name.strip():
            raise RequestError(
                ResponseCode.INVALID_PARAMETER, "The specified topic is blank: name the topic"
            )
        self._topics.check_deletable(name)
        await self._deletion.before_delete(name)
        # The table first, so that the topic can't be written or read while the rest is deleted.
        with self._topics.deleting(name) as existed:
            if existed:
                await self._delete_queues(name)
                await sliced(self._offsets.delete_topic(name))
                self._statistics.topic_deleted(name)
                self._changes.info(request.channel.address, "topic deleted", topic=name)
        await Until("the flush of the log", lambda run: self._store.when_all_flushed(run.resume))
        life = self._store.commit_log.life
        if not life.is_writable:
            raise RequestError(ResponseCode.SYSTEM_ERROR, _unsaved(name, life.refusal))
        self._topics.deleted(name)
        await saved(self._topics.when_saved)
        await saved(functools.partial(self._deletion.after_delete, name))
        await self._registered()
        return Reply()

    async def _delete_queues(self, topic: str) -> None:
        for queue in self._store.queues_of(topic):
            await sliced(self._long_polling.queue_gone(queue))
        try:
            await self._store.delete_queues(topic)
        except OSError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, _unsaved(topic, error)) from error

    # -- reads -------------------------------------------------------------------------------------

    async def all_configs(self, request: Request) -> Reply:
        """GET_ALL_TOPIC_CONFIG: all topics, or a range of them."""
        header = request.header(GetAllTopicConfigHeader)
        wrapper = self._topics.wrapper()
        everything = list(wrapper.topic_config_table.items())
        topics = list(await visible_topics(request, everything, itemgetter(0)))
        start = header.topic_seq or 0
        end = start + header.max_topic_num if header.max_topic_num else None
        table = await fastjson.dumps_sliced(topics[start:end])
        details = await self._mappings.details(name for name, _ in topics[start:end])
        wrapper.mapping_data_version = self._mappings.data_version
        body = wrapper.with_table(table, details)
        total = GetAllTopicConfigResponseHeader(total_topic_num=len(topics))
        return Reply(total, body.parts)

    async def config(self, request: Request) -> Reply:
        """GET_TOPIC_CONFIG: one topic, with its mapping if the request asks for it."""
        header = request.header(GetTopicConfigHeader)
        topic = self._topics.expect(header.topic)
        body = topic.encode()
        if header.logical and (detail := self._mappings.detail(topic.topic_name)) is not None:
            fields = msgspec.to_builtins(topic) | {"mappingDetail": detail}
            body = fastjson.dumps(dict(sorted(fields.items())))
        incarnation = self._topics.incarnations.of(topic.topic_name)

        # An id that is not on disk would change after a crash.
        error = await save_error(self._topics.incarnations.saved.when_saved)
        return Reply(TopicConfigResponseHeader(incarnation=None if error else incarnation), (body,))

    async def stats(self, request: Request) -> Reply:
        """GET_TOPIC_STATS_INFO: offsets and the time of the last message, by queue."""
        header = request.header(GetTopicStatsHeader)
        topic = self._topics.expect(header.topic)
        name = topic.topic_name
        queue_nums = max(topic.read_queue_nums, topic.write_queue_nums)
        with_bytes = bool(header.with_bytes)
        rows = [
            await ready(functools.partial(self._queue_stats, name, queue_id, with_bytes=with_bytes))
            for queue_id in range(queue_nums)
        ]
        table = await fastjson.dumps_sliced(row for row in drained(rows) if row is not None)
        body = {"offsetTable": table, "topicPutTps": self._statistics.topic_rate(name)}
        return Reply(body=fastjson.dumps_parts(body))

    def _queue_stats(
        self, topic: str, queue_id: int, *, with_bytes: bool
    ) -> tuple[MessageQueue, TopicOffset] | None:
        source = self._directory.source_to_list(topic, queue_id)
        if source is None:
            return None
        min_offset, max_offset = source.min_offset(), source.max_offset()
        return MessageQueue(topic, self._config.broker_name, queue_id), TopicOffset(
            min_offset=min_offset,
            max_offset=max_offset,
            missing_count=source.missing_from(min_offset) or None,
            last_update_timestamp=source.store_time_at(max_offset - 1) or 0,
            record_bytes=source.record_bytes() if with_bytes else None,
        )


def _unsaved(topic: str, problem: Exception | None) -> str:
    return f"topic {topic} may come back at the next start, delete it then: {problem}"


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as "1, 3 to 5"."""
    starts = [n for at, n in enumerate(numbers) if not at or numbers[at - 1] != n - 1]
    ends = [n for at, n in enumerate(numbers) if at == len(numbers) - 1 or numbers[at + 1] != n + 1]
    pairs = zip(starts, ends, strict=True)
    return _named([f"{a}" if a == b else f"{a} to {b}" for a, b in pairs])


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more
