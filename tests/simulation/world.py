"""Common parts of all kinds of simulated lives: their world, its driver, and a life's end.

A kind is a model of what must be there, the steps of a life, and promises. All else is here: a
folder, chance and a clock that a seed decides, and a disk (``faulty_files``) on which one life
follows another. Each ends by a stop, a kill or a power cut, at random or at any operation of the
disk. Clusters have the same world, and a network besides (``simulation``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import trio

from headrace_broker.store.errors import StoreError, StoreFormatError
from headrace_broker.store.files import filesystem
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.retention import cleaner
from tests.simulation.determinism import Patches, decided_by, temporary_folder
from tests.simulation.totals import Outcome
from tests.support.broker import forget_brokers
from tests.support.faulty_files import FaultRates, FaultyFiles, PowerCut, next_life
from tests.support.stores import SetClock

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
# Of the disk; what of it is used says how many files of the log have to go.
DISK_FILES = 100
# Of a removed file, given back at a time: files here are small.
FREE_BYTES = 1500
# Enough for the tables of a life; all of it is compared whenever a file is synced or found again.
RESERVE_BYTES = 64 * 1024


class World(NamedTuple):
    """Everything that a seed decides."""

    rng: Random
    folder: Path
    clock: Any
    patches: Patches


class LifeClock(SetClock, trio.abc.Clock):
    """The wall clock, and trio's, which does not jump when that one does."""

    def start_clock(self) -> None:
        """Both stand still until they are moved."""

    def current_time(self) -> float:
        return self.steady_ms() / 1000

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()


async def run_here(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
    """In the place of a thread."""
    return function(*arguments)


class Life:
    """One process from its start to its end; kinds say what it does.

    steps: each may happen at any time, more often if it is there more often.
    """

    store: MessageStore
    steps: list[Callable[[], Any]]

    def __init__(self, lives: Lives[Any], files: FaultyFiles) -> None:
        self.rng: Random = lives.rng
        self.clock: Any = lives.clock
        self.files = files
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Start, and check what the life before has left. Raises PromiseBroken."""

    def live(self, step_count: int) -> None:
        for _ in range(step_count):
            self.rng.choice(self.steps)()

    def close(self) -> None:
        """Stop in order."""
        raise NotImplementedError


LifeT = TypeVar("LifeT", bound=Life)


class Kind:
    """A kind of run that a seed may stand for.

    constants: a module or class, a name in it, and the value that it has during a run.
    """

    name: ClassVar[str]
    clock_type: ClassVar[type[LifeClock]] = LifeClock
    constants: ClassVar[tuple[tuple[Any, str, Any], ...]] = ()

    def __init__(self, world: World) -> None:
        self.rng = world.rng
        self.clock = world.clock
        self.outcome = Outcome(self.name, Counter(), Counter())

    def run(self) -> Outcome:
        """Raises PromiseBroken."""
        raise NotImplementedError

    @classmethod
    def run_seed(cls, seed: int) -> Outcome:
        """Run a seed; returns its outcome. Raises PromiseBroken."""
        clock = cls.clock_type()
        with cls.world(seed, clock, clock.current_time) as world:
            world.patches.put(
                (trio.to_thread, "run_sync", run_here), (cleaner, "FREE_BYTES", FREE_BYTES)
            )
            return cls(world).run()

    @classmethod
    @contextmanager
    def world(cls, seed: int, clock: Any, now_s: Callable[[], float]) -> Iterator[World]:
        """The world of one run. now_s: its time, since any moment."""
        with temporary_folder() as folder, decided_by(seed, now_s) as patches:
            patches.put((filesystem, "RESERVE_BYTES_MAX", RESERVE_BYTES), *cls.constants)
            try:
                yield World(Random(seed), folder, clock, patches)
            finally:
                forget_brokers()


class Lives(Kind, Generic[LifeT]):
    """A folder, what was done to it, and one life after the other. Kinds say what a life is."""

    life_count: ClassVar[int] = 6
    step_counts: ClassVar[range] = range(40)
    # Of lives that nothing else has ended, those that stop in order before their machine ends.
    closed_share: ClassVar[float] = 0.3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.root = world.folder / "store"
        self.files: FaultyFiles | None = None

    # -- what kinds say ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare the lives with faults."""

    def finish(self) -> None:
        """Run the lives without faults that follow, and check. Raises PromiseBroken."""

    def new_life(self, files: FaultyFiles) -> LifeT:
        raise NotImplementedError

    def rates(self) -> FaultRates:
        """Probabilities of failures that a life survives, or is excused by."""
        return FaultRates()

    def arm(self, files: FaultyFiles) -> None:
        """Set an operation of the disk that a life may not survive."""

    def fail(self, files: FaultyFiles) -> None:
        """End the machine of a life that a failure of the disk has ended."""
        files.cut_power_or_kill()

    def end(self, life: LifeT) -> None:
        """End a life that nothing else has ended."""
        if self.rng.random() < self.closed_share:
            life.close()
        life.files.cut_power_or_kill()

    # -- the driver --------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """All lives. Raises PromiseBroken."""
        self.begin()
        for _ in range(self.life_count):
            self.live()
        self.finish()
        return self.outcome

    def live(self) -> None:
        """One life with faults."""
        files = self.next_files(self.rates())
        self.arm(files)
        life = None
        try:
            life = self.new_life(files)
            step_count = self.rng.choice(self.step_counts)
            life.start()
            life.live(step_count)
            self.end(life)
        except PowerCut:
            pass
        except StoreFormatError:
            raise
        except (StoreError, OSError):
            if not (files.faults["failed write"] or files.faults["failed sync"] or files.is_full):
                raise
            self.fail(files)
        finally:
            self.over(life, files)

    def live_calmly(self, *works: Callable[[LifeT], object]) -> None:
        """One life without faults, stopped in order."""
        files = self.next_files(None)
        life = None
        try:
            life = self.new_life(files)
            for work in works:
                work(life)
            life.close()
            files.stop()
        finally:
            self.over(life, files)

    def next_files(self, rates: FaultRates | None) -> FaultyFiles:
        """The disk as the next life finds it, a moment later, so that no file has an old time."""
        self.clock.ms += 1
        self.files = next_life(self.root, self.rng, rates, self.files)
        self.files.clock = self.clock
        return self.files

    def over(self, life: LifeT | None, files: FaultyFiles) -> None:
        self.outcome.faults.update(files.faults)
        self.outcome.counts["lives"] += 1
        self.outcome.counts["operations of the disk"] += files.operation_count
        if life is not None:
            life.store.abandon()
            self.outcome.counts.update(life.counts)
        files.close_all()
