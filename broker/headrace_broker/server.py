"""The broker daemon, put together: store, services, processors, server, registration."""

from __future__ import annotations

import os
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker.clock import SystemClock
from headrace_broker.consumer.groups import ConsumerManager, ProducerManager
from headrace_broker.consumer.locks import QueueLocks
from headrace_broker.consumer.long_polling import LongPolling
from headrace_broker.consumer.offsets import ConsumerOffsets
from headrace_broker.consumer.subscriptions import SubscriptionGroups
from headrace_broker.consumer.unconsumed import UnconsumedLook
from headrace_broker.host_budget import HostBudget
from headrace_broker.monitor import Monitor, Readiness, State
from headrace_broker.processors.admin_broker import AdminBrokerProcessor
from headrace_broker.processors.admin_groups import AdminGroupsProcessor
from headrace_broker.processors.admin_topics import AdminTopicsProcessor
from headrace_broker.processors.bulk import BulkProcessor
from headrace_broker.processors.client import ClientProcessor
from headrace_broker.processors.pull import PullProcessor
from headrace_broker.processors.query import QueryProcessor
from headrace_broker.processors.send import SendProcessor
from headrace_broker.processors.send_back import SendBackProcessor
from headrace_broker.processors.staging import StagingProcessor
from headrace_broker.registration import Registration
from headrace_broker.staging.service import Staging
from headrace_broker.statistics import BrokerStatistics
from headrace_broker.store.config_file import ConfigFile
from headrace_broker.store.errors import LoadInterrupted
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.recovery import LoadStage
from headrace_broker.topic_attributes import topic_limits
from headrace_broker.topics import TopicTable
from headrace_protocol.access import restrict
from headrace_protocol.drivers.host_log import HostLog
from headrace_protocol.drivers.logs import dropped_log_lines
from headrace_protocol.drivers.network import TcpNetwork
from headrace_protocol.drivers.server import RemotingServer, pack_host
from headrace_protocol.drivers.services import Services
from headrace_protocol.drivers.slices import Fetches, SlicedWork
from headrace_protocol.drivers.watchdog import Watchdog
from headrace_protocol.message import UniqKeyGenerator
from headrace_protocol.serving import TURN_S, Registry

if TYPE_CHECKING:
    from headrace_broker.clock import Clock
    from headrace_broker.config import BrokerConfig
    from headrace_broker.persistence import SavedFile
    from headrace_broker.store.files import Files
    from headrace_broker.store.recovery import OnProgress
    from headrace_protocol.drivers.network import Listener, Network
    from headrace_protocol.drivers.server import ServerChannel
    from headrace_protocol.frame import Frame

log = structlog.get_logger("headrace.broker")

_EXPIRE_S = 10.0
_STOP_TIMEOUT_S = 3.0
_PRESSURE_TIMEOUT_S = 2.0
_PRESSURE_LOOK_S = 0.01
_PROGRESS_S = 1.0


class Broker:
    """One broker: a store, and everything that serves it.

    network: where it listens and where its nameservers are. files: the disk of its store.
    owns_loop: see RemotingServer; for a process that is a broker and nothing else.
    services: runs its services, and counts their unexpected errors.
    readiness: where it stands. monitor_address: where that is told over HTTP, if it is.
    on_progress: called each second of a start, in a thread, with the stage that it is at, how much
    of that is done and the most that there is to do: queues looked at, bytes of the log read anew.
    """

    def __init__(
        self,
        config: BrokerConfig,
        network: Network | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
        *,
        owns_loop: bool = False,
    ) -> None:
        self.config = config
        self._owns_process = owns_loop
        # With sync flush answers come from a thread, by way of the scheduler.
        self._owns_loop = owns_loop and not config.is_sync_flush
        self.address = self.monitor_address = ""
        self.readiness = Readiness()
        self.services = Services()
        self.on_progress: OnProgress = _log_progress
        self._network = network or TcpNetwork()
        self._clock = clock or SystemClock()
        self._files = files

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, then stop in order; started with the address when sends are taken.

        Raises, in an ExceptionGroup, OSError (address), StoreError (directory) or IdentityTaken;
        nothing is left open.
        """
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_set_when_cancelled, stop)
            await nursery.start(self._run_shielded, stop)
            task_status.started(self.address)

    async def _run_shielded(
        self, stop: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until ``stop``; the order of stopping is kept even when the broker is cancelled."""
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
            port = await self.services.start(nursery, Monitor(self.readiness, host, port).run)
            self.monitor_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            log.info("monitor", address=self.monitor_address)

    async def _open_and_serve(self, stop: trio.Event, task_status: trio.TaskStatus[None]) -> None:
        # The address first: a port in use must not cost a recovery.
        listener = self._network.listen(self.config.bind_address, self.config.listen_port)
        try:
            store = await self._open_store(listener, _LoadProgress(self, stop))
            try:
                await self._serve(store, listener, stop, task_status)
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
        settings = self.config.store_settings(pack_host(host, listener.port))
        store = MessageStore(settings, self._clock, self._files)
        store.works_aside = self._owns_process
        store.on_progress = progress
        report = await trio.to_thread.run_sync(store.load)
        log.info("store open", path=str(self.config.store_path_root_dir), **report.as_log())
        if report.cut_count:
            log.error(
                "the log was cut at a damaged record, messages are lost",
                path=str(self.config.store_path_root_dir),
                offset=report.log_end,
                whole_records_behind=report.cut_count,
                remedy="restore a copy; after the next crash, headrace store fsck and store copy"
                " before the start find such damage and save what lies behind it",
            )
        return store

    async def _serve(
        self,
        store: MessageStore,
        listener: Listener,
        stop: trio.Event,
        task_status: trio.TaskStatus[None],
    ) -> None:
        parts = _Parts(
            self.config,
            store,
            self._clock,
            self._network,
            listener,
            self.services,
            owns_loop=self._owns_loop,
        )
        for kind, names in parts.topics.kinds().items():
            log.warning(
                "kept for Apache RocketMQ, not served in full", kind=kind.value, topics=names
            )
        await trio.to_thread.run_sync(parts.staging.load)
        start, start_soon = self.services.start, self.services.start_soon
        async with trio.open_nursery() as nursery:
            if self._owns_process:
                await start(nursery, parts.watchdog.run)
                # Embedded, where tables are small and clocks may be a test's, no thread writes.
                start_soon(nursery, parts.topics.saved.run)
                start_soon(nursery, parts.topics.incarnations.saved.run)
                start_soon(nursery, parts.groups.saved.run)
            # Both supervise their own tasks.
            await nursery.start(store.run)
            await nursery.start(parts.staging.run)
            start_soon(nursery, parts.sliced_work.run)
            start_soon(nursery, parts.fetches.run)
            start_soon(nursery, parts.statistics.run, self._clock.now_ms)
            start_soon(nursery, parts.long_polling.run)
            start_soon(nursery, parts.relieve_pressure)
            start_soon(nursery, parts.consumers.run)
            start_soon(nursery, parts.expire_clients)
            start_soon(nursery, parts.persist_offsets)
            # Unsupervised: the server guards each client; any other error of it must end the
            # broker.
            await nursery.start(self._network.serve, listener, parts.server)
            await start(nursery, parts.registration.run)
            log.info("serving", broker=self.config.broker_name, address=self.address)
            self.readiness.failure = store.failure
            self.readiness.followers = store.followers.report
            self.readiness.state = State.SERVING
            task_status.started()
            await stop.wait()
            self.readiness.state = State.STOPPING
            with trio.move_on_after(_STOP_TIMEOUT_S):
                await parts.registration.unregister()
            parts.long_polling.answer_all()
            nursery.cancel_scope.cancel()
        with ExitStack() as tables:  # run in reverse; a failure skips none
            tables.callback(parts.offsets.persist)
            tables.callback(parts.groups.saved.finish)
            tables.callback(parts.topics.saved.finish)
            tables.callback(parts.topics.incarnations.saved.finish)


def log_warnings(warnings: list[str]) -> None:
    """Log the warnings of ``load_config``."""
    for warning in warnings:
        log.warning("setting ignored", reason=warning)


async def _set_when_cancelled(event: trio.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        event.set()


class _LoadProgress:
    """Called by the thread that opens the store: says how far it is, and ends it on demand."""

    def __init__(self, broker: Broker, stop: trio.Event) -> None:
        self._broker = broker
        self._stop = stop
        self._said_at = monotonic()

    def __call__(self, stage: LoadStage, done: int, most: int) -> None:
        """Raises LoadInterrupted once the broker is to stop."""
        readiness = self._broker.readiness
        if stage is LoadStage.QUEUES:
            readiness.done_queues, readiness.queue_count = done, most
        else:
            readiness.done_bytes, readiness.bytes_max = done, most
        if self._stop.is_set():
            raise LoadInterrupted(
                f"stopped after {readiness.done_queues} of {readiness.queue_count} queues were "
                f"looked at and {readiness.done_bytes >> 20} MiB of the log were read"
            )
        if monotonic() - self._said_at >= _PROGRESS_S:
            self._said_at = monotonic()
            self._broker.on_progress(stage, done, most)


def _log_progress(stage: LoadStage, done: int, most: int) -> None:
    if stage is LoadStage.QUEUES:
        log.info("looking at the queues", done=done, of=most)
    else:
        log.info("reading the log", done_mib=done >> 20, at_most_mib=most >> 20)


class _Parts:
    """The services of a running broker; hands the server's frames to the processors."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        clock: Clock,
        network: Network,
        listener: Listener,
        services: Services,
        *,
        owns_loop: bool,
    ) -> None:
        self._store = store
        self._services = services
        self._clock = clock
        self._config = config
        folder = config.store_path_root_dir / "config"
        self.statistics = BrokerStatistics()
        # Logs the changes that clients make.
        self.changes = HostLog(log)
        self.watchdog = Watchdog()
        self.sliced_work = SlicedWork()
        self.fetches = Fetches()
        self.long_polling = LongPolling()
        self.long_polling.run_long = self.sliced_work.start
        store.on_touched = self.long_polling.arrived
        self.server = RemotingServer(self, owns_loop=owns_loop)
        now_ms = clock.now_ms
        budget = HostBudget()
        self.topics = TopicTable(
            config, ConfigFile(folder / "topics.json", store.seam), now_ms, budget
        )
        self.groups = SubscriptionGroups(
            config, ConfigFile(folder / "subscriptionGroup.json", store.seam), now_ms, budget
        )
        self.offsets = ConsumerOffsets(
            ConfigFile(folder / "consumerOffset.json", store.seam), now_ms, budget
        )
        self.consumers = ConsumerManager(self.groups)
        self.consumers.run_long = self.sliced_work.start
        self.producers = ProducerManager()
        self.producers.run_long = self.sliced_work.start
        self.staging = Staging(
            store, config.broker_name, config.staged_reserved_ms, self.statistics.put, budget
        )
        store.start_soon = self.staging.start_soon = services.start_soon
        store.cleaner.look_at_groups = self._look_at_groups
        store.cleaner.topic_limits = lambda: topic_limits(self.topics.all())
        self.locks = QueueLocks(budget)
        self.registration = Registration(
            config, config.nameservers, network, self.topics, listener.address, ha_address=""
        )
        self.topics.on_change = lambda _topic: self.registration.topics_changed()
        # With sync flush a message on disk is of use only with its topic.
        store.flusher.others_saved = self.topics.saved.saved
        store.flusher.answering = self.server.joined
        self.registry = self._registry()
        self._producers_of_batch: list[ServerChannel] = []
        self._held_back: list[ServerChannel] = []
        self._under_pressure = trio.Event()

    def _look_at_groups(self) -> UnconsumedLook:
        return UnconsumedLook(self.offsets, self.groups, self.consumers)

    def _registry(self) -> Registry:
        registry = Registry(self.server.request_failed)
        registry.run_long = self.sliced_work.start
        registry.run_fetch = self.fetches.start
        registry.turn_s = TURN_S
        registry.on_slow = self.watchdog.note
        now_ms = self._clock.now_ms
        uniq_keys = UniqKeyGenerator(now_ms, os.getpid(), self._store.store_host[:-4])
        sends = SendProcessor(self._config, self._store, self.topics, uniq_keys, self.statistics)
        pulls = PullProcessor(
            self._config,
            self._store,
            self.topics,
            self.groups,
            self.consumers,
            self.offsets,
            self.long_polling,
            self.statistics,
        )
        bulk = BulkProcessor(self._store, sends, pulls, self.statistics)
        for processor in (
            sends,
            pulls,
            bulk,
            StagingProcessor(self._store, bulk, self.staging),
            SendBackProcessor(self.server.host_log),
            QueryProcessor(self._store, self.topics),
            ClientProcessor(
                self._store,
                self.topics,
                self.groups,
                self.consumers,
                self.producers,
                self.offsets,
                self.locks,
                now_ms,
            ),
            *self._admin_processors(),
        ):
            processor.register(registry)
        restrict(registry, self._config.anonymous_access)
        return registry

    def _admin_processors(
        self,
    ) -> tuple[AdminTopicsProcessor, AdminGroupsProcessor, AdminBrokerProcessor]:
        return (
            AdminTopicsProcessor(
                self._config,
                self._store,
                self.topics,
                self.offsets,
                self.long_polling,
                self.statistics,
                self.changes,
                self.registration.when_told,
            ),
            AdminGroupsProcessor(
                self._config,
                self._store,
                self.topics,
                self.groups,
                self.consumers,
                self.producers,
                self.offsets,
                self.statistics,
                self._clock.now_ms,
                self.changes,
            ),
            AdminBrokerProcessor(
                self._config,
                self._store,
                self.topics,
                self.offsets,
                self.statistics,
                self._clock.now_ms,
                self.changes,
                self.health,
            ),
        )

    # -- frames ------------------------------------------------------------------------------------

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        """See FrameHandler."""
        store = self._store
        store.begin_batch()
        end = store.max_physical_offset
        try:
            return self.registry.handle(channel, frames)
        finally:
            # Also when something that can't be read came after what was stored.
            if store.max_physical_offset != end:
                self._producers_of_batch.append(channel)

    def finish_batch(self) -> None:
        """Bring what the batch stored into the log."""
        if self._producers_of_batch:
            self._store.write_out()

    def replied(self) -> None:
        """Dispatch what the batch stored, and answer the pulls that waited for it."""
        producers, self._producers_of_batch = self._producers_of_batch, []
        if producers:
            self._dispatch()
            if self._store.pressure():
                self._hold_back(producers)

    def _dispatch(self) -> None:
        self.long_polling.arrived(self._store.dispatch())

    def _hold_back(self, producers: list[ServerChannel]) -> None:
        for channel in producers:
            self.server.hold_back(channel, is_held_back=True)
        self._held_back += producers
        self._under_pressure.set()

    def closed(self, channel: ServerChannel) -> None:
        """Forget a client that is gone."""
        self.long_polling.channel_closed(channel)
        self.consumers.channel_closed(channel)
        self.producers.channel_closed(channel)

    def health(self) -> dict[str, str]:
        """What clients hold, and what kept them waiting; for the monitor."""
        stall = self.watchdog.longest
        return {
            "connectionCount": str(len(self.server.channels)),
            "heldPullCount": str(self.long_polling.held_count),
            # Of the whole event loop: of a broker in somebody's program, with the program's own.
            "taskCount": str(trio.lowlevel.current_statistics().tasks_living),
            "heldBytes": str(self.server.held_bytes),
            "longestLoopStallMs": f"{stall.ms:.1f}",
            "longestLoopStallCpuMs": f"{stall.cpu_ms:.1f}",
            "longestLoopStallRan": stall.ran,
            "loopStallCount": str(self.watchdog.stall_count),
            "longestGarbageCollectionMs": f"{self.watchdog.longest_collection_ms:.1f}",
            "droppedLogLines": str(dropped_log_lines()),
            **self._store.followers.runtime_info(),
            "unexpectedErrors": str(
                self._services.unexpected_errors
                + self.server.unexpected_errors
                + sum(file.unexpected_errors for file in self._saved_files())
            ),
        }

    def _saved_files(self) -> tuple[SavedFile, ...]:
        return self.topics.saved, self.topics.incarnations.saved, self.groups.saved

    # -- services ----------------------------------------------------------------------------------

    async def relieve_pressure(self) -> None:
        """Let producers go on when dispatch has caught up, or when they have waited long enough.

        Those that waited in vain fill the rest of the ring and then get SYSTEM_BUSY.
        """
        while True:
            await self._under_pressure.wait()
            with trio.move_on_after(_PRESSURE_TIMEOUT_S):
                while self._store.pressure():
                    await trio.sleep(_PRESSURE_LOOK_S)
                    self._dispatch()
            if stage := self._store.pressure():
                log.warning("dispatch is behind, sends will be refused", stage=stage)
            self._under_pressure = trio.Event()
            held_back, self._held_back = self._held_back, []
            for channel in held_back:
                self.server.hold_back(channel, is_held_back=False)

    async def expire_clients(self) -> None:
        """Forget clients whose heartbeats stopped, and locks that were not renewed."""
        while True:
            await trio.sleep(_EXPIRE_S)
            self.consumers.expire(self._clock.now_ms())
            self.producers.expire(self._clock.now_ms())
            self.sliced_work.start(self.locks.expire(self._clock.now_ms()))
            self.changes.report()

    async def persist_offsets(self) -> None:
        """Write consumer offsets when they have changed."""
        while True:
            await trio.sleep(self._config.flush_consumer_offset_interval / 1000)
            if (snapshot := self.offsets.take_snapshot()) is not None:
                try:
                    await trio.to_thread.run_sync(self.offsets.save_snapshot, snapshot)
                except OSError as error:
                    log.error("offsets not saved, trying on", reason=str(error))
