"""Pops that are out of one store, opened in turn by headrace and by Apache's broker."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from anyio import run

from headrace import Admin, Message, Producer, SimpleConsumer
from tests.conformance.peer import TIMEOUT_MS, Peer, quick_peer
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPIC, GROUP = "swap_pops", "swap_poppers"
COUNT = 8
INVISIBLE_S = 30
# headrace names what is out in Apache's form at a stop, and before that once it is old.
OLD_INVISIBLE_S = 100
# Apache's broker looks for what was not acknowledged every few seconds.
LIMIT_S = 90
QUIET_S = 15


async def send(nameserver: str) -> None:
    async with Admin(nameserver=nameserver) as admin:
        await admin.create_topic(TOPIC, queues=1)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for number in range(COUNT):
            await producer.send(Message(TOPIC, b"%d" % number))


async def take(nameserver: str, invisible_s: int, limit_s: float) -> list[str]:
    """The bodies of all messages, of which those with even numbers are acknowledged.

    More that come within a while are in it too.
    """
    bodies: list[str] = []
    end = time.monotonic() + limit_s
    async with SimpleConsumer(GROUP, TOPIC, nameserver=nameserver) as consumer:
        while len(bodies) < COUNT and time.monotonic() < end:
            for message in await consumer.receive(wait=1, invisible=invisible_s):
                bodies.append(message.body.decode())
                if int(bodies[-1]) % 2 == 0:
                    await message.ack()
    return sorted(bodies)


async def take_all(nameserver: str, limit_s: float, count: int = COUNT) -> list[str]:
    """The bodies of all messages that come in a while, and once ``count`` are there, in a shorter.

    All are acknowledged.
    """
    bodies: list[str] = []
    end = time.monotonic() + limit_s
    async with SimpleConsumer(GROUP, TOPIC, nameserver=nameserver) as consumer:
        while time.monotonic() < end:
            for message in await consumer.receive(wait=1, invisible=INVISIBLE_S):
                bodies.append(message.body.decode())
                await message.ack()
                if len(bodies) == count:
                    end = time.monotonic() + QUIET_S
    return sorted(bodies)


def has_saved_offset(store: Path) -> bool:
    """Whether the file of offsets counts all messages."""
    path = store / "config/consumerOffset.json"
    return path.exists() and bool(
        re.search(rf'"{TOPIC}@{GROUP}":\s*{{\s*"?0"?:\s*{COUNT}\b', path.read_text())
    )


def leave(peer: Peer, store: Path, end: str) -> float:
    """Take all, acknowledge the even ones, and end the broker; returns when others are visible."""
    run(send, peer.nameserver)
    invisible_s = OLD_INVISIBLE_S if (peer.name, end) == ("headrace", "kill") else INVISIBLE_S
    visible_at = time.monotonic() + invisible_s
    taken = run(take, peer.nameserver, invisible_s, 30)
    assert taken == [str(number) for number in range(COUNT)]
    if end == "kill":
        wait_until(lambda: has_saved_offset(store), "the offset was not saved", LIMIT_S)
    broker = peer.daemons["broker"]
    broker.stop() if end == "stop" else broker.kill()
    return visible_at


ODD = [str(number) for number in range(1, COUNT, 2)]


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        ("headrace", "apache", "stop"),
        ("headrace", "apache", "kill"),
        ("apache", "headrace", "stop"),
        ("apache", "headrace", "kill"),
        ("headrace", "headrace", "stop"),
    ],
)
def test_what_was_not_acknowledged_comes_again(
    tmp_path: Path, first: str, second: str, end: str
) -> None:
    store = tmp_path / "store"
    with quick_peer(first, store=store) as peer:
        visible_at = leave(peer, store, end)
    with quick_peer(second, store=store) as peer:
        left_s = visible_at - time.monotonic()
        early = run(take_all, peer.nameserver, max(left_s - 3, 0))
        assert early == [], "before its time"
        assert run(take_all, peer.nameserver, LIMIT_S, len(ODD)) == ODD
