"""Queries by key for messages that have left the log; see ``processors/query.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.store.reader import CANDIDATES_MAX, QUERY_COUNT_MAX
from headrace_broker.tiered.access.tier_reader import TIERED_DATA
from headrace_protocol.errors import CorruptRecord, RequestError
from headrace_protocol.message import decode_record
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.waiting import fetch, ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.reader import WantedMessages
    from headrace_broker.tiered.access.tier_reader import TierReader
    from headrace_broker.tiered.container.tier_index import IndexHit
    from headrace_protocol.message import Buffer, StoredMessage

# Of the records in one answer, apart from the last.
_ANSWER_BYTES: Final = 4 << 20


class TierLookups:
    """Finds messages by key in the tier."""

    def __init__(self, store: MessageStore, reader: TierReader) -> None:
        self._log = store.commit_log
        self._reader = reader

    def has_foreign_ids(self, _topic: str) -> bool:
        """No: the tier has this broker's own records."""
        return False

    async def find(self, wanted: WantedMessages) -> list[Buffer]:
        """The newest messages of a key that are older than the log.

        If the tier can't be read, what was found elsewhere is the answer. Raises RequestError if
        nothing was.
        """
        log = self._log
        oldest_ms = await ready(lambda: log.store_timestamp_at(log.min_offset))
        end_ms = wanted.end_ms if oldest_ms is None else min(wanted.end_ms, oldest_ms)
        if end_ms < wanted.begin_ms:  # the log has them all
            return []
        try:
            return await self._find(wanted._replace(end_ms=end_ms))
        except RequestError:
            if not wanted.found_count:
                raise
            return []

    async def _find(self, wanted: WantedMessages) -> list[Buffer]:
        topic, begin_ms = wanted.topic, wanted.begin_ms

        def is_wanted(message: StoredMessage) -> bool:
            return begin_ms <= message.store_timestamp and wanted.matches(message)

        def find() -> list[Buffer]:
            self._reader.open()
            index = self._reader.access.tier.index
            text, end_ms = wanted.index_text, wanted.end_ms
            hits = index.query(topic, text, begin_ms, end_ms, CANDIDATES_MAX)
            hits = self._reader.result(hits)
            records = self._records(topic, hits, is_wanted, min(wanted.count_max, QUERY_COUNT_MAX))
            return self._reader.result(records)

        self._reader.breaker.check()
        return await fetch(find, TIERED_DATA)

    def _records(
        self,
        topic: str,
        hits: Iterable[IndexHit],
        is_wanted: Callable[[StoredMessage], bool],
        count_max: int,
    ) -> list[Buffer] | Failure:
        records: list[Buffer] = []
        left_bytes = _ANSWER_BYTES
        for hit in hits:
            if len(records) == count_max or left_bytes <= 0:
                break
            record = self._record(topic, hit)
            if isinstance(record, Failure):
                return record
            if record is None:
                continue
            try:
                is_found = is_wanted(decode_record(record))
            except CorruptRecord as error:
                return Failure(FailureKind.DAMAGED, f"{topic}/{hit.queue_id}", str(error))
            if is_found:
                records.append(record)
                left_bytes -= len(record)
        return records

    def _record(self, topic: str, hit: IndexHit) -> Buffer | Failure | None:
        """The record that an item of the index points to; None if it has expired."""
        queue = self._reader.access.queue(topic, hit.queue_id)
        return None if queue is None else queue.record(hit.log_offset, hit.size)
