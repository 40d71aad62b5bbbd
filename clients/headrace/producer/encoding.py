"""Send requests built from templates: each request fills in only the values that vary.

The header is always JSON, which every server reads; each frame declares its header's encoding.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import TYPE_CHECKING

import anyio
import msgspec
from zlib_ng.zlib_ng import crc32

from headrace.errors import DelayRejected
from headrace.messages import OffsetMessageIds, SendResult
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import VERSION
from headrace_protocol.drivers.errors import MalformedAnswer
from headrace_protocol.frame import LENGTH_BYTES
from headrace_protocol.headers import SendMessageResponseHeader
from headrace_protocol.message import TIMER_DELAY_MS, TIMER_DELIVER_MS
from headrace_protocol.system_topics import DEFAULT_TOPIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.route import TopicRoute
    from headrace_protocol.blocks import EncodedBlock
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.errors import HeadraceError
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.frame import Buffer

# The topic whose settings a broker copies when a send makes a new topic.
DEFAULT_TOPIC_QUEUES = 4

# With each of these codes the message is stored; the last three report missing durability.
STORED = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    }
)

# Of frames: RocketMQ 5.0.0.
_TIMERS_VERSION = 413
_REJECTIONS = frozenset({ResponseCode.MESSAGE_ILLEGAL, ResponseCode.SYSTEM_ERROR})

_json = msgspec.json.Encoder().encode
# Serialize type 0 (JSON) leaves the second word's high byte 0, so the word is the header length.
_PREFIX = struct.Struct(">II")

# Placeholders, in the order of the header; no name chosen by a user contains this character.
_SYS_FLAG, _BORN_TIMESTAMP, _PROPERTIES = "\x01f", "\x01g", "\x01i"
_COUNT, _BODY_CRC32 = "\x01count", "\x01crc"
_FLAG, _OPAQUE = "\x01flag", "\x01opaque"
_FORMATS = {
    _SYS_FLAG: b'"%d"',
    _BORN_TIMESTAMP: b'"%d"',
    _PROPERTIES: b"%b",
    _COUNT: b'"%d"',
    _BODY_CRC32: b'"%d"',
    _FLAG: b"%d",
    _OPAQUE: b"%d",
}


def _template(code: RequestCode, fields: Mapping[str, str]) -> bytes:
    """A header template whose values are filled in with the % operator."""
    header = {
        "code": int(code),
        "extFields": fields,
        "flag": _FLAG,
        "language": "PYTHON",
        "opaque": _OPAQUE,
        "serializeTypeCurrentRPC": "JSON",
        "version": VERSION,
    }
    # The name of a retry topic begins with %, which is special in the template.
    template = _json(header).replace(b"%", b"%%")
    for name, spec in _FORMATS.items():
        template = template.replace(_json(name), spec)
    return template


def _frame(header: bytes, body: Buffer) -> list[Buffer]:
    header_bytes = len(header)
    length = LENGTH_BYTES + header_bytes + len(body)
    return [_PREFIX.pack(length, header_bytes), header, body]


class SendTemplate:
    """Frames of SEND_MESSAGE_V2, or SEND_BATCH_MESSAGE, for one queue."""

    __slots__ = ("_template", "code")

    def __init__(
        self, group: str, topic: str, broker_name: str, queue_id: int, *, batch: bool = False
    ) -> None:
        self.code = RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2
        fields = {
            "a": group,
            "b": topic,
            "c": DEFAULT_TOPIC,
            "d": str(DEFAULT_TOPIC_QUEUES),
            "e": str(queue_id),
            "f": _SYS_FLAG,
            "g": _BORN_TIMESTAMP,
            "h": "0",
            "i": _PROPERTIES,
            "j": "0",
            "k": "false",
            "m": "true" if batch else "false",
            "n": broker_name,
        }
        self._template = _template(self.code, fields)

    def frame(self, outgoing: Outgoing, opaque: int, flag: int = 0) -> list[Buffer]:
        """Buffers of one request, in order."""
        header = self._template % (
            outgoing.sys_flag,
            outgoing.born_timestamp_ms,
            outgoing.properties_json,
            flag,
            opaque,
        )
        return _frame(header, outgoing.body)


class BulkTemplate:
    """Frames of BULK_SEND for one queue."""

    __slots__ = ("_template", "code")

    def __init__(self, group: str, topic: str, queue_id: int) -> None:
        self.code = RequestCode.BULK_SEND
        fields = {
            "producerGroup": group,
            "topic": topic,
            "defaultTopic": DEFAULT_TOPIC,
            "defaultTopicQueueNums": str(DEFAULT_TOPIC_QUEUES),
            "queueId": str(queue_id),
            "count": _COUNT,
            "bodyCrc32": _BODY_CRC32,
        }
        self._template = _template(self.code, fields)

    def frame(self, outgoing: BulkOutgoing, opaque: int) -> list[Buffer]:
        """Buffers of one request, in order."""
        body = outgoing.body
        header = self._template % (outgoing.message_count, crc32(body), 0, opaque)
        return _frame(header, body)


class Target:
    """A queue with the address of its broker's master and its frame templates.

    broker_name: the broker that serves the queue. error: why nothing can be sent to the queue now;
        None if it can.
    """

    def __init__(self, group: str, route: TopicRoute, queue: MessageQueue) -> None:
        self.queue = queue
        self.broker_name = route.broker_of(queue)
        self.address = route.master(self.broker_name) or ""
        self.error: HeadraceError | None = route.why_not_writable(queue)
        self._group = group
        self._route = route

    def note_leader(self, leader: str | None) -> None:
        """React to an answer that came from another broker: see ``TopicRoute.note_leader``."""
        if leader:
            self._route.note_leader(self.queue, leader, anyio.current_time())

    @cached_property
    def single(self) -> SendTemplate:
        """Template for one message to any broker."""
        queue = self.queue
        return SendTemplate(self._group, queue.topic, self.broker_name, queue.queue_id)

    @cached_property
    def batch(self) -> SendTemplate:
        """Template for several messages to any broker."""
        queue = self.queue
        return SendTemplate(self._group, queue.topic, self.broker_name, queue.queue_id, batch=True)

    @cached_property
    def bulk(self) -> BulkTemplate:
        """Template for records to a headrace broker."""
        return BulkTemplate(self._group, self.queue.topic, self.queue.queue_id)


class Outgoing:
    """An encoded message or batch for any broker, independent of the queue.

    message_ids: the client's message ids. has_timer: whether it is a message with a time of
    delivery.
    """

    __slots__ = (
        "body",
        "born_timestamp_ms",
        "has_timer",
        "is_batch",
        "message_ids",
        "properties_json",
        "sys_flag",
    )

    def __init__(
        self,
        body: Buffer,
        sys_flag: int,
        born_timestamp_ms: int,
        properties: str,
        message_ids: list[str],
        *,
        is_batch: bool = False,
    ) -> None:
        self.body = body
        self.sys_flag = sys_flag
        self.born_timestamp_ms = born_timestamp_ms
        self.properties_json = _json(properties)
        self.message_ids = message_ids
        self.is_batch = is_batch
        self.has_timer = f"{TIMER_DELAY_MS}\x01" in properties or (
            f"{TIMER_DELIVER_MS}\x01" in properties
        )

    def code(self, target: Target) -> int:
        """The request code."""
        return self._template(target).code

    def frame(self, target: Target, opaque: int) -> list[Buffer]:
        """Buffers of the request to a queue."""
        return self._template(target).frame(self, opaque)

    def _template(self, target: Target) -> SendTemplate:
        return target.batch if self.is_batch else target.single

    def result(self, target: Target, response: Response) -> SendResult:
        """Decode the response. Raises BrokerError unless stored, DelayRejected, MalformedAnswer."""
        if self.has_timer:
            check_timer(response)
        header = response.expect(*STORED).header(SendMessageResponseHeader)
        target.note_leader(header.leader)
        return SendResult(
            queue=target.queue,
            queue_offset=header.queue_offset,
            message_ids=self.message_ids,
            offset_message_ids=header.msg_id.split(","),
            status=ResponseCode(response.command.code),
            recall_handle=header.recall_handle,
        )


def check_timer(response: Response) -> None:
    """Raise DelayRejected if a broker does not deliver a message at its time."""
    code, remark = response.command.code, response.command.remark or ""
    if code in STORED and response.command.version < _TIMERS_VERSION:
        raise DelayRejected(
            response.address,
            "RocketMQ before 5.0 knows only delay levels, and has delivered the message at once",
        )
    if code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED or (
        code in _REJECTIONS and "timer" in remark
    ):
        raise DelayRejected(response.address, remark)


class BulkOutgoing:
    """Complete records for a headrace broker; their only ids are the broker's."""

    __slots__ = ("_block", "body", "message_count")

    def __init__(self, block: EncodedBlock) -> None:
        self._block = block
        self.body = block.body
        self.message_count = block.record_count

    def code(self, target: Target) -> int:
        """The request code."""
        return target.bulk.code

    def frame(self, target: Target, opaque: int) -> list[Buffer]:
        """Buffers of the request to a queue."""
        return target.bulk.frame(self, opaque)

    def result(self, target: Target, response: Response) -> SendResult:
        """Decode the response. Raises BrokerError unless stored, MalformedAnswer."""
        header = response.expect(*STORED).header(SendMessageResponseHeader)
        try:
            ids = OffsetMessageIds(header.msg_id, self._block.sizes)
        except ValueError as error:
            raise MalformedAnswer(response.address, response.request_code, error) from error
        target.note_leader(header.leader)
        return SendResult(
            queue=target.queue,
            queue_offset=header.queue_offset,
            message_ids=ids,
            offset_message_ids=ids,
            status=ResponseCode(response.command.code),
        )
