"""Queries for messages by key or id, and for offsets.

Source: docs/protocol.md "Queries"; tests/broker/processors/test_query_processor.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_broker.queue_directory import Use
from headrace_broker.store.reader import CANDIDATES_MAX, WantedMessages
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import (
    GetEarliestMsgStoretimeHeader,
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    OffsetResponseHeader,
    QueryMessageHeader,
    QueryMessageResponseHeader,
    SearchOffsetHeader,
    TimestampResponseHeader,
    ViewMessageHeader,
)
from headrace_protocol.inner_batch import unwrap_record
from headrace_protocol.message import REAL_TOPIC, decode_record
from headrace_protocol.rights.late import check_readable
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import ready

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from headrace_broker.consumer.unconsumed import InnerConsumer
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.reader import IndexType, KeyQuery, KeySource
    from headrace_broker.store.store_source import Boundary
    from headrace_protocol.message import Buffer, StoredMessage
    from headrace_protocol.serving import Registry, Request

_UNIQUE_KEY_COUNT_MAX = 32
_INDEX_TYPES: dict[str | None, IndexType | None] = {
    None: None,
    "": None,
    "K": "K",
    "U": "U",
    "T": "T",
}
_BOUNDARIES: dict[str, Boundary] = {"LOWER": "LOWER", "UPPER": "UPPER"}


class _Waiting(NamedTuple):
    physical_offset: int
    record: Buffer
    due_ms: int


class QueryProcessor:
    """Serves lookups of messages and offsets.

    sources: returns what is asked after the log. inner_consumers: returns those whose topics hold
    messages that wait.
    """

    def __init__(
        self,
        store: MessageStore,
        directory: QueueDirectory,
        sources: Callable[[], Sequence[KeySource]],
        inner_consumers: Callable[[], Sequence[InnerConsumer]],
    ) -> None:
        self._store = store
        self._directory = directory
        self._sources = sources
        self._inner_consumers = inner_consumers

    def register(self, registry: Registry) -> None:
        """Route the queries."""
        registry.route_long(RequestCode.QUERY_MESSAGE, self.query_message)
        registry.route(RequestCode.VIEW_MESSAGE_BY_ID, self.view_message)
        registry.route(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, self.search_offset)
        registry.route(RequestCode.GET_MAX_OFFSET, self.max_offset)
        registry.route(RequestCode.GET_MIN_OFFSET, self.min_offset)
        registry.route(RequestCode.GET_EARLIEST_MSG_STORETIME, self.earliest_store_time)

    async def query_message(self, request: Request) -> Reply:
        """QUERY_MESSAGE: records by key."""
        header = request.header(QueryMessageHeader)
        if header.waiting:
            return await self._query_waiting(header)
        wanted = _wanted(header, 0)
        if header.unique_key_query:
            wanted = wanted._replace(count_max=_UNIQUE_KEY_COUNT_MAX)
        query = await self._run(wanted)
        read = self._store.commit_log.record_at
        found: list[Buffer] = []
        for offset in query.found:
            if record := await ready(functools.partial(read, offset)):
                found += wanted.matching(record)
        for source in self._sources():
            if len(found) >= header.max_num or (header.unique_key_query and found):
                break
            more = await source.find(_wanted(header, len(found)))
            found += _missing(more, found, header)
        if not found:
            raise _not_found(header, is_cut=query.is_cut)
        return Reply(self._index_end(), tuple(found))

    async def _run(self, wanted: WantedMessages) -> KeyQuery:
        query = self._store.query_index(wanted)
        while await ready(query.step):
            pass
        return query

    async def _query_waiting(self, header: QueryMessageHeader) -> Reply:
        """The newest messages to a topic that wait in topics of the broker's, each once."""
        found: dict[str, _Waiting] = {}
        for consumer in self._inner_consumers():
            waits = functools.partial(_waits_for, header.topic, consumer.due_ms, found)
            wanted = _wanted(header, 0)._replace(topic=consumer.topic, accepts=waits)
            query = await self._run(wanted)
            if query.is_cut:
                raise _not_found(header, is_cut=True)
            await self._add_waiting(query.found, consumer, found)
        if not found:
            raise _not_found(header, is_cut=False)
        newest = sorted(found.values(), reverse=True)[: header.max_num]
        times = ",".join(str(each.due_ms) for each in newest)
        answer = msgspec.structs.replace(self._index_end(), waits_until=times)
        return Reply(answer, tuple(each.record for each in newest))

    async def _add_waiting(
        self, offsets: Iterable[int], consumer: InnerConsumer, found: dict[str, _Waiting]
    ) -> None:
        for offset in offsets:
            record = await ready(functools.partial(self._store.commit_log.record_at, offset))
            if record is None:
                continue
            message = decode_record(record)
            # It may have been delivered meanwhile, and a copy of it may be found already.
            due_ms = consumer.due_ms(message)
            if due_ms is not None:
                found.setdefault(message.message_id, _Waiting(offset, record, due_ms))

    def _index_end(self) -> QueryMessageResponseHeader:
        files = self._store.index_files.files
        if not files:  # all have expired, and the messages were found without them
            return QueryMessageResponseHeader(
                index_last_update_timestamp=0, index_last_update_phyoffset=0
            )
        last = files[-1].header
        return QueryMessageResponseHeader(
            index_last_update_timestamp=last.end_timestamp,
            index_last_update_phyoffset=last.end_physical_offset,
        )

    async def view_message(self, request: Request) -> Reply:
        """VIEW_MESSAGE_BY_ID: the record at a physical offset; of a batch those of its messages."""
        header = request.header(ViewMessageHeader)
        physical_offset = header.offset
        record = await ready(functools.partial(self._store.message_at, physical_offset))
        if record is None or self._is_of_another(record, header.topic):
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"can not find message by the offset, {physical_offset}: no record begins there, "
                "it has expired, or the id is of another broker; a message of a compacted topic "
                "whose record has expired is found by its key, or by its queue and queue offset",
            )
        check_readable(request, record)
        return Reply(body=tuple(unwrap_record(record)))

    def _is_of_another(self, record: Buffer, topic: str | None) -> bool:
        """True for the id of a message that has been copied out of the log."""
        if topic is None or not any(each.has_foreign_ids(topic) for each in self._sources()):
            return False
        return decode_record(record).topic != topic

    async def search_offset(self, request: Request) -> Reply:
        """SEARCH_OFFSET_BY_TIMESTAMP: the queue offset for a store time."""
        header = request.header(SearchOffsetHeader)
        boundary = _BOUNDARIES.get((header.boundary_type or "LOWER").upper())
        if boundary is None:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"boundaryType {header.boundary_type!r}: expected LOWER or UPPER",
            )
        place = self._directory.serve(header.topic, header.queue_id, Use.BEGIN)
        find = functools.partial(place.source.offset_by_time, header.timestamp, boundary)
        return Reply(OffsetResponseHeader(offset=await ready(find)))

    async def max_offset(self, request: Request) -> Reply:
        """GET_MAX_OFFSET: one past the newest message."""
        header = request.header(GetMaxOffsetHeader)
        place = self._directory.serve(header.topic, header.queue_id, Use.INSPECT)
        return Reply(OffsetResponseHeader(offset=await ready(place.source.max_offset)))

    async def min_offset(self, request: Request) -> Reply:
        """GET_MIN_OFFSET: the oldest message."""
        header = request.header(GetMinOffsetHeader)
        place = self._directory.serve(header.topic, header.queue_id, Use.BEGIN)
        return Reply(OffsetResponseHeader(offset=await ready(place.source.min_offset)))

    async def earliest_store_time(self, request: Request) -> Reply:
        """GET_EARLIEST_MSG_STORETIME: when the oldest message was stored; -1 if there is none."""
        header = request.header(GetEarliestMsgStoretimeHeader)
        source = self._directory.serve(header.topic, header.queue_id, Use.BEGIN).source
        timestamp = await ready(lambda: source.store_time_at(source.min_offset()))
        return Reply(TimestampResponseHeader(timestamp=-1 if timestamp is None else timestamp))


def _index_type(header: QueryMessageHeader) -> IndexType | None:
    """Raises RequestError for an unknown one."""
    try:
        index_type = _INDEX_TYPES[header.index_type]
    except KeyError:
        raise RequestError(
            ResponseCode.INVALID_PARAMETER,
            f"indexType {header.index_type!r}: expected K (keys), U (unique key) or T (tags)",
        ) from None
    return "U" if header.unique_key_query else index_type


def _wanted(header: QueryMessageHeader, found_count: int) -> WantedMessages:
    return WantedMessages(
        header.topic,
        header.key,
        header.max_num - found_count,
        header.begin_timestamp,
        header.end_timestamp,
        _index_type(header),
        header.before_offset,
        found_count,
    )


def _waits_for(
    topic: str,
    due_ms: Callable[[StoredMessage], int | None],
    found: Container[str],
    message: StoredMessage,
) -> bool:
    """True for a message to a topic that waits, and is not found yet."""
    return (
        message.properties.get(REAL_TOPIC) == topic
        and message.message_id not in found
        and due_ms(message) is not None
    )


def _missing(
    more: Sequence[Buffer], found: list[Buffer], header: QueryMessageHeader
) -> list[Buffer]:
    """Records of ``more`` in the time range that are not found yet, as many as fit."""
    addresses = {_address(record) for record in found} if more else set()
    return [
        record
        for record in more
        if header.begin_timestamp <= _stored_ms(record) <= header.end_timestamp
        and _address(record) not in addresses
    ][: header.max_num - len(found)]


def _address(record: Buffer) -> tuple[int, int]:
    message = decode_record(record)
    return message.queue_id, message.queue_offset


def _stored_ms(record: Buffer) -> int:
    return decode_record(record).store_timestamp


def _not_found(header: QueryMessageHeader, *, is_cut: bool) -> RequestError:
    missing = f"can not find message of topic {header.topic} with key {header.key}"
    if is_cut:
        # There may be some, so this is another answer than "none".
        return RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"{missing} among the newest {CANDIDATES_MAX} whose keys have the same hash: set an "
            "earlier end of the time range",
        )
    return RequestError(ResponseCode.QUERY_NOT_FOUND, f"{missing}, maybe time range not correct")
