"""A static topic whose queues move all the time, on a cluster with faults.

Three brokers, as in ``simulation``, whose power, processes, links and clocks fail. One or two
admins at once move, add and repair queues and are cut off in the middle. Producers send by key, two
groups follow along, and others come when all is calm. In some runs messages expire instead, and
mappings are cleaned up. After a last repair the topic must be whole, and keep what
``static_promises`` says.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import trio

from headrace import Admin, Message, SendResult
from headrace.admin.statictopic import Change, HalfDone, UnchangedTopic
from headrace.consumer import offset_store
from headrace.consumer.offset_store import OffsetStore
from headrace.errors import HeadraceError, NoQueue
from headrace_broker import config
from headrace_broker.settings import of_store
from headrace_broker.statictopic import cleanup
from headrace_broker.statictopic.table import MappingTable
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.statictopic.mapping import logic_broker_name
from headrace_protocol.statictopic.plans import Mode
from tests.simulation.cluster import NAMESERVER, BrokerMachine
from tests.simulation.history import Ack, Place, PromiseBroken
from tests.simulation.network import LifeNetwork
from tests.simulation.simulation import Simulation
from tests.simulation.static_promises import MappingWatch, OffsetWatch, StaticHistory
from tests.simulation.workload import TOPIC, Workload
from tests.simulation.world import World
from tests.support.faulty_files import FaultRates

BROKERS = 3
QUEUES = 3
QUEUES_MAX = 6
FAULTS_MAX = 5
CHANGES_MAX = 12
PAUSE_S_MAX = 2.5
CLOCK_JUMP_MS_MAX = 3_600_000
CUT_OFF_PROBABILITY = 0.3
FOLLOWING = {"ordered", "plain"}
LATE = {"ordered-late", "plain-late"}
MEMBERS = {"ordered": 1, "plain": 2, "ordered-late": 1, "plain-late": 1}
RESERVED_S = (math.inf, math.inf, 5, 20)
CLEANUP_PERIOD_S = 3.0
LOOK_PERIOD_S = 1.5
MODES = ((Mode.STRICT,), (Mode.STRICT,), (Mode.AVAILABLE,), (Mode.STRICT, Mode.AVAILABLE))
# Of the simulation's clock: long after the last fault everything must be there.
PATIENCE_S = 600.0


class StaticWorkload(Workload):
    """Clients of one static topic."""

    def message(self, key: str, number: int, **_: bool) -> Message:
        """One that waits for the disk, so that nothing excuses its loss."""
        return super().message(key, number)

    def _acked(self, result: SendResult, messages: list[Message], sent_s: float) -> None:
        first = result.queue_offset
        for index, message in enumerate(messages):
            place = Place(result.queue, first + index if first >= 0 else first)
            ack = Ack(place, message.body, 0, sent_s, trio.current_time())
            self.history.acks.append(ack)

    def _are_all(self, queues: Sequence[MessageQueue]) -> bool:
        return len(queues) >= QUEUES

    async def read_queues(self) -> bool:
        """Until its next registration, the route may lack a leader, but not its queues."""
        try:
            return await super().read_queues()
        except NoQueue:
            return False


class StaticSimulation(Simulation):
    """One run."""

    name = "static topic"
    constants = (
        (cleanup, "_PERIOD_S", CLEANUP_PERIOD_S),
        (config, "_HOUR_MS", 1000),  # what is kept for hours is kept for seconds
        (of_store, "_HOUR_MS", 1000),
    )
    fault_pause_s_max = PAUSE_S_MAX
    patience_s = PATIENCE_S
    history: StaticHistory

    def __init__(self, world: World, nursery: trio.Nursery) -> None:
        super().__init__(world, nursery)
        self.counts, self.faults = self.outcome.counts, self.outcome.faults
        self.modes = self.rng.choice(MODES)
        self.is_calm = True
        self.history = StaticHistory(
            is_sync=True, window_s=0.0, reserved_s=self.rng.choice(RESERVED_S)
        )
        self.history.is_strict = Mode.AVAILABLE not in self.modes
        self.history.queue_count = QUEUES
        self.brokers = [
            BrokerMachine(number, world.folder, self.network, self.history, FaultRates())
            for number in range(BROKERS)
        ]
        self.watch = MappingWatch(TOPIC, self.brokers, is_strict=self.history.is_strict)
        self.offsets = OffsetWatch(self.history, self.watch)
        self.workload = StaticWorkload(self.network, self.history, self.brokers)
        world.patches.put(
            (tempfile, "tempdir", str(world.folder)),  # admins' files
            call_after(MappingTable, "leads_changed", self.watch.leads_changed),
            call_after(MappingTable, "_saved_changed", self.watch.mapping_changed),
            call_after(offset_store, "_commit_header", self.offsets.committing),
        )

    async def create(self, admin: Admin) -> None:
        await admin.create_static_topic(TOPIC, QUEUES, brokers=self._some_brokers())

    async def act(self) -> None:
        self._consume(FOLLOWING)
        self.nursery.start_soon(self._watch_offsets)
        # Without faults nothing excuses what goes wrong.
        self.is_calm = is_calm = self.rng.random() < 0.2
        self.set_calm(is_calm=is_calm)
        self.network.is_calm = is_calm or self.rng.random() < 0.3
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.workload.produce)
            await self._disturb()
            self.set_calm(is_calm=True)
            await self.settle()
            await self._repair()
        self.watch.check()
        with trio.fail_after(PATIENCE_S):
            await self.workload.read_all()
        groups = FOLLOWING if self.history.expires else FOLLOWING | LATE
        self._consume(groups - FOLLOWING)
        await self.until_consumed(groups)
        if not self.history.is_consumed(groups):
            self.history.check()
            raise PromiseBroken("a group has not read what is there")
        await self._look(groups)
        self.watch.check()
        self.counts.update(self.watch.counts)

    async def _disturb(self) -> None:
        """All changes, and all faults."""
        async with trio.open_nursery() as nursery:
            for _ in range(self.rng.choice((1, 1, 2))):
                nursery.start_soon(self._change)
            if not self.is_calm:
                nursery.start_soon(self.do_faults)

    def _consume(self, groups: Iterable[str]) -> None:
        self.consume({group: MEMBERS[group] for group in sorted(groups)})

    # -- faults ------------------------------------------------------------------------------------

    def do_fault(self) -> None:
        broker = self.rng.choice(self.brokers)
        set_clock = partial(self._set_clock, broker)
        faults: list[Callable[[], None]] = [*broker.endings, set_clock, self._kill_nameserver]
        self.rng.choice(faults)()

    def _set_clock(self, broker: BrokerMachine) -> None:
        self.faults["clock jump"] += 1
        broker.clock.ahead_ms = self.rng.randint(-CLOCK_JUMP_MS_MAX, CLOCK_JUMP_MS_MAX)

    def _kill_nameserver(self) -> None:
        self.faults["empty nameserver"] += 1
        self.nameserver.kill()

    # -- changes -----------------------------------------------------------------------------------

    async def _change(self) -> None:
        """One admin after the other; some are cut off in the middle."""
        is_half_done = False
        for _ in range(self.rng.randint(1, CHANGES_MAX)):
            await trio.sleep(self.rng.random() * PAUSE_S_MAX)
            network = LifeNetwork(self.network)
            if not self.is_calm and self.rng.random() < CUT_OFF_PROBABILITY:
                self.nursery.start_soon(self._cut_off, network)
            try:
                async with Admin(nameserver=NAMESERVER, connect=network.connect) as admin:
                    await self._change_once(admin, is_half_done=is_half_done)
                is_half_done = False
            except UnchangedTopic:
                self.counts["changes that change nothing"] += 1
            except HalfDone:
                self.counts["changes half done"] += 1
                is_half_done = self.rng.random() < 0.8
            except HeadraceError:
                self.counts["changes refused"] += 1

    async def _change_once(self, admin: Admin, *, is_half_done: bool) -> None:
        changes = (self._remap, self._remap, self._other_change, self._repair_once)
        change = self._repair_once if is_half_done else self.rng.choice(changes)
        name, _ = await change(admin)
        self.counts[name] += 1

    async def _remap(self, admin: Admin) -> tuple[str, Change]:
        rng = self.rng
        mode = rng.choice(self.modes)
        queues = rng.choice((None, rng.sample(range(QUEUES), rng.randint(1, QUEUES))))
        change = await admin.remap_static_topic(
            TOPIC, self._some_brokers(), queues=queues, mode=mode
        )
        return f"moves, {mode.value}", change

    async def _other_change(self, admin: Admin) -> tuple[str, Change]:
        if self.rng.random() < 0.9:
            return "rebalances", await admin.rebalance_static_topic(TOPIC)
        queues = self.rng.randint(QUEUES + 1, QUEUES_MAX)
        change = await admin.create_static_topic(TOPIC, queues, brokers=self._some_brokers())
        return "additions of queues", change

    async def _repair_once(self, admin: Admin) -> tuple[str, Change]:
        return "repairs", await admin.repair_static_topic(TOPIC)

    def _some_brokers(self) -> list[str]:
        names = [broker.name for broker in self.brokers]
        return self.rng.sample(names, self.rng.randint(1, len(names)))

    async def _cut_off(self, network: LifeNetwork) -> None:
        await trio.sleep(self.rng.random() * 0.3)
        self.faults["admin cut off"] += 1
        network.end()

    async def _repair(self) -> None:
        """Until the topic is whole. Raises PromiseBroken if it never is."""
        deadline = trio.current_time() + PATIENCE_S
        while True:
            async with self.admin() as admin:
                try:
                    await self._repair_once(admin)
                    self.counts["repairs"] += 1
                except UnchangedTopic:
                    return
                except HeadraceError as error:
                    if trio.current_time() > deadline:
                        raise PromiseBroken(f"the topic can't be repaired: {error}") from error
                    await trio.sleep(1)

    # -- the end -----------------------------------------------------------------------------------

    async def _watch_offsets(self) -> None:
        """Look at ends and offsets, where they can be asked for."""
        while True:
            await trio.sleep(LOOK_PERIOD_S)
            with suppress(HeadraceError):
                await self._look(FOLLOWING)

    async def _look(self, groups: set[str]) -> None:
        """Check the ends of queues, and the offsets of groups. Raises HeadraceError."""
        async with self.admin() as admin:
            offsets = OffsetStore(admin._instance)
            for queue in (MessageQueue(TOPIC, logic_broker_name(), each) for each in range(QUEUES)):
                for group in sorted(groups):
                    asked_s = trio.current_time()
                    offset = await offsets.committed(group, queue)
                    self.offsets.check_end(queue, await offsets.max_offset(queue))
                    self.offsets.check(group, queue, offset, asked_s)

    async def while_waiting(self) -> None:
        """Note what has expired since all was read: a group may have waited for a lock."""
        if not self.history.expires:
            return
        async with self.admin() as admin:
            offsets = OffsetStore(admin._instance)
            for queue in self.history.final:
                with suppress(HeadraceError):
                    self.history.firsts[queue] = await offsets.min_offset(queue)


def call_after(owner: Any, name: str, call: Callable[..., None]) -> tuple[Any, str, Any]:
    """The replacement of a function by one that calls another afterwards, with its arguments."""
    function = getattr(owner, name)

    def both(*arguments: Any) -> Any:
        result = function(*arguments)
        call(*arguments)
        return result

    return owner, name, both
