"""Daemons that live and die on machines of their own: a network, and a disk for each broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import trio

from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_broker.store.settings import BATCH_UNIT_BYTES, UNIT_BYTES
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from tests.simulation.determinism import START_MS
from tests.simulation.history import History, Life
from tests.simulation.network import FaultyNetwork, LifeNetwork
from tests.support.faulty_files import FaultRates, FaultyFiles, PowerCut, next_life

NAMESERVER = "127.0.0.1:9876"
RESTART_PAUSE_S_MAX = 3.0
FLUSH_INTERVAL_MS = 2000
DISK_RATES = FaultRates(write=0.002, sync=0.004, read=0.05, cold=0.02)


class SimulatedClock:
    """Wall clock and loop's clock as one.

    ahead_ms: grows and falls when somebody sets the wall clock.
    """

    def __init__(self) -> None:
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return START_MS + self.steady_ms() + self.ahead_ms

    def steady_ms(self) -> int:
        return int(trio.current_time() * 1000)


class BrokerMachine:
    """A broker on its disk, started again whenever it has died."""

    def __init__(
        self,
        number: int,
        folder: Path,
        network: FaultyNetwork,
        history: History,
        rates: FaultRates,
    ) -> None:
        self.name = f"broker-{number}"
        self.rng = network.rng
        self.faults: Counter[str] = Counter()
        self.is_up = False
        self.clock = SimulatedClock()
        self.files: FaultyFiles
        self._network = network
        self._history = history
        self._rates = rates
        self._life: Life
        self._life_network: LifeNetwork
        self._scope = trio.CancelScope()
        self._config = BrokerConfig(
            broker_name=self.name,
            bind_address="127.0.0.1",
            listen_port=10911 + number,
            fast_listen_port=0,
            namesrv_addr=NAMESERVER,
            store_path_root_dir=folder / self.name,
            flush_disk_type="SYNC_FLUSH" if history.is_sync else "ASYNC_FLUSH",
            # "Hours", which are seconds here; a limit of the topic leaves the files alone.
            file_reserved_time=int(min(history.reserved_s, 1_000_000)),
            delete_when=";".join(f"{hour:02}" for hour in range(24)),
            clean_resource_interval=1000,
            append_checksums=self.rng.random() < 0.5,
            **random_sizes(self.rng),
        )

    @property
    def life_number(self) -> int:
        """The number of the life that runs, or ran last."""
        return self._history.lives.index(self._life)

    async def run(self) -> None:
        """Live, life after life, until cancelled."""
        before = None
        while True:
            await self._live(before)
            self.is_up = False
            before = self.files
            if before.faults["failed sync"]:
                # What it dropped is in memory as if it were not: a start must not find it.
                before.cut_power()
            self.faults.update(before.faults)
            await trio.sleep(self.rng.random() * RESTART_PAUSE_S_MAX)

    async def _live(self, before: FaultyFiles | None) -> None:
        """One life. Raises what ended it, unless that was a fault."""
        self._life = Life(self.name)
        self._history.lives.append(self._life)
        self._life_network = network = LifeNetwork(self._network)
        root = self._config.store_path_root_dir
        self.files = next_life(root, self.rng, self._rates, before)
        self.files.is_calm = self._network.is_calm
        self.files.on_fault = self._on_fault
        self.files.clock = self.clock
        broker = Broker(self._config, network, self.clock, self.files)
        try:
            with trio.CancelScope() as self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(broker.run)
                    self._life.has_started = True
                    self.is_up = True
        except BaseExceptionGroup as group:
            self._excuse(group)
        # A service that failed runs again, so it must be asked for.
        assert not broker.services.unexpected_errors or self._is_excused()
        if not self.files.is_over:
            self._stopped()

    def _excuse(self, group: BaseExceptionGroup[BaseException]) -> None:
        """Dead, or with a disk that has failed, it may end in any way; else that is a finding."""
        _, rest = group.split((PowerCut, trio.Cancelled))
        if rest is not None and not self._is_excused():
            raise rest
        if not self.files.is_over:
            self.cut_power()

    def _is_excused(self) -> bool:
        faults = self.files.faults
        has_failed = faults["failed write"] or faults["failed sync"] or faults["full disk"]
        return bool(self.files.is_over or has_failed)

    def _stopped(self) -> None:
        """All must be on disk now, whether the machine goes on or not."""
        self._over("stop")
        if self.rng.random() < 0.5:
            self.files.cut_power()
        else:
            self.files.stop()

    def _on_fault(self, fault: str) -> None:
        if fault in {"power cut", "kill"}:
            self._over(fault)
        elif fault == "failed sync":
            self._life.failed_s = self._life.failed_s or trio.current_time()
            self._network.nursery.start_soon(self._end_soon, self.files)

    async def _end_soon(self, files: FaultyFiles) -> None:
        await trio.sleep(self.rng.random())
        if not files.is_over:
            self.rng.choice((self.cut_power, self.kill))()

    def _over(self, how: str) -> None:
        life = self._life
        if not life.end:
            life.end, life.ended_s = how, trio.current_time()
            self._life_network.end()
        elif life.end == "kill":
            life.end = how

    # -- what happens to it ------------------------------------------------------------------------

    def set_calm(self, *, is_calm: bool) -> None:
        """True if the disk is to be good from now on."""
        self.files.is_calm = is_calm
        if is_calm:
            self.files.is_full, self.files.cut_after = False, -1
            self.files.cut_at_sync = False

    @property
    def endings(self) -> list[Callable[[], None]]:
        """All that may end a life, at once or soon."""
        return [
            self.stop,
            self.kill,
            self.cut_power,
            self.cut_power_soon,
            self.cut_power_at_sync,
        ]

    def stop(self) -> None:
        """In order."""
        self._scope.cancel()

    def kill(self) -> None:
        self.files.kill()
        self._scope.cancel()

    def cut_power(self) -> None:
        self.files.cut_power()
        self._scope.cancel()

    def cut_power_soon(self) -> None:
        """In the middle of one of the disk's next operations."""
        self.files.cut_after = self.files.operation_count + self.rng.randrange(40)

    def cut_power_at_sync(self) -> None:
        """Just before something is durable."""
        self.files.cut_at_sync = True


class NameServerMachine:
    """A nameserver, which forgets everything when it is started again."""

    def __init__(self, network: FaultyNetwork) -> None:
        self._network = network
        self._scope = trio.CancelScope()
        self.is_up = False

    async def run(self) -> None:
        """Live, life after life, until cancelled."""
        while True:
            config = NameServerConfig(bind_address="127.0.0.1", listen_port=9876)
            nameserver = NameServer(config, LifeNetwork(self._network))
            with trio.CancelScope() as self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(nameserver.run)
                    self.is_up = True
            self.is_up = False
            await trio.sleep(self._network.rng.random() * RESTART_PAUSE_S_MAX)

    def kill(self) -> None:
        self._network.drop(NAMESERVER)
        self._scope.cancel()


def random_sizes(rng: Random) -> dict[str, Any]:
    """Small files, so that a run fills several of each; short times, so that it flushes often."""
    log_kib, units = rng.choice((8, 32, 256)), rng.choice((10, 300))
    return {
        "mapped_file_size_commit_log": log_kib * 1024,
        "mapped_file_size_consume_queue": UNIT_BYTES * units,
        "mapper_file_size_batch_consume_queue": BATCH_UNIT_BYTES * units,
        "max_hash_slot_num": 50,
        "max_index_num": rng.choice((40, 1000)),
        "max_message_size": 4096,
        "flush_commit_log_thorough_interval": FLUSH_INTERVAL_MS,
        "flush_consume_queue_thorough_interval": 5000,
        # A full disk must not take what is young: the history would miss it.
        "clean_file_forcibly_enable": False,
    }
