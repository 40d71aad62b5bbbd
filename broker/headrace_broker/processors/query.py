"""Queries for messages by key or id, and for offsets.

Source: docs/protocol.md "Queries"; tests/broker/test_query_processor.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

from headrace_broker.queue_directory import Use
from headrace_broker.store.reader import CANDIDATES_MAX
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
from headrace_protocol.message import decode_record
from headrace_protocol.serving import Reply, all_ready, until_done

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.reader import IndexType, KeyQuery
    from headrace_broker.store.store_source import Boundary
    from headrace_protocol.errors import NotReady
    from headrace_protocol.message import Buffer
    from headrace_protocol.serving import Registry, Request

_UNIQUE_KEY_COUNT_MAX = 32
_INDEX_TYPES: dict[str | None, IndexType | None] = {
    None: None,
    "": None,
    "K": "K",
    "U": "U",
    "T": "T",
}
_TYPES_OF_KEYS = (None, "K")
_BOUNDARIES: dict[str, Boundary] = {"LOWER": "LOWER", "UPPER": "UPPER"}


class KeptMessages(Protocol):
    """Messages that outlive the log files in which they were stored."""

    def keeps(self, topic: str, /) -> bool:
        """Whether messages of a topic outlive their log files."""

    def newest(self, topic: str, key: str, /) -> Generator[NotReady | None, None, list[bytes]]:
        """The newest message of a key in each queue; none of a topic that keeps no messages."""

    def with_id(
        self, topic: str, message_id: str, begin_ms: int, /
    ) -> Generator[NotReady | None, None, list[bytes]]:
        """Messages with their producer's id, stored from a time on; none as ``newest``."""


class TieredMessages(Protocol):
    """Messages of which the log may have a part only."""

    def find(
        self,
        topic: str,
        key: str,
        index_type: IndexType | None,
        begin_ms: int,
        end_ms: int,
        count_max: int,
        /,
    ) -> Generator[NotReady | None, None, list[Buffer]]:
        """The newest messages of a key in a range of store times. Raises RequestError."""


class QueryProcessor:
    """Serves lookups of messages and offsets. tiered: None without a tier that is read."""

    def __init__(
        self,
        store: MessageStore,
        directory: QueueDirectory,
        kept: KeptMessages,
        tiered: TieredMessages | None,
    ) -> None:
        self._store = store
        self._directory = directory
        self._kept = kept
        self._tiered = tiered

    def register(self, registry: Registry) -> None:
        """Route the queries."""
        registry.route_long(RequestCode.QUERY_MESSAGE, self.query_message)
        registry.route(RequestCode.VIEW_MESSAGE_BY_ID, self.view_message)
        registry.route(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, self.search_offset)
        registry.route(RequestCode.GET_MAX_OFFSET, self.max_offset)
        registry.route(RequestCode.GET_MIN_OFFSET, self.min_offset)
        registry.route(RequestCode.GET_EARLIEST_MSG_STORETIME, self.earliest_store_time)

    def query_message(self, request: Request) -> Generator[NotReady | None, None, Reply]:
        """QUERY_MESSAGE: records by key."""
        header = request.header(QueryMessageHeader)
        query = self._query(header)
        yield from until_done(query.step)
        records = yield from all_ready(
            functools.partial(self._store.commit_log.record_at, offset) for offset in query.found
        )
        found: list[Buffer] = [record for record in records if record is not None]
        kept = yield from self._search_kept(header, len(found))
        found += _missing(kept, found, header)
        more = yield from self._find_tiered(header, found)
        found += _missing(more, found, header)
        if not found:
            raise _not_found(header, query)
        return Reply(self._index_end(), tuple(found))

    def _search_kept(
        self, header: QueryMessageHeader, found_count: int
    ) -> Generator[NotReady | None, None, list[bytes]]:
        """Messages that match and may have left the log."""
        index_type = _index_type(header)
        if found_count < header.max_num and index_type in _TYPES_OF_KEYS:
            return (yield from self._kept.newest(header.topic, header.key))
        if not found_count and index_type == "U":
            return (yield from self._kept.with_id(header.topic, header.key, header.begin_timestamp))
        return []

    def _find_tiered(
        self, header: QueryMessageHeader, found: list[Buffer]
    ) -> Generator[NotReady | None, None, list[Buffer]]:
        """Messages that have left the log, after those that were found there.

        If the tier fails, those found are the answer. Raises RequestError if there are none.
        """
        count_max = header.max_num - len(found)
        is_id_found = bool(header.unique_key_query and found)
        if self._tiered is None or count_max <= 0 or is_id_found:
            return []
        log = self._store.commit_log
        (oldest_ms,) = yield from all_ready([lambda: log.store_timestamp_at(log.min_offset)])
        end_ms = header.end_timestamp if oldest_ms is None else min(header.end_timestamp, oldest_ms)
        if end_ms < header.begin_timestamp:  # the log has them all
            return []
        try:
            return (
                yield from self._tiered.find(
                    header.topic,
                    header.key,
                    _index_type(header),
                    header.begin_timestamp,
                    end_ms,
                    count_max,
                )
            )
        except RequestError:
            if not found:
                raise
            return []

    def _query(self, header: QueryMessageHeader) -> KeyQuery:
        is_unique = bool(header.unique_key_query)
        return self._store.query_index(
            header.topic,
            header.key,
            _UNIQUE_KEY_COUNT_MAX if is_unique else header.max_num,
            header.begin_timestamp,
            header.end_timestamp,
            _index_type(header),
            header.before_offset,
        )

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

    def view_message(self, request: Request) -> Reply:
        """VIEW_MESSAGE_BY_ID: the record at a physical offset."""
        header = request.header(ViewMessageHeader)
        physical_offset = header.offset
        record = self._store.message_at(physical_offset)
        if record is None or self._is_of_another(record, header.topic):
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"can not find message by the offset, {physical_offset}: no record begins there, "
                "it has expired, or the id is of another broker; a message of a compacted topic "
                "whose record has expired is found by its key, or by its queue and queue offset",
            )
        return Reply(body=(record,))

    def _is_of_another(self, record: Buffer, topic: str | None) -> bool:
        """Whether the id is that of a message that has been copied out of the log."""
        if topic is None or not self._kept.keeps(topic):
            return False
        return decode_record(record).topic != topic

    def search_offset(self, request: Request) -> Reply:
        """SEARCH_OFFSET_BY_TIMESTAMP: the queue offset for a store time."""
        header = request.header(SearchOffsetHeader)
        boundary = _BOUNDARIES.get((header.boundary_type or "LOWER").upper())
        if boundary is None:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"boundaryType {header.boundary_type!r}: expected LOWER or UPPER",
            )
        place = self._directory.serve(header.topic, header.queue_id, Use.BEGIN)
        offset = place.source.offset_by_time(header.timestamp, boundary)
        return Reply(OffsetResponseHeader(offset=offset))

    def max_offset(self, request: Request) -> Reply:
        """GET_MAX_OFFSET: one past the newest message."""
        header = request.header(GetMaxOffsetHeader)
        place = self._directory.serve(header.topic, header.queue_id, Use.INSPECT)
        return Reply(OffsetResponseHeader(offset=place.source.max_offset()))

    def min_offset(self, request: Request) -> Reply:
        """GET_MIN_OFFSET: the oldest message."""
        header = request.header(GetMinOffsetHeader)
        place = self._directory.serve(header.topic, header.queue_id, Use.BEGIN)
        return Reply(OffsetResponseHeader(offset=place.source.min_offset()))

    def earliest_store_time(self, request: Request) -> Reply:
        """GET_EARLIEST_MSG_STORETIME: when the oldest message was stored; -1 if there is none."""
        header = request.header(GetEarliestMsgStoretimeHeader)
        source = self._directory.serve(header.topic, header.queue_id, Use.BEGIN).source
        timestamp = source.store_time_at(source.min_offset())
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


def _missing(
    kept: Sequence[Buffer], found: list[Buffer], header: QueryMessageHeader
) -> list[Buffer]:
    """Those of ``kept`` in the time range that are not found yet, as many as fit."""
    places = {_place(record) for record in found} if kept else set()
    return [
        record
        for record in kept
        if header.begin_timestamp <= _stored_ms(record) <= header.end_timestamp
        and _place(record) not in places
    ][: header.max_num - len(found)]


def _place(record: Buffer) -> tuple[int, int]:
    message = decode_record(record)
    return message.queue_id, message.queue_offset


def _stored_ms(record: Buffer) -> int:
    return decode_record(record).store_timestamp


def _not_found(header: QueryMessageHeader, query: KeyQuery) -> RequestError:
    missing = f"can not find message of topic {header.topic} with key {header.key}"
    if query.is_cut:
        # There may be some, so this is another answer than "none".
        return RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"{missing} among the newest {CANDIDATES_MAX} whose keys have the same hash: set an "
            "earlier end of the time range",
        )
    return RequestError(ResponseCode.QUERY_NOT_FOUND, f"{missing}, maybe time range not correct")
