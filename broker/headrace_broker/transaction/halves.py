"""Half messages: what a transactional message becomes, and what is made of it later.

Source: docs/protocol.md "Transactions"; tests/broker/test_transactions.py.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from headrace_broker.inner.writer import InnerMessage
from headrace_broker.message_demands import SentMessage
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_ONEWAY, header_fields
from headrace_protocol.errors import RequestError
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import CheckTransactionStateHeader
from headrace_protocol.message import (
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    encode_offset_message_id,
    encode_record,
    property_value,
    tags_code_of,
)
from headrace_protocol.system_topics import (
    CHECK_MAX_TIME_TOPIC,
    GROUP_PREFIXES,
    HALF_TOPIC,
    OP_HALF_TOPIC,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace_broker.inner.waiting import Waiting
    from headrace_protocol.message import StoredMessage

CONSUMER_GROUP: Final = "CID_RMQ_SYS_TRANS"
TRAN_MSG: Final = "TRAN_MSG"
_PRODUCER_GROUP = "PGROUP"
_TRANSACTION_ID = "__transactionId__"
_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
# The queue offset of the first half, in its copies.
_FIRST_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
_REAL_TOPIC, _REAL_QID = "REAL_TOPIC", "REAL_QID"
_REAL = frozenset({_REAL_TOPIC, _REAL_QID})
_OF_BROKERS = _REAL | {_TRANSACTION_ID, _CHECK_TIMES, _FIRST_OFFSET}
_OP_PROPERTIES: Final = b"TAGS\x01d\x02"
# Ours: the halves that an op record names are not decided, they have copies.
_COPIED: Final = b"COPIED\x01true\x02"
_OP_TAGS_CODE = tags_code_of(_OP_PROPERTIES)


class Decision(enum.Enum):
    """What ended a transaction; DISCARD: nobody answered its checks."""

    COMMIT = enum.auto()
    ROLLBACK = enum.auto()
    DISCARD = enum.auto()


# --- what is sent --------------------------------------------------------------------------


class HalfDemand:
    """Has a transactional message wait as a half message."""

    def __init__(self, is_rejected: Callable[[], bool]) -> None:
        """is_rejected: whether this broker takes no transactional messages."""
        self._is_rejected = is_rejected

    def serve(self, message: SentMessage) -> None:
        """Redirect the message. Raises RequestError."""
        values = dict(_split(item) for item in message.properties[:-1])
        if values.get(TRAN_MSG, "").lower() != "true":
            if message.sys_flag & TRANSACTION_MASK:
                raise _illegal(message, f"sysFlag {message.sys_flag} without {TRAN_MSG}=true")
            return
        message.sys_flag &= ~TRANSACTION_MASK
        if _is_retry(message, values):
            return
        if self._is_rejected():
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                "this broker takes no transactional messages (rejectTransactionMessage=true): "
                "send to another one",
            )
        if not values.get(_PRODUCER_GROUP):
            raise _illegal(message, f"{TRAN_MSG}=true without {_PRODUCER_GROUP}")
        message.properties = [
            *_without(message.properties, _OF_BROKERS),
            f"{_TRANSACTION_ID}\x01{values.get('UNIQ_KEY', '')}",
            f"{_REAL_TOPIC}\x01{message.topic}",
            f"{_REAL_QID}\x01{message.queue_id}",
            "",
        ]
        message.topic, message.queue_id = HALF_TOPIC, 0


def _is_retry(message: SentMessage, values: dict[str, str]) -> bool:
    """Whether a consumer sent the message: one that was committed keeps its TRAN_MSG."""
    is_delayed = message.reconsume_times > 0 and values.get("DELAY", "0").isdigit()
    return message.topic.startswith(GROUP_PREFIXES) or (
        is_delayed and int(values.get("DELAY", "0")) > 0
    )


def _illegal(message: SentMessage, what: str) -> RequestError:
    return RequestError(
        ResponseCode.MESSAGE_ILLEGAL,
        f"a message to {message.topic} with {what}: send it as part of a transaction or without; "
        "nothing was stored",
    )


# --- what is stored ------------------------------------------------------------------------


class HalfNames:
    """What the properties of a half say: whose it is, where it goes, how often it was checked.

    first_offset: queue offset of the half that this is a copy of; None for an original, and for
    copies that Apache's broker made. immunity_ms: how long its producer is not asked, 0 by default.
    """

    __slots__ = (
        "first_offset",
        "group",
        "immunity_ms",
        "queue_id",
        "times",
        "topic",
        "transaction_id",
    )

    def __init__(self, properties: bytes) -> None:
        self.group = property_value(properties, _PRODUCER_GROUP.encode()).decode(errors="replace")
        self.transaction_id = property_value(properties, _TRANSACTION_ID.encode())
        self.topic = property_value(properties, _REAL_TOPIC.encode()).decode(errors="replace")
        self.queue_id = _number(properties, _REAL_QID, -1)
        self.times = _number(properties, _CHECK_TIMES, 0)
        first_offset = _number(properties, _FIRST_OFFSET, -1)
        self.first_offset = first_offset if first_offset >= 0 else None
        self.immunity_ms = _number(properties, _IMMUNITY, 0) * 1000


def _number(properties: bytes, name: str, default: int) -> int:
    value = property_value(properties, name.encode())
    return int(value) if value.isdigit() and len(value) < 19 else default


def committed(half: StoredMessage, properties: bytes) -> SentMessage:
    """The message as its topic gets it. properties: of the half, without the record's checksum."""
    names = HalfNames(properties)
    items = _items(properties)
    return SentMessage(
        names.topic,
        names.queue_id,
        [*_without(items, _REAL | {_FIRST_OFFSET}), ""],
        tags_code_of(properties),
        half.sys_flag & ~TRANSACTION_MASK | TRANSACTION_COMMIT,
        half.reconsume_times,
    )


def inner_commit(half: StoredMessage, message: SentMessage, source: int) -> InnerMessage:
    """The record of a committed message. source: physical offset of the half."""
    return InnerMessage(
        message.topic,
        message.queue_id,
        half.stored_body,
        _text(message.properties),
        message.tags_code,
        half.flag,
        message.sys_flag,
        half.born_timestamp,
        half.born_host,
        half.reconsume_times,
        source,
    )


def copy(half: Waiting, first_offset: int, times: int) -> InnerMessage:
    """The half once more, at the end of its queue."""
    items = _without(_items(half.properties), {_CHECK_TIMES, _FIRST_OFFSET})
    items += [f"{_CHECK_TIMES}\x01{times}", f"{_FIRST_OFFSET}\x01{first_offset}", ""]
    return _again(half, half.body, HALF_TOPIC, _text(items))


def discarded(half: Waiting) -> InnerMessage:
    """The half as the topic of undecided ones gets it; names the half, as a commit does."""
    message = _again(half, half.body, CHECK_MAX_TIME_TOPIC, half.properties)
    return message._replace(prepared_transaction_offset=half.physical_offset)


def resumed(record: StoredMessage, properties: bytes) -> InnerMessage:
    """A discarded half as a new one, whose producer is asked again."""
    items = _without(_items(properties), {_CHECK_TIMES, _FIRST_OFFSET})
    again = _text([*items, f"{_CHECK_TIMES}\x010", ""])
    message = _again(record, record.stored_body, HALF_TOPIC, again)
    return message._replace(prepared_transaction_offset=record.physical_offset)


def _again(
    half: Waiting | StoredMessage, body: bytes, topic: str, properties: bytes
) -> InnerMessage:
    return InnerMessage(
        topic,
        0,
        body,
        properties,
        tags_code_of(properties),
        half.flag,
        half.sys_flag,
        half.born_timestamp,
        half.born_host,
        half.reconsume_times,
    )


# --- op records ----------------------------------------------------------------------------


def ops(
    offsets: Iterable[int], bytes_max: int, now_ms: int, host: bytes
) -> Iterator[tuple[InnerMessage, int]]:
    """Records that say which halves are decided, each with how many of ``offsets`` it names."""
    names: list[bytes] = []
    room = bytes_max
    for offset in offsets:
        name = b"%d," % offset
        if names and len(name) > room:
            yield _op(names, now_ms, host), len(names)
            names, room = [], bytes_max
        names.append(name)
        room -= len(name)
    if names:
        yield _op(names, now_ms, host), len(names)


def _op(names: list[bytes], now_ms: int, host: bytes) -> InnerMessage:
    body = b"".join(names)
    return InnerMessage(
        OP_HALF_TOPIC, 0, body, _OP_PROPERTIES, _OP_TAGS_CODE, 0, 0, now_ms, host, 0
    )


def copied(op: InnerMessage) -> InnerMessage:
    """An op record about halves that were stored again.

    Apache's broker, started on this store after a kill, would check each copy by itself.
    """
    return op._replace(properties=op.properties + _COPIED)


def is_about_copies(op: Waiting) -> bool:
    """Whether an op record names halves that were stored again, not decided ones."""
    return _COPIED in op.properties


def named_by(op: Waiting) -> Iterator[int]:
    """The queue offsets of the halves that an op record names."""
    if property_value(op.properties, b"TAGS") == b"d":
        for name in op.body.split(b","):
            if name.strip().isdigit():
                yield int(name)


# --- checks --------------------------------------------------------------------------------


def check(half: Waiting, names: HalfNames, broker_name: str, store_host: bytes) -> bytes:
    """A request that asks a producer how its transaction ended."""
    record = encode_record(
        topic=names.topic,
        queue_id=max(names.queue_id, 0),
        body=half.body,
        properties=half.properties,
        flag=half.flag,
        queue_offset=half.queue_offset,
        physical_offset=half.physical_offset,
        sys_flag=half.sys_flag,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        store_timestamp=half.store_timestamp,
        store_host=store_host,
        reconsume_times=half.reconsume_times,
    )
    uniq_key = property_value(half.properties, b"UNIQ_KEY").decode(errors="replace")
    header = CheckTransactionStateHeader(
        topic=HALF_TOPIC,
        tran_state_table_offset=half.queue_offset,
        commit_log_offset=half.physical_offset,
        msg_id=uniq_key,
        transaction_id=uniq_key,
        offset_msg_id=encode_offset_message_id(store_host, half.physical_offset),
        bname=broker_name,
    )
    frame = encode_frame(
        SerializeType.JSON,
        RequestCode.CHECK_TRANSACTION_STATE,
        0,
        flag=FLAG_ONEWAY,
        fields=header_fields(header),
        body_bytes=len(record),
    )
    return frame + record


# --- properties ----------------------------------------------------------------------------


def _items(properties: bytes) -> list[str]:
    return [item for item in properties.decode(errors="surrogateescape").split("\x02") if item]


def _text(items: Iterable[str]) -> bytes:
    return "\x02".join(items).encode(errors="surrogateescape")


def _split(item: str) -> tuple[str, str]:
    name, _, value = item.partition("\x01")
    return name, value


def _without(items: Iterable[str], names: Iterable[str]) -> list[str]:
    """The properties but those with these names, and the empty ones."""
    left_out = frozenset(names)
    return [item for item in items if item and _split(item)[0] not in left_out]
