"""A cluster and its clients in one process, on a network and a clock of their own.

Nameserver, broker, producers and two consumers of one group run on memory streams; connections
break at random in the middle of what they carry, requests and answers alike, and the broker stops
and starts again on its store. The seed decides everything that is random here. What must hold:

- every message that was acknowledged is consumed;
- a queue's messages come in the order of their offsets, apart from those that come again;
- messages of one key were stored in the order in which they were sent.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest
import trio
import trio.testing
from anyio import BrokenResourceError, EndOfStream
from trio._core import _run

from headrace import Admin, Consumer, Message, Producer
from headrace.errors import HeadraceError
from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.drivers.network import MemoryByteStream, MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.messages import ReceivedMessage
    from headrace_protocol.bodies import MessageQueue

T = TypeVar("T")

TOPIC = "Simulated"
GROUP = "simulation"
QUEUES = 3
KEYS = 4
MESSAGES_PER_KEY = 40
BREAK_PROBABILITY = 0.02
PAUSE_S_MAX = 2.0
START_MS = 1_700_000_000_000
# Of the simulation's clock: long after the last fault everything must have arrived.
TIME_MAX_S = 1200.0


class PromiseBroken(Exception):
    """The cluster lost a message or mixed an order up."""


# -- the network -----------------------------------------------------------------------------------


class FaultyNetwork(MemoryNetwork):
    """Connections break while they carry something; ``is_calm`` stops that."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.is_calm = True
        self.break_count = 0
        self._rng = rng

    async def connect(self, address: str) -> MemoryByteStream:
        stream = await super().connect(address)
        assert isinstance(stream, MemoryByteStream)
        return FaultyStream(stream._stream, self)

    def breaks(self) -> bool:
        if self.is_calm or self._rng.random() >= BREAK_PROBABILITY:
            return False
        self.break_count += 1
        return True

    def cut(self, data: bytes) -> bytes:
        """What of ``data`` still gets through."""
        return data[: self._rng.randrange(len(data) + 1)]


class FaultyStream(MemoryByteStream):
    """The client's end of a connection."""

    def __init__(self, stream: trio.abc.Stream, network: FaultyNetwork) -> None:
        super().__init__(stream)
        self._network = network

    async def send(self, item: bytes) -> None:
        if self._network.breaks():
            await super().send(self._network.cut(bytes(item)))
            await self.aclose()
            raise BrokenResourceError
        await super().send(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await super().receive(max_bytes)
        if self._network.breaks():
            await self.aclose()
            raise EndOfStream
        return data


# -- the cluster -----------------------------------------------------------------------------------


class SimulatedClock:
    """Wall clock and loop's clock as one, so that locks and leases end in time."""

    def now_ms(self) -> int:
        return START_MS + int(trio.current_time() * 1000)


class Cluster:
    """A nameserver, and a broker that can be stopped and started."""

    def __init__(self, network: FaultyNetwork, folder: Path, nursery: trio.Nursery) -> None:
        self.connect = network.connect
        self.restart_count = 0
        self._network = network
        self._nursery = nursery
        self._nameserver = NameServer(
            NameServerConfig(bind_address="127.0.0.1", listen_port=9876), network
        )
        self._broker_config = BrokerConfig(
            broker_name="broker-a",
            bind_address="127.0.0.1",
            listen_port=10911,
            namesrv_addr="127.0.0.1:9876",
            store_path_root_dir=folder,
            mapped_file_size_commit_log=4 * 1024 * 1024,
            mapped_file_size_consume_queue=20 * 1000,
            max_hash_slot_num=1000,
            max_index_num=4000,
        )
        self._broker_scope = trio.CancelScope()
        self._broker_gone = trio.Event()

    @property
    def nameserver(self) -> str:
        return self._nameserver.address

    async def start(self) -> None:
        await self._nursery.start(self._nameserver.run)
        await self._nursery.start(self._run_broker)

    async def _run_broker(self, task_status: trio.TaskStatus[str]) -> None:
        self._broker_gone = trio.Event()
        with trio.CancelScope() as self._broker_scope:
            broker = Broker(self._broker_config, self._network, SimulatedClock())
            await broker.run(task_status=task_status)
        self._broker_gone.set()

    async def restart_broker(self, pause_s: float) -> None:
        """Stop the broker in order, and start it on the same store and address."""
        self._broker_scope.cancel()
        await self._broker_gone.wait()
        await trio.sleep(pause_s)
        await self._nursery.start(self._run_broker)
        self.restart_count += 1


# -- what is sent and what arrives -----------------------------------------------------------------


@dataclass
class Ledger:
    """acked: what the broker has taken. first_seen: in each queue, as it first arrived."""

    acked: set[bytes] = field(default_factory=set)
    consumed: set[bytes] = field(default_factory=set)
    first_seen: dict[MessageQueue, list[ReceivedMessage]] = field(default_factory=dict)

    def received(self, message: ReceivedMessage) -> None:
        self.consumed.add(message.body)
        seen = self.first_seen.setdefault(message.queue, [])
        if all(message.queue_offset != other.queue_offset for other in seen):
            seen.append(message)

    def check_order(self) -> None:
        for queue, messages in self.first_seen.items():
            offsets = [message.queue_offset for message in messages]
            if offsets != sorted(offsets):
                raise PromiseBroken(f"{queue} came in the order {offsets}")
            _check_keys(queue, messages)


def _check_keys(queue: MessageQueue, messages: list[ReceivedMessage]) -> None:
    """Of each key the numbers grow, apart from those of messages that were sent again."""
    last: dict[str, int] = {}
    seen: set[bytes] = set()
    for message in messages:
        number = int(message.body.split(b"/")[1])
        if message.body not in seen and number < last.get(message.key, -1):
            raise PromiseBroken(f"{queue}: {message.body!r} after number {last[message.key]}")
        seen.add(message.body)
        last[message.key] = max(number, last.get(message.key, -1))


async def send_key(producer: Producer, key: str, rng: Random, ledger: Ledger) -> None:
    """One message after the other; what is not acknowledged is left to chance."""
    for number in range(MESSAGES_PER_KEY):
        body = f"{key}/{number}".encode()
        try:
            await producer.send(Message(TOPIC, body, key=key))
        except HeadraceError:
            pass
        else:
            ledger.acked.add(body)
        await trio.sleep(rng.random() * PAUSE_S_MAX)


async def consume(cluster: Cluster, ledger: Ledger, task_status: trio.TaskStatus[None]) -> None:
    """One member of the group."""
    consumer = Consumer(
        GROUP,
        TOPIC,
        nameserver=cluster.nameserver,
        start="first",
        ordered=True,
        connect=cluster.connect,
    )
    async with consumer:
        task_status.started()
        async for message in consumer:
            ledger.received(message)


# -- a run -----------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What happened in a run that kept every promise; seconds are those of its own clock."""

    sent: int
    acked: int
    consumed: int
    broken_connections: int
    restarts: int
    seconds: int


async def simulate(seed: int, folder: Path) -> Result:
    """One run; returns what happened in it. Raises PromiseBroken."""
    rng = Random(seed)
    network = FaultyNetwork(rng)
    ledger = Ledger()
    async with trio.open_nursery() as nursery:
        cluster = Cluster(network, folder, nursery)
        await cluster.start()
        async with Admin(nameserver=cluster.nameserver, connect=cluster.connect) as admin:
            await admin.create_topic(TOPIC, queues=QUEUES)
        for _ in range(2):
            await nursery.start(consume, cluster, ledger)
        network.is_calm = False
        await send_all(cluster, rng, ledger)
        network.is_calm = True
        await until_consumed(ledger)
        nursery.cancel_scope.cancel()
    ledger.check_order()
    return Result(
        sent=KEYS * MESSAGES_PER_KEY,
        acked=len(ledger.acked),
        consumed=len(ledger.consumed),
        broken_connections=network.break_count,
        restarts=cluster.restart_count,
        seconds=round(trio.current_time()),
    )


async def send_all(cluster: Cluster, rng: Random, ledger: Ledger) -> None:
    """Send the messages of all keys while the broker restarts now and then."""
    producer = Producer(nameserver=cluster.nameserver, connect=cluster.connect)
    async with producer, trio.open_nursery() as nursery:
        for index in range(KEYS):
            nursery.start_soon(send_key, producer, f"key{index}", rng, ledger)
        for _ in range(rng.randrange(3)):
            await trio.sleep(rng.random() * 20)
            await cluster.restart_broker(pause_s=rng.random() * 10)


async def until_consumed(ledger: Ledger) -> None:
    while missing := ledger.acked - ledger.consumed:
        if trio.current_time() > TIME_MAX_S:
            raise PromiseBroken(f"acknowledged and not consumed: {sorted(missing)}")
        await trio.sleep(1)


def run(seed: int) -> Result:
    """Simulate on a clock that jumps to the next thing that happens."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    with TemporaryDirectory(prefix="headrace-simulation-") as folder, _decided_by(seed):
        return trio.run(simulate, seed, Path(folder) / "store", clock=clock)


@contextmanager
def _decided_by(seed: int) -> Iterator[None]:
    """Ready tasks run in an order that the seed decides, and none waits for a thread."""
    random.seed(seed)
    _run._r.seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        # As Hypothesis does it.
        patch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        patch.setattr(trio.to_thread, "run_sync", _run_here)
        yield


async def _run_here(function: Callable[..., T], *arguments: Any, **_: Any) -> T:
    await trio.lowlevel.checkpoint()
    return function(*arguments)
