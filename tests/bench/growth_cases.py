"""The things that grow: each case makes them, size after size, and measures at each size."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from headrace_protocol.message import encode_batch
from tests.bench.processes import cpu_s, idle_cpu_percent, resident_mb
from tests.bench.wire import (
    COMMIT_OFFSET,
    HOLD_MS,
    PULL_MESSAGES,
    QUEUES,
    SUBSCRIPTION,
    SUSPEND,
    Client,
    Rotation,
    call_until_accepted,
    heartbeat_frame,
    max_offset_frame,
    pull_frame,
    send_frame,
    topic_frame,
)
from tests.conformance.peer import Peer

BODY = os.urandom(1024)
IDLE_S = 2.0
SETTLE_S = 0.5
QUEUES_PER_TOPIC = 1000
PULLS_PER_CLIENT = 8
GROUP_MESSAGES = 6400
BULK_BODY_BYTES = 64 * 1024
BULK_MESSAGES = 60
OLD_MESSAGES = 9600

Point = dict[str, float]


@dataclass(frozen=True)
class Run:
    """One peer in one case.

    sizes: how many things, ascending. seconds: of each measurement; idle_s: without any request.
    """

    peer: Peer
    sizes: list[int]
    seconds: float
    idle_s: float = IDLE_S

    @property
    def address(self) -> str:
        return self.peer.broker

    def point(self, size: float, rotation: Rotation, messages_per_request: int = 1) -> Point:
        """Measure cost, memory and idle CPU with what is there now."""
        cost = self.cost(rotation, messages_per_request)
        time.sleep(self.idle_s / 4)
        idle = idle_cpu_percent(self.peer, self.idle_s)
        memory = resident_mb([self.peer.broker_pid], mapped_files=False)
        return {"size": size, **cost, "memory_mb": memory, "idle_cpu_percent": idle}

    def cost(self, rotation: Rotation, messages_per_request: int = 1) -> Point:
        before, started = cpu_s([self.peer.broker_pid]), time.monotonic()
        count = rotation.run(seconds=self.seconds) * messages_per_request
        rate = count / (time.monotonic() - started)
        cpu = cpu_s([self.peer.broker_pid]) - before
        return {"broker_cpu_us": cpu / count * 1e6, "rate": rate}


# -- cases -----------------------------------------------------------------------------------------


def connections(run: Run) -> Iterator[Point]:
    """Open connections, all of which send in turn."""
    frames = itertools.cycle(send_frames("CONNECTIONS", QUEUES))
    with ExitStack() as open_ones:
        clients: list[Client] = []
        for size in run.sizes:
            clients += open_clients(run, open_ones, size - len(clients))
            rotation = Rotation(clients, frames)
            rotation.run(count=size)
            yield run.point(size, rotation)


def queues(run: Run) -> Iterator[Point]:
    """Queues with messages, all of which are sent to in turn; 1,000 to a topic."""
    with Client(run.address) as client:
        frames: list[bytes] = []
        for size in run.sizes:
            for first in range(len(frames), size, QUEUES_PER_TOPIC):
                topic, count = f"QUEUES_{first}", min(QUEUES_PER_TOPIC, size - first)
                client.call(topic_frame(topic, count))
                frames += send_frames(topic, count)
            rotation = Rotation([client], itertools.cycle(frames))
            rotation.run(count=size)
            yield run.point(size, rotation)


def groups(run: Run) -> Iterator[Point]:
    """Consumer groups that pull the same messages in turn, and commit; all on one connection."""
    with Client(run.address) as client:
        Rotation([client], itertools.cycle(send_frames("GROUPS", QUEUES))).run(count=GROUP_MESSAGES)
        names: list[str] = []
        for size in run.sizes:
            names += [f"group_{number}" for number in range(len(names), size)]
            client.call(heartbeat_frame("bench@1", names, "GROUPS"))
            rotation = Rotation([client], pulls(names, "GROUPS", GROUP_MESSAGES))
            yield run.point(size, rotation, PULL_MESSAGES)


def held_pulls(run: Run) -> Iterator[Point]:
    """Pulls held at the end of their queues, 8 to a connection, while another topic is sent to.

    Then each queue gets a message, and the answers to all pulls are waited for.
    """
    with ExitStack() as open_ones:
        sender, *clients = open_clients(run, open_ones, 1 + run.sizes[-1] // PULLS_PER_CLIENT)
        sender.call(topic_frame("HELD", PULLS_PER_CLIENT))
        call_all(sender, send_frames("HELD", PULLS_PER_CLIENT))
        # The other peer's queues show a message a little after its answer.
        time.sleep(SETTLE_S)
        rotation = Rotation([sender], itertools.cycle(send_frames("OTHERS", QUEUES)))
        offset = 1
        for size in run.sizes:
            consumers = clients[: size // PULLS_PER_CLIENT]
            held_at = time.monotonic()
            hold(consumers, offset)
            point = run.point(size, rotation)
            if time.monotonic() - held_at > HOLD_MS / 1000:
                raise TimeoutError(f"{size} pulls were not held for as long as the measurement")
            if consumers:
                point |= wake(run, sender, consumers)
                offset += 1
            yield point


def backlog(run: Run) -> Iterator[Point]:
    """Gigabytes in the log, by messages of 64 KiB; the oldest are read, and 1 KiB ones sent."""
    fill = send_frame("FILL", 0, bulk_body(), is_batch=True)
    filled_bytes, batch_bytes = 0, BULK_BODY_BYTES * BULK_MESSAGES
    with Client(run.address) as client:
        sends = Rotation([client], itertools.cycle(send_frames("OLD", QUEUES)))
        sends.run(count=OLD_MESSAGES)
        reads = Rotation([client], pulls(["reader"], "OLD", OLD_MESSAGES))
        for size in run.sizes:
            while filled_bytes < size * 1e9:
                call_until_accepted(client, fill)
                filled_bytes += batch_bytes
            # What is still on its way to the disk would slow down what is measured.
            os.sync()
            read = run.cost(reads, PULL_MESSAGES)
            yield run.point(size, sends) | {"read_cpu_us": read["broker_cpu_us"]}


# -- what they share -------------------------------------------------------------------------------


def send_frames(topic: str, count: int) -> list[bytes]:
    """A send of 1 KiB to each queue."""
    return [send_frame(topic, number, BODY) for number in range(count)]


def open_clients(run: Run, open_ones: ExitStack, count: int) -> list[Client]:
    """Connections that close with ``open_ones``."""
    return [open_ones.enter_context(Client(run.address)) for _ in range(count)]


def pulls(names: list[str], topic: str, messages: int) -> Iterator[bytes]:
    """Every group reads its queues from the start to the end, and again."""
    while True:
        for offset in range(0, messages // QUEUES - PULL_MESSAGES + 1, PULL_MESSAGES):
            for queue_id, name in itertools.product(range(QUEUES), names):
                yield pull_frame(name, topic, queue_id, offset, COMMIT_OFFSET | SUBSCRIPTION)


def call_all(client: Client, frames: list[bytes]) -> None:
    """One after the other."""
    for frame in frames:
        client.call(frame)


def hold(consumers: list[Client], offset: int) -> None:
    """Let each client wait for the next message of each queue."""
    frames = b"".join(
        pull_frame("holders", "HELD", queue_id, offset, SUSPEND | SUBSCRIPTION)
        for queue_id in range(PULLS_PER_CLIENT)
    )
    for consumer in consumers:
        # The cheap request behind them shows that they were read.
        consumer.send(frames + max_offset_frame("HELD", 0))
    for consumer in consumers:
        consumer.take_answers(1)


def wake(run: Run, sender: Client, consumers: list[Client]) -> Point:
    """CPU for each pull that a message ends, and how long it takes until all have it."""
    before, started = cpu_s([run.peer.broker_pid]), time.monotonic()
    call_all(sender, send_frames("HELD", PULLS_PER_CLIENT))
    for consumer in consumers:
        consumer.take_answers(PULLS_PER_CLIENT)
    cpu = cpu_s([run.peer.broker_pid]) - before
    return {
        "wake_cpu_us": cpu / (len(consumers) * PULLS_PER_CLIENT) * 1e6,
        "wake_ms": (time.monotonic() - started) * 1000,
    }


def bulk_body() -> bytes:
    """A batch just below the largest that brokers take."""
    body = os.urandom(BULK_BODY_BYTES)
    return encode_batch([(0, body, b"")] * BULK_MESSAGES)


def warm_up(peer: Peer, seconds: float) -> None:
    """Sends and pulls, until a JIT compiler has seen enough of them."""
    with Client(peer.broker) as client:
        sends = Rotation([client], itertools.cycle(send_frames("WARM_UP", QUEUES)))
        sends.run(count=GROUP_MESSAGES, seconds=seconds * 3 / 4)
        client.call(heartbeat_frame("bench@0", ["warm_up"], "WARM_UP"))
        Rotation([client], pulls(["warm_up"], "WARM_UP", GROUP_MESSAGES)).run(seconds=seconds / 4)


@dataclass(frozen=True)
class Case:
    """sizes: what is measured; more: with --experiments; theirs: the most for the other peer."""

    run: Callable[[Run], Iterator[Point]]
    title: str
    sizes: tuple[int, ...]
    more: tuple[int, ...] = ()
    theirs: int = sys.maxsize


CASES = {
    "connections": Case(connections, "connections", (1, 10, 100, 500, 2000)),
    "queues": Case(queues, "queues", (4, 100, 1000, 10_000), more=(100_000,), theirs=10_000),
    "groups": Case(groups, "consumer groups", (1, 10, 100, 1000)),
    "held-pulls": Case(held_pulls, "idle held pulls", (0, 800, 4000, 20_000)),
    # Filling takes as long as the disk does, so the other peer gets the first gigabytes only.
    "backlog": Case(backlog, "backlog, GB", (1, 4, 16, 50), theirs=4),
}
