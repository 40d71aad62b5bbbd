"""Answers that no client got: their messages come again at once, as if nobody had taken them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from headrace_broker.pop.pop_queue import Origin
from headrace_daemon.network import Network
from headrace_protocol.codes import RequestCode
from headrace_protocol.command import FLAG_ONEWAY, header_fields
from headrace_protocol.drivers.aio import AsyncConnection
from headrace_protocol.drivers.response import Response
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.message import StoredMessage, decode_records
from headrace_protocol.pop.headers import PopMessageHeader
from tests.support.broker import broker_config
from tests.support.channel import LeavingChannel, MemoryChannel
from tests.support.pop_broker import INVISIBLE_MS, PopBroker, answers, bodies
from tests.support.running import in_background
from tests.support.running_brokers import brokers
from tests.support.stores import crash
from tests.support.until import until
from tests.support.wire import ask, send_header

# More than the buffers of a connection take.
COUNT, BODY_BYTES = 48, 200_000
DIES = struct.pack("ii", 1, 0)


@pytest.fixture
def broker(tmp_path: Path) -> PopBroker:
    return PopBroker(tmp_path, commit_log_file_bytes=1 << 16)


def pop_of_one_who_left(broker: PopBroker, **fields: Any) -> None:
    """The client closes its connection while its request is served."""
    channel = LeavingChannel()
    broker.send(RequestCode.POP_MESSAGE, broker.pop_header(**fields), channel=channel)
    broker.clock.ms += 20
    broker.revive()


def pop_one_way(broker: PopBroker, **fields: Any) -> None:
    """The client wants no answer."""
    ext = header_fields(broker.pop_header(**fields))
    frame = encode_frame(
        SerializeType.JSON, RequestCode.POP_MESSAGE, 7, flag=FLAG_ONEWAY, fields=ext
    )
    broker.take(frame, MemoryChannel())
    broker.clock.ms += 20
    broker.revive()


@pytest.mark.parametrize("pop", [pop_of_one_who_left, pop_one_way])
def test_messages_that_nobody_got_come_at_once_as_before(
    broker: PopBroker, pop: Callable[[PopBroker], None]
) -> None:
    for number in range(4):
        broker.store_message("T", number % 2, b"%d" % number)
    pop(broker)
    taken = broker.taken()
    assert bodies(taken) == [b"0", b"1", b"2", b"3"]
    assert {message.reconsume_times for message, _ in taken} == {0}
    assert broker.taken() == []
    for _, handle in taken:
        broker.ack(handle)
    assert (broker.pop_parts.pops.out_count, broker.progress(0), broker.progress(1)) == (0, 2, 2)


def test_a_retry_that_nobody_got_counts_no_further_attempt(broker: PopBroker) -> None:
    broker.store_message("T", 0)
    broker.taken()
    broker.clock.ms += INVISIBLE_MS + 20
    broker.revive()
    pop_of_one_who_left(broker)
    ((message, _),) = broker.taken()
    assert message.reconsume_times == 1


def test_an_orderly_batch_that_nobody_got_counts_no_attempt(broker: PopBroker) -> None:
    for number in range(3):
        broker.store_message("T", 0, b"%d" % number)
    for _ in range(2):
        broker.taken(order=True)
        broker.clock.ms += INVISIBLE_MS
    pop_of_one_who_left(broker, order=True, attempt_id="a")
    answer = broker.pop(order=True, attempt_id="b")
    assert [each.body for each in decode_records(answer.body)] == [b"0", b"1", b"2"]
    counts = "0 qo0%0 2;0 qo0%1 2;0 qo0%2 2;0 0 2"
    assert answer.command.ext()["orderCountInfo"] == counts


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_kill_forgets_no_return(tmp_path: Path, broker: PopBroker, is_ordered: bool) -> None:
    broker.store_message("T", 0)
    channel = LeavingChannel()
    header = broker.pop_header(order=is_ordered)
    broker.send(RequestCode.POP_MESSAGE, header, channel=channel)
    broker.clock.ms += 20
    crash(broker.store)
    broker.pop_parts.log.close()
    later = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    later.revive()
    ((message, _),) = later.taken(order=is_ordered)
    assert message.reconsume_times == 0


async def test_an_answer_that_waited_for_the_disk_may_be_lost(tmp_path: Path) -> None:
    config = broker_config(tmp_path, flush_disk_type="SYNC_FLUSH")
    broker = PopBroker(tmp_path, config, flush="sync")
    broker.store_message("T", 0)
    broker.store.flusher.flush_now()
    broker.store.write_path.publish()
    async with in_background(broker.pop_parts.progress.run):
        await trio.testing.wait_all_tasks_blocked()
        channel = MemoryChannel()
        broker.send(RequestCode.POP_MESSAGE, broker.pop_header(queue_id=0), channel=channel)
        assert answers(channel) == []
        channel.is_open = False
        (queue,) = broker.pop_parts.pops
        await until(lambda: [each.origin for each in queue] == [Origin.SUSPENDED])


def test_what_was_reset_meanwhile_is_not_given_back(broker: PopBroker) -> None:
    broker.store_message("T", 0)
    lost: list[Callable[[], None]] = []

    class Left(MemoryChannel):
        def when_lost(self, notify: Callable[[], None]) -> None:
            lost.append(notify)

    broker.send(RequestCode.POP_MESSAGE, broker.pop_header(), channel=Left())
    broker.offsets.commit("g", "T", 0, 1)
    queue = broker.pop_parts.pops.find("g", "T", 0)
    assert queue is not None
    broker.pop_parts.pops.reset(queue, 0)
    for notify in lost:
        notify()
    assert (len(lost), broker.pop_parts.pops.out_count) == (1, 0)


def number_of(message: StoredMessage) -> int:
    return int(message.body[:3])


def pop_header(**fields: Any) -> PopMessageHeader:
    header = {
        "consumer_group": "g",
        "topic": "T",
        "queue_id": 0,
        "max_msg_nums": 1,
        "invisible_time": INVISIBLE_MS,
        "poll_time": 0,
        "born_time": 0,
        "init_mode": 0,
    }
    return PopMessageHeader(**{**header, **fields})


@pytest.mark.slow
async def test_a_client_that_dies_in_mid_answer_gives_back_what_was_not_sent(
    tmp_path: Path,
) -> None:
    """On sockets: each message is out once, and those not sent come first to somebody else."""
    async with brokers(tmp_path, ["a"], memory=False) as running:
        address = running.brokers["a"].address
        connection = AsyncConnection(await running.network.connect(address), address)
        async with in_background(connection.run):

            async def request(
                code: RequestCode, header: msgspec.Struct, body: bytes = b""
            ) -> Response:
                response = await connection.request(code, header, body, timeout_ms=20_000)
                return response.expect()

            for number in range(COUNT):
                body = b"%03d" % number + bytes(BODY_BYTES)
                await request(RequestCode.SEND_MESSAGE_V2, send_header(0), body)
            await _die_in_mid_answer(running.network, address)
            came: list[StoredMessage] = []
            while not came or number_of(came[-1]) < COUNT - 1:
                header = pop_header(max_msg_nums=32, poll_time=20_000)
                answer = await request(RequestCode.POP_MESSAGE, header)
                came += decode_records(answer.body)
            out = await _out(running.network, address)
    numbers = [number_of(message) for message in came]
    assert numbers == list(range(COUNT - len(numbers), COUNT))
    assert 0 < len(numbers) < COUNT
    assert {message.reconsume_times for message in came} == {0}
    assert out == COUNT


async def _out(network: Network, address: str) -> int:
    response = await ask(network, address, RequestCode.GET_BROKER_RUNTIME_INFO)
    info = response.expect().body
    return int(bytes(info).partition(b'"popMessagesOut":"')[2].partition(b'"')[0])


async def _die_in_mid_answer(network: Network, address: str) -> None:
    """Pop all messages, one by one, read a little, and die."""
    host, _, port = address.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    ext = header_fields(pop_header())
    for opaque in range(COUNT):
        client.sendall(
            encode_frame(SerializeType.JSON, RequestCode.POP_MESSAGE, opaque, fields=ext)
        )
    with trio.fail_after(20):
        while await _out(network, address) < COUNT:
            await trio.lowlevel.checkpoint()
    assert client.recv(1000)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, DIES)
    client.close()
