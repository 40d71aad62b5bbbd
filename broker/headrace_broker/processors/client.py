"""Requests of clients about themselves: heartbeats, members, queue locks and progress.

Source: docs/protocol.md "Clients"; tests/broker/processors/test_client_processor.py.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import msgspec

from headrace_broker.consumer.groups import Member
from headrace_broker.consumer.own_groups import check_not_own
from headrace_broker.host_budget import Host
from headrace_broker.persistence import SAVES
from headrace_broker.queue_directory import Use
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import HeartbeatResponseHeader
from headrace_protocol.bodies import (
    CheckClientRequestBody,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    LockBatchRequestBody,
)
from headrace_protocol.bounds import NAME_CHARS_MAX, check_items, check_text
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import (
    ConsumerGroupHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetHeader,
    UnregisterClientHeader,
    UpdateConsumerOffsetHeader,
)
from headrace_protocol.rights.late import check_create
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import at_once, ready, take_break, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_broker.consumer.filter_table import FilterTable
    from headrace_broker.consumer.groups import ConsumerManager, ProducerManager
    from headrace_broker.consumer.locks import QueueLocks
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.persistence import NowMs
    from headrace_broker.queue_directory import QueueDirectory, Source
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.bodies import ConsumerData, MessageQueue
    from headrace_protocol.serving import LongFunction, Registry, Request, Work

# Like the peer, call a queue young if its first message is no further from the end of the log than
# this share of the machine's memory.
_MEMORY_RATIO = 0.4

# A heartbeat with more groups is handled in slices.
_GROUPS_AT_ONCE = 100

# With lo=false, removes what a group has committed in a queue: the leader of a static topic's queue
# asks for it, and Apache's broker takes such an offset for none.
_WITHDRAWN = -1

# As much of a client's language as a log line shows.
_LANGUAGE_CHARS = 40

# Refused names in one answer.
_REFUSED_NAMED = 10

# Locks per slice, half a millisecond.
_LOCKS_AT_ONCE = 128

# The reply never calls the subscriptions unchanged, so clients always send them.
_HEARTBEAT_REPLY = HeartbeatResponseHeader(is_support_heart_beat_v2=True, is_sub_change=True)


class ClientProcessor:
    """Serves heartbeats, membership, queue locks and consumer progress.

    memory_bytes: of the machine.
    """

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        directory: QueueDirectory,
        groups: SubscriptionGroups,
        consumers: ConsumerManager,
        producers: ProducerManager,
        long_polling: LongPolling,
        offsets: ConsumerOffsets,
        locks: QueueLocks,
        steady_ms: NowMs,
        filters: FilterTable,
    ) -> None:
        self._filters = filters
        self._store = store
        self._topics = topics
        self._directory = directory
        self._groups = groups
        self._consumers = consumers
        self._producers = producers
        self._long_polling = long_polling
        self._offsets = offsets
        self._locks = locks
        self._steady_ms = steady_ms

    def register(self, registry: Registry) -> None:
        """Route the requests of clients."""
        heartbeat = functools.partial(self.heartbeat, registry.begin_long)
        registry.route(RequestCode.HEART_BEAT, heartbeat)
        registry.route(RequestCode.UNREGISTER_CLIENT, self.unregister)
        registry.route(RequestCode.CHECK_CLIENT_CONFIG, self.check_client_config)
        registry.route(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.consumer_list)
        registry.route_long(RequestCode.LOCK_BATCH_MQ, self.lock)
        registry.route(RequestCode.UNLOCK_BATCH_MQ, self.unlock)
        registry.route(RequestCode.QUERY_CONSUMER_OFFSET, self.query_offset)
        registry.route(RequestCode.UPDATE_CONSUMER_OFFSET, self.update_offset)

    # -- membership --------------------------------------------------------------------------------

    def heartbeat(
        self, begin_long: Callable[[LongFunction, Request], None], request: Request
    ) -> Reply | Work | None:
        """HEART_BEAT: register or renew a client in its groups.

        A rejected group or topic does not affect the client's others.
        """
        data = HeartbeatData.decode(request.body)
        _check_bounds(data, request.command.language)
        # The client's next request may depend on its heartbeat, so it is handled at once; a large
        # one can't be, since each new group takes 40 µs.
        if len(data.producer_data_set) + len(data.consumer_data_set) > _GROUPS_AT_ONCE:
            begin_long(functools.partial(self._large_heartbeat, data), request)
            return None
        reply = at_once(self._handle_heartbeat(data, request))
        return self._when_saved(reply) if self._has_unsaved_filters(data) else reply

    async def _large_heartbeat(self, data: HeartbeatData, request: Request) -> Reply | None:
        reply = await self._handle_heartbeat(data, request)
        return await self._when_saved(reply) if self._has_unsaved_filters(data) else reply

    def _has_unsaved_filters(self, data: HeartbeatData) -> bool:
        names = (consumer.group_name for consumer in data.consumer_data_set)
        return any(map(self._filters.is_unsaved, names))

    async def _when_saved(self, reply: Reply | None) -> Reply | None:
        """The reply once the filters of its heartbeat are on disk."""
        await until(SAVES, self._filters.saved.when_saved)
        return reply

    async def _handle_heartbeat(self, data: HeartbeatData, request: Request) -> Reply | None:
        channel, command = request.channel, request.command
        member = Member(channel, data.client_id, command.language, command.version, request.subject)
        now_ms = self._steady_ms()
        for producer in data.producer_data_set:
            self._producers.heartbeat(member, producer.group_name, now_ms)
            await take_break()
            if not channel.is_open:  # closed meanwhile, and removed from its groups
                return None
        rejections: list[RequestError] = []
        conflicts, rights = [], _Rights(request)
        for consumer in filter(None, map(rights.permitted, data.consumer_data_set)):
            try:
                self._prepare_group(consumer, request)
                self._consumers.heartbeat(
                    member, consumer, now_ms, with_subscriptions=not data.without_sub
                )
                conflicts.append(self._consumers.conflict(consumer.group_name))
                if not data.without_sub:
                    rejections += self._filters.register(
                        consumer.group_name,
                        consumer.subscription_data_set,
                        Host.of(channel),
                    )
            except RequestError as error:
                rejections.append(error)
            await take_break()
            if not channel.is_open:
                return None
        if (refusal := rights.refusal(rejections)) is not None:
            raise refusal
        # A remark of a success is ours; Apache's clients ignore it.
        return Reply(_HEARTBEAT_REPLY, remark="; ".join(filter(None, conflicts)) or None)

    def _prepare_group(self, consumer: ConsumerData, request: Request) -> None:
        name = consumer.group_name
        before_create = functools.partial(check_create, request, Kind.GROUP, name)
        group = self._groups.get_or_create(name, Host.of(request.channel), before_create)
        self._topics.create_retry_topic(group.group_name, group.retry_queue_nums)

    def unregister(self, request: Request) -> Reply:
        """UNREGISTER_CLIENT: remove a client from its groups, if it still is in them.

        Its POPs that are held are answered first, so that none takes out messages any more.
        """
        header = request.header(UnregisterClientHeader)
        if header.producer_group:
            self._producers.unregister(header.producer_group, request.channel)
        if header.consumer_group:
            self._long_polling.withdraw(request.channel, header.consumer_group)
            self._consumers.unregister(header.consumer_group, request.channel)
        return Reply()

    def check_client_config(self, request: Request) -> Reply:
        """CHECK_CLIENT_CONFIG: check that the broker can evaluate a subscription."""
        subscription = CheckClientRequestBody.decode(request.body).subscription_data
        self._filters.check(subscription)
        return Reply()

    def consumer_list(self, request: Request) -> Reply:
        """GET_CONSUMER_LIST_BY_GROUP: client ids of the members."""
        group = request.header(ConsumerGroupHeader).consumer_group
        members = self._consumers.members(group)
        if not members:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"no consumer for this group, {group}: no member has sent a heartbeat",
            )
        body = GetConsumerListByGroupResponseBody(
            consumer_id_list=[member.client_id for member in members]
        )
        return Reply(body=(body.encode(),))

    # -- queue locks -------------------------------------------------------------------------------

    async def lock(self, request: Request) -> Reply | None:
        """LOCK_BATCH_MQ: take or renew locks."""
        body = LockBatchRequestBody.decode(request.body)
        check_items("queues to lock", body.mq_set)
        group, client_id, host = body.consumer_group, body.client_id, Host.of(request.channel)
        check_not_own(group)
        held = []
        for queues in _slices(body.mq_set):
            consumed = self._consumers.topics_of(group, request.channel, client_id)
            held += self._locks.lock(group, client_id, queues, self._steady_ms(), host, consumed)
            await take_break()
        written = await fastjson.dumps_list_sliced(held)
        return Reply(body=fastjson.dumps_parts({"lockOKMQSet": written}))

    def unlock(self, request: Request) -> Reply:
        """UNLOCK_BATCH_MQ: release locks. Not in slices: clients usually disconnect right after."""
        body = LockBatchRequestBody.decode(request.body)
        check_items("queues to unlock", body.mq_set)
        if self._locks.unlock(body.consumer_group, body.client_id, body.mq_set):
            self._consumers.notify(body.consumer_group)
        return Reply()

    # -- progress ----------------------------------------------------------------------------------

    async def query_offset(self, request: Request) -> Reply:
        """QUERY_CONSUMER_OFFSET: the offset from which a group resumes.

        A group that has committed nothing starts an empty or young queue at offset 0; in an older
        queue it must choose for itself.
        """
        header = request.header(QueryConsumerOffsetHeader)
        place = self._directory.find(header.topic, header.queue_id, Use.INSPECT)
        offset = self._offsets.query(header.consumer_group, header.topic, header.queue_id)
        if offset is None:
            may_be_zero = header.set_zero_if_not_found is not False
            if (
                place is None
                or not may_be_zero
                or not await ready(functools.partial(self._is_young, place.source))
            ):
                raise RequestError(
                    ResponseCode.QUERY_NOT_FOUND,
                    f"Not found: group {header.consumer_group} has committed nothing in "
                    f"{header.topic} queue {header.queue_id}, choose where to begin",
                )
            offset = 0
        return Reply(OffsetResponseHeader(offset=offset))

    def _is_young(self, source: Source) -> bool:
        """True if the first message ever sent to a queue still exists, and is likely in memory.

        A queue that never had a message is young: if the client had to query for the end next, it
        would skip a message that arrives in between.
        """
        if not source.max_offset():
            return True
        if source.min_offset() > 0:
            return False
        physical_offset, _, _ = source.unit(0)
        distance = self._store.commit_log.max_offset - physical_offset
        return distance <= self.memory_bytes * _MEMORY_RATIO

    def update_offset(self, request: Request) -> Reply:
        """UPDATE_CONSUMER_OFFSET: commit a group's progress in a queue."""
        header = request.header(UpdateConsumerOffsetHeader)
        group, topic = header.consumer_group, header.topic
        if self._groups.get(group) is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Group {group} not exist! Send a heartbeat first, or create the group",
            )
        is_withdrawn = header.commit_offset == _WITHDRAWN and header.logical is False
        if header.commit_offset < 0 and not is_withdrawn:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"commit of group {group}, topic {topic}, queue {header.queue_id}: offset "
                f"{header.commit_offset} must not be negative",
            )
        self._directory.serve(topic, header.queue_id, Use.INSPECT)
        self._offsets.make_room(group, topic, header.queue_id, Host.of(request.channel))
        if is_withdrawn:
            self._offsets.withdraw(group, topic, header.queue_id)
            return Reply()
        if self._offsets.commit(group, topic, header.queue_id, header.commit_offset):
            return Reply()
        return Reply(remark="Offset has been previously reset")


class _Rights:
    """Judges the names in one heartbeat, and collects the refused ones.

    Apache's broker refuses a whole heartbeat for one topic, and its client only logs that.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._refused: list[str] = []

    def permitted(self, consumer: ConsumerData) -> ConsumerData | None:
        """A group with the subscriptions that the client may have; None if not even the group."""
        if self._request.subject is None:
            return consumer
        if not self._may_sub(Kind.GROUP, consumer.group_name):
            return None
        kept = [
            each for each in consumer.subscription_data_set if self._may_sub(Kind.TOPIC, each.topic)
        ]
        return msgspec.structs.replace(consumer, subscription_data_set=kept)

    def _may_sub(self, kind: Kind, name: str) -> bool:
        may_sub = self._request.may(kind, name, Action.SUB)
        if not may_sub:
            self._refused.append(f"{kind.value}:{name}")
        return may_sub

    def refusal(self, others: list[RequestError]) -> RequestError | None:
        """The answer that names what was refused; None if nothing was.

        others: other reasons to reject parts of the heartbeat.
        """
        reasons = _named([other.remark for other in others], "; ")
        subject = self._request.subject
        if not self._refused or subject is None:
            return RequestError(others[0].code, reasons) if others else None
        remark = (
            f"{subject} has no permission to access {_named(self._refused, ', ')} from "
            f"{subject.address}; the rest of the heartbeat was taken"
        )
        if others:
            remark += f", except: {reasons}"
        return RequestError(ResponseCode.NO_PERMISSION, remark)


def _named(refused: list[str], separator: str) -> str:
    """The first of what was refused, and how many more there are."""
    names = separator.join(refused[:_REFUSED_NAMED])
    more = len(refused) - _REFUSED_NAMED
    return f"{names} and {more} more" if more > 0 else names


def warn_of_heartbeat(log: HostLog, request: Request, reply: Reply) -> None:
    """Log a refused heartbeat: some clients ignore the answer, and then consume nothing."""
    if request.command.code == RequestCode.HEART_BEAT:
        language = request.command.language[:_LANGUAGE_CHARS]
        address = request.channel.address
        log.warning(address, "heartbeat refused", language=language, reason=reply.remark)


def _check_bounds(data: HeartbeatData, language: str) -> None:
    """Raise OutOfBounds for a heartbeat that would make lists of members too long."""
    check_text("clientID", data.client_id, NAME_CHARS_MAX)
    check_text("language", language, NAME_CHARS_MAX)
    check_items("producer groups", data.producer_data_set)
    check_items("consumer groups", data.consumer_data_set)
    for consumer in data.consumer_data_set:
        check_items("subscriptions", consumer.subscription_data_set)


def _slices(queues: list[MessageQueue]) -> Iterator[list[MessageQueue]]:
    return (
        queues[start : start + _LOCKS_AT_ONCE] for start in range(0, len(queues), _LOCKS_AT_ONCE)
    )
