"""A cluster and its clients in one process, on a network, disks and a clock of their own.

Nameserver, brokers, producers and three groups of consumers, one of them with a SQL92 filter, run
on memory streams. Connections break in the middle of what they carry, lag, and live on as ghosts;
disks fill up, fail, are slow and lose what was not synced; brokers stop, are killed, and lose power
at any operation of their disk. The seed decides everything. ``history`` says what must hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any, ClassVar, TypeVar

import trio
import trio.testing

from headrace import Admin
from headrace_broker import config
from headrace_broker.settings import of_store
from headrace_broker.store.log import commit_log
from headrace_broker.topics import attributes
from tests.simulation.cluster import (
    DISK_RATES,
    FLUSH_INTERVAL_MS,
    NAMESERVER,
    BrokerMachine,
    NameServerMachine,
)
from tests.simulation.history import History, PromiseBroken
from tests.simulation.network import FaultyNetwork
from tests.simulation.totals import Outcome
from tests.simulation.workload import TOPIC, Workload
from tests.simulation.world import Kind, World
from tests.support.faulty_files import FaultRates

T = TypeVar("T")

QUEUES = 2
FAULTS_MAX = 5
GROUPS = {"ordered": 2, "plain": 1, "filtered": 1}
SLOW_DISK_PROBABILITIES = (0.05, 0.5)
SLOW_DISK_S_MAX = 0.4
# Flush loop: interval, what it sleeps, and slow syncs, its own and one that it waits for.
WINDOW_S = FLUSH_INTERVAL_MS / 1000 + 0.5 + 4 * SLOW_DISK_S_MAX
# Whole seconds, of messages that expire; most of them live for tens of seconds.
RESERVED_S = (5, 20, math.inf)
# Consumers commit every 5 s, and brokers save that every 5 s.
COMMITTED_S = 20.0
# Pages further back than this count as old, so that reading them from the disk is simulated too.
HOT_BYTES = 16 * 1024
# Of the simulation's clock: long after the last fault everything must have arrived.
PATIENCE_S = 1200.0


class Simulation(Kind):
    """One run of a cluster. Kinds say what it serves, what changes, and what must hold."""

    history: History
    brokers: list[BrokerMachine]
    workload: Workload
    fault_pause_s_max: ClassVar[float] = 8.0
    patience_s: ClassVar[float]

    def __init__(self, world: World, nursery: trio.Nursery) -> None:
        super().__init__(world)
        self.nursery = nursery
        self.network = FaultyNetwork(self.rng, nursery)
        self.nameserver = NameServerMachine(self.network)

    # -- what kinds say ----------------------------------------------------------------------------

    async def create(self, admin: Admin) -> None:
        """Create the topic, once all daemons are up."""
        raise NotImplementedError

    async def act(self) -> None:
        """All that happens. Raises PromiseBroken."""
        raise NotImplementedError

    def do_fault(self) -> None:
        """One of the faults of daemons."""
        raise NotImplementedError

    async def while_waiting(self) -> None:
        """Look again, while groups consume what is left."""

    # -- the driver --------------------------------------------------------------------------------

    async def simulate(self) -> Outcome:
        """Raises PromiseBroken."""
        self.nursery.start_soon(self.nameserver.run)
        for broker in self.brokers:
            self.nursery.start_soon(broker.run)
        await self.settle()
        async with self.admin() as admin:
            await self.create(admin)
        await self.act()
        self.history.check()
        self._count()
        return self.outcome._replace(
            seconds=trio.current_time(), loss_window_s=self.history.loss_window_s
        )

    def admin(self) -> Admin:
        return Admin(nameserver=NAMESERVER, connect=self.network.connect)

    def consume(self, members: Mapping[str, int]) -> None:
        """Start groups of so many members."""
        for group, count in members.items():
            for member in range(count):
                self.nursery.start_soon(self.workload.consume, group, member)

    def set_calm(self, *, is_calm: bool) -> None:
        self.network.is_calm = is_calm
        for broker in self.brokers:
            broker.set_calm(is_calm=is_calm)

    async def do_faults(self) -> None:
        for _ in range(self.rng.randrange(FAULTS_MAX + 1)):
            await trio.sleep(self.rng.random() * self.fault_pause_s_max)
            self.do_fault()

    def _all_are_up(self) -> bool:
        return self.nameserver.is_up and all(broker.is_up for broker in self.brokers)

    async def settle(self) -> None:
        """Wait until all daemons are up; and once more for one that dies of what it did before."""
        for _ in range(2):
            while not self._all_are_up():  # noqa: ASYNC110
                await trio.sleep(0.1)
            await trio.sleep(3)

    async def until_consumed(self, groups: Iterable[str]) -> None:
        """Wait for some groups; what they have not got in the end, the history's check says."""
        deadline = trio.current_time() + self.patience_s
        while not self.history.is_consumed(groups) and trio.current_time() <= deadline:
            await trio.sleep(1)
            await self.while_waiting()

    def _count(self) -> None:
        history, (_, counts, faults, *_) = self.history, self.outcome
        faults.update(self.network.faults)
        for broker in self.brokers:
            faults.update(broker.faults)
            faults.update(broker.files.faults)
        faults["restart"] = len(history.lives) - len(self.brokers)
        counts.update(history.findings)
        counts.update(
            sent=len(history.sent), acknowledged=len(history.acks), consumed=len(history.got)
        )

    @classmethod
    def run_seed(cls, seed: int) -> Outcome:
        """Simulate on a clock that jumps to the next thing that happens. Raises PromiseBroken."""
        clock = trio.testing.MockClock(autojump_threshold=0)
        with cls.world(seed, clock, trio.current_time) as world:
            faults: Counter[str] = Counter()
            world.patches.put((trio.to_thread, "run_sync", run_here(world.rng, faults)))
            try:
                outcome = trio.run(cls._simulate, world, clock=clock)
            except BaseExceptionGroup as group:
                raise first_cause(group) from None
            outcome.faults.update(faults)
            return outcome

    @classmethod
    async def _simulate(cls, world: World) -> Outcome:
        async with trio.open_nursery() as nursery:
            outcome = await cls(world, nursery).simulate()
            nursery.cancel_scope.cancel()
        return outcome


class PlainCluster(Simulation):
    """Plain topics: all that a broker may do with them, and messages that expire."""

    name = "cluster"
    constants = (
        (commit_log, "HOT_BYTES", HOT_BYTES),
        # What is kept for hours is kept for seconds.
        (config, "_HOUR_MS", 1000),
        (of_store, "_HOUR_MS", 1000),
        (attributes, "_HOUR_MS", 1000),
    )
    patience_s = PATIENCE_S

    def __init__(self, world: World, nursery: trio.Nursery) -> None:
        super().__init__(world, nursery)
        rng = self.rng
        self.history = History(
            is_sync=rng.random() < 0.6, window_s=WINDOW_S, reserved_s=rng.choice(RESERVED_S)
        )
        flush = "sync" if self.history.is_sync else "async"
        self.outcome = self.outcome._replace(kind=f"cluster, {flush} flush")
        rates = rng.choice((FaultRates(), FaultRates(cold=0.1, read=0.05), DISK_RATES))
        self.brokers = [
            BrokerMachine(number, world.folder, self.network, self.history, rates)
            for number in range(rng.choice((1, 1, 2)))
        ]
        self.workload = Workload(self.network, self.history, self.brokers)
        self.faults: list[Callable[[], None]] = [
            *(fault for broker in self.brokers for fault in self._faults_of(broker)),
            self.nameserver.kill,
        ]

    def _faults_of(self, broker: BrokerMachine) -> list[Callable[[], None]]:
        return [
            *broker.endings,
            lambda: self.nursery.start_soon(self._fill_disk, broker),
        ]

    async def _fill_disk(self, broker: BrokerMachine) -> None:
        files = broker.files
        files.is_full = True
        await trio.sleep(self.rng.random() * 8)
        files.is_full = False

    def do_fault(self) -> None:
        self.rng.choice(self.faults)()

    async def create(self, admin: Admin) -> None:
        batched = {"queue.type": "BatchCQ"} if self.rng.random() < 0.25 else {}
        attributes = {**self._topic_limits(), **batched}
        await admin.create_topic(TOPIC, queues=QUEUES, attributes=attributes)

    def _topic_limits(self) -> dict[str, str]:
        """Half of the topics that expire do so before their files."""
        reserved_s = self.history.reserved_s
        is_limited = reserved_s < math.inf and self.rng.random() < 0.5
        return {"reserve.time": str(reserved_s)} if is_limited else {}

    async def act(self) -> None:
        self.consume(GROUPS)
        if self.history.reserved_s < math.inf:
            # What a group has not consumed stays if the broker knows that it consumes at all.
            await trio.sleep(COMMITTED_S)
        self.set_calm(is_calm=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.workload.produce)
            nursery.start_soon(self.do_faults)
        self.set_calm(is_calm=True)
        await self.settle()
        await self.workload.read_all()
        await self.until_consumed(GROUPS)


def run_here(rng: Random, faults: Counter[str]) -> Callable[..., Any]:
    """A thread that the loop waits for; now and then its disk is slow before or after the work."""

    slow_disk_probability = rng.choice(SLOW_DISK_PROBABILITIES)

    async def run_sync(function: Callable[..., T], *arguments: Any, **_: Any) -> T:
        with trio.CancelScope(shield=True):
            await pause()
            try:
                result = function(*arguments)
            finally:
                await pause()
        return result

    async def pause() -> None:
        is_slow = rng.random() < slow_disk_probability
        faults["slow disk"] += is_slow
        await trio.sleep(rng.random() * SLOW_DISK_S_MAX if is_slow else 0)

    return run_sync


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The finding in a group, if there is one, else what came first."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, BaseExceptionGroup):
            waiting = [*each.exceptions, *waiting]
        else:
            leaves.append(each)
    return next((leaf for leaf in leaves if isinstance(leaf, PromiseBroken)), leaves[0])
