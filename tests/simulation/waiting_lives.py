"""The lives of a broker with messages that wait: delays, timers, retries and transactions.

The same faulty disk as that of a store alone. The services run as in a broker, and several clients
act at random beside them. The clock jumps both ways, topics are deleted and made anew, the disk
fills up, and each life ends by a stop, a kill or a power cut, also in the middle of any operation
of the disk. The log is the judge (``waiting_promises``): whatever happens, a message that waited is
delivered at most once and never early, and a transaction is decided once. What clients were told
is in the log (``waiting_clients``). When the last life has let enough time pass, all is delivered
and all transactions are decided.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final

import trio

from headrace_broker.schedule.schedule import Schedule
from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.log.log_rows import scan_from
from headrace_broker.timer import wheel
from headrace_broker.timer.timers import Timers
from headrace_broker.transaction.transactions import Transactions
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.message import TRANSACTION_COMMIT
from headrace_protocol.system_topics import TIMER_TOPIC
from tests.simulation.waiting_clients import GROUPS, TOPICS, Clients, Told
from tests.simulation.waiting_promises import LEVELS_MS, Jump, WaitingLog, timer_due_ms
from tests.simulation.world import HOUR_MS, Life, LifeClock, Lives, World
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.faulty_files import FaultRates, FaultyFiles, PowerCut
from tests.support.features import services_of

CLIENTS: Final = 2
# Enough for a producer that answers each check.
LAST_ROUNDS_MAX: Final = 60
WHEEL_SLOTS: Final = 512
_RESTART_S: Final = 1.0


class WaitingClock(LifeClock):
    """A clock that moves on while all tasks sleep."""

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if deadline == math.inf:
            return math.inf
        # Rounded up, a deadline of a broken millisecond might still not be reached.
        self.ms = max(self.ms, math.floor(deadline * 1000) + 1 + self.jumped_ms)
        return 0.0


class WaitingLife(Life):
    """One broker from its start to its end."""

    def __init__(self, lives: WaitingLives, files: FaultyFiles) -> None:
        super().__init__(lives, files)
        self.lives = lives
        self.jumps = lives.jumps
        self.told = lives.told
        self.broker = BrokerUnderTest(
            self.files.root.parent,
            lives.config,
            self.clock,
            files=files,
            commit_log_file_bytes=65536,
            consume_queue_file_bytes=2000,
            delay_levels_ms=LEVELS_MS,
            flush=lives.flush,
        )
        self.store = self.broker.store
        self.clients = Clients(self.broker, self.rng, self.told, self.counts, self.log)
        self.services = services_of(self.broker.services, Schedule, Timers, Transactions)
        clients = self.clients
        self.steps = [
            *[clients.send_delayed] * 4,
            *[clients.send_timer] * 4,
            clients.recall,
            *[clients.send_back] * 2,
            *[clients.send_half] * 4,
            *[clients.decide] * 3,
            clients.join,
            *[clients.answer_checks] * 3,
            clients.resume,
            *[self.pass_time] * 8,
            self.stall,
            self.save_offsets,
            self.carry_over,
            self.flush,
            self.jump_clock,
            self.fill_disk,
            self.change_topic,
        ]

    def log(self) -> WaitingLog:
        """The records of the log at the moment."""
        columns = [block.columns for block in scan_from(self.store.commit_log, 0)]
        return WaitingLog([each.message(number) for each in columns for number in range(len(each))])

    def start(self) -> None:
        end = self.store.commit_log.max_offset
        self.jumps[:] = [jump._replace(log_end=min(jump.log_end, end)) for jump in self.jumps]
        for service in self.services:
            if service.load is not None:
                service.load()
        log = self.log()
        if self.lives.has_lost:
            self.told.forget_lost(log)
        self.told.check(log)
        log.check(self.jumps)
        self.lives.has_lost = False
        for topic in TOPICS:
            self.create(topic)
        self.broker.groups.put(SubscriptionGroupConfig(group_name="g", retry_max_times=3))

    def live(self, step_count: int) -> None:
        """Serve clients for some steps."""
        self.run(partial(self._act_all, step_count))

    async def _act_all(self, step_count: int) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(self._act, step_count)

    async def _act(self, step_count: int) -> None:
        for _ in range(step_count):
            with suppress(OSError, StoreNotWritable):
                await self.rng.choice(self.steps)()
            if not self.store.commit_log.life.is_writable:
                return
            self.clock.ms += self.rng.choice((0, 1, 300))
            await trio.lowlevel.checkpoint()

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run some work beside all services."""

        async def run() -> None:
            async with trio.open_nursery() as nursery:
                for loop in self.loops():
                    nursery.start_soon(self._supervise, loop)
                await work()
                nursery.cancel_scope.cancel()

        try:
            trio.run(run, clock=self.clock)
        except* PowerCut:
            raise PowerCut from None

    def loops(self) -> list[Callable[[], Awaitable[Any]]]:
        """The services of a broker without clean-up: the log is to tell everything."""
        store = self.store
        return [
            store.write_path.run,
            store.flusher.run_group_commit,
            store.flusher.run_log_flush,
            store.flusher.run_queue_flush,
            store.upkeep.run_index,
            store.upkeep.prepare_files,
            store.healer.run,
            *(service.run for service in self.services if service.run is not None),
        ]

    async def _supervise(self, loop: Callable[[], Awaitable[Any]]) -> None:
        """As a broker's supervisor, which restarts what the disk has ended."""
        while True:
            with suppress(OSError, StoreNotWritable):
                await loop()
            await trio.sleep(_RESTART_S)

    def close(self) -> None:
        for service in self.services:
            if service.finish is not None:
                service.finish()
        self.broker.offsets.persist()
        self.store.close()

    # -- what happens to a broker ------------------------------------------------------------------

    def create(self, topic: str) -> None:
        if self.broker.topics.get(topic) is None:
            self.broker.create_topic(topic)

    async def pass_time(self) -> None:
        await trio.sleep(self.rng.choice((0.01, 0.3, 1, 3, 12)))

    async def stall(self) -> None:
        """The machine stands still for a while."""
        self.clock.ms += self.rng.choice((1000, 5000, 60_000))

    async def save_offsets(self) -> None:
        self.broker.offsets.persist()

    async def carry_over(self) -> None:
        """As clean-up does before a log file goes."""
        log_end = self.store.commit_log.max_offset
        await self.broker.timers.carry_over(self.rng.randrange(log_end + 1))

    async def flush(self) -> None:
        self.store.flusher.flush_now()

    async def jump_clock(self) -> None:
        before_ms, jump_ms = self.clock.ms, self.rng.choice((-HOUR_MS, HOUR_MS, 8 * 24 * HOUR_MS))
        self.clock.jump(jump_ms)
        if jump_ms < 0:
            self.jumps.append(Jump(self.store.commit_log.max_offset, before_ms, self.clock.ms))

    async def fill_disk(self) -> None:
        self.files.is_full = not self.files.is_full
        await trio.sleep(2)

    async def change_topic(self) -> None:
        topic = self.rng.choice(TOPICS)
        self.broker.topics.delete(topic)
        if self.rng.random() < 0.7:
            self.create(topic)

    # -- the last life -----------------------------------------------------------------------------

    def end(self) -> None:
        """Decide and deliver everything. Raises PromiseBroken."""
        self.broker.config.transaction_check_max = 1000
        self.run(self._end_everything)
        log = self.log()
        log.check(self.jumps)
        log.check_ended()
        self.told.check(log)
        self.counts.update(log.counts())

    async def _end_everything(self) -> None:
        """Producers commit what is open, and the last delivery time comes."""
        for group in GROUPS:
            self.clients.connect(group)
        for _ in range(LAST_ROUNDS_MAX):
            for key in self.clients.hear_checks():
                await self.clients.end(key, TRANSACTION_COMMIT)
            await trio.sleep(2)
            if not any(one.is_open for one in self.log().transactions.values()):
                break
        dues_ms = [
            timer_due_ms(waits.properties, waits.store_timestamp)
            for waits in self.log().waiting()
            if waits.topic == TIMER_TOPIC
        ]
        self.clock.ms = max([self.clock.ms, *dues_ms])
        await trio.sleep(2 * max(LEVELS_MS) / 1000)


class WaitingLives(Lives[WaitingLife]):
    """A directory, what clients were told, and how the clock jumped.

    has_lost: since the last start that was finished, a power cut may have taken what was
    acknowledged.
    """

    name = "broker with messages that wait"
    clock_type = WaitingClock
    # A wheel of seven days is 38 MB, which the disk would have to compare at each power cut.
    constants: ClassVar[tuple[tuple[Any, str, Any], ...]] = ((wheel, "WHEEL_SLOTS", WHEEL_SLOTS),)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.jumps: list[Jump] = []
        self.told = Told()
        self.has_lost = False
        self.flush = self.rng.choice(("async", "async", "sync"))
        self.config = broker_config(
            world.folder,
            flush_delay_offset_interval=2000,
            transaction_check_interval=1000,
            transaction_time_out=500,
            transaction_check_max=3,
            timer_roll_window_slot=self.rng.choice((172_800, 10)),
            mapped_file_size_timer_log=4096,
        )

    def begin(self) -> None:
        # No source is at 0.
        self.live_calmly(WaitingLife.start, lambda life: life.broker.store_message("Zero", 0))

    def finish(self) -> None:
        self.live_calmly(WaitingLife.start, WaitingLife.end)

    def new_life(self, files: FaultyFiles) -> WaitingLife:
        return WaitingLife(self, files)

    def rates(self) -> FaultRates:
        return FaultRates(write=self.rng.choice((0, 0, 0.01)), sync=self.rng.choice((0, 0, 0.02)))

    def arm(self, files: FaultyFiles) -> None:
        rng = self.rng
        operations = rng.choice((-1, -1, rng.randrange(300), rng.randrange(2000)))
        if rng.random() < 0.5:
            files.cut_after = operations
        else:
            files.kill_after = operations

    def next_files(self, rates: FaultRates | None) -> FaultyFiles:
        has_power_failed = self.files is not None and self.files.image is not None
        self.has_lost |= has_power_failed and self.flush == "async"
        return super().next_files(rates)

    def fail(self, files: FaultyFiles) -> None:
        files.cut_power()

    def end(self, life: WaitingLife) -> None:
        if self.rng.random() < self.closed_share:
            life.close()
        if life.files.faults["failed sync"] or self.rng.random() < 0.5:
            life.files.cut_power()
        else:
            life.files.kill()
