"""A broker with transactions, and what its producers do."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from headrace_protocol.bodies import HeartbeatData, ProducerData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import EndTransactionHeader
from headrace_protocol.message import (
    TRANSACTION_PREPARED,
    decode_offset_message_id,
    decode_record,
    encode_properties,
)
from headrace_protocol.system_topics import OP_HALF_TOPIC
from tests.support.broker import Answer, BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.stores import read_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from headrace_protocol.message import StoredMessage

GROUP = "g_tx"
INTERVAL_S = 30
_SIZES = {"commit_log_file_bytes": 1 << 16, "consume_queue_file_bytes": 4000, "ring_rows": 1024}


class Half(NamedTuple):
    """What a producer knows of its half."""

    queue_offset: int
    physical_offset: int
    transaction_id: str


class Check(NamedTuple):
    """A check as its producer gets it."""

    half: Half
    message: StoredMessage
    fields: dict[str, str]


class Ledger:
    """A broker with transactions, and what its producers do."""

    def __init__(self, folder: Path, ms: int | None = None, **store: Any) -> None:
        self.broker = BrokerUnderTest(folder, broker_config(folder), **{**_SIZES, **store})
        self.broker.clock.ms = ms or self.broker.clock.ms
        self.transactions = self.broker.parts.waiting.transactions
        self.sent = 0

    @property
    def clock(self) -> Any:
        return self.broker.clock

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await trio.to_thread.run_sync(self.broker.parts.waiting.schedule.load)
        await trio.to_thread.run_sync(self.transactions.load)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.broker.store.run)
            nursery.start_soon(self.broker.parts.waiting.schedule.run)
            nursery.start_soon(self.transactions.run_naming)
            yield
            nursery.cancel_scope.cancel()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Let the schedule look at the clock, which the test has moved, until something is so."""
        with trio.fail_after(60):
            while not is_so():  # noqa: ASYNC110 - the mock clock jumps
                await trio.sleep(0.01)

    async def check_later(self, seconds: int = INTERVAL_S) -> None:
        """One look at all halves, when time has passed."""
        self.clock.ms += seconds * 1000
        await self.transactions.check()

    # -- producers -----------------------------------------------------------------------------

    def answer(self, body: bytes, queue_id: int = 1, **fields: Any) -> Answer:
        """The answer to a transactional message."""
        self.sent += 1
        properties = {"TRAN_MSG": "true", "PGROUP": GROUP, "UNIQ_KEY": f"A{self.sent}"}
        properties |= fields.pop("properties", {})
        ext = {"a": GROUP, "b": "T", "c": "TBW102", "d": 4, "e": queue_id, "g": 17, "h": 5}
        frame = encode_frame(
            SerializeType.JSON,
            RequestCode.SEND_MESSAGE_V2,
            7,
            fields={
                **ext,
                "f": TRANSACTION_PREPARED,
                "i": encode_properties(properties).decode(),
                **fields,
            },
            body_bytes=len(body),
        )
        channel = MemoryChannel()
        channel.is_greeted = True
        self.broker.take(frame + body, channel)
        ((reply, reply_body),) = channel.replies()
        return Answer(reply, reply_body)

    def send(self, body: bytes, **properties: str) -> Half:
        """A message that is stored as half."""
        reply = self.answer(body, properties=properties)
        assert reply.code == ResponseCode.SUCCESS, reply.remark
        fields = reply.command.ext()
        _, physical_offset = decode_offset_message_id(fields["msgId"])
        return Half(int(fields["queueOffset"]), physical_offset, fields["transactionId"])

    def end(self, half: Half, decision: int, **fields: Any) -> Answer:
        """A producer tells its decision."""
        known = {
            "producer_group": GROUP,
            "tran_state_table_offset": half.queue_offset,
            "commit_log_offset": half.physical_offset,
            "commit_or_rollback": decision,
            "msg_id": half.transaction_id,
        }
        header = EndTransactionHeader(**{**known, **fields})
        return self.broker.ask(RequestCode.END_TRANSACTION, header)

    def join(self, group: str = GROUP, client_id: str = "p") -> MemoryChannel:
        """A producer that is connected."""
        channel = MemoryChannel()
        beat = HeartbeatData(
            client_id=client_id, producer_data_set=[ProducerData(group_name=group)]
        )
        self.broker.ask(RequestCode.HEART_BEAT, body=beat.encode(), channel=channel)
        return channel

    # -- what is stored ------------------------------------------------------------------------

    def stored(self, topic: str = "T", queue_id: int = 1) -> list[StoredMessage]:
        return read_all(self.broker.store, self.broker.store.queue(topic, queue_id))

    def bodies(self, topic: str = "T", queue_id: int = 1) -> list[bytes]:
        return [message.body for message in self.stored(topic, queue_id)]

    def named(self) -> list[int]:
        """The halves that op records call decided."""
        ops = [op for op in self.stored(OP_HALF_TOPIC, 0) if "COPIED" not in op.properties]
        names = b"".join(op.body for op in ops).split(b",")
        return [int(name) for name in names if name]


def checks(channel: MemoryChannel) -> list[Check]:
    """The checks that a producer was sent since the last time."""
    found = []
    for command, body in channel.replies():
        assert command.code == RequestCode.CHECK_TRANSACTION_STATE
        assert command.is_oneway
        fields = command.ext()
        half = Half(
            int(fields["tranStateTableOffset"]),
            int(fields["commitLogOffset"]),
            fields["transactionId"],
        )
        found.append(Check(half, decode_record(body), fields))
    return found
