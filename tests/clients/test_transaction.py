"""Transactions of the producer, against an embedded broker."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import pytest

import headrace
from headrace import Message, Producer, ReceivedMessage
from headrace.embedded import Embedded
from headrace.errors import ClientClosed, InvalidMessage
from headrace.producer.transaction import Checks
from headrace_protocol.codes import RequestCode
from headrace_protocol.connection import RequestReceived
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.message import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, encode_record


async def read(mq: Embedded, count: int) -> list[bytes]:
    """The first messages of topic t."""
    bodies: list[bytes] = []
    async with mq.consumer("g", "t") as consumer:
        async for message in consumer:
            bodies.append(message.body)
            if len(bodies) == count:
                break
    return sorted(bodies)


async def test_messages_are_committed_at_the_end_of_the_block() -> None:
    async with headrace.embedded() as mq, mq.producer() as producer:
        async with producer.transaction("t") as transaction:
            await transaction.send(Message("t", b"first", key="k", tag="x"))
            await transaction.send(Message("t", b"second" * 2000))
        with suppress(InvalidMessage):
            async with producer.transaction("t") as transaction:
                await transaction.send(Message("t", b"dropped"))
                await transaction.send(Message("t", b""))
                raise AssertionError("an empty body")
        await producer.send(Message("t", b"plain"))
        assert await read(mq, 3) == [b"first", b"plain", b"second" * 2000]


async def test_a_transaction_is_about_one_topic() -> None:
    async with headrace.embedded() as mq, mq.producer() as producer:
        transaction = producer.transaction("t")
        with pytest.raises(InvalidMessage, match="transaction for t"):
            await transaction.send(Message("u", b"other"))
    with pytest.raises(ClientClosed):
        Producer(nameserver="127.0.0.1:1").transaction("t")


class _Broker:
    """Its end of a connection: keeps what the producer says one-way."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Any]] = []

    def oneway(self, code: int, header: Any) -> None:
        self.told.append((code, header))


def _check() -> RequestReceived:
    record = encode_record(topic="t", queue_id=1, body=b"paid", queue_offset=7)
    fields = {"tranStateTableOffset": "7", "commitLogOffset": "900", "msgId": "A", "bname": "b"}
    code = RequestCode.CHECK_TRANSACTION_STATE
    frame = encode_frame(SerializeType.JSON, code, 1, flag=2, fields=fields, body_bytes=len(record))
    ((serialize_type, header, body),) = FrameReader().feed(frame + record)
    command = decode_header(serialize_type, header)
    return RequestReceived(serialize_type, command, memoryview(body))


@pytest.mark.parametrize(
    ("answer", "decisions"),
    [(True, [TRANSACTION_COMMIT]), (False, [TRANSACTION_ROLLBACK]), (None, []), ("fails", [])],
)
async def test_a_check_is_answered(answer: Any, decisions: list[int]) -> None:
    asked = []

    async def on_check(message: ReceivedMessage) -> bool | None:
        asked.append((message.queue.topic, message.body))
        if answer == "fails":
            raise KeyError
        return None if answer is None else bool(answer)

    broker: Any = _Broker()
    checks = Checks("p", on_check)
    async with anyio.create_task_group() as checks.tasks:
        checks.asked(broker, _check())
    assert asked == [("t", b"paid")]
    assert [header.commit_or_rollback for _, header in broker.told] == decisions
    for code, header in broker.told:
        assert (code, header.producer_group) == (RequestCode.END_TRANSACTION, "p")
        assert (header.tran_state_table_offset, header.commit_log_offset) == (7, 900)
        assert header.from_transaction_check
