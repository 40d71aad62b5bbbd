"""Pulls the messages of a queue from another broker, as Apache's MessageFetcher does.

It joins a group of its own, pulls from an offset on without being held, and leaves the group.
Source: Apache RocketMQ 5.5, MessageFetcher; docs/compaction.md "Rebuild".
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import trio

from headrace_broker.peers.callers import REBUILDS
from headrace_broker.peers.peers import Ask
from headrace_protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.headers import (
    PullMessageHeader,
    PullMessageResponseHeader,
    UnregisterClientHeader,
)

if TYPE_CHECKING:
    import msgspec

    from headrace_broker.peers.peers import Peers
    from headrace_protocol.columns import Buffer
    from headrace_protocol.drivers.response import Response

_HEARTBEAT_S: Final = 30.0
_SUBSCRIPTION_FLAG: Final = 0x4
_LITE_FLAG: Final = 0x10
# Brokers return fewer by limits of their own.
_COUNT_MAX: Final = 1024
_BYTES_MAX: Final = 4 << 20
_CODES: Final = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
)


class Pulled(NamedTuple):
    """The answer to a pull. position: of the next pull, None at the end of the queue.

    max_offset: one past the last queue offset of the master.
    """

    records: RecordColumns | None
    position: int | None
    max_offset: int


class Master:
    """One queue of a broker; ``leave`` ends the membership."""

    def __init__(self, peers: Peers, address: str, topic: str, queue_id: int) -> None:
        """address: of a held connection; the membership ends with it."""
        self._peers = peers
        self._address = address
        self._topic = topic
        self._queue_id = queue_id
        self._group = f"{topic}-{queue_id}-pull-group"
        self._client_id = f"rebuild@{os.getpid()}"
        self._beat_due_s = 0.0

    async def pull(self, offset: int) -> Pulled:
        """Messages from an offset on, checked. Raises HeadraceError."""
        await self._beat()
        header = PullMessageHeader(
            topic=self._topic,
            queue_id=self._queue_id,
            consumer_group=self._group,
            queue_offset=offset,
            max_msg_nums=_COUNT_MAX,
            sys_flag=_SUBSCRIPTION_FLAG | _LITE_FLAG,
            commit_offset=0,
            suspend_timeout_millis=0,
            sub_version=0,
            subscription="*",
            expression_type="TAG",
            max_msg_bytes=_BYTES_MAX,
        )
        code = RequestCode.LITE_PULL_MESSAGE
        answer = await self._ask(code, header)
        outcome = answer.expect(*_CODES).command.code
        head = answer.header(PullMessageResponseHeader)
        position: int | None = head.next_begin_offset
        records = None
        if outcome == ResponseCode.SUCCESS:
            records = answer.read(self._records)
            offsets = [offset - 1, *records.queue_offset.tolist(), head.next_begin_offset]
            if len(offsets) == 2 or bool((np.diff(offsets) <= 0).any()):
                raise answer.malformed(f"records with the queue offsets {offsets[1:-1]}")
        elif outcome == ResponseCode.PULL_NOT_FOUND or offset >= head.max_offset:
            position = None
        elif head.next_begin_offset <= offset:
            raise answer.malformed(f"nextBeginOffset={head.next_begin_offset} after {offset}")
        return Pulled(records, position, head.max_offset)

    def _records(self, body: Buffer) -> RecordColumns:
        """Raises ValueError for records of another queue."""
        records = RecordColumns.from_records(body)
        if not records.has_topic(self._topic) or (records.queue_id != self._queue_id).any():
            raise ValueError(f"not all messages are of {self._topic}/{self._queue_id}")
        records.check_bodies()
        return records

    async def _beat(self) -> None:
        if trio.current_time() < self._beat_due_s:
            return
        self._beat_due_s = trio.current_time() + _HEARTBEAT_S
        subscription = SubscriptionData(topic=self._topic, sub_string="*")
        member = ConsumerData(
            group_name=self._group,
            consume_type="CONSUME_ACTIVELY",
            consume_from_where="CONSUME_FROM_FIRST_OFFSET",
            subscription_data_set=[subscription],
        )
        data = HeartbeatData(client_id=self._client_id, consumer_data_set=[member])
        code, body = RequestCode.HEART_BEAT, data.encode()
        (await self._ask(code, None, body)).expect()

    async def leave(self) -> None:
        """Leave the group. Raises HeadraceError."""
        header = UnregisterClientHeader(client_id=self._client_id, consumer_group=self._group)
        code = RequestCode.UNREGISTER_CLIENT
        await self._ask(code, header)

    async def _ask(
        self, code: RequestCode, header: msgspec.Struct | None, body: Buffer = b""
    ) -> Response:
        return await self._peers.ask(REBUILDS, Ask(self._address, code, header=header, body=body))
