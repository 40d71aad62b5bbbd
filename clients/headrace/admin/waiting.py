"""An operator's view of messages that wait: timers, and transactions that nobody has decided."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace.admin.key_query import ID_PAGE, newest
from headrace.admin.requests import BrokerProblem, BrokerRequests
from headrace.errors import BrokerError, HeadraceError, RouteNotFound
from headrace.recall import recall
from headrace.received import ReceivedMessage
from headrace.tasks import gather_or_raise
from headrace_protocol.admin_headers import QueryConsumeQueueHeader, ResumeCheckHalfMessageHeader
from headrace_protocol.bodies import QueryConsumeQueueResponseBody as Units
from headrace_protocol.bodies import TimerMetrics, WaitingList
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    ListTimersHeader,
    ListTransactionsHeader,
    QueryMessageHeader,
    ViewMessageHeader,
)
from headrace_protocol.message import UNIQ_KEY, decode_record, property_number
from headrace_protocol.recall_handle import RecallHandle
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, TIMER_TOPIC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_protocol.message import StoredMessage

_COUNT = 32
_PAGE: Final = 32
_TIMESTAMP_MAX: Final = 2**63 - 1


class CannotList(HeadraceError):
    """A broker has no request that lists what waits in it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"Apache RocketMQ's brokers cannot list {what}; headrace's can")


class WaitingTimer(msgspec.Struct, frozen=True):
    """A message that waits for its time.

    due_ms: ms since 1970. message: the record that waits; its queue is the broker's own.
    recall_handle: what recalls it; None if it has no id.
    """

    topic: str
    due_ms: int
    recall_handle: str | None
    message: ReceivedMessage


class OpenTransaction(msgspec.Struct, frozen=True):
    """A half message that its producer has not decided.

    group: of its producer. checks: how often the broker has asked a producer of the group.
    is_discarded: whether the broker has given up asking. message: the record that waits; its queue
    is the broker's own.
    """

    topic: str
    group: str
    checks: int
    is_discarded: bool
    message: ReceivedMessage


class WaitingAdmin(BrokerRequests):
    """The methods of Admin for timers and transactions."""

    # -- timers ------------------------------------------------------------------------------------

    async def timers(
        self,
        topic: str | None = None,
        *,
        until_ms: int | None = None,
        max_count: int = _COUNT,
        problems: list[BrokerProblem] | None = None,
    ) -> tuple[list[WaitingTimer], int]:
        """The first timers that wait, and the number of all, of a topic or of all topics.

        until_ms: only timers that are due until then, in ms since 1970; all are counted.
        Raises CannotList for brokers of Apache RocketMQ.
        """
        header = ListTimersHeader(topic=topic, until_timestamp=until_ms, max_num=max_count)
        lists = await self._lists(RequestCode.LIST_TIMERS, header, "timers", problems)
        timers = [
            _timer(stored, broker, waiting.due_ms)
            for broker, _, records in lists
            for waiting, stored in records
        ]
        timers.sort(key=lambda timer: (timer.due_ms, timer.message.queue_offset))
        return timers[:max_count], sum(count for _, count, _ in lists)

    async def timer_counts(self, *, problems: list[BrokerProblem] | None = None) -> dict[str, int]:
        """The number of waiting timers by topic."""
        ask = self._asking(RequestCode.GET_TIMER_METRICS, TimerMetrics)
        counts: dict[str, int] = {}
        for metrics in (await self._gather(await self._masters(), ask, problems)).values():
            for topic, timing in metrics.timing_count.items():
                counts[topic] = counts.get(topic, 0) + timing.count
        return counts

    async def cancel_timer(self, handle: RecallHandle) -> None:
        """Recall a timer. Raises RecallRejected if it does not wait any more."""
        (address,) = (await self._masters(handle.broker_name)).values()
        await recall(self._instance, address, handle.topic, handle.encode())

    # -- transactions ------------------------------------------------------------------------------

    async def transactions(
        self,
        group: str | None = None,
        *,
        max_count: int = _COUNT,
        problems: list[BrokerProblem] | None = None,
    ) -> tuple[list[OpenTransaction], int]:
        """The oldest transactions without a decision, of a group or all, and their whole number.

        A half message is listed some seconds after it was sent.
        Raises CannotList for brokers of Apache RocketMQ.
        """
        header = ListTransactionsHeader(producer_group=group, max_num=max_count)
        code = RequestCode.LIST_TRANSACTIONS
        lists = await self._lists(code, header, "transactions", problems)
        halves = [
            _half(stored, broker, is_discarded=False)
            for broker, _, records in lists
            for _, stored in records
        ]
        halves.sort(key=lambda half: half.message.born_timestamp_ms)
        return halves[:max_count], sum(count for _, count, _ in lists)

    async def discarded_transactions(
        self,
        group: str | None = None,
        *,
        max_count: int | None = None,
        problems: list[BrokerProblem] | None = None,
    ) -> list[OpenTransaction]:
        """The transactions that were discarded and not resumed, of a group or all, oldest first.

        max_count: most of each broker, those discarded last; None for all.
        """

        async def ask(address: str) -> list[StoredMessage]:
            return await self._discarded(address, group, max_count or sys.maxsize)

        try:
            masters = await self._topic_masters(CHECK_MAX_TIME_TOPIC)
        except RouteNotFound:
            return []
        found = await self._gather(masters, ask, problems)
        return [
            _half(stored, broker, is_discarded=True)
            for broker, records in found.items()
            for stored in records
        ]

    async def _discarded(
        self, address: str, group: str | None, max_count: int
    ) -> list[StoredMessage]:
        """The last ``max_count`` of a broker. Goes back page by page."""
        found: list[StoredMessage] = []
        first, end = await self._bounds(address)
        while end > first and len(found) < max_count:
            begin = max(first, end - _PAGE)
            units = await self._units(address, begin, end - begin)
            records = await self._view(address, [unit.physic_offset for unit in units.queue_data])
            wanted = [
                stored
                for stored in records
                if stored and group in {None, stored.properties.get("PGROUP", "")}
            ]
            resumed = await gather_or_raise(
                lambda stored: self._is_resumed(address, stored), wanted
            )
            there = [stored for stored, gone in zip(wanted, resumed, strict=True) if not gone]
            found = [*there, *found]
            end = begin
        return found[-max_count:]

    async def _bounds(self, address: str) -> tuple[int, int]:
        """Offsets of the discarded transactions; none if there never was one."""
        try:
            bounds = await self._units(address, 0, 0)
        except BrokerError as error:
            if error.code != ResponseCode.SYSTEM_ERROR:
                raise
            return 0, 0
        return bounds.min_queue_index, bounds.max_queue_index

    async def _units(self, address: str, index: int, count: int) -> Units:
        header = QueryConsumeQueueHeader(
            topic=CHECK_MAX_TIME_TOPIC, queue_id=0, index=index, count=count
        )
        return (await self._ask(address, RequestCode.QUERY_CONSUME_QUEUE, header)).decode(Units)

    async def _is_resumed(self, address: str, discarded: StoredMessage) -> bool:
        """True if a half message was written that names a discarded one."""
        header = QueryMessageHeader(
            topic=HALF_TOPIC,
            key=discarded.properties.get(UNIQ_KEY, ""),
            max_num=ID_PAGE,
            begin_timestamp=0,
            end_timestamp=_TIMESTAMP_MAX,
            unique_key_query=True,
        )
        offset = discarded.physical_offset
        found = await newest(
            partial(self._query_page, address),
            header,
            lambda half: half.prepared_transaction_offset == offset,
            max_count=1,
        )
        return bool(found.messages)

    async def resume_transaction(self, discarded: ReceivedMessage) -> None:
        """Have a discarded transaction checked again. Raises BrokerError if it was resumed."""
        (address,) = (await self._masters(discarded.queue.broker_name)).values()
        header = ResumeCheckHalfMessageHeader(
            topic=CHECK_MAX_TIME_TOPIC, msg_id=discarded.offset_message_id
        )
        await self._ask(address, RequestCode.RESUME_CHECK_HALF_MESSAGE, header)

    # -- records -----------------------------------------------------------------------------------

    async def _lists(
        self,
        code: RequestCode,
        header: msgspec.Struct,
        what: str,
        problems: list[BrokerProblem] | None,
    ) -> list[tuple[str, int, list[tuple[Any, StoredMessage]]]]:
        """By broker: its name, the number of all, and the first ones with their records."""

        async def ask(address: str) -> tuple[int, list[tuple[Any, StoredMessage]]]:
            if not await self._is_headrace(address):
                raise CannotList(what)
            waiting = (await self._ask(address, code, header)).decode(WaitingList)
            offsets = [each.physical_offset for each in waiting.messages]
            records = await self._view(address, offsets)
            pairs = zip(waiting.messages, records, strict=True)
            return waiting.count, [(each, stored) for each, stored in pairs if stored]

        found = await self._gather(await self._masters(), ask, problems)
        return [(broker, count, records) for broker, (count, records) in found.items()]

    async def _view(
        self, address: str, physical_offsets: Iterable[int]
    ) -> list[StoredMessage | None]:
        """The records at these offsets; None for those that are gone."""
        return await gather_or_raise(partial(self._record_at, address), list(physical_offsets))

    async def _record_at(self, address: str, physical_offset: int) -> StoredMessage | None:
        header = ViewMessageHeader(offset=physical_offset)
        try:
            response = await self._ask(address, RequestCode.VIEW_MESSAGE_BY_ID, header)
        except BrokerError:
            return None
        return response.read(decode_record)


def handle_of(waiting: ReceivedMessage) -> RecallHandle | None:
    """The handle of a record that waits in the queue of timers; None for any other."""
    properties = waiting.stored.properties
    topic, uniq_key = properties.get("REAL_TOPIC", ""), properties.get(UNIQ_KEY, "")
    out_ms = property_number(waiting.stored.raw_properties, b"TIMER_OUT_MS", -1)
    if waiting.queue.topic != TIMER_TOPIC or not (topic and uniq_key and out_ms >= 0):
        return None
    return RecallHandle(topic, waiting.queue.broker_name, out_ms + 1, uniq_key)


def _timer(stored: StoredMessage, broker: str, due_ms: int) -> WaitingTimer:
    message = ReceivedMessage.from_stored(stored, broker)
    handle = handle_of(message)
    topic = stored.properties.get("REAL_TOPIC", "")
    return WaitingTimer(topic, due_ms, handle.encode() if handle else None, message)


def _half(stored: StoredMessage, broker: str, *, is_discarded: bool) -> OpenTransaction:
    properties = stored.properties
    return OpenTransaction(
        properties.get("REAL_TOPIC", ""),
        properties.get("PGROUP", ""),
        property_number(stored.raw_properties, b"TRANSACTION_CHECK_TIMES", 0),
        is_discarded,
        ReceivedMessage.from_stored(stored, broker),
    )
