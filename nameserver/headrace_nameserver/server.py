"""The nameserver daemon: wires table, processors, server and expiry together."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from headrace_daemon.access.opening import open_access
from headrace_daemon.metrics.scrapes import NotServing, Scrapes
from headrace_daemon.network import TcpNetwork
from headrace_daemon.quotas.processor import QuotaProcessor
from headrace_daemon.quotas.quotas import Quotas
from headrace_daemon.quotas.table import QuotaTable
from headrace_daemon.saved_table import PlainFile
from headrace_daemon.services import Service, Services
from headrace_daemon.serving.server import RemotingServer, ServerLimits
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_daemon.slices import Fetches, SlicedWork
from headrace_daemon.watchdog import Watchdog
from headrace_nameserver.broker_names import BrokerNames
from headrace_nameserver.config import check_users_path
from headrace_nameserver.departed_file import DepartedFile
from headrace_nameserver.kv_config import KVConfig
from headrace_nameserver.processors import NameServerProcessor, Policy
from headrace_nameserver.routes import RouteTable
from headrace_nameserver.settings_requests import SettingsRequests
from headrace_protocol.outages import Outages
from headrace_protocol.quotas import NAMESERVER_LIMITS
from headrace_protocol.serving import TURN_S, Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_daemon.audit.audit_log import AuditLog
    from headrace_daemon.network import Listener, Network
    from headrace_daemon.quotas.metering import Metering
    from headrace_nameserver.brokers import LiveBroker
    from headrace_nameserver.config import NameServerConfig
    from headrace_protocol.frame import Frame

log = structlog.get_logger("headrace.nameserver")

# This daemon in the file of its users, and the cluster that it is, as rules name it.
OWNER: Final = "nameserver"
# Upper bound on the wait: a broker that registers meanwhile may request a shorter timeout.
_EXPIRE_PERIOD_S = 1.0
_REPORT_PERIOD_S = 5.0
# Between two looks at whether departed brokers must be saved, and as a multiple of the last save.
_SAVE_PERIOD_S = 1.0
_SAVE_SHARE = 20


class NameServer:
    """A nameserver. Routes are kept in memory only, departed brokers also in a file.

    network: the network to listen on.
    address: the host:port that it serves, once it runs; monitor_address: that of its monitor.

    Raises ConfigError for an unreadable file.
    """

    def __init__(self, config: NameServerConfig, network: Network | None = None) -> None:
        self.config = config
        self.address = self.monitor_address = ""
        self._network = network or TcpNetwork()
        self._supervisor = Services()
        self._table = RouteTable(
            broker_timeout_ms=config.broker_timeout_ms,
            support_acting_master=config.support_acting_master,
            departed_ms=config.departed_broker_hours * 3_600_000,
        )
        check_users_path(config)
        self._departed_file = DepartedFile(path) if (path := config.departed_path) else None
        if self._departed_file:
            self._departed_file.load(0, 0)  # an unreadable file is an error before any start
        self._saved_changes = 0
        self._file_thread = trio.CapacityLimiter(1)
        self._outages = Outages(log.warning)
        processor = NameServerProcessor(
            self._table,
            KVConfig(Path(config.kv_config_path) if config.kv_config_path else None),
            _now_ms,
            Policy(config.order_message_enable, config.checks_own_address),
            broker_names=_broker_names(config),
        )
        self._log = processor.log
        self._server = RemotingServer(self)
        self._audit = _audit_log(config)
        self._sliced_work = SlicedWork()
        self._fetches = Fetches()
        self._registry = Registry(
            self._server.request_failed,
            run_long=self._sliced_work.start,
            run_fetch=self._fetches.start,
            turn_s=TURN_S,
            on_late=self._server.late.note,
        )
        processor.register(self._registry)
        SettingsRequests(config).register(self._registry)
        self._begin = processor.begin
        path = config.quotas_path
        file = None if path is None else PlainFile(path)
        table = QuotaTable(file, {"user": NAMESERVER_LIMITS})
        QuotaProcessor(table, self._log).register(self._registry)
        # None while there are no quotas.
        self._meter: Metering | None = None
        self._quotas = Quotas(table, partial(self._new_metering, table), self._set_meter)
        if self._audit is not None:
            self._audit.watch(self._registry, self._server)
            processor.on_broker = self._audit.broker_changed
        self._watchdog = Watchdog()
        self._scrapes: Scrapes | None = None
        self._is_serving = False

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; reports its address once started. Raises OSError."""
        listener = self._network.listen(self.config.bind_address, self.config.listen_port)
        self.address = listener.address
        # Not in the constructor: the daemon first raises its limit of open files.
        self._server.limits = ServerLimits()
        self._load()
        self._open_access()
        self._begin()
        try:
            async with trio.open_nursery() as nursery:
                await self._start_monitor(nursery)
                await self._supervisor.start_all(
                    nursery, self._services(listener), owns_process=True
                )
                log.info("serving", address=self.address)
                self._is_serving = True
                task_status.started(self.address)
        finally:
            self._is_serving = False
            listener.close()

    async def _start_monitor(self, nursery: trio.Nursery) -> None:
        host, port = self.config.bind_address, self.config.monitor_port
        if port < 0:
            return
        from headrace_daemon.metrics.daemon_metrics import DaemonMetrics
        from headrace_daemon.monitor import Monitor
        from headrace_nameserver.metrics import NameServerMetrics

        self._scrapes = Scrapes({"node_id": self.address, "node_type": "nameserver"})
        self._scrapes.collectors = (
            DaemonMetrics(
                self._server,
                self._registry,
                self._watchdog,
                self._unexpected_error_count,
                self._audit,
            ),
            NameServerMetrics(self._table, _now_ms),
            self._quotas.collect,
        )
        port = await self._supervisor.start(nursery, Monitor(self, host, port).run)
        self.monitor_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("monitor listening", address=self.monitor_address)

    def _unexpected_error_count(self) -> int:
        return self._supervisor.unexpected_errors + self._server.unexpected_errors

    def report(self) -> tuple[bool, dict[str, Any]]:
        """See Monitored."""
        return self._is_serving, {"state": "serving" if self._is_serving else "stopping"}

    def metrics(self) -> bytes:
        """See Monitored."""
        if self._scrapes is None:
            raise NotServing("the nameserver is starting")
        return self._scrapes.page()

    def _services(self, listener: Listener) -> tuple[Service, ...]:
        """The services, in starting order."""
        watched = (
            ()
            if self._scrapes is None
            else (
                Service(self._watchdog.run, is_awaited=True),
                Service(self._scrapes.run),
            )
        )
        return (
            *watched,
            *((Service(self._audit.run, is_awaited=True),) if self._audit is not None else ()),
            Service(self._expire),
            Service(self._report),
            Service(self._save_departed),
            Service(self._quotas.run),
            Service(self._sliced_work.run),
            Service(self._fetches.run),
            # The server contains errors of each client; any other error must end the nameserver.
            Service(
                partial(self._network.serve, listener, self._server),
                is_awaited=True,
                is_supervised=False,
            ),
        )

    async def _report(self) -> None:
        """Report suppressed log lines and reset the limit of every host."""
        while True:
            await trio.sleep(_REPORT_PERIOD_S)
            self._log.report()

    def _load(self) -> None:
        """Remember the brokers that the file names, until they register. Raises ConfigError."""
        if self._departed_file:
            for broker in self._departed_file.load(_now_ms(), _wall_ms()):
                self._table.departed.add(broker)

    def _open_access(self) -> None:
        """Serve requests about users, and judge all of them. Raises AccessError."""
        config = self.config
        path = config.users_path or Path("users.json")
        opened = open_access(config.access_config(), path, OWNER, OWNER, self._log)
        opened.requests.register(self._registry)
        if opened.sessions is not None:
            opened.sessions.register(self._registry)
        self._server.is_user = opened.users.users.__contains__
        if not opened.access.is_open:
            self._registry.guard(opened.access.check)
        if self._audit is not None:
            if opened.sessions is not None:
                opened.sessions.on_outcome = self._audit.authenticated
            self._audit.restrict(self._registry)

    async def _save_departed(self) -> None:
        """Save departed brokers after each change; the changes of a second together."""
        try:
            while True:
                await trio.sleep(_SAVE_PERIOD_S)
                if save := self._unsaved():
                    began = trio.current_time()
                    await trio.to_thread.run_sync(save, limiter=self._file_thread)
                    await trio.sleep(_SAVE_SHARE * (trio.current_time() - began))
        finally:
            if save := self._unsaved():
                save()

    def _unsaved(self) -> Callable[[], None] | None:
        """Saves what has changed, in any thread; None if nothing has."""
        file, count = self._departed_file, self._table.change_count
        if file is None or count == self._saved_changes:
            return None
        known, clock_ms = self._table.known(), _wall_ms() - _now_ms()

        def save() -> None:
            try:
                file.save(known, clock_ms)
            except OSError as error:
                self._outages.failed(str(file.path), error)
            else:
                self._outages.worked(str(file.path))
                self._saved_changes = count

        return save

    async def _expire(self) -> None:
        while True:
            await trio.sleep(self._until_expiry_s())
            for broker in self._table.expire(_now_ms()):
                self._log_lost(broker, f"silent for {broker.timeout_ms} ms")
                assert isinstance(broker.channel, ServerChannel)
                broker.channel.close("its broker is silent")

    def _until_expiry_s(self) -> float:
        expiry_ms = self._table.next_expiry_ms()
        if expiry_ms is None:
            return _EXPIRE_PERIOD_S
        return min(max(0, expiry_ms - _now_ms()) / 1000, _EXPIRE_PERIOD_S)

    # -- frames ------------------------------------------------------------------------------------

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        """See FrameHandler."""
        if self._meter is not None:
            return self._meter.handle(channel, frames, self._registry.handle)
        return self._registry.handle(channel, frames)

    def _new_metering(self, table: QuotaTable) -> Metering:
        from headrace_daemon.quotas.metering import Metering

        return Metering(table, self._registry, self._server.hold_back)

    def _set_meter(self, meter: Metering | None) -> None:
        self._meter = meter

    def finish_turn(self) -> None:
        """See FrameHandler. Nothing to do: every request was answered at once."""

    def replied(self) -> None:
        """See FrameHandler. Nothing to do: no work was deferred."""

    def closed(self, channel: ServerChannel) -> None:
        """Drop the brokers of a closed connection: a live broker keeps its connection open."""
        if self._meter is not None:
            self._meter.closed(channel)
        for broker in self._table.close_channel(channel, _now_ms()):
            self._log_lost(broker, "connection closed")

    def _log_lost(self, broker: LiveBroker, reason: str) -> None:
        client, name, address = broker.channel.address, broker.name, broker.address
        self._log.warning(client, "broker lost", broker=name, address=address, reason=reason)
        if self._audit is not None:
            self._audit.broker_changed("lost", broker.channel, name, address)


def _audit_log(config: NameServerConfig) -> AuditLog | None:
    if config.audit is None:
        return None
    from headrace_daemon.audit.audit_log import AuditLog

    return AuditLog(f"nameserver/{config.bind_address}:{config.listen_port}", config.audit)


def _broker_names(config: NameServerConfig) -> BrokerNames | None:
    path = config.users_path
    if path is None or not config.authentication_enabled:
        return None
    return BrokerNames(KVConfig(path.with_name("brokerNames.json")))


def _now_ms() -> int:
    return int(trio.current_time() * 1000)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
