"""The broker daemon: opens its store, starts its services, and stops them in order."""

from __future__ import annotations

from contextlib import AsyncExitStack
from time import monotonic
from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker import assembly
from headrace_broker.clock import SystemClock
from headrace_broker.cluster.expected_store import check_never_left, check_store, keep_begun_without
from headrace_broker.core import Pace, Surroundings, build_core
from headrace_broker.serving.readiness import Readiness, State
from headrace_broker.store.errors import LoadInterrupted
from headrace_broker.store.recovery import LoadStage
from headrace_daemon.network import TcpNetwork, listen_with_fast
from headrace_daemon.services import Services, StopStage, finish_all, load_all
from headrace_protocol.drivers.address import pack_host

if TYPE_CHECKING:
    from headrace_broker.clock import Clock
    from headrace_broker.config import BrokerConfig
    from headrace_broker.core import Core
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.recovery import OnProgress
    from headrace_daemon.network import Listener, Network

log = structlog.get_logger("headrace.broker")

_PROGRESS_S = 1.0


class Broker:
    """One broker: a store, and everything that serves it.

    network: where it listens and reaches its nameservers. files: the disk of its store.
    owns_loop: see RemotingServer; for a process that is a broker and nothing else.
    services: supervises the services and counts their unexpected errors.
    readiness: progress of start and stop. monitor_address: serves it over HTTP; "" if disabled.
    on_progress: called in a thread each second of a start, with the stage, the amount done and the
    maximum: queues checked, or bytes of the log read again.
    """

    def __init__(
        self,
        config: BrokerConfig,
        network: Network | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
        *,
        owns_loop: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        """on_progress: None logs the progress."""
        self.config = config
        self._owns_process = owns_loop
        self.address = self.monitor_address = ""
        self.readiness = Readiness()
        self.services = Services()
        self.on_progress = on_progress or log_progress
        self.progress_s = _PROGRESS_S
        self._network = network or TcpNetwork()
        self._clock = clock or SystemClock()
        self._files = files

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, then stop in order; report started with the address once serving.

        Raises, in an ExceptionGroup, OSError (address), StoreError (directory) or IdentityTaken;
        nothing is left open then.
        """
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_set_when_cancelled, stop)
            await nursery.start(self._run_shielded, stop)
            task_status.started(self.address)

    async def _run_shielded(
        self, stop: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until ``stop``; cancelling the broker doesn't change the order of its stop."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                await self._start_monitor(nursery)
                await self._open_and_serve(stop, task_status)
                nursery.cancel_scope.cancel()
        log.info("stopped", broker=self.config.broker_name)
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _start_monitor(self, nursery: trio.Nursery) -> None:
        host, port = self.config.bind_address, self.config.monitor_port
        if port >= 0:
            from headrace_daemon.monitor import Monitor

            port = await self.services.start(nursery, Monitor(self.readiness, host, port).run)
            self.monitor_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            log.info("monitor listening", address=self.monitor_address)

    async def _open_and_serve(self, stop: trio.Event, task_status: trio.TaskStatus[None]) -> None:
        check_store(self.config)
        # Listen first, so that a port in use is reported before a long recovery.
        listener = listen_with_fast(
            self._network,
            self.config.bind_address,
            self.config.listen_port,
            self.config.fast_listen_port,
        )
        try:
            unasked = await check_never_left(self.config, self._network)
            keep_begun_without(self.config, unasked)
            store = await self._open_store(listener, _LoadProgress(self, stop))
            try:
                core = self._build(store, listener)
                await self._recover(core)
                await self._serve(core, stop, task_status)
            finally:
                store.close()
        except LoadInterrupted as error:
            log.info("store not opened", reason=str(error))
        finally:
            listener.close()

    async def _open_store(self, listener: Listener, progress: _LoadProgress) -> MessageStore:
        host = self.config.broker_ip1 or listener.host
        listener.host = host
        self.address = listener.address
        store = assembly.new_store(
            self.config,
            pack_host(host, listener.port),
            self._clock,
            self._files,
            self.services,
            owns_process=self._owns_process,
            on_progress=progress,
        )
        await trio.to_thread.run_sync(store.open)
        return store

    def _build(self, store: MessageStore, listener: Listener) -> Core:
        # Answers that wait for a gate are sent by other tasks, which need the scheduler.
        owns_loop = self._owns_process and store.write_path.confirmation.is_immediate
        around = Surroundings(self._network, listener, self.services, Pace(), owns_loop)
        core = build_core(self.config, store, around)
        assembly.add_features(core)
        return core

    async def _recover(self, core: Core) -> None:
        report = await trio.to_thread.run_sync(core.store.recover, core.added.scans)
        log.info("store open", path=str(self.config.store_path_root_dir), **report.as_log())
        if report.cut_count:
            log.error(
                "log truncated at a damaged record, messages lost",
                path=str(self.config.store_path_root_dir),
                offset=report.log_end,
                whole_records_behind=report.cut_count,
                remedy="restore a copy; after another crash, run headrace store fsck and store copy"
                " before the start: they find such damage and save the records behind it",
            )

    async def _serve(
        self,
        core: Core,
        stop: trio.Event,
        task_status: trio.TaskStatus[None],
    ) -> None:
        store, running = core.store, assembly.connect(core)
        await load_all(running)
        async with AsyncExitStack() as ended, trio.open_nursery() as nursery:
            await self.services.start_all(nursery, running, owns_process=self._owns_process)
            log.info("serving", broker=self.config.broker_name, address=self.address)
            self.readiness.failure = store.failure
            self.readiness.followers = store.followers.report
            if core.serving.scrapes is not None:
                self.readiness.page = core.serving.scrapes.page
            self.readiness.state = State.SERVING
            task_status.started()
            await stop.wait()
            self.readiness.state = State.STOPPING
            # A broker that fails leaves its tables as they are.
            ended.push_async_callback(finish_all, running, StopStage.SAVE, StopStage.COPY)
            await finish_all(running, StopStage.DEPART, StopStage.ANSWER)
            nursery.cancel_scope.cancel()


def log_warnings(warnings: list[str]) -> None:
    """Log the warnings of ``load_config``."""
    for warning in warnings:
        log.warning("check the settings", reason=warning)


async def _set_when_cancelled(event: trio.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        event.set()


class _LoadProgress:
    """Callback of the thread that opens the store: reports progress, and interrupts on a stop."""

    def __init__(self, broker: Broker, stop: trio.Event) -> None:
        self._broker = broker
        self._stop = stop
        self._reported_at = monotonic()

    def __call__(self, stage: LoadStage, done: int, most: int) -> None:
        """Report at most once a second. Raises LoadInterrupted once the broker is to stop."""
        readiness = self._broker.readiness
        if stage is LoadStage.QUEUES:
            readiness.done_queues, readiness.queue_count = done, most
        else:
            readiness.done_bytes, readiness.bytes_max = done, most
        if self._stop.is_set():
            raise LoadInterrupted(
                f"stopped after checking {readiness.done_queues} of {readiness.queue_count} queues "
                f"and reading {readiness.done_bytes >> 20} MiB of the log"
            )
        if monotonic() - self._reported_at >= self._broker.progress_s:
            self._reported_at = monotonic()
            self._broker.on_progress(stage, done, most)


def log_progress(stage: LoadStage, done: int, most: int) -> None:
    """Log how far a start is."""
    if stage is LoadStage.QUEUES:
        log.info("checking queues", done=done, of=most)
    else:
        log.info("reading the log", done_mib=done >> 20, at_most_mib=most >> 20)
