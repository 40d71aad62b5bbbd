"""PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361).

The queue that a group may read, and its filter, are looked up once and cached until topics, groups
or subscriptions change. Records are sent as the log holds them, straight from its memory map.
Source: docs/protocol.md "Pull".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec

from headrace_broker.consumer.filtered import FilteredReader
from headrace_broker.consumer.filters import filter_bytes
from headrace_broker.consumer.groups import BROADCASTING
from headrace_broker.consumer.long_polling import JudgedRequest
from headrace_broker.host_budget import Host
from headrace_broker.queue_directory import Use
from headrace_broker.store.store_source import GetResult, GetStatus
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import NotReady
from headrace_protocol.forbidden import ForbiddenType, reading_forbidden
from headrace_protocol.header_codecs import SerializeType
from headrace_protocol.headers import (
    BulkPullHeader,
    PullMessageHeader,
    PullMessageResponseHeader,
)
from headrace_protocol.quick_frames import pull_found
from headrace_protocol.rights.late import check_create
from headrace_protocol.rights.rules import Kind
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import later, now_or_later

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.filter_table import FilterTable
    from headrace_broker.consumer.filters import Filter
    from headrace_broker.consumer.groups import ConsumerManager
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.pull_watch import LastPull, PullWatch
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.queue_directory import GroupPositions, Here, QueueDirectory, Reader
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.bodies import SubscriptionGroupConfig
    from headrace_protocol.rights.access import Access
    from headrace_protocol.serving import Registry, Request, Work

_COMMIT_OFFSET = 0x1
_SUSPEND = 0x2
_SUBSCRIPTION = 0x4

# Enough for 95,000 queues, or a hundred subscriptions with thousands of tags.
_TARGETS_BYTES_MAX = 64 * 1024 * 1024
_TARGET_BYTES = 704
# More than the peer returns (32 messages, 256 KiB), for clients that ask for more.
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
    GetStatus.OFFSET_RESET: ResponseCode.PULL_OFFSET_MOVED,
}

# What ends a wait at the end of a queue.
_ANSWERED_AT_END = (GetStatus.FOUND, GetStatus.OFFSET_RESET)

PullHeader = PullMessageHeader | BulkPullHeader
Header = TypeVar("Header", PullMessageHeader, BulkPullHeader)
# Reads from a queue offset on.
Get = Callable[[Header, "PullTarget", int], GetResult]
# Returns what the function of a request returns.
AnswerResult = Callable[["Request", ResponseCode, GetResult], Reply | None]


class PullTarget(NamedTuple):
    """A queue that a group may read, and the tags that it wants.

    queue: where pulls wait. reader: where they read; it applies any other filter than tags.
    positions: where those of its group are kept.
    last_pull: noted for ``PullWatch``. filter_bytes: memory of the filter, beyond a few tags.
    """

    queue: StoreQueue
    reader: Reader
    positions: GroupPositions
    tags: frozenset[int] | None
    last_pull: LastPull
    filter_bytes: int


class _HeldPull(JudgedRequest, Generic[Header]):
    """A pull at the end of its queue; ``position`` moves past messages that its filter rejects."""

    __slots__ = ("_answer", "_get", "_header", "_processor", "_target")

    def __init__(
        self,
        processor: PullProcessor,
        request: Request,
        header: Header,
        target: PullTarget,
        get: Get[Header],
        answer: AnswerResult,
    ) -> None:
        held_bytes = request.held_bytes + target.filter_bytes
        super().__init__(
            processor.registry, processor.access, request, header.queue_offset, held_bytes
        )
        self._processor: PullProcessor = processor
        self._header: Header = header
        self._target: PullTarget = target
        self._get: Get[Header] = get
        self._answer: AnswerResult = answer

    def attempt(self, *, may_wait: bool) -> bool:
        """See JudgedRequest."""
        position, header, target = self.position, self._header, self._target
        try:
            result = take_reset(header, target) or self._get(header, target, position)
        except NotReady as away:
            # The messages have left memory meanwhile, are those of another broker, or so many that
            # others come first.
            processor = self._processor
            header = msgspec.structs.replace(header, queue_offset=position)
            read = partial(processor.read, self.request, header, target, self._get, self._answer)
            processor.registry.start(self.request, later(away, partial(read, may_hold=may_wait)))
            return True
        is_at_end = result.next_offset >= result.max_offset
        if may_wait and is_at_end and result.status not in _ANSWERED_AT_END:
            # The next attempt starts after the messages that the filter rejected.
            if result.status is GetStatus.NO_MATCHED_MESSAGE:
                self.position = result.next_offset
            return False
        request, answer = self.request, self._answer
        reply = self._processor.answer(request, header, target, position, result, answer)
        if reply is not None:
            request.reply(reply)
        return True


class PullProcessor:
    """Serves pulls. access: judges held ones again."""

    def __init__(
        self,
        config: BrokerConfig,
        access: Access,
        topics: TopicTable,
        directory: QueueDirectory,
        groups: SubscriptionGroups,
        consumers: ConsumerManager,
        offsets: ConsumerOffsets,
        long_polling: LongPolling,
        statistics: BrokerStatistics,
        watch: PullWatch,
        filters: FilterTable,
    ) -> None:
        self._config = config
        self._filters = filters
        self.access = access
        self._topics = topics
        self._directory = directory
        self._groups = groups
        self._consumers = consumers
        self._offsets = offsets
        self._long_polling = long_polling
        self._statistics = statistics
        self._watch = watch
        self.registry: Registry
        self._targets: dict[tuple[object, ...], PullTarget] = {}
        self._targets_bytes = 0
        self._targets_change: tuple[int, int, int] = (-1, -1, -1)

    def register(self, registry: Registry) -> None:
        """Route both pulls."""
        self.registry = registry
        registry.route(RequestCode.PULL_MESSAGE, self.pull)
        registry.route(RequestCode.LITE_PULL_MESSAGE, self.pull)

    def pull(self, request: Request) -> Reply | Work | None:
        """Answer with records, or hold the request until some arrive."""
        header = request.header(PullMessageHeader)
        is_in_request = header.sys_flag & _SUBSCRIPTION
        wanted = header.subscription if is_in_request else header.sub_version
        target = self.target(request, header, wanted)
        return self.serve(request, header, target, self._get, _answer)

    def _get(self, header: PullMessageHeader, target: PullTarget, queue_offset: int) -> GetResult:
        bytes_max = min(max(header.max_msg_bytes or 0, _BODY_BYTES), _BODY_BYTES_MAX)
        return target.reader.get(
            queue_offset,
            min(header.max_msg_nums, _COUNT_MAX),
            bytes_max,
            target.tags,
        )

    # -- pulls of any kind -------------------------------------------------------------------------

    def serve(
        self,
        request: Request,
        header: Header,
        target: PullTarget,
        get: Get[Header],
        answer: AnswerResult,
    ) -> Reply | Work | None:
        """Serve a pull of any kind: commit if asked to, read, then answer or hold.

        answer: builds the reply from what was read.
        """
        if header.sys_flag & _COMMIT_OFFSET and header.commit_offset >= 0:
            target.positions.commit(
                header.consumer_group,
                header.topic,
                header.queue_id,
                header.commit_offset,
            )
        last_pull = target.last_pull
        last_pull.look, last_pull.address = self._watch.look, request.channel.address
        return now_or_later(partial(self.read, request, header, target, get, answer))

    def read(
        self,
        request: Request,
        header: Header,
        target: PullTarget,
        get: Get[Header],
        answer: AnswerResult,
        *,
        may_hold: bool = True,
    ) -> Reply | None:
        """Read, then answer or hold. Raises NotReady."""
        position = header.queue_offset
        result = take_reset(header, target) or get(header, target, position)
        if header.sys_flag & _SUSPEND and may_hold and _is_held(result.status, position):
            self._hold(request, header, target, get, answer)
            return None
        return self.answer(request, header, target, position, result, answer)

    def _hold(
        self,
        request: Request,
        header: Header,
        target: PullTarget,
        get: Get[Header],
        answer: AnswerResult,
    ) -> None:
        timeout_ms = (
            min(max(header.suspend_timeout_millis, 0), _SUSPEND_TIMEOUT_MS_MAX)
            if self._config.long_polling_enable
            else _SHORT_POLL_MS
        )
        # A pull needs no body; a client's would only hold memory.
        request.body = b""
        held = _HeldPull(self, request, header, target, get, answer)
        self._long_polling.hold(held, (target.queue,), timeout_ms / 1000)
        self._watch.held(target.last_pull, timeout_ms / 1000)

    def answer(
        self,
        request: Request,
        header: PullHeader,
        target: PullTarget,
        position: int,
        result: GetResult,
        answer: AnswerResult,
    ) -> Reply | None:
        """Answer with what was read from ``position`` on, and record the position."""
        if result.status is GetStatus.FOUND:
            group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
            self._statistics.get(group, topic, result.count, result.body_bytes)
            target.positions.commit_pull(group, topic, queue_id, result.next_offset)
        return answer(request, _code(result.status, position), result)

    # -- targets -----------------------------------------------------------------------------------

    def target(self, request: Request, header: PullHeader, wanted: str | int | None) -> PullTarget:
        """The queue that a group may read, with the tags that it wants. Raises RequestError.

        wanted: tags, or the version of the subscription in the group's heartbeats.
        """
        change = (
            self._topics.change_count,
            self._groups.change_count,
            self._consumers.change_count,
        )
        if change != self._targets_change or self._targets_bytes > _TARGETS_BYTES_MAX:
            self._targets.clear()
            self._targets_bytes = 0
            self._targets_change = change
        key = (
            header.consumer_group,
            header.topic,
            header.queue_id,
            wanted,
            header.expression_type,
            header.logical,
        )
        target = self._targets.get(key)
        if target is None:
            target = self._targets[key] = self._find_target(request, header, wanted)
            text_bytes = 4 * len(wanted) if isinstance(wanted, str) else 0
            self._targets_bytes += _TARGET_BYTES + text_bytes + target.filter_bytes
        return target

    def _find_target(
        self, request: Request, header: PullHeader, wanted: str | int | None
    ) -> PullTarget:
        host = Host.of(request.channel)
        before_create = partial(check_create, request, Kind.GROUP, header.consumer_group)
        settings = self._groups.check_consumable(header.consumer_group, host, before_create)
        self._check_message_model(settings)
        self._groups.check_readable(header.consumer_group, header.topic)
        make_room = partial(self._make_room, header, host)
        use = Use.READ if header.logical is False else Use.PULL
        place = self._directory.serve(header.topic, header.queue_id, use, make_room)
        assert place.queue is not None
        found = self._filter(header, wanted)
        return PullTarget(
            place.queue,
            self._reader(place, found),
            place.positions or self._offsets,
            found.tags,
            self._watch.last_pull(header.consumer_group, header.topic, header.queue_id),
            filter_bytes(found),
        )

    def _reader(self, place: Here, wanted: Filter) -> Reader:
        expression = wanted.expression
        if expression is None:
            return place.reader or place.source
        filtered = partial(FilteredReader, expression=expression, policy=self._config)
        if place.filtered is not None:
            return place.filtered(expression.text, filtered)
        return filtered(place.source)

    def _check_message_model(self, settings: SubscriptionGroupConfig) -> None:
        """Raise RequestError for a broadcasting group that must not be one."""
        name = settings.group_name
        group = self._consumers.group(name)
        is_broadcasting = group is not None and group.data.message_model == BROADCASTING
        if is_broadcasting and not settings.consume_broadcast_enable:
            raise reading_forbidden(
                ForbiddenType.BROADCASTING,
                f"the consumer group[{name}] can not consume by broadcast way: "
                "consumeBroadcastEnable is false; mqadmin updateSubGroup -d true allows it",
            )

    def _make_room(self, header: PullHeader, host: Host, is_new: bool) -> None:
        self._offsets.make_room(header.consumer_group, header.topic, header.queue_id, host)
        if is_new:
            self._offsets.make_queue_room(header.topic, header.queue_id, host)

    def _filter(self, header: PullHeader, wanted: str | int | None) -> Filter:
        """The filter of a pull's own subscription, or of the group's heartbeats."""
        group, topic = header.consumer_group, header.topic
        if not isinstance(wanted, int):
            return self._filters.of_pull(group, topic, wanted, header.expression_type)
        subscription = self._consumers.subscription_for_pull(group, topic, wanted)
        return self._filters.of_group(group, subscription, wanted)


def take_reset(header: PullHeader, target: PullTarget) -> GetResult | None:
    """The result that sends a group to the offset of a reset; None without a reset."""
    offset = target.positions.take_reset(header.consumer_group, header.topic, header.queue_id)
    if offset is None:
        return None
    min_offset, max_offset = target.reader.known_range()
    return GetResult(GetStatus.OFFSET_RESET, [], 0, 0, offset, min_offset, max_offset)


def _answer(request: Request, code: ResponseCode, result: GetResult) -> Reply | None:
    delta = result.offset_delta
    if code == ResponseCode.SUCCESS and request.serialize_type == SerializeType.JSON:
        offsets = result.next_offset, result.max_offset, result.min_offset
        start = pull_found(offsets, delta, request.command.opaque, result.body_bytes)
        request.channel.write(start, *result.buffers)
        return None
    return Reply(
        PullMessageResponseHeader(
            suggest_which_broker_id=0,
            next_begin_offset=result.next_offset,
            min_offset=result.min_offset,
            max_offset=result.max_offset,
            offset_delta=delta or None,
            topic_sys_flag=0,
            group_sys_flag=0,
        ),
        tuple(result.buffers),
        code,
        result.status.name,
    )


def _is_held(status: GetStatus, queue_offset: int) -> bool:
    return _code(status, queue_offset) == ResponseCode.PULL_NOT_FOUND


def _code(status: GetStatus, queue_offset: int) -> ResponseCode:
    """The response code for the status of a read from ``queue_offset``."""
    if status is GetStatus.NO_MESSAGE_IN_QUEUE:
        return ResponseCode.PULL_OFFSET_MOVED if queue_offset else ResponseCode.PULL_NOT_FOUND
    return _CODES[status]
