"""Messages by key or by id, at the brokers that have their topic."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headrace.admin.chains import ChainAdmin
from headrace.admin.key_query import ID_PAGE, KEY_PAGE, Found, UnlistedMessages, newest
from headrace.admin.requests import BrokerProblem
from headrace.admin.statictopic import is_compacted
from headrace.errors import BrokerError, ConfigurationError, PartialAnswer
from headrace.missing import departed_part
from headrace.received import ReceivedMessage
from headrace_protocol.admin_headers import ConsumeDirectlyHeader
from headrace_protocol.bodies import DirectResult
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    QueryMessageHeader,
    QueryMessageResponseHeader,
    ViewMessageHeader,
)
from headrace_protocol.message import KEYS, UNIQ_KEY, StoredMessage, decode_record, decode_records
from headrace_protocol.message_ids import decode_offset_message_id, host_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.admin.requests import BrokerNode

_TIMESTAMP_MAX = 2**63 - 1
# A broker waits 10 s for a member.
_MEMBER_TIMEOUT_MS = 12_000


class QueuedMessage(msgspec.Struct, frozen=True):
    """A message that its broker has not delivered to its topic yet.

    until_ms: when it will, in ms since 1970; None if a transaction decides. message: as it waits,
    in a topic of the broker's.
    """

    topic: str
    until_ms: int | None
    message: ReceivedMessage


class QueryAdmin(ChainAdmin):
    """The methods of Admin that find messages."""

    async def query_by_key(
        self,
        topic: str,
        key: str,
        *,
        max_count: int = 32,
        begin_ms: int = 0,
        end_ms: int = _TIMESTAMP_MAX,
        problems: list[BrokerProblem] | None = None,
    ) -> list[ReceivedMessage]:
        """Messages with a key, oldest first.

        max_count: most messages per broker, the newest ones. begin_ms, end_ms: range of store
        times, in milliseconds since 1970.
        Raises UnlistedMessages if a broker of Apache RocketMQ has more messages of one millisecond
        than it returns at once. Raises ConfigurationError for a key with a space, unless the topic
        is compacted: brokers split the keys of other topics at spaces.
        """
        if " " in key and not await self._is_compacted(topic, problems):
            raise ConfigurationError(
                f"no message can be found by the key {key!r}: brokers split keys at spaces; query "
                f"one of the parts: {' or '.join(map(repr, key.split()))}"
            )
        header = QueryMessageHeader(
            topic=topic,
            key=key,
            max_num=min(max_count, KEY_PAGE),
            begin_timestamp=begin_ms,
            end_timestamp=end_ms,
            unique_key_query=False,
        )

        def matches(stored: StoredMessage) -> bool:
            return key in stored.keys or stored.properties.get(KEYS) == key

        return await self._query(header, matches, max_count, problems)

    async def queued(
        self,
        topic: str,
        key: str,
        *,
        by_id: bool = False,
        max_count: int = 32,
        begin_ms: int = 0,
        end_ms: int = _TIMESTAMP_MAX,
        problems: list[BrokerProblem] | None = None,
    ) -> list[QueuedMessage]:
        """Messages to a topic that wait for a time or a transaction's end, oldest first.

        key: one of theirs, or their producer's id with ``by_id``. max_count, begin_ms, end_ms: as
        of ``query_by_key``. Apache RocketMQ's brokers do not list such messages.
        """
        header = QueryMessageHeader(
            topic=topic,
            key=key,
            max_num=min(max_count, KEY_PAGE),
            begin_timestamp=begin_ms,
            end_timestamp=end_ms,
            unique_key_query=by_id,
            waiting=True,
        )

        async def ask(address: str) -> list[tuple[StoredMessage, int]]:
            due_ms: dict[str, int] = {}

            async def page(asked: QueryMessageHeader) -> list[StoredMessage]:
                waiting = await self._queued_page(address, asked)
                due_ms.update((stored.offset_message_id, due) for stored, due in waiting)
                return [stored for stored, _ in waiting]

            found = await newest(page, header, lambda _stored: True, max_count)
            return [(stored, due_ms[stored.offset_message_id]) for stored in found.messages]

        found = [
            QueuedMessage(topic, due_ms or None, ReceivedMessage.from_stored(stored, broker))
            for broker, waiting in (await self._ask_topic(topic, ask, problems)).items()
            for stored, due_ms in waiting
        ]
        return sorted(found, key=_when_stored)

    async def resend(
        self, message_id: str, group: str, client_id: str, topic: str | None = None
    ) -> DirectResult | None:
        """Have a member of a group process a message again; None if there is no such message.

        message_id, topic: as of ``message``. client_id: of the member. Its group's progress stays
        where it is. Raises BrokerError if there is no such member, or it does not answer in time.
        """
        message = await self.message(message_id, topic)
        master = await self._master_in(message.offset_message_id) if message else None
        if message is None or master is None:
            return None
        header = ConsumeDirectlyHeader(
            consumer_group=group,
            client_id=client_id,
            msg_id=message.offset_message_id,
            broker_name=master.broker_name,
            topic=message.queue.topic,
        )
        code = RequestCode.CONSUME_MESSAGE_DIRECTLY
        response = await self._instance.request(
            master.address, code, header, timeout_ms=_MEMBER_TIMEOUT_MS
        )
        return response.expect().decode(DirectResult)

    async def _queued_page(
        self, address: str, header: QueryMessageHeader
    ) -> list[tuple[StoredMessage, int]]:
        code = RequestCode.QUERY_MESSAGE
        response = await self._instance.request(address, code, header)
        if response.command.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        times = response.expect().header(QueryMessageResponseHeader).waits_until
        if times is None:
            return []  # Apache's brokers have answered with messages that are delivered

        def pairs(body: memoryview) -> list[tuple[StoredMessage, int]]:
            return list(zip(decode_records(body), map(int, times.split(",")), strict=True))

        return response.read(pairs)

    async def _is_compacted(self, topic: str, problems: list[BrokerProblem] | None) -> bool:
        configs = await self.topic(topic, problems=problems)
        return any(is_compacted(config.attributes) for config in configs.values())

    async def message(
        self,
        message_id: str,
        topic: str | None = None,
        *,
        problems: list[BrokerProblem] | None = None,
    ) -> ReceivedMessage | None:
        """One message by the broker's id or, with ``topic``, the producer's; None if not found."""
        master = await self._master_in(message_id)
        if master:
            _, physical_offset = decode_offset_message_id(message_id)
            view = ViewMessageHeader(offset=physical_offset, topic=topic)
            try:
                response = await self._ask(master.address, RequestCode.VIEW_MESSAGE_BY_ID, view)
            except BrokerError:
                return None
            stored = response.read(decode_record)
            message = ReceivedMessage.from_stored(stored, master.broker_name)
            return (await self._logic_messages([message], problems=problems))[0]
        await self._check_departed(message_id)
        if topic is None:
            raise ConfigurationError(
                f"{message_id} is not an offset message id of any broker of this nameserver; to "
                "look up a producer's message id, name its topic"
            )
        away: list[BrokerProblem] = []
        found = await self.query_by_id(message_id, topic, problems=away)
        if problems is not None:
            problems += away
        elif away and not found:
            raise away[0].error
        return found[0] if found else None

    async def query_by_id(
        self,
        message_id: str,
        topic: str,
        *,
        begin_ms: int = 0,
        problems: list[BrokerProblem] | None = None,
    ) -> list[ReceivedMessage]:
        """Messages with a producer's id, oldest first: a retry can store a message twice.

        begin_ms: earliest store time, in milliseconds since 1970.
        """
        header = QueryMessageHeader(
            topic=topic,
            key=message_id,
            max_num=ID_PAGE,
            begin_timestamp=begin_ms,
            end_timestamp=_TIMESTAMP_MAX,
            unique_key_query=True,
        )
        return await self._query(
            header,
            lambda stored: stored.properties.get(UNIQ_KEY) == message_id,
            sys.maxsize,
            problems,
        )

    async def _query(
        self,
        header: QueryMessageHeader,
        matches: Callable[[StoredMessage], bool],
        max_count: int,
        problems: list[BrokerProblem] | None,
    ) -> list[ReceivedMessage]:
        async def ask(address: str) -> Found:
            # The index contains only hashes of keys.
            return await newest(partial(self._query_page, address), header, matches, max_count)

        masters = await self._topic_masters(header.topic)
        by_broker = await self._ask_topic(header.topic, ask, problems)
        stored_ones = [
            ReceivedMessage.from_stored(stored, broker_name)
            for broker_name, found in by_broker.items()
            for stored in found.messages
        ]
        for broker_name, (_, stopped_ms) in by_broker.items():
            if stopped_ms is not None:
                error = UnlistedMessages(masters[broker_name], header.key, stopped_ms)
                if problems is None:
                    raise error
                problems.append(BrokerProblem(broker_name, masters[broker_name], error))
        found = await self._logic_messages(stored_ones, problems=problems)
        return sorted(found, key=lambda message: (message.store_timestamp_ms, message.queue_offset))

    async def _check_departed(self, message_id: str) -> None:
        """Raise PartialAnswer if the broker of an offset message id has left."""
        address = _address_in(message_id)
        for broker in await self.departed_brokers() if address else ():
            if broker.broker_addr == address:
                part = departed_part(broker)
                raise PartialAnswer(f"message {message_id}", [part])

    async def _master_in(self, message_id: str) -> BrokerNode | None:
        """The master whose address an offset message id contains; None for other ids."""
        address = _address_in(message_id)
        return next((node for node in await self.cluster() if node.address == address), None)


def _when_stored(queued: QueuedMessage) -> tuple[int, int]:
    stored = queued.message.stored
    return stored.store_timestamp, stored.physical_offset


def _address_in(message_id: str) -> str | None:
    """The address of a broker that an offset message id contains; None for other ids."""
    try:
        return host_text(decode_offset_message_id(message_id)[0])
    except ValueError:
        return None
