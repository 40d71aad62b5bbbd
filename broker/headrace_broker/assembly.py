"""Assembly of the broker: creates each part and passes it the other parts that it needs.

A feature adds its own modules, and a line here in each list that it joins: ``takers``,
``followers``, ``places``, ``sources``, ``demands``, ``processors``, ``services``, ``add_guards``,
``inner_consumers``, ``runtime_info``, ``collectors``.
tests/broker/test_seams.py adds one of each.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import structlog

from headrace_broker.client_processors import admin_processors, client_processors
from headrace_broker.compaction.lookups import KeyLookups
from headrace_broker.compaction.requests import CompactionRequests
from headrace_broker.compaction.service import Compaction
from headrace_broker.consumer.conflicts import SubscriptionConflicts
from headrace_broker.consumer.groups import ConsumerManager, ProducerManager
from headrace_broker.consumer.locks import QueueLocks
from headrace_broker.consumer.long_polling import LongPolling
from headrace_broker.consumer.offsets import ConsumerOffsets
from headrace_broker.consumer.own_groups import guard_own_groups
from headrace_broker.consumer.pull_watch import PullWatch
from headrace_broker.consumer.subscriptions import SubscriptionGroups
from headrace_broker.consumer.unconsumed import InnerConsumer, UnconsumedOffsets
from headrace_broker.expected_store import BegunWithout
from headrace_broker.frame_loop import FrameLoop
from headrace_broker.health import Health
from headrace_broker.host_budget import HostBudget
from headrace_broker.message_demands import Demand, MessageDemands
from headrace_broker.metrics.broker_metrics import ServingMetrics, StoreMetrics, TrafficMetrics
from headrace_broker.metrics.feature_metrics import CompactionMetrics, StaticTopicMetrics
from headrace_broker.metrics.lag import GroupMetrics
from headrace_broker.metrics.tier_metrics import TierMetrics
from headrace_broker.metrics.timed_frames import TimedFrameLoop
from headrace_broker.parts import Pace, Parts, Processor
from headrace_broker.peer_places import peer_place
from headrace_broker.peers.nameservers import Nameservers
from headrace_broker.peers.peers import Peers
from headrace_broker.processors.bulk import BulkProcessor
from headrace_broker.processors.client import warn_of_heartbeat
from headrace_broker.processors.pull import PullProcessor
from headrace_broker.processors.query import QueryProcessor
from headrace_broker.processors.send import SendProcessor, rejection
from headrace_broker.processors.staging import StagingProcessor
from headrace_broker.queue_directory import QueueDirectory
from headrace_broker.registration import Registration
from headrace_broker.retry.dead_letters import DeadLetters, is_retry_topic
from headrace_broker.retry.processor import SendBackProcessor
from headrace_broker.schedule.processor import ScheduleProcessor
from headrace_broker.staging.service import Staging
from headrace_broker.static_topics import StaticTopics, static_topics
from headrace_broker.statictopic.changes import StaticTopicChanges
from headrace_broker.statictopic.cleanup import MappingCleanup
from headrace_broker.statictopic.fence import Fence
from headrace_broker.statictopic.left_groups import LeftGroups
from headrace_broker.statictopic.own_queues import OwnQueues
from headrace_broker.statictopic.staged import StagedQueues
from headrace_broker.statictopic.table import MAPPING_NAME, MappingTable
from headrace_broker.statictopic.undecided import UndecidedQueues
from headrace_broker.statistics import BrokerStatistics
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.message_store import MessageStore
from headrace_broker.tiered.access.decisions import TierDecisions
from headrace_broker.tiered.access.plan import TierPlanRequests
from headrace_broker.tiered.access.status import TierStatusRequests
from headrace_broker.tiered.access.tiered_storage import TieredStorage
from headrace_broker.tiered.container.tier import Home
from headrace_broker.timer.processor import TimerProcessor
from headrace_broker.topics.attributes import topic_limits
from headrace_broker.topics.table import TopicTable
from headrace_broker.transaction.processor import TransactionProcessor
from headrace_broker.upkeep import ClientExpiry, expire_locks
from headrace_broker.waiting_services import waiting_services
from headrace_daemon.host_log import HostLog
from headrace_daemon.metrics.daemon_metrics import DaemonMetrics
from headrace_daemon.metrics.scrapes import Scrapes
from headrace_daemon.services import Service, StopStage
from headrace_daemon.serving.client_requests import ClientRequests
from headrace_daemon.serving.server import RemotingServer
from headrace_daemon.watchdog import Watchdog
from headrace_protocol.access import restrict
from headrace_protocol.message import INNER_BATCH, TRANSACTION_MASK, UniqKeyGenerator
from headrace_protocol.serving import Registry
from headrace_protocol.system_topics import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace_broker.clock import Clock
    from headrace_broker.config import BrokerConfig
    from headrace_broker.persistence import SavedFile
    from headrace_broker.queue_directory import FindPlace, FindSource
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.followers.follower_work import Follower
    from headrace_broker.store.log.takers import Taker
    from headrace_broker.store.recovery import OnProgress
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_daemon.metrics.samples import Collect
    from headrace_daemon.network import Listener, Network
    from headrace_daemon.services import Services
    from headrace_daemon.serving.server_channel import ServerChannel

log = structlog.get_logger("headrace.broker")


def new_store(
    config: BrokerConfig,
    store_host: bytes,
    clock: Clock,
    files: Files | None,
    supervisor: Services,
    *,
    owns_process: bool,
    on_progress: OnProgress,
) -> MessageStore:
    """The store of a broker that clients reach at ``store_host``; not loaded yet."""
    return MessageStore(
        config.store_settings(store_host),
        clock,
        files,
        use_threads=owns_process,
        start_soon=supervisor.start_soon,
        on_progress=on_progress,
        more_takers=takers(config),
    )


def assemble(
    config: BrokerConfig,
    store: MessageStore,
    network: Network,
    listener: Listener,
    supervisor: Services,
    *,
    pace: Pace | None = None,
    owns_loop: bool = False,
) -> Parts:
    """The parts of a broker, connected but not running; reads the tables and no other file.

    store: loaded and not running; the caller closes it. listener: where the broker will serve.
    owns_loop: see RemotingServer. Raises StoreFormatError if a table or a position can't be read.
    """
    pace, changes = pace or Pace(), HostLog(log)
    budget, statistics, watchdog = HostBudget(), BrokerStatistics(), Watchdog()
    topics, mappings, groups, offsets = _tables(config, store, budget)
    long_polling, client_requests = LongPolling(pace.sliced_work.start), ClientRequests()
    locks, consumers, producers = _clients(config, groups, budget, changes, pace)
    of_clients = (client_requests, long_polling, consumers, producers)
    frames, server, registry = _server(config, store, of_clients, pace, watchdog, owns_loop)
    of_fence = (mappings, topics, store, long_polling)
    peers, nameservers, fence, registration = _cluster(config, network, listener, server, *of_fence)
    of_groups = (offsets, groups, consumers, long_polling)
    static = static_topics(config, peers, nameservers, mappings, store, *of_groups)
    compaction = Compaction(config, store, topics, peers, OwnQueues(mappings))
    tier = _tier(config, store, topics)
    directory = _directory(config, store, topics, static, compaction, tier)
    staging = _staging(config, store, mappings, statistics, budget, supervisor, pace)
    of_changes = (offsets, groups, long_polling, staging, changes, registration, registry)
    of_waiting = (topics, directory, offsets, producers, statistics, budget, server.host_log)
    parts = Parts(
        config=config,
        store=store,
        network=network,
        listener=listener,
        supervisor=supervisor,
        pace=pace,
        watchdog=watchdog,
        statistics=statistics,
        changes=changes,
        budget=budget,
        topics=topics,
        peers=peers,
        fence=fence,
        undecided=UndecidedQueues(mappings, topics, store.clock.now_ms),
        mapping_changes=_mapping_changes(static, topics, directory, store, *of_changes),
        static=static,
        compaction=compaction,
        tier=tier,
        directory=directory,
        groups=groups,
        offsets=offsets,
        consumers=consumers,
        producers=producers,
        pull_watch=PullWatch(consumers, _watched_queues(topics, mappings), pace.sliced_work.start),
        locks=locks,
        long_polling=long_polling,
        client_requests=client_requests,
        staging=staging,
        dead_letters=DeadLetters(topics, groups, locks),
        waiting=waiting_services(config, store, *of_waiting, static.deliveries),
        registration=registration,
        frames=frames,
        server=server,
        registry=registry,
        scrapes=_new_scrapes(config),
    )
    return _serve(parts)


def _tier(config: BrokerConfig, store: MessageStore, topics: TopicTable) -> TieredStorage | None:
    home = Home(config.broker_cluster_name, config.broker_name)
    settings = config.tier_settings(config.store_path_root_dir, home)
    if settings is None:
        return None
    return TieredStorage(settings, store, topics, lambda: not config.delete_untiered_enable)


def _watched_queues(topics: TopicTable, mappings: MappingTable) -> Callable[[str], int]:
    """The number of queues whose lack of pulls is reported; a static topic's may be elsewhere."""
    return lambda topic: 0 if mappings.is_static(topic) else topics.readable_queues(topic)


def _clients(
    config: BrokerConfig,
    groups: SubscriptionGroups,
    budget: HostBudget,
    changes: HostLog,
    pace: Pace,
) -> tuple[QueueLocks, ConsumerManager, ProducerManager]:
    locks, conflicts = QueueLocks(budget), SubscriptionConflicts(config, changes)
    consumers = ConsumerManager(groups, locks, conflicts, config, pace.sliced_work.start)
    return locks, consumers, ProducerManager(pace.sliced_work.start)


def _server(
    config: BrokerConfig,
    store: MessageStore,
    of_clients: tuple[ClientRequests, LongPolling, ConsumerManager, ProducerManager],
    pace: Pace,
    watchdog: Watchdog,
    owns_loop: bool,
) -> tuple[FrameLoop, RemotingServer, Registry]:
    """of_clients: what must know when a client disconnects."""
    frames = _new_frame_loop(config, store, [each.channel_closed for each in of_clients])
    server = RemotingServer(frames, owns_loop=owns_loop)
    return frames, server, _registry(server, frames, of_clients[0], pace, watchdog)


def _serve(parts: Parts) -> Parts:
    """Connect the parts, route the requests, and guard them."""
    _connect(parts)
    for processor in processors(parts):
        processor.register(parts.registry)
    add_guards(parts)
    return parts


def _cluster(
    config: BrokerConfig,
    network: Network,
    listener: Listener,
    server: RemotingServer,
    mappings: MappingTable,
    topics: TopicTable,
    store: MessageStore,
    long_polling: LongPolling,
) -> tuple[Peers, Nameservers, Fence, Registration]:
    """The parts that ask other daemons for themselves or for others."""
    peers = Peers(network.connect, lambda: config.forward_timeout)
    nameservers = Nameservers(peers, config.broker_cluster_name, config.nameservers)
    peers.find_address = nameservers.find_address
    peers.on_waiting = lambda is_waiting: server.share_loop(is_shared=is_waiting)
    fence = Fence(mappings, topics, store, long_polling, nameservers)
    begun = BegunWithout(config, nameservers, store.flusher.stop_writing)

    async def before(nameserver: str) -> None:
        await begun.look(nameserver)
        await fence.look(nameserver)

    registration = Registration(
        config, peers, nameservers, topics, mappings, before, listener.address, ha_address=""
    )
    return peers, nameservers, fence, registration


def _directory(
    config: BrokerConfig,
    store: MessageStore,
    topics: TopicTable,
    static: StaticTopics,
    compaction: Compaction,
    tier: TieredStorage | None,
) -> QueueDirectory:
    found = places(static), sources(compaction, tier)
    return QueueDirectory(config.broker_name, store, topics, *found)


def _mapping_changes(
    static: StaticTopics,
    topics: TopicTable,
    directory: QueueDirectory,
    store: MessageStore,
    offsets: ConsumerOffsets,
    groups: SubscriptionGroups,
    long_polling: LongPolling,
    staging: Staging,
    changes: HostLog,
    registration: Registration,
    registry: Registry,
) -> StaticTopicChanges:
    return StaticTopicChanges(
        static.mappings,
        topics,
        directory,
        store,
        offsets,
        groups,
        long_polling,
        staging,
        static.founders,
        static.workers,
        changes,
        registration,
        registry,
    )


def _tables(
    config: BrokerConfig, store: MessageStore, budget: HostBudget
) -> tuple[TopicTable, MappingTable, SubscriptionGroups, ConsumerOffsets]:
    folder, now_ms = config.store_path_root_dir / "config", store.clock.now_ms

    def file(name: str) -> ConfigFile:
        return ConfigFile(folder / name, store.fs)

    return (
        TopicTable(
            config,
            file("topics.json"),
            now_ms,
            budget,
            lambda: store.commit_log.max_offset,
            store.topics(),
        ),
        MappingTable(config.broker_name, file(MAPPING_NAME), now_ms),
        SubscriptionGroups(config, file("subscriptionGroup.json"), now_ms, budget),
        ConsumerOffsets(file("consumerOffset.json"), now_ms, budget),
    )


def _registry(
    server: RemotingServer,
    frames: FrameLoop,
    client_requests: ClientRequests,
    pace: Pace,
    watchdog: Watchdog,
) -> Registry:
    return Registry(
        server.request_failed,
        run_long=pace.sliced_work.start,
        run_fetch=pace.fetches.start,
        serve_again=partial(frames.serve_again, server),
        turn_s=pace.turn_s,
        answered=client_requests.answered,
        on_slow=watchdog.note,
        on_refused=partial(warn_of_heartbeat, server.host_log),
    )


def _staging(
    config: BrokerConfig,
    store: MessageStore,
    mappings: MappingTable,
    statistics: BrokerStatistics,
    budget: HostBudget,
    supervisor: Services,
    pace: Pace,
) -> Staging:
    return Staging(
        store,
        config.broker_name,
        config.staged_reserved_ms,
        statistics.put,
        StagedQueues(mappings, store),
        budget,
        supervisor.start_soon,
        pace.sliced_work.start,
    )


def _connect(parts: Parts) -> None:
    """Connect parts that depend on each other."""
    topics, store = parts.topics, parts.store
    end_turn = parts.waiting.transactions.write_ops
    parts.frames.connect(parts.registry, parts.server.hold_back, end_turn)
    topics.subscribe(lambda _topic: parts.registration.topics_changed())
    topics.rules.append(parts.mapping_changes.check_plain_change)
    parts.static.mappings.subscribe(topics.lookups_changed)
    parts.mapping_changes.restore_topics()
    store.write_path.on_published(parts.long_polling.arrived)
    for follower in followers(parts):
        following = store.followers.add(follower)
        if follower is parts.compaction.follower:
            parts.compaction.follow(following)
    if parts.scrapes is not None:
        parts.scrapes.collectors = collectors(parts)
    store.connect(
        unconsumed=partial(_unconsumed, parts),
        carriers={TIMER_TOPIC: parts.waiting.timers.carry_over},
        topic_limits=lambda: topic_limits(topics.all()),
        # With synchronous flush, a message on disk is useful only if its topic is too.
        wait_tables_saved=topics.saved.wait_saved,
        answering=parts.server.joined,
    )


def _unconsumed(parts: Parts) -> LowestUnconsumed:
    lowest = UnconsumedOffsets(
        parts.offsets,
        parts.groups,
        parts.consumers,
        inner_consumers(parts),
        parts.compaction.queues.wants,
        OwnQueues(parts.static.mappings).later,
    )
    return lowest if parts.tier is None else parts.tier.unconsumed(lowest)


# -- messages and queues ---------------------------------------------------------------------------


def takers(config: BrokerConfig) -> tuple[Taker, ...]:  # noqa: ARG001 - for features
    """Additional readers of the log's rows, in step with the appends; see ``Taker``."""
    return ()


def followers(parts: Parts) -> tuple[Follower, ...]:
    """Readers of whole queues in the background; see ``Follower``."""
    return (parts.compaction.follower,)


def inner_consumers(parts: Parts) -> dict[str, InnerConsumer]:
    """By topic, the services that messages wait for; their log files stay until then."""
    return {
        SCHEDULE_TOPIC: InnerConsumer("delayed messages", parts.waiting.schedule.next_offset),
        TIMER_TOPIC: InnerConsumer("timers", parts.waiting.timers.next_offset),
        HALF_TOPIC: InnerConsumer("undecided transactions", parts.waiting.transactions.next_offset),
    }


def places(static: StaticTopics) -> tuple[FindPlace, ...]:
    """Functions that find where a queue is served; see ``QueueDirectory``."""
    return (peer_place, static.mappings.reject_unusable, static.places.place)


def sources(compaction: Compaction, tier: TieredStorage | None) -> tuple[FindSource, ...]:
    """Functions that find where a queue served here is read; see ``QueueDirectory``."""
    return (compaction.find_source, *(() if tier is None else (tier.find_source,)))


def demands(parts: Parts) -> tuple[Demand, ...]:
    """The table of demands, in the order in which they apply; see ``Demand``."""
    return (
        Demand(
            "delete markers with a body",
            matches_topic=parts.compaction.demand.matches,
            apply=parts.compaction.demand.serve,
            takes_empty=True,
            quick=parts.compaction.find_check,
        ),
        Demand("retries", matches_topic=is_retry_topic, apply=parts.dead_letters.serve),
        Demand("inner batches", sys_flags=INNER_BATCH),
        Demand(
            "transactional messages",
            ("TRAN_MSG",),
            TRANSACTION_MASK,
            apply=parts.waiting.transactions.demand.serve,
            admit=parts.waiting.transactions.demand.admit,
        ),
        *delays(parts),
    )


def delays(parts: Parts) -> tuple[Demand, ...]:
    """The demands to wait; a message of a transaction waits once it is committed."""
    return (
        Demand("delayed messages", ("DELAY",), apply=parts.waiting.schedule.demand.serve),
        Demand(
            "messages with a delivery time",
            ("TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS"),
            apply=parts.waiting.timer_demand.serve,
        ),
    )


# -- requests --------------------------------------------------------------------------------------


def add_guards(parts: Parts) -> None:
    """Add the checks that requests must pass, each with one call; see ``Registry.guard``."""
    restrict(parts.registry, parts.config.anonymous_access)
    guard_own_groups(parts.registry)
    parts.static.connect(parts.registry)


def processors(parts: Parts) -> tuple[Processor, ...]:
    """All processors of requests."""
    return (
        *_message_processors(parts),
        *client_processors(parts),
        *admin_processors(parts, _health(parts)),
    )


def _message_processors(parts: Parts) -> tuple[Processor, ...]:
    config, store, topics, statistics = parts.config, parts.store, parts.topics, parts.statistics
    uniq_keys = UniqKeyGenerator(store.clock.now_ms, os.getpid(), store.settings.store_host[:-4])
    table = MessageDemands(demands(parts))
    sends = SendProcessor(config, store, topics, parts.directory, uniq_keys, table, statistics)
    pulls = PullProcessor(
        config,
        topics,
        parts.directory,
        parts.groups,
        parts.consumers,
        parts.offsets,
        parts.long_polling,
        statistics,
        parts.pull_watch,
    )
    bulk = BulkProcessor(store, sends, pulls, table, statistics)
    compaction = parts.compaction
    lookups = KeyLookups(store, topics, parts.directory, compaction.queues, compaction.index_builds)
    tier = parts.tier
    return (
        sends,
        pulls,
        bulk,
        StagingProcessor(store, bulk, parts.staging),
        SendBackProcessor(
            store,
            topics,
            parts.groups,
            statistics,
            parts.dead_letters,
            parts.waiting.schedule.demand.serve,
            sends.reply_confirmed,
            rejection,
            parts.server.host_log,
        ),
        ScheduleProcessor(parts.waiting.schedule),
        TimerProcessor(
            store,
            topics,
            parts.waiting.timers,
            config.broker_name,
            lambda: config.recall_message_enable,
            lambda: config.timer_max_delay_sec,
            sends.reply_confirmed,
            rejection,
        ),
        TransactionProcessor(
            store,
            parts.waiting.transactions,
            parts.waiting.writer,
            parts.waiting.delivery,
            MessageDemands(delays(parts)),
            parts.static.deliveries.find_target,
            sends.reply_confirmed,
            rejection,
        ),
        lookups,
        QueryProcessor(store, parts.directory, lookups, tier.lookups if tier else None),
        CompactionRequests(topics, compaction),
        TierStatusRequests(tier.state if tier else None),
        TierPlanRequests(tier.state.reader if tier else None, topics),
        TierDecisions(tier.state if tier else None),
    )


def runtime_info(parts: Parts) -> tuple[Callable[[], Mapping[str, str]], ...]:
    """What features add to the numbers of GET_BROKER_RUNTIME_INFO."""
    return (
        parts.store.followers.runtime_info,
        parts.waiting.schedule.runtime_info,
        parts.waiting.timers.runtime_info,
        parts.waiting.transactions.runtime_info,
        parts.waiting.delivery.runtime_info,
        parts.dead_letters.runtime_info,
        parts.pull_watch.runtime_info,
        parts.static.runtime_info,
        parts.mapping_changes.runtime_info,
        parts.undecided.runtime_info,
        parts.compaction.runtime_info,
        *(() if parts.tier is None else (parts.tier.runtime_info,)),
    )


def _health(parts: Parts) -> Health:
    topics = parts.topics
    saved_files = (topics.saved, topics.incarnations.saved, parts.groups.saved, *_mappings(parts))
    return Health(
        parts.server,
        parts.long_polling,
        parts.watchdog,
        parts.supervisor,
        runtime_info(parts),
        saved_files,
    )


# -- metrics ---------------------------------------------------------------------------------------


def collectors(parts: Parts) -> tuple[Collect, ...]:
    """Collectors of metrics, in the order of the page; see ``Collect``."""
    store, topics, offsets, consumers = parts.store, parts.topics, parts.offsets, parts.consumers
    unconsumed = UnconsumedOffsets(offsets, parts.groups, consumers)
    return (
        DaemonMetrics(
            parts.server, parts.registry, parts.watchdog, _health(parts).unexpected_errors
        ),
        ServingMetrics(
            parts.config, topics, parts.groups, parts.producers, parts.long_polling, parts.frames
        ),
        StoreMetrics(store),
        TrafficMetrics(parts.statistics, topics),
        GroupMetrics(store, topics, parts.directory, offsets, consumers, unconsumed),
        CompactionMetrics(parts.compaction.totals),
        StaticTopicMetrics(parts.static),
        *(() if parts.tier is None else (TierMetrics(parts.tier.state),)),
    )


def _new_scrapes(config: BrokerConfig) -> Scrapes | None:
    if config.monitor_port < 0:
        return None
    return Scrapes(
        {
            "cluster": config.broker_cluster_name,
            "node_id": config.broker_name,
            "node_type": "broker",
        }
    )


def _new_frame_loop(
    config: BrokerConfig,
    store: MessageStore,
    on_closed: Iterable[Callable[[ServerChannel], None]],
) -> FrameLoop:
    """Without a monitor nothing reads the times of turns, so they are not measured."""
    return (FrameLoop if config.monitor_port < 0 else TimedFrameLoop)(store, on_closed)


# -- services --------------------------------------------------------------------------------------


def services(parts: Parts) -> tuple[Service, ...]:
    """The services in starting order; see ``Service`` for the order in which they finish."""
    clock = parts.store.clock
    expiry = ClientExpiry(parts.consumers, parts.producers, parts.changes, clock)
    return (
        Service(parts.watchdog.run, is_awaited=True, needs_process=True),
        *_saved_files(parts),
        Service(parts.fence.run, parts.fence.load),
        Service(parts.undecided.run),
        Service(_mapping_cleanup(parts).run),
        *((Service(parts.scrapes.run),) if parts.scrapes is not None else ()),
        # These two supervise their own tasks.
        Service(parts.store.run, is_awaited=True, is_supervised=False),
        Service(parts.staging.run, parts.staging.load, is_awaited=True, is_supervised=False),
        Service(
            parts.compaction.schedule.run, parts.compaction.load, finish=parts.compaction.finish
        ),
        Service(parts.peers.run),
        Service(parts.compaction.rebuilds.run),
        Service(parts.compaction.index_builds.run),
        *(() if parts.tier is None else parts.tier.services()),
        *_waiting_services(parts),
        Service(parts.pace.sliced_work.run),
        Service(parts.pace.fetches.run),
        Service(parts.client_requests.run),
        Service(parts.static.relay.blocks.run),
        Service(parts.static.founders.run),
        Service(parts.static.forwarding.run),
        Service(partial(parts.statistics.run, clock.now_ms)),
        Service(
            parts.long_polling.run, finish=parts.long_polling.answer_all, stage=StopStage.ANSWER
        ),
        Service(parts.frames.relieve_pressure),
        Service(parts.consumers.run),
        Service(parts.pull_watch.run),
        Service(expiry.run),
        Service(partial(expire_locks, parts.consumers, clock)),
        Service(
            partial(parts.offsets.run, lambda: parts.config.flush_consumer_offset_interval / 1000),
            finish=parts.offsets.persist,
        ),
        *(() if parts.tier is None else (parts.tier.tables_service(),)),
        # The server handles the errors of each client; any other error must end the broker.
        Service(
            partial(parts.network.serve, parts.listener, parts.server),
            is_awaited=True,
            is_supervised=False,
        ),
        Service(
            parts.registration.run,
            finish=parts.registration.unregister,
            stage=StopStage.DEPART,
            is_awaited=True,
        ),
    )


def _waiting_services(parts: Parts) -> tuple[Service, ...]:
    waiting = parts.waiting
    schedule, timers, transactions = waiting.schedule, waiting.timers, waiting.transactions
    return (
        Service(schedule.run, schedule.load, finish=schedule.finish),
        Service(schedule.run_saving),
        Service(timers.run, timers.load, finish=timers.finish),
        Service(timers.run_saving),
        Service(transactions.run, transactions.load, finish=transactions.finish),
        Service(transactions.run_looking),
        Service(transactions.run_writing),
        Service(transactions.run_saving),
    )


def _mapping_cleanup(parts: Parts) -> MappingCleanup:
    return MappingCleanup(
        parts.static.mappings,
        parts.store,
        parts.peers,
        parts.mapping_changes.is_changing,
        inner_consumers(parts),
        LeftGroups(parts.static.mappings.broker_name, parts.offsets, parts.peers),
        parts.directory.source_to_list,
    )


def _saved_files(parts: Parts) -> tuple[Service, ...]:
    """Table writers. An embedded broker has none: its tables are small, its clock may be fake."""
    topics = parts.topics
    files = (*_mappings(parts), topics.incarnations.saved, topics.saved, parts.groups.saved)
    return tuple(Service(saved.run, finish=saved.finish, needs_process=True) for saved in files)


def _mappings(parts: Parts) -> tuple[SavedFile, SavedFile]:
    """The files of static topics."""
    return parts.static.mappings.saved, parts.static.mappings.marks.saved
