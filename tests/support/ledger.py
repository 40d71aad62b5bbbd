"""A broker with transactions, and what its producers do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import trio
import trio.testing

from headrace_protocol.admin_headers import ResumeCheckHalfMessageHeader
from headrace_protocol.bodies import HeartbeatData, ProducerData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import EndTransactionHeader
from headrace_protocol.message import (
    TRANSACTION_PREPARED,
    StoredMessage,
    decode_record,
    encode_properties,
)
from headrace_protocol.message_ids import decode_offset_message_id
from headrace_protocol.system_topics import OP_HALF_TOPIC
from tests.support.broker import Answer
from tests.support.channel import MemoryChannel
from tests.support.waiting_broker import WaitingBroker

GROUP = "g_tx"
INTERVAL_S = 30


class Half(NamedTuple):
    """A producer's knowledge of its half."""

    queue_offset: int
    physical_offset: int
    transaction_id: str


class Check(NamedTuple):
    """A check as its producer gets it."""

    half: Half
    message: StoredMessage
    fields: dict[str, str]


class Ledger(WaitingBroker):
    """A broker with transactions, and what its producers do."""

    def __init__(
        self,
        folder: Path,
        ms: int | None = None,
        settings: Mapping[str, Any] | None = None,
        **store: Any,
    ) -> None:
        super().__init__(folder, ms, settings, **{"ring_rows": 1024, **store})
        self.transactions, schedule = self.broker.transactions, self.broker.schedule
        self.loads = [schedule.load, self.transactions.load]
        transactions = self.transactions
        self.runs = [schedule.run, transactions.run_looking, transactions.run_writing]
        self.sent = 0

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
        text = encode_properties(properties).decode()
        known = {"a": GROUP, "e": queue_id, "f": TRANSACTION_PREPARED, "i": text}
        return self.produce(body, **{**known, **fields})

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

    async def resume(self, message_id: str) -> Answer:
        """An administrator gives a discarded half a second chance."""
        channel = MemoryChannel()
        header = ResumeCheckHalfMessageHeader(msg_id=message_id)
        self.broker.send(RequestCode.RESUME_CHECK_HALF_MESSAGE, header, channel=channel)
        await trio.testing.wait_all_tasks_blocked()
        (reply,) = channel.replies()
        return Answer(*reply)

    def join(self, group: str = GROUP, client_id: str = "p") -> MemoryChannel:
        """A producer that is connected."""
        channel = MemoryChannel()
        beat = HeartbeatData(
            client_id=client_id, producer_data_set=[ProducerData(group_name=group)]
        )
        self.broker.ask(RequestCode.HEART_BEAT, body=beat.encode(), channel=channel)
        return channel

    # -- what is stored ------------------------------------------------------------------------

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
