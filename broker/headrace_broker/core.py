"""The core of a broker, from which its features are built. ``build_core`` connects its parts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import structlog

from headrace_broker.access.opening import open_access
from headrace_broker.cluster.registration import Registration
from headrace_broker.consumer.conflicts import SubscriptionConflicts
from headrace_broker.consumer.filter_table import FILTER_NAME, FilterTable
from headrace_broker.consumer.groups import ConsumerManager, ProducerManager
from headrace_broker.consumer.locks import QueueLocks
from headrace_broker.consumer.long_polling import LongPolling
from headrace_broker.consumer.offsets import ConsumerOffsets
from headrace_broker.consumer.pull_watch import PullWatch
from headrace_broker.consumer.subscriptions import SubscriptionGroups
from headrace_broker.feature import Feature
from headrace_broker.host_budget import HostBudget
from headrace_broker.inner.delivery import Delivery
from headrace_broker.inner.writer import InnerWriter
from headrace_broker.message_demands import MessageDemands
from headrace_broker.peers.nameservers import Nameservers
from headrace_broker.peers.peers import Peers
from headrace_broker.processors.bulk import BulkProcessor
from headrace_broker.processors.client import warn_of_heartbeat
from headrace_broker.processors.pull import PullProcessor
from headrace_broker.processors.send import SendProcessor
from headrace_broker.queue_directory import QueueDirectory
from headrace_broker.serving.frame_loop import FrameLoop
from headrace_broker.serving.health import Health
from headrace_broker.statictopic.own_queues import OwnQueues
from headrace_broker.statictopic.table import MAPPING_NAME, MappingTable
from headrace_broker.statistics import BrokerStatistics
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.positions import FOLDER, PositionFile, Value
from headrace_broker.topics.table import TopicTable
from headrace_daemon.host_log import HostLog
from headrace_daemon.serving.client_requests import ClientRequests
from headrace_daemon.serving.server import RemotingServer
from headrace_daemon.slices import Fetches, SlicedWork
from headrace_daemon.watchdog import Watchdog
from headrace_protocol.message_ids import UniqKeyGenerator
from headrace_protocol.serving import TURN_S, Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.config import BrokerConfig
    from headrace_broker.store.message_store import MessageStore
    from headrace_daemon.access.opening import OpenedAccess
    from headrace_daemon.audit.audit_log import AuditLog
    from headrace_daemon.metrics.samples import Collect
    from headrace_daemon.metrics.scrapes import Scrapes
    from headrace_daemon.network import Listener, Network
    from headrace_daemon.services import Services
    from headrace_protocol.rights.access import Access

log = structlog.get_logger("headrace.broker")


@dataclass(frozen=True, slots=True)
class Pace:
    """The means to keep the loop responsive: slices, work for threads, and clients' turns.

    turn_s: how long one client is served before the others get their turn, in seconds.
    """

    sliced_work: SlicedWork = field(default_factory=SlicedWork)
    fetches: Fetches = field(default_factory=Fetches)
    turn_s: float = TURN_S


class Surroundings(NamedTuple):
    """Surroundings of a broker. listener: of its port. owns_loop: see RemotingServer.

    rights: the users and their rules; None for those of the settings.
    """

    network: Network
    listener: Listener
    supervisor: Services
    pace: Pace
    owns_loop: bool = False
    rights: OpenedAccess | None = None


class Tables(NamedTuple):
    """The tables in the store's directory. mappings: the queues of static topics."""

    topics: TopicTable
    mappings: MappingTable
    groups: SubscriptionGroups
    offsets: ConsumerOffsets


class Clients(NamedTuple):
    """Producers and consumers. requests: those to clients. long_polling: their held requests."""

    requests: ClientRequests
    long_polling: LongPolling
    consumers: ConsumerManager
    producers: ProducerManager
    locks: QueueLocks


class Serving(NamedTuple):
    """The server, and the means to keep it responsive. scrapes: None without a monitor."""

    network: Network
    listener: Listener
    supervisor: Services
    pace: Pace
    watchdog: Watchdog
    frames: FrameLoop
    server: RemotingServer
    registry: Registry
    scrapes: Scrapes | None


class Messages(NamedTuple):
    """Processors and writers of messages. delays: the demands that make a message wait.

    writer, delivery: serve messages that have waited.
    """

    demands: MessageDemands
    delays: MessageDemands
    sends: SendProcessor
    pulls: PullProcessor
    bulk: BulkProcessor
    writer: InnerWriter
    delivery: Delivery


@dataclass(slots=True, kw_only=True)
class Core:
    """The argument of a feature's ``build``.

    changes: logs the changes that clients make. audit: records administration.
    filters: those that groups have registered.
    own_queues: this broker's queues of static topics. rights: the users and their rules.
    added: the features as one record; empty until all are built.
    """

    config: BrokerConfig
    rights: OpenedAccess
    store: MessageStore
    tables: Tables
    clients: Clients
    filters: FilterTable
    serving: Serving
    messages: Messages
    directory: QueueDirectory
    own_queues: OwnQueues
    peers: Peers
    nameservers: Nameservers
    registration: Registration
    pull_watch: PullWatch
    statistics: BrokerStatistics
    budget: HostBudget
    changes: HostLog
    health: Health
    audit: AuditLog | None
    added: Feature = field(default_factory=Feature)

    def collectors(self, make: Callable[[], Collect]) -> tuple[Collect, ...]:
        """The collector that ``make`` imports and makes; none without a monitor."""
        return (make(),) if self.serving.scrapes is not None else ()

    def file(self, name: str) -> ConfigFile:
        """A file of the store's folder ``config``."""
        return _file(self.config, self.store, name)

    def position(self, owner: str, value_type: type[Value]) -> PositionFile[Value]:
        """The saved position of an owner."""
        path = self.store.root / FOLDER / f"{owner}.json"
        return PositionFile(path, value_type, self.store.fs)


def build_core(config: BrokerConfig, store: MessageStore, around: Surroundings) -> Core:
    """The core, without features; reads the tables and no other file.

    store: loaded and not running; the caller closes it.
    Raises StoreFormatError if a table can't be read, AccessError for users or their settings.
    """
    pace, changes, budget = around.pace, HostLog(log), HostBudget()
    rights = around.rights or open_access(config, store.fs, changes)
    tables = _tables(config, store, budget)
    store.is_batch_topic = tables.topics.is_batched
    filters = FilterTable(config, _file(config, store, FILTER_NAME), store.clock.now_ms, budget)
    clients = _clients(config, tables, filters, budget, changes, pace)
    serving = _serving(config, store, clients, around)
    directory = QueueDirectory(config.broker_name, store, tables.topics)
    statistics = BrokerStatistics()
    watch = PullWatch(clients.consumers, partial(_watched_queues, tables), pace.sliced_work.start)
    messages = _messages(
        config,
        rights.access,
        store,
        tables,
        clients,
        filters,
        directory,
        statistics,
        watch,
        serving,
    )
    peers, nameservers = _peers(config, serving)

    async def before(nameserver: str) -> None:
        for look in core.added.before_registration:
            await look(nameserver)

    core = Core(
        config=config,
        rights=rights,
        store=store,
        tables=tables,
        clients=clients,
        filters=filters,
        serving=serving,
        messages=messages,
        directory=directory,
        peers=peers,
        nameservers=nameservers,
        own_queues=OwnQueues(tables.mappings, store),
        registration=Registration(
            config, nameservers, *tables[:2], before, around.listener.address
        ),
        pull_watch=watch,
        statistics=statistics,
        budget=budget,
        changes=changes,
        audit=_audit_log(config),
        health=_health(serving, clients, lambda: core.added),
    )
    return core


def _health(serving: Serving, clients: Clients, added: Callable[[], Feature]) -> Health:
    return Health(serving.server, clients.long_polling, serving.watchdog, serving.supervisor, added)


def _file(config: BrokerConfig, store: MessageStore, name: str) -> ConfigFile:
    return ConfigFile(config.store_path_root_dir / "config" / name, store.fs)


def _tables(config: BrokerConfig, store: MessageStore, budget: HostBudget) -> Tables:
    file, now_ms = partial(_file, config, store), store.clock.now_ms
    return Tables(
        TopicTable(
            config,
            file("topics.json"),
            now_ms,
            budget,
            lambda: store.commit_log.max_offset,
        ),
        MappingTable(config.broker_name, file(MAPPING_NAME), now_ms),
        SubscriptionGroups(config, file("subscriptionGroup.json"), now_ms, budget),
        ConsumerOffsets(file("consumerOffset.json"), now_ms, budget),
    )


def _watched_queues(tables: Tables, topic: str) -> int:
    """The number of queues whose lack of pulls is reported; a static topic's may be elsewhere."""
    return 0 if tables.mappings.is_static(topic) else tables.topics.readable_queues(topic)


def _clients(
    config: BrokerConfig,
    tables: Tables,
    filters: FilterTable,
    budget: HostBudget,
    changes: HostLog,
    pace: Pace,
) -> Clients:
    run_long = pace.sliced_work.start
    locks, conflicts = QueueLocks(budget), SubscriptionConflicts(config, changes)
    return Clients(
        ClientRequests(),
        LongPolling(run_long),
        ConsumerManager(tables.groups, locks, conflicts, config, run_long, filters.left),
        ProducerManager(run_long),
        locks,
    )


def _serving(
    config: BrokerConfig, store: MessageStore, clients: Clients, around: Surroundings
) -> Serving:
    network, listener, supervisor, pace, owns_loop, _ = around
    watchdog = Watchdog()
    frames, scrapes = _frames(config, store, clients)
    server = RemotingServer(frames, owns_loop=owns_loop)
    registry = Registry(
        server.request_failed,
        run_long=pace.sliced_work.start,
        run_fetch=pace.fetches.start,
        in_turn=partial(frames.in_turn, server),
        turn_s=pace.turn_s,
        answered=clients.requests.answered,
        on_slow=watchdog.note,
        on_late=server.late.note,
    )
    registry.on_refused.append(partial(warn_of_heartbeat, server.host_log))
    return Serving(network, listener, supervisor, pace, watchdog, frames, server, registry, scrapes)


def _frames(
    config: BrokerConfig, store: MessageStore, clients: Clients
) -> tuple[FrameLoop, Scrapes | None]:
    """Without a monitor nothing reads the times of turns, so they are not measured."""
    requests, long_polling, consumers, producers, _ = clients
    on_closed = [each.channel_closed for each in (requests, long_polling, consumers, producers)]
    if config.monitor_port < 0:
        return FrameLoop(store, on_closed), None
    from headrace_broker.metrics.timed_frames import TimedFrameLoop
    from headrace_daemon.metrics.scrapes import Scrapes

    cluster, name = config.broker_cluster_name, config.broker_name
    labels = {"cluster": cluster, "node_id": name, "node_type": "broker"}
    return TimedFrameLoop(store, on_closed), Scrapes(labels)


def _peers(config: BrokerConfig, serving: Serving) -> tuple[Peers, Nameservers]:
    inner = config.access_config().inner
    peers = Peers(serving.network.connect, lambda: config.forward_timeout, credentials=inner)
    nameservers = Nameservers(
        peers, config.broker_cluster_name, config.nameservers, serving.network.names
    )
    peers.find_address = nameservers.find_address
    peers.on_waiting = lambda is_waiting: serving.server.share_loop(is_shared=is_waiting)
    return peers, nameservers


def _audit_log(config: BrokerConfig) -> AuditLog | None:
    if config.audit is None:
        return None
    from headrace_daemon.audit.audit_log import AuditLog

    return AuditLog(f"broker/{config.broker_name}", config.audit)


def _messages(
    config: BrokerConfig,
    access: Access,
    store: MessageStore,
    tables: Tables,
    clients: Clients,
    filters: FilterTable,
    directory: QueueDirectory,
    statistics: BrokerStatistics,
    watch: PullWatch,
    serving: Serving,
) -> Messages:
    topics, host_log = tables.topics, serving.server.host_log
    uniq_keys = UniqKeyGenerator(store.clock.now_ms, os.getpid(), store.settings.store_host[:-4])
    demands = MessageDemands()
    sends = SendProcessor(config, access, store, topics, directory, uniq_keys, demands, statistics)
    pulls = PullProcessor(
        config,
        access,
        topics,
        directory,
        tables.groups,
        clients.consumers,
        tables.offsets,
        clients.long_polling,
        statistics,
        watch,
        filters,
    )
    delivery = Delivery(topics, directory, host_log)
    return Messages(
        demands,
        MessageDemands(),
        sends,
        pulls,
        BulkProcessor(store, sends, pulls, demands, statistics),
        InnerWriter(store, statistics.put, host_log, delivery.redirect),
        delivery,
    )
