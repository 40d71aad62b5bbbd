"""END_TRANSACTION (37), LIST_TRANSACTIONS and RESUME_CHECK_HALF_MESSAGE (323).

Source: docs/protocol.md "Transactions"; tests/broker/transaction/test_transactions.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from headrace_broker.message_demands import SentMessage
from headrace_broker.processors.send_answers import rejection
from headrace_broker.store.errors import StoreError
from headrace_broker.store.log.record_checksum import without_checksum
from headrace_broker.store.reader import WantedMessages
from headrace_broker.transaction.halves import (
    Decision,
    HalfNames,
    committed,
    committed_properties,
    resumed,
)
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import ResumeCheckHalfMessageHeader
from headrace_protocol.bodies import WaitingMessage
from headrace_protocol.bounds import ITEMS_MAX
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import EndTransactionHeader, ListTransactionsHeader
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import (
    TRANSACTION_COMMIT,
    TRANSACTION_ROLLBACK,
    UNIQ_KEY,
    decode_record,
)
from headrace_protocol.message_ids import decode_offset_message_id
from headrace_protocol.rights.late import SEE, real_topic
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.serving import Reply
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC
from headrace_protocol.waiting import Until, now_or_later, ready, take_break

if TYPE_CHECKING:
    from collections.abc import Collection

    from headrace_broker.inner.delivery import Delivery
    from headrace_broker.inner.writer import InnerMessage, InnerWriter
    from headrace_broker.message_demands import MessageDemands
    from headrace_broker.processors.send import SendProcessor
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.transaction.transactions import Transactions
    from headrace_protocol.message import StoredMessage
    from headrace_protocol.serving import Registry, Request, Work
    from headrace_protocol.waiting import Run

_UNKNOWN: Final = 0
# Each check adds a copy with the same key.
_INDEXED_MAX: Final = 64
_FOREVER_MS: Final = 1 << 62
_HALVES_AT_ONCE: Final = 128
_SOON: Final = b"DELAY\x011\x02"
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
    """Serves the decisions of producers, and requests to resume discarded halves."""

    def __init__(
        self,
        store: MessageStore,
        transactions: Transactions,
        writer: InnerWriter,
        delivery: Delivery,
        delays: MessageDemands,
        sends: SendProcessor,
    ) -> None:
        """delays: redirects a committed message that its properties delay."""
        self._store = store
        self._transactions = transactions
        self._writer = writer
        self._delivery = delivery
        self._delays = delays
        self._sends = sends

    def register(self, registry: Registry) -> None:
        """Serve the codes."""
        registry.route(RequestCode.END_TRANSACTION, self.end)
        registry.route_long(RequestCode.LIST_TRANSACTIONS, self.list_open)
        registry.route(RequestCode.RESUME_CHECK_HALF_MESSAGE, self.resume)

    # -- decisions ---------------------------------------------------------------------------------

    def end(self, request: Request) -> Reply | Work | None:
        """END_TRANSACTION: the first decision about any copy of the half wins."""
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
        return now_or_later(partial(self._end, request, header, decision))

    def _end(
        self, request: Request, header: EndTransactionHeader, decision: Decision
    ) -> Reply | None:
        """Carry a decision out. Raises NotReady before it has changed anything."""
        half = self._find(header)
        properties = without_checksum(half.raw_properties)
        names = HalfNames(properties)
        # Clients that answer a check name the topic of halves; old ones name none.
        request.check(Kind.TOPIC, names.topic, Action.PUB)
        _check(header, half, names)
        table = self._transactions.table
        first = table.first_of(half.queue_offset, names.first_offset)
        if not table.is_open(first):
            self._check_same(half, decision)
            return self._decided(request, decision)
        if decision is Decision.COMMIT:
            source = table.newest_physical_offset(first, half.physical_offset)
            self._commit(half, names, committed_properties(properties), source)
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
        return self._sends.reply_confirmed(request, Reply())

    def _find(self, header: EndTransactionHeader) -> StoredMessage:
        """The half at an offset in the log. Raises RequestError, NotReady."""
        queue_offset, physical_offset = header.tran_state_table_offset, header.commit_log_offset
        half = self._store.message_in(HALF_TOPIC, 0, queue_offset, physical_offset)
        if half is None:
            record = self._store.message_at(physical_offset)
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

    def _commit(
        self, half: StoredMessage, names: HalfNames, properties: bytes, source: int
    ) -> None:
        """Append the message to its topic, or to where it waits. Raises RequestError.

        properties: of the message. source: physical offset of the newest copy; a start reads that
        copy in any case.
        """
        topic = names.topic
        queue_id, reason = self._delivery.find(topic, names.queue_id, half.physical_offset)
        record = committed(half, topic, queue_id, properties, tags_code_of(properties), source)
        if reason:
            record = self._delivery.redirect(record, reason)
        else:
            record = self._delayed(record)
            if not isinstance(self._writer.find_target(record.topic, record.queue_id), int):
                # The schedule delivers to other brokers, and repeats that until they have it.
                record = self._delayed(record._replace(properties=_SOON + record.properties))
        try:
            self._writer.append_now(record)
        except StoreError as error:
            raise rejection(error, record.topic) from None

    def _delayed(self, record: InnerMessage) -> InnerMessage:
        """A committed message, redirected to where it waits if it does. Raises RequestError."""
        message = SentMessage(
            record.topic,
            record.queue_id,
            SentMessage.property_items(record.properties),
            record.tags_code,
            record.sys_flag,
            record.reconsume_times,
        )
        self._delays.apply(message)
        if message.topic == record.topic:
            return record
        return record._replace(
            topic=message.topic,
            queue_id=message.queue_id,
            properties=message.raw_properties,
            tags_code=message.tags_code,
            sys_flag=message.sys_flag,
        )

    # -- what waits --------------------------------------------------------------------------------

    async def list_open(self, request: Request) -> Reply:
        """LIST_TRANSACTIONS: the oldest halves that are not decided, and how many there are."""
        header = request.header(ListTransactionsHeader)
        group, count = header.producer_group, min(max(header.max_num, 0), ITEMS_MAX)
        messages, found = [], 0
        for number, half in enumerate(list(self._transactions.table.open.values())):
            if group in {None, half.group} and request.may(Kind.TOPIC, half.topic, *SEE):
                found += 1
                if found <= count:
                    offset = half.physical_offset
                    messages.append(WaitingMessage(physical_offset=offset, due_ms=half.due_ms))
            if not number % _HALVES_AT_ONCE:
                await take_break()
        written = await fastjson.dumps_list_sliced(messages)
        return Reply(body=fastjson.dumps_parts({"messages": written, "count": found}))

    # -- second chances ----------------------------------------------------------------------------

    async def resume(self, request: Request) -> Reply | None:
        """RESUME_CHECK_HALF_MESSAGE: a discarded half is checked again from the start."""
        message_id = request.header(ResumeCheckHalfMessageHeader).msg_id or ""
        record = await ready(partial(self._find_discarded, message_id))
        request.check(Kind.TOPIC, real_topic(record), Action.UPDATE)
        self._transactions.admit(record.born_host)
        sources = await self._resumed_sources(record)
        half = resumed(record, without_checksum(record.raw_properties))
        offset = record.physical_offset

        def begin(run: Run) -> None:
            if offset in sources or not self._transactions.resume(offset, half, run.resume):
                raise _failed(f"msgId {message_id}: was resumed before, and is checked or decided")

        await Until("a write", begin)
        return self._sends.reply_confirmed(request, Reply())

    async def _resumed_sources(self, record: StoredMessage) -> Collection[int]:
        """Physical offsets of the discarded halves of a record's key that were resumed."""
        key = record.properties.get(UNIQ_KEY, "")
        wanted = WantedMessages(HALF_TOPIC, key, _INDEXED_MAX, 0, _FOREVER_MS, "U")
        query = self._store.query_index(wanted)
        while await ready(query.step):
            pass
        read = self._store.commit_log.record_at
        found = [await ready(partial(read, offset)) for offset in query.found]
        return {decode_record(half).prepared_transaction_offset for half in found if half}

    def _find_discarded(self, message_id: str) -> StoredMessage:
        """The discarded half with an offset message id. Raises RequestError, NotReady."""
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
    """Raise RequestError unless a half is its producer's and at the offset of the request."""
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
