"""Transactions: messages that consumers get once the producer's own work is done, or never."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

import anyio

from headrace.errors import HeadraceError, InvalidMessage
from headrace.messages import encoded
from headrace.received import ReceivedMessage
from headrace.values import shown
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import CheckTransactionStateHeader, EndTransactionHeader
from headrace_protocol.message import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, decode_record
from headrace_protocol.message_ids import decode_offset_message_id

if TYPE_CHECKING:
    from types import TracebackType

    from anyio.abc import TaskGroup

    from headrace.messages import Message, SendResult
    from headrace.producer.sender import Sender
    from headrace.telemetry import MessageTraces
    from headrace_protocol.connection import RequestReceived
    from headrace_protocol.drivers.aio import AsyncConnection

_log = logging.getLogger("headrace.client")

_ROLLBACK_S: Final = 3.0

# Returns True to commit the message, False to roll it back, None if that is not known yet.
OnCheck = Callable[[ReceivedMessage], Awaitable[bool | None]]


class Transaction:
    """An ``async with`` block whose messages are committed at its end, each on its own.

    An exception in the block rolls them back. Brokers ask the producers of the group about messages
    whose decision they did not get; see ``on_check`` of ``Producer``.
    """

    def __init__(self, sender: Sender, group: str, topic: str) -> None:
        self._sender = sender
        self._group = group
        self._topic = topic
        self._sent: list[SendResult] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            for sent in self._sent:
                await self._end(sent, TRANSACTION_COMMIT)
            return
        # A rollback that fails leaves the decision to a check.
        with anyio.move_on_after(_ROLLBACK_S, shield=True), suppress(HeadraceError):
            for sent in self._sent:
                await self._end(sent, TRANSACTION_ROLLBACK)

    async def send(self, message: Message) -> SendResult:
        """Store one message, which no consumer gets yet.

        Raises InvalidMessage, RouteNotFound, or the error of the last attempt.
        """
        self._sender.instance.check_open("producer.transaction")
        whole = encoded(message)
        if whole.topic != self._topic:
            raise InvalidMessage(
                f"a message for {whole.topic} in a transaction for {self._topic}: "
                "send it in a transaction of its own"
            )
        sent = await self._sender.send_half(whole, self._group)
        self._sent.append(sent)
        return sent

    async def _end(self, sent: SendResult, decision: int) -> None:
        """Tell the broker the decision on one message. Raises HeadraceError."""
        instance = self._sender.instance
        store_host, physical_offset = decode_offset_message_id(sent.offset_message_ids[0])
        header = EndTransactionHeader(
            topic=self._topic,
            producer_group=self._group,
            tran_state_table_offset=sent.queue_offset,
            commit_log_offset=physical_offset,
            commit_or_rollback=decision,
            from_transaction_check=False,
            msg_id=sent.message_id,
            transaction_id=sent.message_id,
        )
        address = await instance.stored_at(sent.queue, store_host)
        response = await instance.request(address, RequestCode.END_TRANSACTION, header)
        response.expect()
        if instance.traces:
            instance.traces.transaction_ended(header, address)


class Checks:
    """Answers brokers that ask how a transaction ended."""

    tasks: TaskGroup
    traces: MessageTraces | None = None

    def __init__(self, group: str, on_check: OnCheck) -> None:
        self._group = group
        self._on_check = on_check

    def asked(self, connection: AsyncConnection, request: RequestReceived) -> None:
        """Have a check answered. Raises ValueError for a malformed one."""
        header = request.command.header(CheckTransactionStateHeader)
        record = decode_record(request.body)
        message = ReceivedMessage.from_stored(record, header.bname or "")
        self.tasks.start_soon(self._answer, connection, header, message)

    async def _answer(
        self,
        connection: AsyncConnection,
        header: CheckTransactionStateHeader,
        message: ReceivedMessage,
    ) -> None:
        try:
            is_committed: object = await self._on_check(message)
        except Exception:  # noqa: BLE001 - of the user's function
            _log.exception("on_check failed, the transaction of %r stays undecided", message)
            return
        if is_committed is None:
            return
        if not isinstance(is_committed, bool):
            _log.error(
                "on_check returned %s for %r, which stays undecided: it must return True, False or "
                "None",
                shown(is_committed),
                message,
            )
            return
        end = EndTransactionHeader(
            topic=header.topic,
            producer_group=self._group,
            tran_state_table_offset=header.tran_state_table_offset,
            commit_log_offset=header.commit_log_offset,
            commit_or_rollback=TRANSACTION_COMMIT if is_committed else TRANSACTION_ROLLBACK,
            from_transaction_check=True,
            msg_id=header.msg_id or "",
            transaction_id=header.transaction_id,
        )
        if self.traces:
            self.traces.transaction_ended(end, connection.address)
        try:
            connection.oneway(RequestCode.END_TRANSACTION, end)
        except HeadraceError as error:
            _log.warning("check of %r not answered, the broker repeats it: %s", message, error)
