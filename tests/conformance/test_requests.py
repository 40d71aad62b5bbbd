"""Requests between a client of ours and Java's official client, on our broker and on Apache's."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio

from headrace import Admin, Consumer, Message, Producer
from tests.conformance.console import Console
from tests.conformance.peer import TIMEOUT_MS
from tests.conformance.test_mixed_groups import PEERS, broker

pytestmark = [pytest.mark.conformance, pytest.mark.slow]


@pytest.mark.parametrize("peer", PEERS)
async def test_each_client_replies_to_the_other(
    peer: str, request: pytest.FixtureRequest, console: Console
) -> None:
    number = random.randrange(1 << 32)
    ours, javas = f"ours_{number}", f"javas_{number}"
    in_thread = trio.to_thread.run_sync
    async with broker(peer, request) as nameserver:
        async with Admin(nameserver=nameserver) as admin:
            for topic in (ours, javas):
                await admin.create_topic(topic, queues=1)
        async with (
            Consumer(f"G_{number}", ours, nameserver=nameserver, start="earliest") as consumer,
            trio.open_nursery() as tasks,
        ):

            async def serve() -> None:
                async for message in consumer:
                    await message.reply(b"yes, " + message.body)
                    return

            tasks.start_soon(serve)
            reply = await in_thread(partial(console.ask, nameserver, ours, "Java"))
        assert reply == "yes, Java"

        replier = console.replier(nameserver, f"J_{number}", javas)
        await in_thread(replier.__enter__)
        try:
            async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
                answer = await producer.request(Message(javas, b"Python"), timeout=60)
                assert (answer.body, producer.late_replies) == (b"re: Python", 0)
        finally:
            await in_thread(partial(replier.__exit__, None, None, None))
