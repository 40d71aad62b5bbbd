"""The message record: stored in the CommitLog, returned by pulls, decoded by clients.

Byte tables are in docs/store-format.md; all integers are big-endian and signed.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from zlib_ng.zlib_ng import crc32

from headrace_protocol.compression import decompress
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message_ids import encode_offset_message_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Buffer = bytes | bytearray | memoryview

MAGIC_V1: Final = 0xDAA320A7 - (1 << 32)
MAGIC_V2: Final = 0xDAA320AB - (1 << 32)
MAGIC_BLANK: Final = 0xCBD43194 - (1 << 32)

CRC_MASK: Final = 0x7FFFFFFF
# Messages in a batch. headrace producers send at most 10,485: each counts as 100 bytes of 1 MiB.
BATCH_ITEMS_MAX: Final = 16_384
TOPIC_BYTES_MAX_V1: Final = 0x7F
PROPERTIES_BYTES_MAX: Final = 0x7FFF
# Of a number in a property, which then fits a signed long.
_DIGITS_MAX: Final = 18

# sysFlag bits; those of compression are in ``compression``
MULTI_TAGS: Final = 0x2
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC
TRANSACTION_MASK: Final = 0xC
BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
NEED_UNWRAP: Final = 0x40
INNER_BATCH: Final = 0x80

# property names
KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
UNIQ_KEY: Final = "UNIQ_KEY"
CRC32: Final = "__CRC32#"  # of the whole record; written only by its broker
CLUSTER: Final = "CLUSTER"
# "true" deletes the key of a compacted topic; for clients that can't send an empty body.
DELETE: Final = "__DELETE__"
RETRY_TOPIC: Final = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QID: Final = "REAL_QID"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
POP_CK: Final = "POP_CK"
MSG_REGION: Final = "MSG_REGION"
TRACE_ON: Final = "TRACE_ON"
# Of a request between clients, and of its reply.
CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
MSG_TYPE: Final = "MSG_TYPE"
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"
ARRIVE_TIME: Final = "ARRIVE_TIME"
# Of a record that holds a whole batch: its messages, and the queue offset of the first.
INNER_NUM: Final = "INNER_NUM"
INNER_BASE: Final = "INNER_BASE"

# All names that RocketMQ's clients and brokers use themselves; the others are the users'.
# Source: RocketMQ's MessageConst.
SYSTEM_PROPERTIES: Final = frozenset(
    {
        KEYS,
        TAGS,
        WAIT,
        DELAY,
        UNIQ_KEY,
        CRC32,
        CLUSTER,
        RETRY_TOPIC,
        ORIGIN_MESSAGE_ID,
        REAL_TOPIC,
        REAL_QID,
        POP_CK,
        MSG_REGION,
        TRACE_ON,
        "1ST_POP_TIME",
        ARRIVE_TIME,
        "BORN_HOST",
        "BORN_TIMESTAMP",
        "BUYER_ID",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "CONSUME_START_TIME",
        "CORRECTION_FLAG",
        CORRELATION_ID,
        "DLQ_ORIGIN_MESSAGE_ID",
        "DLQ_ORIGIN_TOPIC",
        "DUP_INFO",
        "EXTEND_UNIQ_INFO",
        INNER_BASE,
        "INNER_MULTI_DISPATCH",
        "INNER_MULTI_QUEUE_OFFSET",
        INNER_NUM,
        "INSTANCE_ID",
        "MAX_OFFSET",
        "MAX_RECONSUME_TIMES",
        "MIN_OFFSET",
        "MQ2_FLAG",
        MSG_TYPE,
        "PGROUP",
        PUSH_REPLY_TIME,
        "REAL_MESSAGE_ID",
        "RECONSUME_TIME",
        "REDIRECT",
        REPLY_TO_CLIENT,
        "TIMER_DELAY_LEVEL",
        TIMER_DELAY_MS,
        TIMER_DELAY_SEC,
        TIMER_DELIVER_MS,
        "TIMER_DEQUEUE_MS",
        "TIMER_DEL_UNIQKEY",
        "TIMER_ENQUEUE_MS",
        TIMER_OUT_MS,
        TIMER_ROLL_TIMES,
        "TRANSACTION_CHECK_TIMES",
        "TRANSFER_FLAG",
        "TRAN_MSG",
        "TRAN_PREPARED_QUEUE_OFFSET",
        TTL,
        "__SHARDINGKEY",
        "__STARTDELIVERTIME",
        "__transactionId__",
    }
)
KEY_SEPARATOR: Final = " "
_NAME_VALUE_SEPARATOR: Final = "\x01"
_PROPERTY_SEPARATOR: Final = "\x02"


# --- record layout -------------------------------------------------------------------------


def _head(born_host_bytes: int, store_host_bytes: int) -> struct.Struct:
    return struct.Struct(f">iiiiiqqiq{born_host_bytes}sq{store_host_bytes}siqi")


# Fields 1 to the body length, by the two IPv6 bits: RECORD_HEADS[sys_flag >> 4 & 3].
RECORD_HEADS: Final = (_head(8, 8), _head(20, 8), _head(8, 20), _head(20, 20))
RECORD_BYTES_MIN: Final = RECORD_HEADS[0].size + 1 + 2
SYS_FLAG_AT: Final = 36
_START = struct.Struct(">ii28xi")  # total size, magic, sysFlag
_SHORT = struct.Struct(">h")
BLANK_RECORD: Final = struct.Struct(">ii")


def topic_field(topic: str) -> tuple[int, bytes]:
    """Magic number and length-prefixed topic, for the record version that can hold ``topic``."""
    name = topic.encode()
    if len(name) <= TOPIC_BYTES_MAX_V1:
        return MAGIC_V1, bytes((len(name),)) + name
    return MAGIC_V2, _SHORT.pack(len(name)) + name


def host_flags(born_host: bytes, store_host: bytes) -> int:
    """The sysFlag bits for the lengths of the two hosts."""
    return (BORN_HOST_V6 if len(born_host) == 20 else 0) | (
        STORE_HOST_V6 if len(store_host) == 20 else 0
    )


def encode_record(
    *,
    topic: str,
    queue_id: int,
    body: bytes,
    properties: bytes = b"",
    flag: int = 0,
    queue_offset: int = 0,
    physical_offset: int = 0,
    sys_flag: int = 0,
    born_timestamp: int = 0,
    born_host: bytes = bytes(8),
    store_timestamp: int = 0,
    store_host: bytes = bytes(8),
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
) -> bytes:
    """Encode one whole record, as V2 if the topic requires it.

    body: as stored: compressed if ``sys_flag`` says so.
    properties: as ``encode_properties`` returns them.
    born_host, store_host: as ``encode_host`` returns them; they determine the IPv6 bits.

    Raises ValueError if a part does not fit its length field.
    """
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise ValueError(f"properties have {len(properties)} bytes, more than 32767")
    magic, topic_bytes = topic_field(topic)
    sys_flag = sys_flag & ~0x30 | host_flags(born_host, store_host)
    head = RECORD_HEADS[sys_flag >> 4 & 3]
    size = head.size + len(body) + len(topic_bytes) + 2 + len(properties)
    return b"".join(
        (
            head.pack(
                size,
                magic,
                crc32(body) & CRC_MASK,
                queue_id,
                flag,
                queue_offset,
                physical_offset,
                sys_flag,
                born_timestamp,
                born_host,
                store_timestamp,
                store_host,
                reconsume_times,
                prepared_transaction_offset,
                len(body),
            ),
            body,
            topic_bytes,
            _SHORT.pack(len(properties)),
            properties,
        )
    )


class StoredMessage:
    """A decoded record. Body and properties are decoded on first use.

    ``sys_flag`` and ``stored_body`` are as stored; ``body`` is decompressed.
    """

    __slots__ = (
        "_body",
        "_properties",
        "body_crc",
        "born_host",
        "born_timestamp",
        "flag",
        "magic",
        "physical_offset",
        "prepared_transaction_offset",
        "queue_id",
        "queue_offset",
        "raw_properties",
        "reconsume_times",
        "size",
        "store_host",
        "store_timestamp",
        "stored_body",
        "sys_flag",
        "topic",
    )

    def __init__(
        self,
        head: tuple[int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int],
        stored_body: bytes,
        topic: str,
        raw_properties: bytes,
    ) -> None:
        (
            self.size,
            self.magic,
            self.body_crc,
            self.queue_id,
            self.flag,
            self.queue_offset,
            self.physical_offset,
            self.sys_flag,
            self.born_timestamp,
            self.born_host,
            self.store_timestamp,
            self.store_host,
            self.reconsume_times,
            self.prepared_transaction_offset,
            _,
        ) = head
        self.stored_body = stored_body
        self.topic = topic
        self.raw_properties = raw_properties
        self._body: bytes | None = None
        self._properties: dict[str, str] | None = None

    def __repr__(self) -> str:
        return (
            f"<StoredMessage {self.topic}/{self.queue_id}@{self.queue_offset}"
            f" physical_offset={self.physical_offset} body={len(self.stored_body)} bytes>"
        )

    @property
    def body(self) -> bytes:
        """The body as its producer sent it. Raises CodecMissing, BodyTooLarge, CorruptRecord."""
        if self._body is None:
            self._body = decompress(self.stored_body, self.sys_flag)
        return self._body

    @property
    def properties(self) -> dict[str, str]:
        """All properties, including system ones."""
        if self._properties is None:
            self._properties = decode_properties(self.raw_properties)
        return self._properties

    @property
    def tags(self) -> str | None:
        """The whole TAGS text; None if missing."""
        return self.properties.get(TAGS)

    @property
    def keys(self) -> list[str]:
        """The index keys of the KEYS property."""
        return split_keys(self.properties.get(KEYS, ""))

    @property
    def offset_message_id(self) -> str:
        """The id that encodes the record's position in its broker's log."""
        return encode_offset_message_id(self.store_host, self.physical_offset)

    @property
    def message_id(self) -> str:
        """The producer's id, or the offset message id if the producer gave none."""
        return self.properties.get(UNIQ_KEY) or self.offset_message_id

    def encode(self) -> bytes:
        """Encode the record again, byte for byte."""
        return encode_record(
            topic=self.topic,
            queue_id=self.queue_id,
            body=self.stored_body,
            properties=self.raw_properties,
            flag=self.flag,
            queue_offset=self.queue_offset,
            physical_offset=self.physical_offset,
            sys_flag=self.sys_flag,
            born_timestamp=self.born_timestamp,
            born_host=self.born_host,
            store_timestamp=self.store_timestamp,
            store_host=self.store_host,
            reconsume_times=self.reconsume_times,
            prepared_transaction_offset=self.prepared_transaction_offset,
        )


def decode_record(buffer: Buffer, position: int = 0) -> StoredMessage:
    """Decode the record at ``position``, checking its lengths and body CRC.

    Raises CorruptRecord, also for an end-of-file (BLANK) record and a truncated record.
    """
    data = buffer if isinstance(buffer, bytes) else bytes(buffer)
    size, magic, sys_flag = _record_start(data, position)
    end = position + size
    head_struct = RECORD_HEADS[sys_flag >> 4 & 3]
    body_at = position + head_struct.size
    if body_at > end:
        raise CorruptRecord(position, f"size {size} is smaller than the record's head")
    head = head_struct.unpack_from(data, position)
    topic_at = body_at + head[14]
    prefix = 1 if magic == MAGIC_V1 else 2
    if head[14] < 0 or topic_at + prefix > end:
        raise CorruptRecord(position, f"body length {head[14]} exceeds record size {size}")
    topic_bytes = data[topic_at] if prefix == 1 else _SHORT.unpack_from(data, topic_at)[0]
    length_at = topic_at + prefix + topic_bytes
    if topic_bytes < 0 or length_at + 2 > end:
        raise CorruptRecord(position, f"topic length {topic_bytes} exceeds record size {size}")
    if _SHORT.unpack_from(data, length_at)[0] != end - length_at - 2:
        raise CorruptRecord(position, f"properties do not end with the record of {size} bytes")
    body = data[body_at:topic_at]
    if crc32(body) & CRC_MASK != head[2]:
        raise CorruptRecord(position, "body CRC does not match")
    topic = data[topic_at + prefix : length_at].decode(errors="replace")
    return StoredMessage(head, body, topic, data[length_at + 2 : end])


def _record_start(data: bytes, position: int) -> tuple[int, int, int]:
    remaining = len(data) - position
    if remaining < RECORD_BYTES_MIN:
        raise CorruptRecord(position, f"only {remaining} bytes are left")
    size, magic, sys_flag = _START.unpack_from(data, position)
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        raise CorruptRecord(position, f"unknown magic number {magic & 0xFFFFFFFF:#010x}")
    if not RECORD_BYTES_MIN <= size <= remaining:
        raise CorruptRecord(position, f"size {size}, but {remaining} bytes are left")
    return size, magic, sys_flag


def decode_records(body: Buffer) -> list[StoredMessage]:
    """Decode the records in a pull's body. Raises CorruptRecord for any other content."""
    data = bytes(body)
    messages = []
    position, end = 0, len(data)
    while position < end:
        message = decode_record(data, position)
        messages.append(message)
        position += message.size
    return messages


# --- properties and keys ------------------------------------------------------------------


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Encode as ``name 0x01 value 0x02`` per entry, in the mapping's order."""
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()]).encode()


def property_text(raw: Buffer) -> str:
    r"""Text of properties. A byte that is not UTF-8 becomes ``\xNN``, so texts stay distinct."""
    return str(raw, "utf-8", "backslashreplace")


def decode_properties(raw: Buffer) -> dict[str, str]:
    """Decode entries, ignoring any without name or value; of equal names the last wins."""
    properties = {}
    for entry in property_text(raw).split(_PROPERTY_SEPARATOR):
        name, _, value = entry.partition(_NAME_VALUE_SEPARATOR)
        if name and value:
            properties[name] = value
    return properties


def property_value(raw: bytes, name: bytes) -> bytes:
    """One value, without decoding the others; empty if missing."""
    at = raw.rfind(b"\x02" + name + b"\x01") + 1
    if not at and not raw.startswith(name + b"\x01"):
        return b""
    start = at + len(name) + 1
    end = raw.find(b"\x02", start)
    if end == start or start == len(raw):
        # decode_properties ignores empty values, so an earlier entry of this name counts.
        return decode_properties(raw).get(name.decode(), "").encode()
    return raw[start:end] if end >= 0 else raw[start:]


def property_number(raw: bytes, name: bytes, default: int) -> int:
    """One value as a number; ``default`` unless it is one to 18 digits."""
    return decimal(property_value(raw, name), default)


def decimal(text: bytes, default: int) -> int:
    """A text as a number; ``default`` unless it is one to 18 digits, which no int() rejects."""
    return int(text) if text.isdigit() and len(text) <= _DIGITS_MAX else default


def with_properties(
    raw: bytes, properties: Mapping[bytes, bytes], dropped: Iterable[bytes] = ()
) -> bytes:
    """Properties with some set, at the end, and without those of the names in ``dropped``."""
    replaced = {*properties, *dropped}
    kept = [item for item in raw.split(b"\x02") if item.partition(b"\x01")[0] not in replaced]
    items = [item for item in kept if item]
    items += [b"%s\x01%s" % item for item in properties.items()]
    return b"".join([item + b"\x02" for item in items])


def split_keys(keys: str) -> list[str]:
    """The index keys in a KEYS text: its non-empty parts between spaces."""
    return [key for key in keys.split(KEY_SEPARATOR) if key]


# --- batch body (codes 320 and 310 with batch=true) ----------------------------------------

BATCH_ITEM_HEAD: Final = struct.Struct(">i8xii")  # size, 0, 0, flag, body length


def encode_batch(items: Iterable[tuple[int, bytes, bytes]]) -> bytes:
    """The batch body of (flag, body, properties) items."""
    parts: list[bytes] = []
    for flag, body, properties in items:
        size = BATCH_ITEM_HEAD.size + len(body) + 2 + len(properties)
        parts += (BATCH_ITEM_HEAD.pack(size, flag, len(body)), body)
        parts += (_SHORT.pack(len(properties)), properties)
    return b"".join(parts)
