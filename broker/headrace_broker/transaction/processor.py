"""END_TRANSACTION (37) and RESUME_CHECK_HALF_MESSAGE (323).

Source: docs/protocol.md "Transactions"; tests/broker/test_transactions.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.store.errors import StoreError
from headrace_broker.store.log.record_checksum import without_checksum
from headrace_broker.transaction.halves import (
    Decision,
    HalfNames,
    committed,
    inner_commit,
    resumed,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import EndTransactionHeader, ResumeCheckHalfMessageHeader
from headrace_protocol.message import (
    TRANSACTION_COMMIT,
    TRANSACTION_ROLLBACK,
    decode_offset_message_id,
    decode_record,
)
from headrace_protocol.serving import Reply
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.inner.undelivered import Delivery, Undelivered
    from headrace_broker.inner.writer import InnerMessage
    from headrace_broker.message_demands import SentMessage
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.transaction.service import Transactions
    from headrace_protocol.message import StoredMessage
    from headrace_protocol.serving import Registry, Request

_UNKNOWN: Final = 0
# A half has a copy for each check.
_INDEXED_MAX: Final = 64
_FOREVER_MS: Final = 1 << 62
_DECISIONS: Final = {
    TRANSACTION_COMMIT: Decision.COMMIT,
    TRANSACTION_ROLLBACK: Decision.ROLLBACK,
}
_ENDED: Final = {
    None: "was decided long ago",
    Decision.COMMIT: "is committed",
    Decision.ROLLBACK: "is rolled back",
    Decision.DISCARD: f"was given up, its message is in {CHECK_MAX_TIME_TOPIC}",
}


class TransactionProcessor:
    """Serves the decisions of producers, and the second chance of discarded halves."""

    def __init__(
        self,
        store: MessageStore,
        transactions: Transactions,
        statistics: BrokerStatistics,
        delivery: Delivery,
        undelivered: Undelivered,
        wait: Callable[[SentMessage], None],
        reply_confirmed: Callable[[Request, Reply], Reply | None],
        rejection: Callable[[StoreError, str], RequestError],
    ) -> None:
        """wait: has a committed message wait where its properties demand it.

        reply_confirmed: replies once all that was appended is confirmed.
        rejection: the answer for a message that the store does not take.
        """
        self._store = store
        self._transactions = transactions
        self._statistics = statistics
        self._delivery = delivery
        self._undelivered = undelivered
        self._wait = wait
        self._reply_confirmed = reply_confirmed
        self._rejection = rejection
        self._resumed: set[int] = set()  # places of discarded halves; the index may come later

    def register(self, registry: Registry) -> None:
        """Serve both codes."""
        registry.route(RequestCode.END_TRANSACTION, self.end)
        registry.route(RequestCode.RESUME_CHECK_HALF_MESSAGE, self.resume)

    # -- decisions ---------------------------------------------------------------------------------

    def end(self, request: Request) -> Reply | None:
        """END_TRANSACTION: the first decision wins, over all copies of the half."""
        header = request.header(EndTransactionHeader)
        if header.commit_or_rollback == _UNKNOWN:
            return Reply()
        decision = _DECISIONS.get(header.commit_or_rollback)
        if decision is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"commitOrRollback={header.commit_or_rollback}: expected {TRANSACTION_COMMIT}, "
                f"{TRANSACTION_ROLLBACK} or {_UNKNOWN}",
            )
        half = self._find(header)
        properties = without_checksum(half.raw_properties)
        names = HalfNames(properties)
        _check(header, half, names)
        table = self._transactions.table
        first = table.first_of(half.queue_offset, names.first_offset)
        if not table.is_open(first):
            self._check_same(half, decision)
            return self._decided(request, decision)
        if decision is Decision.COMMIT:
            self._commit(half, properties, table.newest_place(first, half.physical_offset))
        self._transactions.ended(first, half.queue_offset, decision)
        return self._decided(request, decision)

    def _decided(self, request: Request, decision: Decision) -> Reply | None:
        """The answer to a decision that was made, now or before, once the log says so."""
        if request.command.is_oneway:
            return None
        self._transactions.write_ops()
        if decision is Decision.ROLLBACK and not self._transactions.table.is_settled:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                "the rollback is not in the log yet: the store takes no messages, send it again",
            )
        return self._reply_confirmed(request, Reply())

    def _find(self, header: EndTransactionHeader) -> StoredMessage:
        """The half at an offset in the log. Raises RequestError, NotReady."""
        record = self._store.message_at(header.commit_log_offset)
        half = decode_record(record) if record is not None else None
        if half is None or half.topic != HALF_TOPIC:
            raise _failed(
                f"Find prepared transaction message failed: none at {header.commit_log_offset}"
            )
        return half

    def _check_same(self, half: StoredMessage, decision: Decision) -> None:
        """Raise RequestError if a transaction that is ended was ended in another way."""
        before = self._transactions.table.decision(half.queue_offset)
        if before is not decision:
            raise RequestError(
                ResponseCode.ILLEGAL_OPERATION,
                f"the transaction of half message {half.queue_offset} {_ENDED[before]}: "
                "the first decision counts",
            )

    def _commit(self, half: StoredMessage, properties: bytes, source: int) -> None:
        """Append the message where it belongs. Raises RequestError, NotReady.

        source: physical offset of the newest copy, which a start reads in any case.
        """
        message = committed(half, properties)
        reason = self._delivery.why_not(message.topic, message.queue_id, half.physical_offset)
        if reason:
            record = self._undelivered.redirect(inner_commit(half, message, source), reason)
        else:
            self._wait(message)
            record = inner_commit(half, message, source)
        self._append(record)

    def _append(self, record: InnerMessage) -> None:
        try:
            self._store.write_path.append(
                self._store.queue(record.topic, record.queue_id), *record[2:]
            )
        except StoreError as error:
            raise self._rejection(error, record.topic) from None
        self._statistics.put(record.topic, 1, len(record.body))

    # -- second chances ----------------------------------------------------------------------------

    def resume(self, request: Request) -> Reply | None:
        """RESUME_CHECK_HALF_MESSAGE: a discarded half is checked again from the start."""
        header = request.header(ResumeCheckHalfMessageHeader)
        record = self._find_discarded(header.msg_id or "")
        if self._was_resumed(record):
            raise _failed(f"msgId {header.msg_id}: was resumed before, and is checked or decided")
        self._append(resumed(record, without_checksum(record.raw_properties)))
        self._resumed.add(record.physical_offset)
        return self._reply_confirmed(request, Reply())

    def _was_resumed(self, record: StoredMessage) -> bool:
        """Whether a half was made of a discarded one. Raises NotReady."""
        if record.physical_offset in self._resumed:
            return True
        key = record.properties.get("UNIQ_KEY", "")
        query = self._store.query_index(HALF_TOPIC, key, _INDEXED_MAX, 0, _FOREVER_MS, "U")
        while query.step():
            pass
        found = map(self._store.commit_log.record_at, query.found)
        sources = (decode_record(half).prepared_transaction_offset for half in found if half)
        return record.physical_offset in sources

    def _find_discarded(self, message_id: str) -> StoredMessage:
        """Raises RequestError, NotReady."""
        try:
            _, physical_offset = decode_offset_message_id(message_id)
        except ValueError:
            raise _failed(f"msgId {message_id[:80]!r}: expected an offset message id") from None
        found = self._store.message_at(physical_offset)
        record = decode_record(found) if found is not None else None
        if record is None or record.topic != CHECK_MAX_TIME_TOPIC:
            raise _failed(f"msgId {message_id}: no message of {CHECK_MAX_TIME_TOPIC} begins there")
        return record


def _check(header: EndTransactionHeader, half: StoredMessage, names: HalfNames) -> None:
    """Raise RequestError unless a half is the one that a producer means, and its own."""
    if names.group != header.producer_group:
        raise _failed(
            f"The producer group wrong: {header.producer_group}, the half message is of another one"
        )
    if half.queue_offset != header.tran_state_table_offset:
        raise _failed(
            f"The transaction state table offset wrong: {header.tran_state_table_offset}, "
            f"the half message at {header.commit_log_offset} has {half.queue_offset}"
        )


def _failed(remark: str) -> RequestError:
    return RequestError(ResponseCode.SYSTEM_ERROR, remark)
