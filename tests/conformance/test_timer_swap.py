"""Timers in one store, opened in turn by headrace and by Apache's broker, after stops and kills."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from anyio import run

from headrace import Admin, Message, Producer, PullConsumer, SendResult
from tests.conformance.peer import TIMEOUT_MS, Peer, quick_peer
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPIC = "swap_timers"
WINDOW_S = 60
SETTINGS = {"recallMessageEnable": "true", "timerRollWindowSlot": str(WINDOW_S)}
LIMIT_S = 30
# Time for both brokers to save that a second is over, and for Apache's to deliver what is due.
SETTLE_S = 4
LATER_S, ROLLED_S = 45, WINDOW_S + 2
# A timer that waits for little longer than the window is rolled after half of it.
ROLL_S = WINDOW_S // 2
KEPT = {"at once": 1, "later": LATER_S, "rolled": ROLLED_S}
RECALLED = {
    "recalled": LATER_S,
    "rolled and recalled": ROLLED_S,
    "recalled at the other broker": ROLLED_S,
}
WHEN_NONE_RUNS = "when none runs"

Timers = dict[str, "SendResult"]


async def create_topic(nameserver: str) -> None:
    async with Admin(nameserver=nameserver) as admin:
        await admin.create_topic(TOPIC, queues=1)


async def send(nameserver: str, part: str, delays_s: dict[str, int]) -> Timers:
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        return {
            name: await producer.send(Message(TOPIC, f"{part} {name}".encode(), delay=delay_s))
            for name, delay_s in delays_s.items()
        }


async def recall(nameserver: str, sent: Sequence[SendResult]) -> None:
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for each in sent:
            await producer.recall(each)


async def stored(nameserver: str) -> list[str]:
    """The bodies in the topic."""
    async with PullConsumer(nameserver=nameserver) as consumer:
        (queue,) = await consumer.queues(TOPIC)
        count = await consumer.max_offset(queue)
        await consumer.assign([queue])
        bodies: list[str] = []
        while len(bodies) < count:
            bodies += [each.body.decode() for each in await consumer.receive_many() or []]
    return sorted(bodies)


def wait_for(nameserver: str, body: str) -> None:
    wait_until(lambda: body in run(stored, nameserver), f"{body!r} was not delivered", LIMIT_S)


def use(peer: Peer, part: str, recalled: Sequence[SendResult]) -> tuple[float, Timers]:
    """Send timers, recall some and wait for the first; returns when they were sent, and all."""
    began = time.monotonic()
    timers = run(send, peer.nameserver, part, KEPT | RECALLED)
    run(recall, peer.nameserver, [timers["rolled and recalled"], *recalled])
    wait_for(peer.nameserver, f"{part} at once")
    time.sleep(SETTLE_S)
    return began, timers


def leave(peer: Peer, part: str, timers: Timers, end: str) -> None:
    """End the broker while it takes a timer and a recall."""
    run(send, peer.nameserver, part, {WHEN_NONE_RUNS: 2})
    run(recall, peer.nameserver, [timers["recalled"]])
    broker = peer.daemons["broker"]
    broker.stop() if end == "stop" else broker.kill()


def sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0))


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_each_timer_is_delivered_once(tmp_path: Path, end: str) -> None:
    store = tmp_path / "store"
    with quick_peer("headrace", store=store, settings=SETTINGS) as peer:
        run(create_topic, peer.nameserver)
        began, first = use(peer, "first", [])
        leave(peer, "first", first, end)
    with quick_peer("apache", store=store, settings=SETTINGS) as peer:
        # Otherwise it delivers a recalled timer; see below.
        assert time.monotonic() < began + LATER_S, "too late for this test"
        began_again, second = use(peer, "second", [first["recalled at the other broker"]])
        sleep_until(began + ROLL_S + SETTLE_S)
        leave(peer, "second", second, end)
    with quick_peer("headrace", store=store, settings=SETTINGS) as peer:
        run(recall, peer.nameserver, [second["recalled at the other broker"]])
        sleep_until(began_again + ROLLED_S + SETTLE_S)
        names = [*KEPT, WHEN_NONE_RUNS]
        expected = sorted(f"{part} {name}" for part in ("first", "second") for name in names)
        assert run(stored, peer.nameserver) == expected


@pytest.mark.parametrize(
    ("second", "delivered"), [("apache", ["kept", "recalled"]), ("headrace", ["kept"])]
)
def test_only_apache_delivers_a_recalled_timer_that_it_rolls_too_late(
    tmp_path: Path, second: str, delivered: list[str]
) -> None:
    store = tmp_path / "store"
    settings = {**SETTINGS, "timerRollWindowSlot": "10"}
    with quick_peer("apache", store=store, settings=settings) as peer:
        run(create_topic, peer.nameserver)
        began = time.monotonic()
        # Rolled after 10 s; the recall is sent less than 10 s before the timers are due.
        timers = run(send, peer.nameserver, "both", {"kept": 14, "recalled": 14})
        sleep_until(began + 5)
        run(recall, peer.nameserver, [timers["recalled"]])
        sleep_until(began + 5 + SETTLE_S)
    sleep_until(began + 15)
    with quick_peer(second, store=store, settings=settings) as peer:
        wait_for(peer.nameserver, f"both {delivered[-1]}")
        time.sleep(SETTLE_S)
        assert run(stored, peer.nameserver) == [f"both {name}" for name in delivered]
