"""The message record: stored in the CommitLog, returned by pulls, decoded by clients.

Byte tables are in docs/store-format.md; all integers are big-endian and signed.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import struct
import zlib
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING, Final

from zlib_ng.zlib_ng import crc32

from headrace_protocol.bounds import HASHED_CHARS_MAX, OutOfBounds
from headrace_protocol.errors import PortableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Buffer = bytes | bytearray | memoryview

MAGIC_V1: Final = 0xDAA320A7 - (1 << 32)
MAGIC_V2: Final = 0xDAA320AB - (1 << 32)
MAGIC_BLANK: Final = 0xCBD43194 - (1 << 32)

CRC_MASK: Final = 0x7FFFFFFF
# Default limit for decompressing a body; producers send at most 4 MiB.
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
# Default limit for all bodies of a batch together, which can inflate a thousandfold.
BATCH_BYTES_MAX: Final = 256 * 1024 * 1024
PROPERTIES_BYTES_MAX: Final = 0x7FFF
# Of a number in a property, which then fits a signed long.
_DIGITS_MAX: Final = 18
# Messages in a batch. headrace producers send at most 10,485: each counts as 100 bytes of 1 MiB.
BATCH_ITEMS_MAX: Final = 16_384
TOPIC_BYTES_MAX_V1: Final = 0x7F

# sysFlag bits
COMPRESSED: Final = 0x1
MULTI_TAGS: Final = 0x2
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC
TRANSACTION_MASK: Final = 0xC
BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
NEED_UNWRAP: Final = 0x40
INNER_BATCH: Final = 0x80
COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300

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
        "ARRIVE_TIME",
        "BORN_HOST",
        "BORN_TIMESTAMP",
        "BUYER_ID",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "CONSUME_START_TIME",
        "CORRECTION_FLAG",
        "CORRELATION_ID",
        "DLQ_ORIGIN_MESSAGE_ID",
        "DLQ_ORIGIN_TOPIC",
        "DUP_INFO",
        "EXTEND_UNIQ_INFO",
        "INNER_BASE",
        "INNER_MULTI_DISPATCH",
        "INNER_MULTI_QUEUE_OFFSET",
        "INNER_NUM",
        "INSTANCE_ID",
        "MAX_OFFSET",
        "MAX_RECONSUME_TIMES",
        "MIN_OFFSET",
        "MQ2_FLAG",
        "MSG_TYPE",
        "PGROUP",
        "PUSH_REPLY_TIME",
        "REAL_MESSAGE_ID",
        "RECONSUME_TIME",
        "REDIRECT",
        "REPLY_TO_CLIENT",
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
        "TTL",
        "__SHARDINGKEY",
        "__STARTDELIVERTIME",
        "__transactionId__",
    }
)
KEY_SEPARATOR: Final = " "
_NAME_VALUE_SEPARATOR: Final = "\x01"
_PROPERTY_SEPARATOR: Final = "\x02"


class CorruptRecord(PortableError, ValueError):
    """Bytes that are not a valid record, or not a valid batch item."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"no message record at byte {position}: {reason}")
        self.position = position
        self.reason = reason


class CodecMissing(ValueError):
    """A body is compressed with a codec whose package is not installed."""


class BodyTooLarge(PortableError, ValueError):
    """A compressed body is larger than its reader allows."""

    def __init__(self, codec: str, stored_bytes: int, body_bytes_max: int) -> None:
        super().__init__(
            f"a {codec} body of {stored_bytes} bytes has more than {body_bytes_max} bytes when "
            "decompressed: if such bodies are sent, give the consumer a larger body_bytes_max"
        )


class BatchTooLarge(PortableError, ValueError):
    """The bodies of a batch together exceed the reader's limit."""

    def __init__(self, message_count: int, batch_bytes_max: int) -> None:
        super().__init__(
            f"the bodies of {message_count} messages have more than {batch_bytes_max} bytes when "
            "decompressed: read the messages one by one, fetch fewer at a time (max_messages), "
            "or raise the consumer's batch_bytes_max"
        )


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


# --- properties, keys and tags -------------------------------------------------------------


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


# Long texts are hashed in blocks: powers for all of their units would cost time and memory.
_BLOCK_UNITS = 128
_POWERS_OF_31 = [pow(31, exponent, 1 << 32) for exponent in range(_BLOCK_UNITS + 1)]
# The powers for a block, by its number of units.
_POWERS = [tuple(_POWERS_OF_31[:count][::-1]) for count in range(_BLOCK_UNITS + 1)]


def java_hash(text: str) -> int:
    """Java's ``String.hashCode``: over UTF-16 units, wrapped to a signed 32-bit integer.

    Raises OutOfBounds for a text longer than any tags or key.
    """
    if len(text) > HASHED_CHARS_MAX:
        raise OutOfBounds(
            f"tags or key of {len(text)} characters: the maximum is {HASHED_CHARS_MAX}"
        )
    units: Sequence[int]
    if text.isascii():
        units = text.encode()
    else:
        raw = text.encode("utf-16-be", "surrogatepass")
        units = struct.unpack(f">{len(raw) // 2}H", raw)
    value = 0
    for start in range(0, len(units), _BLOCK_UNITS):
        block = units[start : start + _BLOCK_UNITS]
        count = len(block)
        value = (value * _POWERS_OF_31[count] + sum(map(mul, block, _POWERS[count]))) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


_java_hash_cached = lru_cache(maxsize=4096)(java_hash)
# Longer tags are not used in practice; caching them would only fill memory.
_CACHED_CHARS_MAX = 256


def tags_code(tags: str | None) -> int:
    """The hash of the TAGS text that a ConsumeQueue unit holds; 0 without tags."""
    if not tags:
        return 0
    return java_hash(tags) if len(tags) > _CACHED_CHARS_MAX else _java_hash_cached(tags)


def tags_code_of(raw_properties: bytes) -> int:
    """The tags code of a record with these properties."""
    start = raw_properties.rfind(b"\x02TAGS\x01") + 6
    if start == 5 and not raw_properties.startswith(b"TAGS\x01"):
        return 0
    end = raw_properties.find(b"\x02", start)
    if end <= start:  # no value, or no separator after it
        return tags_code(property_value(raw_properties, b"TAGS").decode(errors="replace"))
    if end - start > _CACHED_CHARS_MAX:
        return java_hash(raw_properties[start:end].decode(errors="replace"))
    return _tags_code_of_bytes(raw_properties[start:end])


@lru_cache(maxsize=4096)
def _tags_code_of_bytes(tags: bytes) -> int:
    return java_hash(tags.decode(errors="replace"))


def index_key_hash(topic: str, key: str) -> int:
    """The key hash of an IndexFile entry: never negative."""
    value = abs(java_hash(f"{topic}#{key}"))
    return 0 if value == 1 << 31 else value


# --- hosts and message ids -----------------------------------------------------------------


def encode_host(ip: str, port: int) -> bytes:
    """4 or 16 address bytes and the port as a 4-byte integer."""
    return ipaddress.ip_address(ip).packed + port.to_bytes(4, "big")


def decode_host(host: bytes) -> tuple[str, int]:
    """Address text and port. Raises ValueError unless ``host`` has 8 or 20 bytes."""
    return str(ipaddress.ip_address(host[:-4])), int.from_bytes(host[-4:], "big")


def encode_offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """The 32 or 56 hex digits that identify a record by broker address and log position."""
    return (store_host + physical_offset.to_bytes(8, "big", signed=True)).hex().upper()


def decode_offset_message_id(message_id: str) -> tuple[bytes, int]:
    """Store host and physical offset. Raises ValueError for anything but 32 or 56 hex digits."""
    if len(message_id) not in {32, 56}:
        raise ValueError(f"message id {message_id!r} is not 32 or 56 hex digits")
    raw = bytes.fromhex(message_id)
    return raw[:-8], int.from_bytes(raw[-8:], "big", signed=True)


class UniqKeyGenerator:
    """Generates UNIQ_KEYs: address, process, instance, time in the local month, counter."""

    __slots__ = ("_counter", "_month_end_ms", "_month_start_ms", "_now_ms", "_prefix")

    def __init__(self, now_ms: Callable[[], int], pid: int, ip: bytes, instance: int = 0) -> None:
        """now_ms: wall clock. ip: 4 or 16 bytes. instance: distinguishes two in one process."""
        self._now_ms = now_ms
        raw = ip + (pid & 0xFFFF).to_bytes(2, "big") + (instance & 0xFFFFFFFF).to_bytes(4, "big")
        self._prefix = raw.hex().upper()
        self._counter = 0
        self._month_start_ms = self._month_end_ms = 0

    def next(self) -> str:
        """A new key of 32 (IPv4) or 56 characters."""
        now_ms = self._now_ms()
        if not self._month_start_ms <= now_ms < self._month_end_ms:
            self._month_start_ms, self._month_end_ms = _local_month_ms(now_ms)
        self._counter = (self._counter + 1) & 0xFFFF
        return f"{self._prefix}{now_ms - self._month_start_ms & 0xFFFFFFFF:08X}{self._counter:04X}"


def uniq_key_time_ms(uniq_key: str, now_ms: int) -> int:
    """The time at which a UNIQ_KEY was generated, at most a month before ``now_ms``.

    The key only holds the time since the start of the month, in its producer's local time.
    Raises ValueError if it is not a UNIQ_KEY.
    """
    if len(uniq_key) not in {32, 56}:
        raise ValueError(f"UNIQ_KEY {uniq_key!r} has {len(uniq_key)} characters, not 32 or 56")
    elapsed_ms = int(uniq_key[-12:-4], 16)
    month_start_ms, _ = _local_month_ms(now_ms)
    if month_start_ms + elapsed_ms > now_ms:
        month_start_ms, _ = _local_month_ms(month_start_ms - 1)
    return month_start_ms + elapsed_ms


def _local_month_ms(now_ms: int) -> tuple[int, int]:
    today = dt.datetime.fromtimestamp(now_ms / 1000).astimezone()
    start = dt.datetime(today.year, today.month, 1)  # noqa: DTZ001 - local time is meant
    following = (start + dt.timedelta(days=32)).replace(day=1)
    return int(start.timestamp() * 1000), int(following.timestamp() * 1000)


# --- compression ---------------------------------------------------------------------------


def compress(body: bytes, level: int = 5) -> tuple[bytes, int]:
    """The body compressed with ZLIB, and the sysFlag bits for that; as it is if that is shorter."""
    compressed = zlib.compress(body, level)
    if len(compressed) >= len(body):
        return body, 0
    return compressed, COMPRESSED | COMPRESSION_ZLIB


def decompress(stored_body: bytes, sys_flag: int, body_bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """Decompress a body; returns it unchanged if ``sys_flag`` says that it is not compressed.

    Raises CodecMissing with the package to install, BodyTooLarge if the result has more than
    ``body_bytes_max`` bytes, CorruptRecord if it does not decompress.
    """
    if not sys_flag & COMPRESSED:
        return stored_body
    codec, inflate = _CODECS.get(sys_flag & COMPRESSION_MASK, _ZLIB)
    body = inflate(stored_body, body_bytes_max + 1)
    if body is None:
        raise CorruptRecord(0, f"{codec} body does not decompress: it is truncated")
    if len(body) > body_bytes_max:
        raise BodyTooLarge(codec, len(stored_body), body_bytes_max)
    return body


def decompress_each(
    bodies: list[bytes],
    sys_flags: Iterable[tuple[int, int]],
    body_bytes_max: int = BODY_BYTES_MAX,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> None:
    """Decompress the stored bodies of a batch in place.

    sys_flags: index and flags of each body that may be compressed.
    Raises as ``decompress``, and BatchTooLarge for more than ``batch_bytes_max`` in total.
    """
    room = batch_bytes_max - sum(map(len, bodies))
    for index, sys_flag in sys_flags:
        room += len(bodies[index])
        try:
            body = decompress(bodies[index], sys_flag, max(0, min(body_bytes_max, room)))
        except BodyTooLarge as error:
            if room < body_bytes_max:
                raise BatchTooLarge(len(bodies), batch_bytes_max) from error
            raise
        bodies[index] = body
        room -= len(body)


# Each stops at ``bytes_max``, so that a small body cannot fill the memory. They return None for a
# truncated body, except with ZSTD, whose reader does not detect it.


def _inflate_zlib(stored_body: bytes, bytes_max: int) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(stored_body, bytes_max)
    except zlib.error as error:
        raise CorruptRecord(0, f"ZLIB body does not decompress: {error}") from error
    return body if inflater.eof or len(body) == bytes_max else None


def _inflate_lz4(stored_body: bytes, bytes_max: int) -> bytes | None:
    try:
        import lz4.frame
    except ImportError as error:
        raise CodecMissing("the body is LZ4-compressed: pip install lz4") from error
    inflater = lz4.frame.LZ4FrameDecompressor()
    try:
        body: bytes = inflater.decompress(stored_body, bytes_max)
    except RuntimeError as error:
        raise CorruptRecord(0, f"LZ4 body does not decompress: {error}") from error
    return body if inflater.eof or len(body) == bytes_max else None


def _inflate_zstd(stored_body: bytes, bytes_max: int) -> bytes | None:
    try:
        import zstandard
    except ImportError as error:
        raise CodecMissing("the body is ZSTD-compressed: pip install zstandard") from error
    try:
        # Java's stream writer leaves the size out of the frame, which one-shot decompress() needs.
        return zstandard.ZstdDecompressor().stream_reader(stored_body).read(bytes_max)
    except zstandard.ZstdError as error:
        raise CorruptRecord(0, f"ZSTD body does not decompress: {error}") from error


_ZLIB = ("ZLIB", _inflate_zlib)
_CODECS: dict[int, tuple[str, Callable[[bytes, int], bytes | None]]] = {
    COMPRESSION_LZ4: ("LZ4", _inflate_lz4),
    COMPRESSION_ZSTD: ("ZSTD", _inflate_zstd),
}


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
