"""The queues that a POP reads: those of its topic, and of the topic's retries."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.consumer.filtered import FilteredReader
from headrace_broker.consumer.filters import Filter, filter_bytes, filter_of
from headrace_broker.host_budget import Host
from headrace_broker.queue_directory import Use
from headrace_broker.topics.attributes import BATCHED, QUEUE_TYPE
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.pop.handle import TopicKind
from headrace_protocol.pop.headers import ANY_QUEUE
from headrace_protocol.rights.late import check_create
from headrace_protocol.rights.rules import Kind
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.core import Tables
    from headrace_broker.queue_directory import QueueDirectory, Reader, Source
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.serving import Request

_TARGETS_BYTES_MAX: Final = 64 << 20
_TARGET_BYTES: Final = 1024
_SOURCE_BYTES: Final = 512


class PopSource(NamedTuple):
    """A queue, and how a POP names it. reader: where messages are read, through a filter or not."""

    kind: TopicKind
    topic: str
    queue: StoreQueue
    source: Source
    reader: Reader

    @property
    def queue_id(self) -> int:
        """The queue's id in its topic."""
        return self.queue.queue_id


class Wanted(NamedTuple):
    """The fields of a request that select its queues."""

    group: str
    topic: str
    queue_id: int
    expression_type: str | None
    expression: str | None


class PopTarget(NamedTuple):
    """The queues of a POP, and the tags that its group wants of the topic.

    filter_bytes: memory of the filter and its readers, beyond a few tags.
    """

    wanted: Wanted
    retries: tuple[PopSource, ...]
    sources: tuple[PopSource, ...]
    tags: frozenset[int] | None
    filter_bytes: int

    @property
    def held_bytes(self) -> int:
        """Memory of all of it."""
        sources_bytes = _SOURCE_BYTES * (len(self.retries) + len(self.sources))
        text_bytes = 4 * sum(len(each) for each in self.wanted if isinstance(each, str))
        return _TARGET_BYTES + sources_bytes + text_bytes + self.filter_bytes

    @property
    def queues(self) -> tuple[StoreQueue, ...]:
        """The queues at which a held request waits."""
        return tuple(each.queue for each in (*self.retries, *self.sources))

    def in_order(self, retries_percent: int) -> tuple[PopSource, ...]:
        """All queues, as one POP goes through them: no queue always comes first."""
        sources, retries = self.sources, self.retries
        if len(sources) > 1:
            first = random.randrange(len(sources))
            sources = sources[first:] + sources[:first]
        if not retries:
            return sources
        is_first = random.randrange(100) < retries_percent
        return retries + sources if is_first else sources + retries


class PopTargets:
    """Finds targets, and keeps them until topics or groups change. byte_count: their memory."""

    def __init__(self, config: BrokerConfig, tables: Tables, directory: QueueDirectory) -> None:
        self._config = config
        self._topics, _, self._groups, self._offsets = tables
        self._directory = directory
        self._targets: dict[Wanted, PopTarget] = {}
        self.byte_count = 0
        self._change: tuple[object, ...] = ()

    def find(self, request: Request, wanted: Wanted) -> PopTarget:
        """The target of a request. Raises RequestError, in the peer's order of checks."""
        change = (
            self._topics.change_count,
            self._groups.change_count,
            self._config.enable_retry_topic_v2,
            self._config.retrieve_message_from_pop_retry_topic_v1,
        )
        if change != self._change or self.byte_count > _TARGETS_BYTES_MAX:
            self._targets.clear()
            self.byte_count = 0
            self._change = change
        target = self._targets.get(wanted)
        if target is None:
            target = self._targets[wanted] = self._find(request, wanted)
            self.byte_count += target.held_bytes
        return target

    def _find(self, request: Request, wanted: Wanted) -> PopTarget:
        group, topic, queue_id, *_ = wanted
        config = self._topics.check_readable(topic)
        self._check_queue_id(config, queue_id)
        host = Host.of(request.channel)
        before_create = partial(check_create, request, Kind.GROUP, group)
        if not group:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "a POP without a consumer group"
            )
        self._groups.check_consumable(group, host, before_create)
        self._groups.check_readable(group, topic)
        found = self._filter(wanted)
        queue_ids = range(config.read_queue_nums) if queue_id == ANY_QUEUE else (queue_id,)
        sources = tuple(
            self._filtered(self._source(TopicKind.NORMAL, group, topic, each, host), found)
            for each in queue_ids
        )
        readers_bytes = _SOURCE_BYTES * len(sources) if found.expression is not None else 0
        return PopTarget(
            wanted,
            self._retries(group, topic, host),
            sources,
            found.tags,
            filter_bytes(found) + readers_bytes,
        )

    def _filtered(self, source: PopSource, wanted: Filter) -> PopSource:
        if wanted.expression is None:
            return source
        return source._replace(
            reader=FilteredReader(source.source, wanted.expression, self._config)
        )

    def _check_queue_id(self, config: TopicConfig, queue_id: int) -> None:
        if not ANY_QUEUE <= queue_id < config.read_queue_nums:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{queue_id}] is illegal, topic:[{config.topic_name}] "
                f"topicConfig.readQueueNums:[{config.read_queue_nums}]",
            )

    def _filter(self, wanted: Wanted) -> Filter:
        try:
            return filter_of(wanted.expression, wanted.expression_type, self._config)
        except RequestError as error:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED,
                f"parse the consumer's subscription failed: {error.remark}",
            ) from None

    def _retries(self, group: str, topic: str, host: Host) -> tuple[PopSource, ...]:
        """The queues of messages that were not acknowledged in time."""
        if topic.startswith(RETRY_PREFIX):
            return ()
        kinds = [TopicKind.RETRY_V1]
        if self._config.enable_retry_topic_v2:
            is_v1_read = self._config.retrieve_message_from_pop_retry_topic_v1
            kinds = [TopicKind.RETRY_V2, *(kinds if is_v1_read else [])]
        found = []
        for kind in kinds:
            name = kind.topic(topic, group)
            if (config := self._topics.get(name)) is not None:
                found += [
                    self._source(kind, group, name, queue_id, host)
                    for queue_id in range(config.read_queue_nums)
                ]
        return tuple(found)

    def _source(
        self, kind: TopicKind, group: str, topic: str, queue_id: int, host: Host
    ) -> PopSource:
        def make_room(is_new: bool) -> None:
            self._offsets.make_room(group, topic, queue_id, host)
            if is_new:
                self._offsets.make_queue_room(topic, queue_id, host)

        place = self._directory.serve(topic, queue_id, Use.PULL, make_room)
        if place.reader is not None:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"topic {topic} is static: its queues span brokers, which POP can't follow; "
                "consume it by pulls",
            )
        assert place.queue is not None
        if place.queue.consume_queue.is_batch:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"topic {topic} has {QUEUE_TYPE}={BATCHED}: its records hold whole batches, of "
                "which POP can't take single messages; consume it by pulls",
            )
        return PopSource(kind, topic, place.queue, place.source, place.source)
