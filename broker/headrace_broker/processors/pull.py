"""PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361).

What a group may read from a queue, and by which filter, is looked up once and kept until topics,
groups or subscriptions change. The records go out as the log holds them, from its memory map.
Source: docs/protocol.md "Pull".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.consumer.filters import wanted_tags
from headrace_broker.consumer.long_polling import HeldPull
from headrace_broker.store.reader import GetStatus
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.frame import frame_prefix
from headrace_protocol.header_codecs import SerializeType
from headrace_protocol.headers import PullMessageHeader, PullMessageResponseHeader
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.groups import ConsumerManager
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.reader import GetResult
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics import TopicTable
    from headrace_protocol.serving import Registry, Request

_COMMIT_OFFSET = 0x1
_SUSPEND = 0x2
_SUBSCRIPTION = 0x4

_TARGETS_KEPT = 100_000
# More than the peer gives (32 messages of 256 KiB), for those who ask for more.
_COUNT_MAX = 4096
_BODY_BYTES = 256 * 1024
_BODY_BYTES_MAX = 4 * 1024 * 1024
_SUSPEND_TIMEOUT_MS_MAX = 60_000
_SHORT_POLL_MS = 1000

_CODES = {
    GetStatus.FOUND: ResponseCode.SUCCESS,
    GetStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}

_FOUND = (
    b'{"code":0,"extFields":{"suggestWhichBrokerId":"0","groupSysFlag":"0",'
    b'"nextBeginOffset":"%d","maxOffset":"%d","minOffset":"%d","topicSysFlag":"0"},"flag":1,'
    b'"language":"PYTHON","opaque":%d,"remark":"FOUND","serializeTypeCurrentRPC":"JSON",'
    b'"version":513}'
)


class _Target(NamedTuple):
    """A queue that a group may read, and the tags it wants."""

    queue: StoreQueue
    tags: frozenset[int] | None


class PullProcessor:
    """Hands out records."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        consumers: ConsumerManager,
        offsets: ConsumerOffsets,
        long_polling: LongPolling,
        statistics: BrokerStatistics,
    ) -> None:
        self._config = config
        self._store = store
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._offsets = offsets
        self._long_polling = long_polling
        self._statistics = statistics
        self._targets: dict[tuple[object, ...], _Target] = {}
        self._targets_change: tuple[int, int, int] = (-1, -1, -1)

    def register(self, registry: Registry) -> None:
        """Serve both pulls."""
        registry.route(RequestCode.PULL_MESSAGE, self.pull)
        registry.route(RequestCode.LITE_PULL_MESSAGE, self.pull)

    def pull(self, request: Request) -> Reply | None:
        """Answer with records, or hold the request until some arrive."""
        header = request.header(PullMessageHeader)
        target = self._target(header)
        sys_flag = header.sys_flag
        if sys_flag & _COMMIT_OFFSET and header.commit_offset >= 0:
            self._offsets.commit(
                header.consumer_group,
                header.topic,
                header.queue_id,
                header.commit_offset,
            )
        if (reset := self._take_reset(header, target)) is not None:
            return reset
        result = self._get(header, target)
        if sys_flag & _SUSPEND and _is_held(result.status, header.queue_offset):
            self._hold(request, header, target)
            return None
        return self._answer(request, header, result)

    def _take_reset(self, header: PullMessageHeader, target: _Target) -> Reply | None:
        """Send a group elsewhere when somebody has reset its offset."""
        offset = self._offsets.take_reset(header.consumer_group, header.topic, header.queue_id)
        if offset is None:
            return None
        queue = target.queue
        return Reply(
            PullMessageResponseHeader(
                suggest_which_broker_id=0,
                next_begin_offset=offset,
                min_offset=self._store.min_offset(queue),
                max_offset=self._store.max_offset(queue),
            ),
            code=ResponseCode.PULL_OFFSET_MOVED,
            remark="OFFSET_RESET",
        )

    def _get(self, header: PullMessageHeader, target: _Target) -> GetResult:
        bytes_max = min(max(header.max_msg_bytes or 0, _BODY_BYTES), _BODY_BYTES_MAX)
        return self._store.get(
            target.queue,
            header.queue_offset,
            min(header.max_msg_nums, _COUNT_MAX),
            bytes_max,
            target.tags,
        )

    def _hold(self, request: Request, header: PullMessageHeader, target: _Target) -> None:
        timeout_ms = (
            min(max(header.suspend_timeout_millis, 0), _SUSPEND_TIMEOUT_MS_MAX)
            if self._config.long_polling_enable
            else _SHORT_POLL_MS
        )

        def answer(may_wait: bool) -> bool:
            if not request.channel.is_open:
                return True
            result = self._get(header, target)
            if may_wait and result.status is not GetStatus.FOUND:
                # Nothing for this filter: it looks further on from here next time.
                if result.status is GetStatus.NO_MATCHED_MESSAGE:
                    header.queue_offset = result.next_offset
                return False
            if (reply := self._answer(request, header, result)) is not None:
                request.reply(reply)
            return True

        self._long_polling.hold(target.queue, HeldPull(answer), timeout_ms / 1000)

    def _answer(
        self, request: Request, header: PullMessageHeader, result: GetResult
    ) -> Reply | None:
        status = result.status
        if status is GetStatus.FOUND:
            group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
            self._statistics.get(group, topic, result.count, result.body_bytes)
            self._offsets.commit_pull(group, topic, queue_id, result.next_offset)
            if request.serialize_type == SerializeType.JSON:
                frame = _FOUND % (
                    result.next_offset,
                    result.max_offset,
                    result.min_offset,
                    request.command.opaque,
                )
                prefix = frame_prefix(SerializeType.JSON, len(frame), result.body_bytes)
                request.channel.write(prefix + frame, *result.buffers)
                return None
        return Reply(
            PullMessageResponseHeader(
                suggest_which_broker_id=0,
                next_begin_offset=result.next_offset,
                min_offset=result.min_offset,
                max_offset=result.max_offset,
                topic_sys_flag=0,
                group_sys_flag=0,
            ),
            tuple(result.buffers),
            _code(status, header.queue_offset),
            status.name,
        )

    # -- targets -----------------------------------------------------------------------------------

    def _target(self, header: PullMessageHeader) -> _Target:
        change = (
            self._topics.change_count,
            self._groups.change_count,
            self._consumers.change_count,
        )
        if change != self._targets_change or len(self._targets) > _TARGETS_KEPT:
            self._targets.clear()
            self._targets_change = change
        has_subscription = header.sys_flag & _SUBSCRIPTION
        key = (
            header.consumer_group,
            header.topic,
            header.queue_id,
            header.subscription if has_subscription else header.sub_version,
            header.expression_type,
        )
        target = self._targets.get(key)
        if target is None:
            target = self._targets[key] = self._find_target(header)
        return target

    def _find_target(self, header: PullMessageHeader) -> _Target:
        self._groups.check_consumable(header.consumer_group)
        topic = self._topics.check_readable(header.topic)
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"queue {header.queue_id} of topic {header.topic} on broker "
                f"{self._config.broker_name}: there are {topic.read_queue_nums} to read, "
                "ask for the route again",
            )
        queue = self._store.queue(header.topic, header.queue_id)
        return _Target(queue, self._wanted_tags(header))

    def _wanted_tags(self, header: PullMessageHeader) -> frozenset[int] | None:
        if header.sys_flag & _SUBSCRIPTION:
            return wanted_tags(header.subscription, header.expression_type)
        subscription = self._consumers.subscription_for_pull(
            header.consumer_group, header.topic, header.sub_version
        )
        return wanted_tags(subscription.sub_string, subscription.expression_type)


def _is_held(status: GetStatus, queue_offset: int) -> bool:
    return _code(status, queue_offset) == ResponseCode.PULL_NOT_FOUND


def _code(status: GetStatus, queue_offset: int) -> ResponseCode:
    if status is GetStatus.NO_MESSAGE_IN_QUEUE:
        return ResponseCode.PULL_OFFSET_MOVED if queue_offset else ResponseCode.PULL_NOT_FOUND
    return _CODES[status]
