"""SEND_MESSAGE (10), SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320).

The broker's hot path. Whatever depends only on the queue is looked up once for each subject, and
cached until topics or rights change. Left for each message: decode the header, scan the properties,
append, and fill in the reply's template. Source: docs/protocol.md "Send".
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_broker.message_demands import SentMessage
from headrace_broker.processors.send_answers import (
    NOT_FLUSHED_REMARK,
    FlushedReply,
    message_ids,
    rejection,
)
from headrace_broker.processors.sent_properties import (
    TAIL_CHARS_MAX,
    TAILS_KEPT,
    NotPlainError,
    SentProperties,
)
from headrace_broker.queue_directory import Use
from headrace_broker.store.errors import (
    StoreError,
)
from headrace_broker.store.log.batch_records import Origin
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.compression import COMPRESSED
from headrace_protocol.errors import CorruptRecord, RequestError
from headrace_protocol.headers import (
    SendMessageHeader,
    SendMessageHeaderV2,
    SendMessageResponseHeader,
)
from headrace_protocol.message import BORN_HOST_V6, MULTI_TAGS, STORE_HOST_V6
from headrace_protocol.quick_frames import SendAnswer, SendCommand, decode_send, send_replies
from headrace_protocol.recall_handle import RecallHandle
from headrace_protocol.rights.late import check_create
from headrace_protocol.rights.rules import Kind
from headrace_protocol.serving import Reply
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.config import BrokerConfig
    from headrace_broker.message_demands import MessageDemands, TopicDemand
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.log.commit_log import BatchItems, PlainMessage
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.channel import Channel
    from headrace_protocol.frame import Buffer, Frame
    from headrace_protocol.headers import BulkSendHeader
    from headrace_protocol.message_ids import UniqKeyGenerator
    from headrace_protocol.rights.access import Access
    from headrace_protocol.serving import Registry, Request
    from headrace_protocol.subject import Subject

_SendHeader = SendMessageHeader | SendMessageHeaderV2

# Targets of all subjects, some 50 MiB.
_TARGETS_MAX = 100_000
# Flags that clients may set; the broker sets those for the length of a record's hosts.
_CLIENT_FLAGS = ~(BORN_HOST_V6 | STORE_HOST_V6)


# Errors on which ``send_ready`` falls back to the general path, which answers or closes.
_NOT_PLAIN = (
    NotPlainError,
    RequestError,
    KeyError,
    msgspec.MsgspecError,
    UnicodeError,
    RecursionError,
)


class SendTarget(NamedTuple):
    """A queue that a producer may write to.

    sys_flag: bits that its topic adds to each record. queue_id, offset_delta: see ``Here``.
    is_decided: whether there is an offset_delta. demand: what every message to it demands.
    read: for ``send_ready``, see ``SentProperties.plain``.
    """

    queue: StoreQueue
    sys_flag: int
    queue_id: int
    offset_delta: int
    is_decided: bool
    demand: TopicDemand | None
    read: Callable[[str], tuple[bytes, int, str]]

    @property
    def is_kept(self) -> bool:
        """True if ``send_ready`` may find it: plain messages to it are stored as they are."""
        return self.is_decided and (self.demand is None or self.demand.quick is not None)

    def client_offset(self, queue_offset: int) -> int:
        """An offset in the queue as clients see it; -1 while that is undecided."""
        return queue_offset + self.offset_delta if self.is_decided else -1


class _DemandLayout(NamedTuple):
    """Messages to a queue that make a demand and differ only in KEYS, UNIQ_KEY and body.

    queue, tags_code, sys_flag: of their records. parts: of their stored properties, with the
    UNIQ_KEY between them. admit: see ``Demand``.
    """

    queue: StoreQueue
    parts: tuple[str, ...]
    tags_code: int
    sys_flag: int
    admit: Callable[[bytes], None]


# Stands for every UNIQ_KEY of a layout.
_ANY_KEY = "\x00"
# Response code and remark.
_STORED = (0, "")
_NOT_FLUSHED = (int(ResponseCode.FLUSH_DISK_TIMEOUT), NOT_FLUSHED_REMARK)


class SendProcessor:
    """Stores the messages of producers."""

    def __init__(
        self,
        config: BrokerConfig,
        access: Access,
        store: MessageStore,
        topics: TopicTable,
        directory: QueueDirectory,
        uniq_keys: UniqKeyGenerator,
        demands: MessageDemands,
        statistics: BrokerStatistics,
    ) -> None:
        self._access = access
        self._broker_name = config.broker_name
        self._store_host_hex = store.settings.store_host.hex().upper()
        self._store = store
        self._write_path = store.write_path
        self._confirmation = store.write_path.confirmation
        self._topics = topics
        self._directory = directory
        self._properties = SentProperties(
            config.broker_cluster_name, uniq_keys, store.write_path.confirmation
        )
        self._demands = demands
        self._statistics = statistics
        # Queues to which each subject has sent, so that it may; by topic and queue id.
        self._targets: dict[Subject | None, dict[tuple[str, int], SendTarget]] = {}
        self._target_count = 0
        self._targets_change = -1, -1
        # Topic, queue id, sysFlag, and the properties without KEYS and UNIQ_KEY.
        self._layouts: dict[tuple[str, int, int, str, str], _DemandLayout] = {}

    def register(self, registry: Registry) -> None:
        """Route the three ways of sending; the table of demands is complete."""
        self._properties.know(self._demands.properties)
        self._demand_flags = self._demands.sys_flags
        registry.route(RequestCode.SEND_MESSAGE, self.send)
        registry.route(RequestCode.SEND_MESSAGE_V2, self.send_v2)
        registry.route(RequestCode.SEND_BATCH_MESSAGE, self.send_v2)
        self._serve_one = registry.serve
        registry.route_ready(RequestCode.SEND_MESSAGE_V2, self.send_ready)

    def send_ready(self, channel: Channel, frames: list[Frame]) -> None:
        """Store the sends of one ``recv`` together; those that are not plain are served singly."""
        if self._access.is_open:
            self._store_ready(channel, None, frames)
            return
        for subject, sent in self._access.senders(channel, frames):
            if subject is not None:
                self._store_ready(channel, subject, sent)
                continue
            for frame in sent:
                self._serve_one(channel, frame)

    def _store_ready(
        self, channel: Channel, subject: Subject | None, frames: Iterable[Frame]
    ) -> None:
        messages: list[PlainMessage] = []
        answers: list[SendAnswer] = []
        plain: list[Frame] = []
        targets = self._current_targets(subject)
        demand_flags = self._demand_flags
        for frame in frames:
            try:
                command = decode_send(frame[1])
                header = command.fields
                target = targets[header.topic, header.queue_id]
                queue, sys_flag, queue_id, delta, _, demand, read = target
                if command.flag or header.batch or header.sys_flag & demand_flags:
                    message, uniq_key = self._demanding(channel, command, frame[2], target)
                    messages.append(message)
                    answers.append((queue_id, 0, uniq_key, command.opaque))
                    plain.append(frame)
                    continue
                properties, code, uniq_key = read(header.properties)
                body = frame[2]
                if not body and not (demand and demand.takes_empty):
                    raise NotPlainError
            except _NOT_PLAIN:
                # Keep the order of arrival.
                self._store_plain(channel, plain, messages, answers)
                self._serve_one(channel, frame)
                messages, answers, plain = [], [], []
                targets = self._current_targets(subject)
                continue
            messages.append(
                (
                    queue,
                    body,
                    properties,
                    code,
                    header.flag,
                    header.sys_flag | sys_flag,
                    header.born_timestamp,
                    header.reconsume_times,
                )
            )
            answers.append((queue_id, delta, uniq_key, command.opaque))
            plain.append(frame)
        self._store_plain(channel, plain, messages, answers)

    def _demanding(
        self, channel: Channel, command: SendCommand, body: Buffer, target: SendTarget
    ) -> tuple[PlainMessage, str]:
        """A message with flags that make a demand as the log gets it, and its UNIQ_KEY.

        Its demand is applied once for all messages of its layout.
        Raises NotPlainError, RequestError.
        """
        header = command.fields
        if command.flag or header.batch or header.reconsume_times or not body:
            raise NotPlainError
        keys, _, rest = header.properties.partition("UNIQ_KEY\x01")
        start = keys.find("\x02") + 1 if keys.startswith("KEYS\x01") else 0
        uniq_key, _, tail = rest.partition("\x02")
        if not (uniq_key.isalnum() and uniq_key.isascii()):
            raise NotPlainError
        name = header.topic, header.queue_id, header.sys_flag, keys[start:], tail
        layout = self._layouts.get(name)
        if layout is None:
            layout = self._layout(channel, target, *name[2:])
            self._layouts[name] = layout
        layout.admit(channel.host_bytes)
        properties = f"{keys[:start]}{uniq_key.join(layout.parts)}".encode()
        message = (
            layout.queue,
            body,
            properties,
            layout.tags_code,
            header.flag,
            layout.sys_flag,
            header.born_timestamp,
            0,
        )
        return message, uniq_key

    def _layout(
        self, channel: Channel, target: SendTarget, sys_flag: int, start: str, tail: str
    ) -> _DemandLayout:
        """Apply the demand of messages of a layout. Raises NotPlainError, RequestError."""
        queue, added_flag = target.queue, target.sys_flag
        properties = f"{start}UNIQ_KEY\x01{_ANY_KEY}\x02{tail}"
        items, code, uniq_key, _, waits = self._properties.parse(properties)
        if (
            uniq_key != _ANY_KEY
            or "\x00" in start + tail
            or len(start) + len(tail) > TAIL_CHARS_MAX
            or not (waits or self._confirmation.is_immediate)
        ):
            raise NotPlainError
        flags = sys_flag & _CLIENT_FLAGS | added_flag
        message = SentMessage(queue.topic, queue.queue_id, items, code, flags)
        message.born_host = channel.host_bytes
        admit = self._demands.apply_to_all(message)
        if admit is None or message.sys_flag & self._demand_flags:
            raise NotPlainError
        parts = self._properties.stored(message.properties).decode().split(_ANY_KEY)
        if len(self._layouts) >= TAILS_KEPT:
            self._layouts.clear()
        return _DemandLayout(
            self._store.queue(message.topic, message.queue_id),
            tuple(parts),
            message.tags_code,
            message.sys_flag,
            admit,
        )

    def _store_plain(
        self,
        channel: Channel,
        frames: list[Frame],
        messages: list[PlainMessage],
        answers: list[SendAnswer],
    ) -> None:
        """Store and answer; messages that don't fit take the general path, which makes room."""
        while messages:
            addresses = self._write_path.append_each(messages, channel.host_bytes)
            stored = len(addresses)
            if stored:
                self._count(messages[:stored])
                self._answer_plain(channel, answers, addresses)
            if stored == len(messages):
                return
            self._serve_one(channel, frames[stored])
            rest = stored + 1
            frames, messages, answers = frames[rest:], messages[rest:], answers[rest:]

    def _answer_plain(
        self, channel: Channel, answers: list[SendAnswer], addresses: list[tuple[int, int]]
    ) -> None:
        """Answer the stored messages, the first ``len(addresses)``, once they are confirmed."""

        def answer(is_flushed: bool) -> None:
            outcome = _STORED if is_flushed else _NOT_FLUSHED
            channel.write(send_replies(self._store_host_hex, answers, addresses, *outcome))

        if self._confirmation.is_immediate:
            answer(True)
        else:
            self._confirmation.when_confirmed(self._store.commit_log.max_offset, answer)

    def _count(self, messages: list[PlainMessage]) -> None:
        topic, count, body_bytes = messages[0][0].topic, 0, 0
        for message in messages:
            if message[0].topic is not topic:
                self._statistics.put(topic, count, body_bytes)
                topic, count, body_bytes = message[0].topic, 0, 0
            count += 1
            body_bytes += len(message[1])
        self._statistics.put(topic, count, body_bytes)

    def send(self, request: Request) -> Reply | None:
        """SEND_MESSAGE, whose header has the long names."""
        return self._store_request(request, request.header(SendMessageHeader))

    def send_v2(self, request: Request) -> Reply | None:
        """SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE; the ``batch`` field decides, not the code."""
        return self._store_request(request, request.header(SendMessageHeaderV2))

    def _store_request(self, request: Request, header: _SendHeader) -> Reply | None:
        target = self.target(request, header)
        if header.sys_flag & self._demand_flags:
            self._demands.check_flags(header.topic, header.sys_flag)
        if not request.body and not (target.demand and target.demand.takes_empty):
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a message to {header.topic} has no body: send one",
            )
        try:
            if header.batch:
                return self._store_batch(request, header, target)
            return self._store_one(request, header, target)
        except (StoreError, CorruptRecord) as error:
            raise rejection(error, header.topic) from None

    def _store_one(self, request: Request, header: _SendHeader, target: SendTarget) -> Reply | None:
        properties, code, uniq_key, has_demand, waits = self._properties.parse(
            header.properties or ""
        )
        queue, body, recall_ms = target.queue, request.body, 0
        sys_flag = header.sys_flag & _CLIENT_FLAGS | target.sys_flag
        if has_demand or sys_flag & self._demand_flags or target.demand:
            message = _sent_message(request, header, queue, properties, code, sys_flag)
            self._demands.apply(message)
            queue = self._store.queue(message.topic, message.queue_id)
            properties, code, sys_flag = message.properties, message.tags_code, message.sys_flag
            recall_ms = message.recall_ms
            body = message.body or b""
        queue_offset = queue.next_offset
        physical_offset = self._write_path.append(
            (
                queue,
                body,
                self._properties.stored(properties),
                code,
                header.flag,
                sys_flag,
                header.born_timestamp,
                header.reconsume_times or 0,
            ),
            request.channel.host_bytes,
        )
        self._statistics.put(queue.topic, 1, len(body))
        # The same as message.encode_offset_message_id.
        message_id = f"{self._store_host_hex}{physical_offset:016X}"
        handle = self._recall_handle(header.topic, recall_ms, uniq_key)
        if queue is target.queue:
            queue_offset = target.client_offset(queue_offset)
        return self._answer(
            request, target.queue_id, queue_offset, message_id, uniq_key, waits, handle
        )

    def _recall_handle(self, topic: str, recall_ms: int, uniq_key: str) -> str | None:
        """The handle to recall a timer with; None for other messages."""
        if not recall_ms or topic.startswith(RETRY_PREFIX):
            return None
        return RecallHandle(topic, self._broker_name, recall_ms, uniq_key).encode()

    def _store_batch(
        self, request: Request, header: _SendHeader, target: SendTarget
    ) -> Reply | None:
        if header.topic.startswith(RETRY_PREFIX):
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a batch to the retry topic {header.topic}: send its messages one by one",
            )
        queue = target.queue
        properties = header.properties or ""
        # Those of the request; ``check_items`` checks those of its items.
        stored, code, uniq_key, has_demand, waits = self._properties.parse(properties)
        if has_demand or header.sys_flag & self._demand_flags:
            self._demands.check_block(
                header.topic,
                queue.queue_id,
                [properties.encode()],
                target.demand,
                sys_flag=header.sys_flag,
            )
        check_items = self._demands.check_items
        if target.demand:
            check_items = partial(
                self._demands.check_items_of, queue.topic, queue.queue_id, target.demand.quick
            )
        sys_flag = header.sys_flag & _CLIENT_FLAGS | target.sys_flag
        # A key that the batch does not have was made for it.
        if uniq_key in properties and _may_be_inner(queue, sys_flag):
            message = (
                queue,
                request.body,
                self._properties.stored_inner(stored),
                code,
                header.flag,
                sys_flag,
                header.born_timestamp,
                header.reconsume_times or 0,
            )
            return self._store_inner(request, target, message, uniq_key, check_items, waits=waits)
        queue_offset, physical_offsets = self._write_path.append_batch(
            queue,
            request.body,
            sys_flag,
            Origin(header.born_timestamp, request.channel.host_bytes, header.reconsume_times or 0),
            check_items,
        )
        self._statistics.put(queue.topic, len(physical_offsets), len(request.body))
        queue_offset = target.client_offset(queue_offset)
        ids = message_ids(self._store_host_hex, physical_offsets)
        return self._answer(request, target.queue_id, queue_offset, ids, uniq_key, waits)

    def _store_inner(
        self,
        request: Request,
        target: SendTarget,
        message: PlainMessage,
        uniq_key: str,
        check: Callable[[BatchItems], None],
        *,
        waits: bool,
    ) -> Reply | None:
        """Store a batch as one record."""
        queue, queue_offset = target.queue, target.queue.next_offset
        host = request.channel.host_bytes
        physical_offset, count = self._write_path.append_inner_batch(message, host, check)
        self._statistics.put(queue.topic, count, len(request.body))
        reply = Reply(
            SendMessageResponseHeader(
                msg_id=f"{self._store_host_hex}{physical_offset:016X}",
                queue_id=target.queue_id,
                queue_offset=queue_offset,
                transaction_id=uniq_key,
                batch_uniq_id=uniq_key,
            )
        )
        return self.reply_confirmed(request, reply) if waits else reply

    # -- answers -----------------------------------------------------------------------------------

    def _answer(
        self,
        request: Request,
        queue_id: int,
        queue_offset: int,
        message_id: str,
        uniq_key: str,
        waits: bool,
        recall_handle: str | None = None,
    ) -> Reply | None:
        reply = Reply(
            SendMessageResponseHeader(
                msg_id=message_id,
                queue_id=queue_id,
                queue_offset=queue_offset,
                transaction_id=uniq_key,
                recall_handle=recall_handle,
            )
        )
        return self.reply_confirmed(request, reply) if waits else reply

    def reply_confirmed(self, request: Request, reply: Reply) -> Reply | None:
        """The reply, or None if it is sent later, once everything appended so far is confirmed."""
        if self._confirmation.is_immediate:
            return reply
        self._confirmation.when_confirmed(
            self._store.commit_log.max_offset, FlushedReply(request, reply).answer
        )
        return None

    # -- targets -----------------------------------------------------------------------------------

    def _current_targets(self, subject: Subject | None) -> dict[tuple[str, int], SendTarget]:
        change = self._topics.change_count, self._access.version
        if self._targets_change != change or self._target_count > _TARGETS_MAX:
            self._targets.clear()
            self._layouts.clear()
            self._target_count = 0
            self._targets_change = change
        targets = self._targets.get(subject)
        if targets is None:
            targets = self._targets[subject] = {}
            self._target_count += 1
        return targets

    def target(self, request: Request, header: _SendHeader | BulkSendHeader) -> SendTarget:
        """The queue of a send; creates the topic if that is allowed. Raises RequestError."""
        target = self._current_targets(request.subject).get((header.topic, header.queue_id))
        if target is None:
            target = self._find_target(request, header)
            if header.queue_id >= 0 and target.is_kept:
                # The topic may be new.
                targets = self._current_targets(request.subject)
                targets[header.topic, header.queue_id] = target
                self._target_count += 1
        return target

    def _find_target(self, request: Request, header: _SendHeader | BulkSendHeader) -> SendTarget:
        topic = self._topics.create_on_send(
            header.topic,
            header.default_topic,
            header.default_topic_queue_nums,
            request.channel,
            partial(check_create, request, Kind.TOPIC, header.topic),
        )
        place = self._directory.serve(topic.topic_name, header.queue_id, Use.SEND)
        assert place.queue is not None
        sys_flag = MULTI_TAGS if topic.topic_filter_type == "MULTI_TAG" else 0
        demand = self._demands.of_topic(topic.topic_name, place.queue.queue_id)
        quick = demand.quick if demand else None
        return SendTarget(
            place.queue,
            sys_flag,
            place.queue_id,
            place.offset_delta or 0,
            place.offset_delta is not None,
            demand,
            partial(self._properties.passed, quick) if quick else self._properties.plain,
        )


def _may_be_inner(queue: StoreQueue, sys_flag: int) -> bool:
    """True if a batch with a UNIQ_KEY is stored as one record, as in Apache's broker.

    Not if its messages are compressed, each by itself: the flag would mean the whole body.
    """
    return queue.consume_queue.is_batch and not sys_flag & COMPRESSED


def _sent_message(
    request: Request,
    header: _SendHeader,
    queue: StoreQueue,
    properties: list[str],
    tags_code: int,
    sys_flag: int,
) -> SentMessage:
    return SentMessage(
        queue.topic,
        queue.queue_id,
        properties,
        tags_code,
        sys_flag,
        header.reconsume_times or 0,
        header.max_reconsume_times,
        request.channel.host_bytes,
        body=request.body,
    )
