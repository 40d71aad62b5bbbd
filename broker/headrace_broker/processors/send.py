"""SEND_MESSAGE (10), SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320).

The hot path of the broker. What can be known per queue is looked up once and kept until topics
change; what remains per message is: decode the header, look at its properties, append, fill in a
reply's template. Source: docs/protocol.md "Send".
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_broker.store.errors import RecordTooLarge, StoreBusy, StoreNotWritable
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import VERSION
from headrace_protocol.errors import RequestError
from headrace_protocol.frame import LENGTH_BYTES, PREFIX
from headrace_protocol.header_codecs import SerializeType
from headrace_protocol.headers import (
    Int32,
    SendMessageHeader,
    SendMessageHeaderV2,
    SendMessageResponseHeader,
)
from headrace_protocol.message import (
    BORN_HOST_V6,
    INNER_BATCH,
    MULTI_TAGS,
    PROPERTIES_BYTES_MAX,
    STORE_HOST_V6,
    TRANSACTION_MASK,
    CorruptRecord,
    tags_code,
)
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics import TopicTable
    from headrace_protocol.frame import Frame
    from headrace_protocol.message import UniqKeyGenerator
    from headrace_protocol.serving import Channel, Registry, Request

_SendHeader = SendMessageHeader | SendMessageHeaderV2

_TAGS_KEPT = 10_000
_RETRY_PREFIX = "%RETRY%"

# What the properties of a message may ask of the broker, which is to store it now.
_NOT_SERVED = {
    "DELAY": "delayed messages",
    "TIMER_DELIVER_MS": "messages with a delivery time",
    "TIMER_DELAY_SEC": "messages with a delivery time",
    "TIMER_DELAY_MS": "messages with a delivery time",
    "TRAN_MSG": "transactional messages",
}
# What is for the broker, or added by it: not stored as it came.
_DROPPED = frozenset({"WAIT", "POP_CK", "CLUSTER", "MSG_REGION", "TRACE_ON"})
_NOTED = frozenset({"TAGS", "UNIQ_KEY", *_DROPPED, *_NOT_SERVED})

_NOT_SERVED_FLAGS = TRANSACTION_MASK | INNER_BATCH
# How long the hosts of a record are is for the broker to say.
_FROM_CLIENTS = ~(BORN_HOST_V6 | STORE_HOST_V6)


class _SendCommand(msgspec.Struct, gc=False):
    """A request of SEND_MESSAGE_V2, header and extension fields read in one pass."""

    fields: SendMessageHeaderV2 = msgspec.field(name="extFields")
    opaque: Int32 = 0
    flag: Int32 = 0


_decode_send = msgspec.json.Decoder(_SendCommand, strict=False).decode
# How every client's JSON header of SEND_MESSAGE_V2 begins: the peer sorts its keys.
_SEND_START = b'{"code":310,'


class _Target(NamedTuple):
    """A queue that may be written to, with what its topic adds to each record."""

    queue: StoreQueue
    sys_flag: int


# Properties as the log holds them, tags code, UNIQ_KEY, whether the answer waits for the disk.
_Stored = tuple[bytes, int, str, bool]


class SendProcessor:
    """Stores what producers send."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        topics: TopicTable,
        uniq_keys: UniqKeyGenerator,
        statistics: BrokerStatistics,
    ) -> None:
        self._broker_name = config.broker_name
        self._is_sync_flush = config.is_sync_flush
        self._store_host_hex = store.store_host.hex().upper()
        self._store = store
        self._topics = topics
        self._uniq_keys = uniq_keys
        self._statistics = statistics
        self._targets: dict[tuple[str, int], _Target] = {}
        self._targets_change = -1
        self._tags_codes: dict[str, int] = {}
        # What the peer adds to every message that did not come in a batch.
        self._added = (
            "MSG_REGION\x01DefaultRegion\x02TRACE_ON\x01true\x02"
            f"CLUSTER\x01{config.broker_cluster_name}\x02"
        )

    def register(self, registry: Registry) -> None:
        """Serve the three ways of sending."""
        registry.route(RequestCode.SEND_MESSAGE, self.send)
        registry.route(RequestCode.SEND_MESSAGE_V2, self.send_v2)
        registry.route(RequestCode.SEND_BATCH_MESSAGE, self.send_v2)
        if not self._is_sync_flush:
            self._serve_one = registry.serve
            registry.route_ready(_SEND_START, self.send_ready)

    def send_ready(self, channel: Channel, frames: list[Frame]) -> None:
        """Store messages that came at once, one each; what is not plain is served one by one."""
        append = self._store.append
        host_bytes = channel.host_bytes
        store_host_hex = self._store_host_hex
        targets = self._current_targets()
        replies: list[bytes] = []
        for frame in frames:
            body = frame[2]
            try:
                command = _decode_send(frame[1])
                header = command.fields
                target = targets.get((header.topic, header.queue_id))
                if (
                    target is None
                    or command.flag
                    or header.batch
                    or header.sys_flag & _NOT_SERVED_FLAGS
                    or not body
                ):
                    self._serve_one(channel, frame)
                    continue
                properties, code, uniq_key, _ = self._stored_properties(header)
                if not uniq_key.isalnum():
                    self._serve_one(channel, frame)
                    continue
                queue = target.queue
                queue_offset = queue.next_offset
                physical_offset = append(
                    queue,
                    body,
                    properties,
                    code,
                    header.flag,
                    header.sys_flag & _FROM_CLIENTS | target.sys_flag,
                    header.born_timestamp,
                    host_bytes,
                    header.reconsume_times or 0,
                )
            except Exception:  # noqa: BLE001
                # Nothing was stored; served alone, it fails again and gets its answer.
                self._serve_one(channel, frame)
                continue
            self._statistics.put(queue.topic, 1, len(body))
            replies.append(
                _reply(
                    queue.queue_id,
                    uniq_key,
                    f"{store_host_hex}{physical_offset:016X}",
                    queue_offset,
                    command.opaque,
                )
            )
        channel.write(*replies)

    def send(self, request: Request) -> Reply | None:
        """SEND_MESSAGE: the long names."""
        return self._store_request(request, request.header(SendMessageHeader))

    def send_v2(self, request: Request) -> Reply | None:
        """SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE; the field, not the code, tells which."""
        return self._store_request(request, request.header(SendMessageHeaderV2))

    def _store_request(self, request: Request, header: _SendHeader) -> Reply | None:
        target = self._target(request, header)
        if not request.body:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a message to {header.topic} without a body: send one",
            )
        try:
            if header.batch:
                return self._store_batch(request, header, target)
            return self._store_one(request, header, target)
        except RecordTooLarge as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from None
        except CorruptRecord as error:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the batch to {header.topic} is torn at byte {error.position}: {error.reason}; "
                "nothing of it was stored, send whole messages",
            ) from None
        except StoreBusy as error:
            raise RequestError(ResponseCode.SYSTEM_BUSY, str(error)) from None
        except StoreNotWritable as error:
            raise RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, str(error)) from None

    def _store_one(self, request: Request, header: _SendHeader, target: _Target) -> Reply | None:
        properties, code, uniq_key, waits = self._stored_properties(header)
        queue = target.queue
        queue_offset = queue.next_offset
        physical_offset = self._store.append(
            queue,
            request.body,
            properties,
            code,
            header.flag,
            header.sys_flag & _FROM_CLIENTS | target.sys_flag,
            header.born_timestamp,
            request.channel.host_bytes,
            header.reconsume_times or 0,
        )
        self._statistics.put(queue.topic, 1, len(request.body))
        # As message.encode_offset_message_id writes it.
        message_id = f"{self._store_host_hex}{physical_offset:016X}"
        return self._answer(request, queue, queue_offset, message_id, uniq_key, waits)

    def _store_batch(self, request: Request, header: _SendHeader, target: _Target) -> Reply | None:
        if header.topic.startswith(_RETRY_PREFIX):
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a batch to the retry topic {header.topic}: send its messages one by one",
            )
        queue = target.queue
        queue_offset, physical_offsets = self._store.append_batch(
            queue,
            request.body,
            header.sys_flag & _FROM_CLIENTS | target.sys_flag,
            header.born_timestamp,
            request.channel.host_bytes,
            header.reconsume_times or 0,
        )
        self._statistics.put(queue.topic, len(physical_offsets), len(request.body))
        store_host = self._store_host_hex
        message_ids = ",".join([f"{store_host}{offset:016X}" for offset in physical_offsets])
        _, _, uniq_key, waits = self._stored_properties(header)
        return self._answer(request, queue, queue_offset, message_ids, uniq_key, waits)

    # -- answers -----------------------------------------------------------------------------------

    def _answer(
        self,
        request: Request,
        queue: StoreQueue,
        queue_offset: int,
        message_id: str,
        uniq_key: str,
        waits: bool,
    ) -> Reply | None:
        is_sync = waits and self._is_sync_flush
        if is_sync or request.serialize_type != SerializeType.JSON or not uniq_key.isalnum():
            reply = Reply(
                SendMessageResponseHeader(
                    msg_id=message_id,
                    queue_id=queue.queue_id,
                    queue_offset=queue_offset,
                    transaction_id=uniq_key,
                )
            )
            if not is_sync:
                return reply
            self._store.when_flushed(
                self._store.max_physical_offset, _FlushedReply(request, reply).answer
            )
        elif not request.command.is_oneway:
            request.channel.write(
                _reply(queue.queue_id, uniq_key, message_id, queue_offset, request.command.opaque)
            )
        return None

    # -- properties --------------------------------------------------------------------------------

    def _stored_properties(self, header: _SendHeader) -> _Stored:
        """The properties to store for a message that came alone.

        They are looked through as text: most are none of the broker's business.
        """
        items = (header.properties or "").split("\x02")
        uniq_key, tags_code, waits = "", 0, True
        dropped: list[str] = []
        for item in items:
            name, _, value = item.partition("\x01")
            if name not in _NOTED:
                continue
            if name == "UNIQ_KEY":
                uniq_key = value
            elif name == "TAGS":
                tags_code = self._tags_code(value)
            elif name == "WAIT":
                waits = value != "false"
                dropped.append(item)
            elif name in _DROPPED:
                dropped.append(item)
            elif value not in {"", "0", "false"}:
                raise _not_served(_NOT_SERVED[name], f"property {name}={value}")
        for item in dropped:
            items.remove(item)
        if items[-1]:
            items.append("")
        if not uniq_key:
            uniq_key = self._uniq_keys.next()
            items.insert(0, f"UNIQ_KEY\x01{uniq_key}")
        properties = ("\x02".join(items) + self._added).encode()
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"properties of {len(properties)} bytes to {header.topic}: {PROPERTIES_BYTES_MAX} "
                "is the most, put what is larger into the body",
            )
        return properties, tags_code, uniq_key, waits

    def _tags_code(self, tags: str) -> int:
        code = self._tags_codes.get(tags)
        if code is None:
            if len(self._tags_codes) >= _TAGS_KEPT:
                self._tags_codes.clear()
            code = self._tags_codes[tags] = tags_code(tags)
        return code

    # -- targets -----------------------------------------------------------------------------------

    def _current_targets(self) -> dict[tuple[str, int], _Target]:
        if self._targets_change != self._topics.change_count:
            self._targets.clear()
            self._targets_change = self._topics.change_count
        return self._targets

    def _target(self, request: Request, header: _SendHeader) -> _Target:
        target = self._current_targets().get((header.topic, header.queue_id))
        if target is None:
            target = self._find_target(request, header)
            if header.queue_id >= 0:
                self._targets[header.topic, header.queue_id] = target
        if header.sys_flag & _NOT_SERVED_FLAGS:
            is_batch = header.sys_flag & INNER_BATCH
            what = "inner batches" if is_batch else "transactional messages"
            raise _not_served(what, f"sysFlag {header.sys_flag} to {header.topic}")
        return target

    def _find_target(self, request: Request, header: _SendHeader) -> _Target:
        topic = self._topics.create_on_send(
            header.topic,
            header.default_topic,
            header.default_topic_queue_nums,
            request.channel.address,
        )
        self._topics.check_writable(topic)
        queue_count = max(topic.write_queue_nums, topic.read_queue_nums)
        queue_id = header.queue_id
        if queue_id < 0:
            queue_id = random.randrange(topic.write_queue_nums)
        if queue_id >= queue_count:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"queue {queue_id} of topic {topic.topic_name} on broker "
                f"{self._broker_name}: there are {queue_count}, ask for the route again",
            )
        sys_flag = MULTI_TAGS if topic.topic_filter_type == "MULTI_TAG" else 0
        return _Target(self._store.queue(topic.topic_name, queue_id), sys_flag)


class _FlushedReply:
    """An answer that waits for the disk."""

    __slots__ = ("_reply", "_request")

    def __init__(self, request: Request, reply: Reply) -> None:
        self._request = request
        self._reply = reply

    def answer(self, is_flushed: bool) -> None:
        if not is_flushed:
            self._reply.code = ResponseCode.FLUSH_DISK_TIMEOUT
            self._reply.remark = "stored, but not known to be on disk"
        self._request.reply(self._reply)


def _reply(queue_id: int, uniq_key: str, message_id: str, queue_offset: int, opaque: int) -> bytes:
    """The answer to a send, as the general encoder would write it, in one piece.

    uniq_key: letters and digits, or it would have to be escaped.
    """
    header = (
        f'{{"code":0,"extFields":{{"queueId":"{queue_id}","transactionId":"{uniq_key}",'
        f'"msgId":"{message_id}","TRACE_ON":"true","MSG_REGION":"DefaultRegion",'
        f'"queueOffset":"{queue_offset}"}},"flag":1,"language":"PYTHON","opaque":{opaque},'
        f'"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
    ).encode()
    return PREFIX.pack(len(header) + LENGTH_BYTES, len(header)) + header


def _not_served(what: str, place: str) -> RequestError:
    return RequestError(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        f"{what} are not served by this broker ({place}): send without, nothing was stored",
    )
