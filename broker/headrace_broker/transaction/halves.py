"""Half messages: how a transactional message is stored, and the records made of it later.

Source: docs/protocol.md "Transactions"; tests/broker/transaction/test_transactions.py.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Final

from headrace_broker.inner.writer import InnerMessage
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_ONEWAY, header_fields
from headrace_protocol.errors import RequestError
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import CheckTransactionStateHeader
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    DELAY,
    REAL_QID,
    REAL_TOPIC,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    UNIQ_KEY,
    decimal,
    encode_record,
    property_number,
    property_value,
    with_properties,
)
from headrace_protocol.message_ids import encode_offset_message_id
from headrace_protocol.system_topics import (
    CHECK_MAX_TIME_TOPIC,
    GROUP_PREFIXES,
    HALF_TOPIC,
    OP_HALF_TOPIC,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace_broker.inner.waiting import Waiting
    from headrace_broker.message_demands import SentMessage
    from headrace_protocol.message import StoredMessage

TRAN_MSG: Final = "TRAN_MSG"
_PRODUCER_GROUP = "PGROUP"
_TRANSACTION_ID = "__transactionId__"
_CHECK_TIMES: Final = b"TRANSACTION_CHECK_TIMES"
# Among the properties of every copy.
CHECK_TIMES_MARK: Final = _CHECK_TIMES + b"\x01"
# The queue offset of the first half, in its copies.
_FIRST_OFFSET: Final = b"TRAN_PREPARED_QUEUE_OFFSET"
_IMMUNITY: Final = b"CHECK_IMMUNITY_TIME_IN_SECONDS"
# What a half says about its checks; only brokers may.
_OF_CHECKS: Final = (_CHECK_TIMES.decode(), _FIRST_OFFSET.decode())
_POSITIVE: Final = re.compile(r"\+?0*[1-9][0-9]*", re.ASCII)
_OP_PROPERTIES: Final = b"TAGS\x01d\x02"
# headrace's own: the halves that the op record names have copies and are not decided.
_COPIED: Final = b"COPIED\x01true\x02"
_OP_TAGS_CODE = tags_code_of(_OP_PROPERTIES)


class Decision(enum.Enum):
    """The end of a transaction; DISCARD: its producer answered no check."""

    COMMIT = enum.auto()
    ROLLBACK = enum.auto()
    DISCARD = enum.auto()


# --- what is sent --------------------------------------------------------------------------


class HalfDemand:
    """Has a transactional message wait as a half message."""

    def __init__(
        self, is_rejected: Callable[[], bool], check_budget: Callable[[bytes], None]
    ) -> None:
        """is_rejected: whether this broker rejects transactional messages.

        check_budget: raises RequestError if the host of a producer has too many undecided.
        """
        self._is_rejected = is_rejected
        self._check_budget = check_budget

    def admit(self, born_host: bytes) -> None:
        """Raise RequestError if a producer may send no transactional message now."""
        self._check_served()
        self._check_budget(born_host)

    def serve(self, message: SentMessage) -> None:
        """Redirect the message. Raises RequestError."""
        values = message.values()
        if values.get(TRAN_MSG, "").lower() != "true":
            if message.sys_flag & TRANSACTION_MASK:
                raise _illegal(message, f"sysFlag {message.sys_flag} without {TRAN_MSG}=true")
            return
        message.sys_flag &= ~TRANSACTION_MASK
        if _is_retry(message, values):
            return
        self._check_served()
        if not values.get(_PRODUCER_GROUP):
            raise _illegal(message, f"{TRAN_MSG}=true without {_PRODUCER_GROUP}")
        self._check_budget(message.born_host)
        message.put(
            {
                _TRANSACTION_ID: values.get(UNIQ_KEY, ""),
                REAL_TOPIC: message.topic,
                REAL_QID: str(message.queue_id),
            },
            dropped=_OF_CHECKS,
        )
        message.topic, message.queue_id = HALF_TOPIC, 0

    def _check_served(self) -> None:
        if self._is_rejected():
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                "this broker takes no transactional messages (rejectTransactionMessage=true): "
                "send to another one",
            )


def _is_retry(message: SentMessage, values: dict[str, str]) -> bool:
    """True if a consumer sent the message; a committed message keeps its TRAN_MSG."""
    is_delayed = bool(_POSITIVE.fullmatch(values.get(DELAY, "")))
    return message.topic.startswith(GROUP_PREFIXES) or (is_delayed and message.reconsume_times > 0)


def _illegal(message: SentMessage, what: str) -> RequestError:
    return RequestError(
        ResponseCode.MESSAGE_ILLEGAL,
        f"a message to {message.topic} with {what}: send it as part of a transaction or without; "
        "nothing was stored",
    )


# --- what is stored ------------------------------------------------------------------------


class HalfNames:
    """The properties of a half that brokers use.

    group: of its producer. topic, queue_id: where its message goes. times: number of checks.
    first_offset: queue offset of the original of a copy; None for an original, and for a copy that
    Apache's broker made. immunity_ms: time until the first check, 0 if the half does not say.
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
        self.topic = property_value(properties, REAL_TOPIC.encode()).decode(errors="replace")
        self.queue_id = property_number(properties, REAL_QID.encode(), -1)
        self.times = property_number(properties, _CHECK_TIMES, 0)
        first_offset = property_number(properties, _FIRST_OFFSET, -1)
        self.first_offset = first_offset if first_offset >= 0 else None
        self.immunity_ms = property_number(properties, _IMMUNITY, 0) * 1000


def committed_properties(properties: bytes) -> bytes:
    """Properties of the committed message, from the half's without the record's checksum."""
    return with_properties(properties, {}, (REAL_TOPIC.encode(), REAL_QID.encode(), _FIRST_OFFSET))


def committed(
    half: StoredMessage,
    topic: str,
    queue_id: int,
    properties: bytes,
    tags_code: int,
    source: int,
) -> InnerMessage:
    """The record of a committed message. source: physical offset of the half."""
    return InnerMessage(
        topic,
        queue_id,
        half.stored_body,
        properties,
        tags_code,
        half.flag,
        half.sys_flag & ~TRANSACTION_MASK | TRANSACTION_COMMIT,
        half.born_timestamp,
        half.reconsume_times,
        half.born_host,
        source,
    )


def copy(half: Waiting, first_offset: int, times: int) -> InnerMessage:
    """A copy of the half, for the end of its queue."""
    names = {_CHECK_TIMES: b"%d" % times, _FIRST_OFFSET: b"%d" % first_offset}
    return _again(half, half.body, HALF_TOPIC, with_properties(half.properties, names))


def discarded(half: Waiting) -> InnerMessage:
    """The half as TRANS_CHECK_MAX_TIME_TOPIC gets it; names the half, as a commit does."""
    message = _again(half, half.body, CHECK_MAX_TIME_TOPIC, half.properties)
    return message._replace(prepared_transaction_offset=half.physical_offset)


def resumed(record: StoredMessage, properties: bytes) -> InnerMessage:
    """A discarded half as a new one, with no checks yet."""
    again = with_properties(properties, {_CHECK_TIMES: b"0"}, [_FIRST_OFFSET])
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
        half.reconsume_times,
        half.born_host,
    )


# --- op records ----------------------------------------------------------------------------


def ops(
    offsets: Iterable[int], bytes_max: int, now_ms: int, host: bytes
) -> Iterator[tuple[InnerMessage, int]]:
    """Records that name decided halves, each with the number of ``offsets`` that it names."""
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
        OP_HALF_TOPIC, 0, body, _OP_PROPERTIES, _OP_TAGS_CODE, 0, 0, now_ms, 0, host
    )


def copied(op: InnerMessage) -> InnerMessage:
    """An op record that names halves that were stored again.

    Without it, an Apache broker on this store would check each copy by itself.
    """
    return op._replace(properties=op.properties + _COPIED)


def is_about_copies(op: Waiting) -> bool:
    """True if an op record names halves that were stored again instead of decided ones."""
    return _COPIED in op.properties


def named_by(op: Waiting) -> Iterator[int]:
    """The queue offsets of the halves that an op record names."""
    if property_value(op.properties, b"TAGS") == b"d":
        for name in op.body.split(b","):
            if (offset := decimal(name.strip(), -1)) >= 0:
                yield offset


# --- checks --------------------------------------------------------------------------------


def check(half: Waiting, names: HalfNames, broker_name: str, store_host: bytes) -> bytes:
    """The frame of a request that asks a producer for its decision."""
    record = _record_to_check(half, names, store_host)
    uniq_key = property_value(half.properties, UNIQ_KEY.encode()).decode(errors="replace")
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


def _record_to_check(half: Waiting, names: HalfNames, store_host: bytes) -> bytes:
    """The half's record, with the topic and queue of its message."""
    return encode_record(
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
