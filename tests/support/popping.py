"""A SimpleConsumer with scripted brokers, and their answers to POPs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from headrace import Consumer, MessageQueue, PoppedMessage, SimpleConsumer
from headrace_protocol.bodies import MessageQueueAssignment, QueryAssignmentResponseBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import encode_properties, encode_record
from headrace_protocol.pop.handle import TopicKind
from headrace_protocol.pop.headers import (
    ChangeInvisibleTimeResponseHeader,
    PopMessageResponseHeader,
)
from headrace_protocol.pop.infos import PoppedQueue, encode_offsets
from headrace_protocol.serving import Reply
from tests.support.scripted import (
    Scripted,
    route,
    scripted_cluster,
    scripted_in_thread,
)

POP = RequestCode.POP_MESSAGE
ACK = RequestCode.ACK_MESSAGE
ACKS = RequestCode.BATCH_ACK_MESSAGE
CHANGE = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
POP_TIME = 1_795_235_851_336


def record(offset: int, queue_id: int = 0, topic: str = "T", **properties: str) -> bytes:
    return encode_record(
        topic=topic,
        queue_id=queue_id,
        body=b"%d" % offset,
        queue_offset=offset,
        properties=encode_properties(properties),
        physical_offset=1000 + offset,
    )


def popped(*offsets: int, queue_id: int = 0, start: int | None = None, **properties: str) -> Reply:
    """The answer to a POP: messages of one queue."""
    queue = PoppedQueue(TopicKind.NORMAL, queue_id, offsets[0] if start is None else start, offsets)
    records = b"".join(record(offset, queue_id, **properties) for offset in offsets)
    return answer([queue], records)


def answer(queues: list[PoppedQueue], records: bytes) -> Reply:
    start_info, offset_info = encode_offsets(queues)
    header = PopMessageResponseHeader(
        pop_time=POP_TIME,
        invisible_time=30_000,
        revive_qid=3,
        rest_num=0,
        start_offset_info=start_info,
        msg_offset_info=offset_info,
    )
    return Reply(header, (records,))


EMPTY = Reply(code=ResponseCode.POLLING_TIMEOUT)
CHANGED = Reply(
    ChangeInvisibleTimeResponseHeader(pop_time=POP_TIME + 7, invisible_time=9000, revive_qid=5)
)


def assigned(*queues: MessageQueue, mode: Any = "POP") -> Reply:
    """The answer to QUERY_ASSIGNMENT."""
    shares = [MessageQueueAssignment(message_queue=queue, mode=mode) for queue in queues]
    return Reply(body=(QueryAssignmentResponseBody(message_queue_assignments=shares).encode(),))


@contextlib.asynccontextmanager
async def consuming(
    brokers: int = 1, topics: Any = "T", **options: Any
) -> AsyncIterator[tuple[SimpleConsumer, list[Scripted], Scripted]]:
    async with (
        _popped_cluster(brokers) as (nameserver, masters, at),
        SimpleConsumer("g", topics, **at, **options) as consumer,
    ):
        yield consumer, masters, nameserver


@contextlib.asynccontextmanager
async def looping(
    brokers: int = 1, **options: Any
) -> AsyncIterator[tuple[Consumer, list[Scripted], Scripted]]:
    """A Consumer that pops."""
    async with (
        _popped_cluster(brokers) as (nameserver, masters, at),
        Consumer("g", "T", mode="pop", **at, **options) as consumer,
    ):
        yield consumer, masters, nameserver


@contextlib.asynccontextmanager
async def _popped_cluster(
    brokers: int,
) -> AsyncIterator[tuple[Scripted, list[Scripted], dict[str, Any]]]:
    async with scripted_cluster(brokers) as (nameserver, masters, network):
        for master in masters:
            master.answer(POP, EMPTY)
            master.answer(CHANGE, CHANGED)
        yield (
            nameserver,
            masters,
            {"nameserver": nameserver.address, "connect": network.connect},
        )


def bodies(messages: Iterable[PoppedMessage]) -> list[bytes]:
    return [message.body for message in messages]


@contextlib.contextmanager
def in_thread(*answers: Reply) -> Iterator[tuple[str, Scripted]]:
    """A scripted broker on loopback sockets, and its nameserver's address."""
    with scripted_in_thread(2) as (nameserver, broker):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(broker))
        broker.answer(POP, *answers)
        broker.answer(CHANGE, CHANGED)
        yield nameserver.address, broker
