"""Look up messages by key in a broker's index, where that is cheaper than reading a range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.headers import QueryMessageHeader
from headrace_protocol.message import split_keys

if TYPE_CHECKING:
    from headrace.spark.plan.filters import Predicates
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.blocking import BlockingConnection

# A broker returns no more, so a result of this size may be incomplete.
_FOUND_MAX = 64
# An index query takes about as long as reading this many messages.
_MESSAGES_PER_QUERY = 2000
_TIMEOUT_MS = 30_000
_EVER_MS = 2**63 - 1


def records_by_keys(
    connection: BlockingConnection,
    predicates: Predicates | None,
    queue: MessageQueue,
    start_offset: int,
    end_offset: int,
) -> RecordColumns | None:
    """The messages of a range with one of the wanted keys, possibly with others, in order.

    None if the range has to be read instead: no keys are wanted, there are too many for the length
    of the range, one has too many messages, or the broker runs Apache RocketMQ, whose results may
    be incomplete.
    """
    keys = predicates.keys if predicates else None
    # The index has other hashes of keys with bytes that are not UTF-8.
    if keys is None or any(r"\x" in key for key in keys):
        return None
    if len(keys) * _MESSAGES_PER_QUERY > end_offset - start_offset:
        return None
    found: list[memoryview] = []
    for key in sorted(keys):
        records = _query(connection, queue.topic, key)
        if records is None or not connection.peer_is_headrace:
            return None
        found.append(records)
    columns = RecordColumns.from_records(b"".join(found))
    is_inside = (columns.queue_offset >= start_offset) & (columns.queue_offset < end_offset)
    columns = columns.select(is_inside & (columns.queue_id == queue.queue_id))
    return columns.select(np.unique(columns.queue_offset, return_index=True)[1])


def _query(connection: BlockingConnection, topic: str, keys: str) -> memoryview | None:
    """The records with these keys; None if the result may be incomplete."""
    words = split_keys(keys)
    if not words:
        return None
    header = QueryMessageHeader(
        topic=topic,
        key=words[0],
        max_num=_FOUND_MAX,
        begin_timestamp=0,
        end_timestamp=_EVER_MS,
        index_type="K",
    )
    response = connection.request(RequestCode.QUERY_MESSAGE, header, timeout_ms=_TIMEOUT_MS)
    response.expect(ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)
    if response.command.code == ResponseCode.QUERY_NOT_FOUND:
        return memoryview(b"")
    is_all = len(response.read(RecordColumns.from_records)) < _FOUND_MAX
    return response.body if is_all else None
