"""What plain topics cost on a broker that also has 1,000 static ones with 64,000 items."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from headrace_protocol.message import encode_batch
from tests.bench.static_cases import (
    BATCH_MESSAGES,
    PASSES,
    Work,
    broker_on,
    fill,
    pairs,
    pid_of,
    reader,
    store_many_items,
)
from tests.bench.wire import QUEUES, Client, Rotation, send_frame, topic_frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.bench.driver import Report
    from tests.conformance.peer import Peer

SIZES = (100, 1024)
# What a start leaves to do would count for the first case.
SETTLED_S = 2


class Sends(NamedTuple):
    """messages: of a measured pass, in requests of ``batch`` messages, so many of them unanswered.

    A batch of 1 is a single message.
    """

    name: str
    messages: int
    in_flight: int
    batch: int = 1

    def work(self, client: Client, body: bytes) -> Work:
        payload = body if self.batch == 1 else encode_batch([(0, body, b"")] * self.batch)
        frames = [
            send_frame("PLAIN", queue, payload, is_batch=self.batch > 1) for queue in range(QUEUES)
        ]
        rotation = Rotation([client], itertools.cycle(frames), self.in_flight)
        return lambda: rotation.run(count=self.messages // self.batch)


SENDS = (
    Sends("sync-1", 4000, 1),
    Sends("sync-32", 12_800, 32),
    Sends("async-1000", 12_000, 1000),
    Sends("batch-100", 24_000, 1, BATCH_MESSAGES),
)
DRAINED = 24_000
BESIDE = tuple(
    f"beside static topics: {name} {size} B"
    for name in (*(each.name for each in SENDS), "drain-lite")
    for size in SIZES
)


def beside(directory: Path, rounds: int) -> Iterator[tuple[str, Report]]:
    """Plain topics with 1,000 static ones ÷ without.

    Each round has new processes: two brokers alike differ by some percent for their whole life.
    """
    folders = directory / "without", directory / "with"
    store_many_items(folders[1])
    for number in range(rounds):
        with ExitStack() as stack:
            peers = [stack.enter_context(broker_on(folder))[0] for folder in folders]
            clients = [stack.enter_context(Client(peer.broker)) for peer in peers]
            if number == 0:
                for peer, client in zip(peers, clients, strict=True):
                    _prepare(peer, client)
            time.sleep(SETTLED_S)
            pids = [pid_of(peer) for peer in peers]
            for case, messages, works in _cases(clients):
                for report in pairs([number], messages, pids, *works):
                    yield case, report


def _prepare(peer: Peer, client: Client) -> None:
    """Topics to write and to read."""
    for topic in ("PLAIN", *(f"READ_{size}" for size in SIZES)):
        client.call(topic_frame(topic, QUEUES))
    for size in SIZES:
        fill(peer.broker, f"READ_{size}", DRAINED // QUEUES, body=os.urandom(size))


def _cases(clients: list[Client]) -> Iterator[tuple[str, int, list[Work]]]:
    """Names, messages of a pass, and works on both brokers."""
    names = iter(BESIDE)
    for sends, size in itertools.product(SENDS, SIZES):
        body = os.urandom(size)
        yield next(names), sends.messages, [sends.work(client, body) for client in clients]
    for size in SIZES:
        works = [reader(client, f"READ_{size}", end=DRAINED // QUEUES) for client in clients]
        yield next(names), PASSES * DRAINED, works
