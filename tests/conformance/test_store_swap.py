"""One store directory, opened in turn by headrace and by Apache's broker, after stops and kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anyio import run

from headrace import Admin, Message, Producer, PullConsumer
from tests.conformance.peer import TIMEOUT_MS, PeerError, quick_peer

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPICS = ("swap_one", "swap_two")
GROUP = "swap_group"
COUNT = 100

Body = tuple[str, str, str, bytes]


async def write(nameserver: str, part: str) -> list[Body]:
    """Store messages of all topics; returns topic, key, tag and body of each."""
    bodies = [
        (topic, f"key-{part}-{number}", f"tag{number % 3}", f"{part} {number}".encode())
        for topic in TOPICS
        for number in range(COUNT)
    ]
    async with Admin(nameserver=nameserver) as admin:
        for topic in TOPICS:
            await admin.create_topic(topic, queues=3, if_not_exists=True)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for topic, key, tag, body in bodies:
            await producer.send(Message(topic, body, key=key, tag=tag))
    return bodies


async def check(nameserver: str, wanted: list[Body], parts: list[str]) -> None:
    """Everything that was acknowledged is there: by queue and by key."""
    found: list[Body] = []
    async with PullConsumer(nameserver=nameserver) as consumer:
        for topic in TOPICS:
            count = sum(body[0] == topic for body in wanted)
            await consumer.assign(await consumer.queues(topic))
            messages: list[Any] = []
            while len(messages) < count:
                messages += await consumer.receive_many() or []
            found += [(each.topic, each.key, each.tag, each.body) for each in messages]
    assert sorted(found) == sorted(wanted)
    async with Admin(nameserver=nameserver) as admin:
        for part in parts:
            (message,) = await admin.query_by_key(TOPICS[0], f"key-{part}-7")
            assert message.body == f"{part} 7".encode()


async def commit(nameserver: str, offset: int) -> None:
    async with PullConsumer(GROUP, nameserver=nameserver) as consumer:
        queues = await consumer.queues(TOPICS[0])
        await consumer.assign(queues)
        for queue in queues:
            consumer.seek(queue, offset)
        await consumer.commit()


async def committed(nameserver: str) -> set[int | None]:
    async with PullConsumer(GROUP, nameserver=nameserver) as consumer:
        return {await consumer.committed(each) for each in await consumer.queues(TOPICS[0])}


def test_either_broker_opens_the_others_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    wanted: list[Body] = []
    with quick_peer("headrace", store=store) as peer:
        wanted += run(write, peer.nameserver, "first")
        run(commit, peer.nameserver, 5)
        peer.daemons["broker"].stop()
    with quick_peer("apache", store=store) as peer:
        run(check, peer.nameserver, wanted, ["first"])
        assert run(committed, peer.nameserver) == {5}
        wanted += run(write, peer.nameserver, "second")
    with quick_peer("headrace", store=store) as peer:
        run(check, peer.nameserver, wanted, ["first", "second"])
        wanted += run(write, peer.nameserver, "third")
    with quick_peer("apache", store=store) as peer:
        run(check, peer.nameserver, wanted, ["first", "second", "third"])


@pytest.mark.parametrize(("holder", "other"), [("headrace", "apache"), ("apache", "headrace")])
def test_a_second_broker_is_kept_out(holder: str, other: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with quick_peer(holder, tmp_path, store=store) as peer:
        wanted = run(write, peer.nameserver, "before")
        with (
            pytest.raises(PeerError, match=r"Lock failed, MQ already started|is in use"),
            quick_peer(other, tmp_path, store=store),
        ):
            pass
        wanted += run(write, peer.nameserver, "after")
        run(check, peer.nameserver, wanted, ["after"])
        peer.daemons["broker"].stop()
    # Apache's broker looks at the lock after it has read the store, and has changed it by then.
    with quick_peer(holder, tmp_path, store=store) as peer:
        run(check, peer.nameserver, wanted, ["before", "after"])
