"""Blocks of records through a real socket, larger than what the daemon receives at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from headrace.embedded import run_daemons
from headrace_daemon.network import TcpNetwork
from headrace_protocol.blocks import encode_records
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.drivers.response import Response
from headrace_protocol.headers import BulkPullResponseHeader, SendMessageResponseHeader
from headrace_protocol.message_ids import encode_host, encode_offset_message_id
from tests.support.wire import bulk_pull_header, bulk_send_header

HOST = encode_host("10.0.0.1", 4711)
TIMEOUT_MS = 10_000


def blocks() -> list[list[bytes]]:
    rng = random.Random(7)
    mixed = [
        [rng.randbytes(rng.choice([0, 100, 300])) for _ in range(count)]
        for count in (1, 5000, 3, 20_000, 400)
    ]
    return [*mixed, [rng.randbytes(1024) for _ in range(1000)]]


def send_all(connection: BlockingConnection, sent: list[list[bytes]]) -> list[Response]:
    answers: list[Response] = []
    for bodies in sent:
        block = encode_records("T", bodies, b"", born_timestamp=1, born_host=HOST)
        header = bulk_send_header(default_topic_queue_nums=1, count=len(bodies))
        connection.submit(RequestCode.BULK_SEND, header, block.body, answers.append)
    connection.drain(timeout_ms=TIMEOUT_MS)
    return answers


def pull_from(connection: BlockingConnection, queue_offset: int) -> Response:
    header = bulk_pull_header(queue_offset, max_msg_nums=7000)
    return connection.request(RequestCode.BULK_PULL, header, timeout_ms=TIMEOUT_MS)


def exchange(address: str) -> None:
    sent = blocks()
    with BlockingConnection.connect(address) as connection:
        answers = send_all(connection, sent)
        assert [answer.command.code for answer in answers] == [ResponseCode.SUCCESS] * len(sent)
        placed = [answer.header(SendMessageResponseHeader) for answer in answers]
        got: list[bytes] = []
        ids: dict[int, str] = {}
        while (answer := pull_from(connection, len(got))).command.code == ResponseCode.SUCCESS:
            header = answer.header(BulkPullResponseHeader)
            columns = RecordColumns.from_bulk(header, answer.body)
            columns.check_bodies()
            first = columns.message(0)
            ids[first.queue_offset] = first.offset_message_id
            got += columns.bodies()
        assert got == [body for bodies in sent for body in bodies]
    starts = [sum(map(len, sent[:number])) for number in range(len(sent))]
    assert [header.queue_offset for header in placed] == starts
    assert all(ids.get(each.queue_offset, each.msg_id) == each.msg_id for each in placed)
    assert placed[0].msg_id == encode_offset_message_id(encode_host(*split(address)), 0)


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.mark.slow
async def test_blocks_come_back_as_they_were_sent(tmp_path: Path) -> None:
    async with run_daemons(tmp_path, network=TcpNetwork()) as running:
        await trio.to_thread.run_sync(exchange, running.broker)
