"""An outage of a nameserver and a broker is a few lines in the log of every kind of client."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio
from anyio.abc import ByteStream

from headrace import Consumer, Message, Producer, PullConsumer, Table
from headrace.errors import HeadraceError
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import GetByKeyResponseHeader, OffsetResponseHeader
from headrace_protocol.key_lookup import NoRecord, encode_found
from headrace_protocol.serving import Reply
from tests.support.member import NO_TOPIC, Apache, Log, hold_pulls, lock_all
from tests.support.scripted import Asked, Scripted, route, scripted_cluster

QUEUES = 8
AWAY_S = 65


def messages(count: int = 32) -> list[Message]:
    return [Message("T", b"body", key=f"key {number}") for number in range(count)]


async def send(**where: Any) -> None:
    async with Producer(delivery_timeout_ms=4000, **where) as producer, trio.open_nursery() as each:

        async def send_forever(message: Message) -> None:
            while True:
                with suppress(HeadraceError):
                    await producer.send(message)
                await trio.sleep(1)

        for message in messages():
            each.start_soon(send_forever, message)


async def send_many(**where: Any) -> None:
    async with Producer(delivery_timeout_ms=100_000, **where) as producer:
        while True:
            await producer.send_many(messages())
            await trio.sleep(1)


async def send_in_a_pipeline(**where: Any) -> None:
    async with (
        Producer(delivery_timeout_ms=100_000, **where) as producer,
        producer.pipeline(on_result=lambda _message, _result: None) as pipeline,
    ):
        while True:
            await pipeline.send_all(messages())
            await trio.sleep(0.1)


async def consume(**where: Any) -> None:
    async with Consumer("g", "T", **where) as consumer:
        async for _ in consumer:
            pass


async def consume_in_order(**where: Any) -> None:
    async with Consumer("g", "T", ordered=True, **where) as consumer:
        async for _ in consumer:
            pass


async def pull(**where: Any) -> None:
    async with PullConsumer(**where) as consumer:
        await consumer.assign(await consumer.queues("T"))
        while True:
            await consumer.receive_many()


async def follow_a_table(**where: Any) -> None:
    async with Table("T", **where) as table:
        while True:
            with suppress(HeadraceError):
                await table.synced()
            await trio.sleep(0.5)


async def look_up(**where: Any) -> None:
    async with Table("T", local=False, delivery_timeout_ms=3000, **where) as table:
        while True:
            with suppress(HeadraceError):
                await table.get("key")
            await trio.sleep(0.5)


CLIENTS = [
    send,
    send_many,
    send_in_a_pipeline,
    consume,
    consume_in_order,
    pull,
    follow_a_table,
    look_up,
]


class Servers:
    """A nameserver and a broker that go and come back."""

    def __init__(
        self,
        nameserver: Scripted,
        broker: Scripted,
        network: MemoryNetwork,
        tasks: trio.Nursery,
    ) -> None:
        self._servers = nameserver, broker
        self._network = network
        self._are_away = False
        hold_pulls(Log(nameserver, broker, 0, Apache()), tasks)
        known = route(broker, queues=QUEUES)
        nameserver.answer(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            lambda asked: known if asked.ext["topic"] == "T" else NO_TOPIC,
        )
        broker.answer(RequestCode.GET_MAX_OFFSET, Reply(OffsetResponseHeader(offset=0)))
        broker.answer(RequestCode.LOCK_BATCH_MQ, lock_all)
        broker.answer(RequestCode.GET_BY_KEY, nothing_found)

    async def connect(self, address: str) -> ByteStream:
        if self._are_away:
            raise ConnectionRefusedError("refused")
        return await self._network.connect(address)

    def go(self) -> None:
        self._are_away = True
        for server in self._servers:
            for asked in server.asked:
                asked.channel.close("")

    def come_back(self) -> None:
        self._are_away = False


def nothing_found(asked: Asked) -> Reply:
    count = int(asked.ext["count"])
    return Reply(GetByKeyResponseHeader(count=count), encode_found([NoRecord.NEVER] * count))


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_outage_is_a_line_per_half_minute_and_one_at_its_end(
    client: Callable[..., Coroutine[Any, Any, None]],
    autojump_clock: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        scripted_cluster(headrace=client is look_up) as (nameserver, (broker,), network),
        trio.open_nursery() as tasks,
    ):
        servers = Servers(nameserver, broker, network, tasks)
        run = partial(client, nameserver=nameserver.address, connect=servers.connect)
        tasks.start_soon(run)
        await trio.sleep(25)
        assert caplog.messages == []
        servers.go()
        await trio.sleep(AWAY_S)
        servers.come_back()
        await trio.sleep(60)
        tasks.cancel_scope.cancel()
    seen: defaultdict[str, list[str]] = defaultdict(list)
    for text in caplog.messages:
        match = re.match(r"(.*?) (is unav|has been unav|is available again)", text)
        assert match, text
        seen[match[1]].append(match[2])
    assert seen.keys() <= {"broker broker-0", f"nameserver {nameserver.address}"}
    assert "broker broker-0" in seen
    for states in seen.values():
        assert states[0] == "is unav"
        assert 1 <= states.count("has been unav") <= 2
        assert states.count("is available again") == (states[-1] == "is available again") == 1
