"""Assembly of a broker: a core, its features, and one connection for each field of their records.

A feature is a line in ``FEATURES``; see ``Feature`` for what it may add.
tests/broker/test_seams.py adds a whole one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from headrace_broker.access import feature as access
from headrace_broker.assignment import feature as assignment
from headrace_broker.compaction import feature as compaction
from headrace_broker.consumer.unconsumed import UnconsumedOffsets
from headrace_broker.feature import merge
from headrace_broker.metrics import feature as metrics
from headrace_broker.pop import feature as pop
from headrace_broker.processors import feature as processors
from headrace_broker.quotas import feature as quotas
from headrace_broker.reply import feature as reply
from headrace_broker.retry import feature as retry
from headrace_broker.schedule import feature as schedule
from headrace_broker.serving.upkeep import ClientExpiry, expire_locks
from headrace_broker.settings.of_store import store_settings
from headrace_broker.staging import feature as staging
from headrace_broker.statictopic import feature as statictopic
from headrace_broker.store.message_store import MessageStore
from headrace_broker.tiered import feature as tiered
from headrace_broker.timer import feature as timer
from headrace_broker.topics.attributes import topic_limits
from headrace_broker.transaction import feature as transaction
from headrace_daemon.services import Service, StopStage

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.clock import Clock
    from headrace_broker.config import BrokerConfig
    from headrace_broker.core import Core
    from headrace_broker.feature import Feature
    from headrace_broker.inner.writer import Deliver, FindTarget
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.recovery import OnProgress
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_daemon.services import Services

# In the order in which they are asked: the first place, source or demand that applies decides. No
# feature imports another; one that is switched off imports nothing. Rights are judged first.
FEATURES: Final[tuple[Callable[[Core], Feature], ...]] = (
    access.build,
    metrics.build,
    processors.build,
    quotas.build,
    assignment.build,
    compaction.build,
    retry.build,
    reply.build,
    pop.build,
    transaction.build,
    schedule.build,
    timer.build,
    staging.build,
    statictopic.build,
    tiered.build,
)


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
        store_settings(config, store_host),
        clock,
        files,
        use_threads=owns_process,
        start_soon=supervisor.start_soon,
        on_progress=on_progress,
    )


def add_features(core: Core) -> None:
    """Build all features; the store is open and not recovered, which takes their scans.

    Raises StoreFormatError if a position can't be read.
    """
    core.added = merge(build(core) for build in FEATURES)


def connect(core: Core) -> tuple[Service, ...]:
    """Connect the features, once the store is recovered; returns what to run, in that order."""
    core.tables.topics.recovered(core.store.topics())
    _connect_messages(core)
    _connect_store(core)
    _connect_requests(core)
    return _services(core)


def _connect_messages(core: Core) -> None:
    added, messages = core.added, core.messages
    core.directory.ask(added.places, added.sources)
    messages.demands.set(added.demands)
    messages.delays.set(demand for demand in added.demands if demand.is_delay)
    messages.writer.find_target = _find_target(added.targets)


def _find_target(targets: tuple[FindTarget, ...]) -> FindTarget:
    """Each is asked for the queue that the one before it has found here."""
    if len(targets) == 1:
        return targets[0]

    def find(topic: str, queue_id: int) -> int | Deliver:
        found: int | Deliver = queue_id
        for target in targets:
            found = target(topic, found) if isinstance(found, int) else found
        return found

    return find


def _connect_store(core: Core) -> None:
    store, topics, added = core.store, core.tables.topics, core.added
    topics.subscribe(lambda _topic: core.registration.topics_changed())
    topics.rules.extend(rule.check_plain_change for rule in added.topic_rules)
    store.write_path.on_published(core.clients.long_polling.arrived)
    for followed in added.followers:
        following = store.followers.add(followed.follower, followed.save_s, followed.holds_log)
        followed.on_following(following)
    store.connect(
        unconsumed=partial(_unconsumed, core),
        carriers={each.topic: each.carry_over for each in added.inner_consumers if each.carry_over},
        topic_limits=lambda: topic_limits(topics.all()),
        # With synchronous flush, a message on disk is useful only if its topic is too.
        wait_tables_saved=topics.saved.wait_saved,
        answering=core.serving.server.joined,
    )


def _unconsumed(core: Core) -> LowestUnconsumed:
    lowest: LowestUnconsumed = UnconsumedOffsets(
        core.tables.offsets,
        core.tables.groups,
        core.clients.consumers,
        {each.topic: each for each in core.added.inner_consumers},
        core.own_queues.later,
    )
    for change in core.added.unconsumed:
        lowest = change(lowest)
    return lowest


def _connect_requests(core: Core) -> None:
    serving, added = core.serving, core.added
    serving.frames.connect(serving.registry, serving.server.hold_back, _end_turn(core))
    if core.audit is not None:
        core.audit.watch(serving.registry, serving.server)
    for processor in added.processors:
        processor.register(serving.registry)
    for add_guard in added.guards:
        add_guard(serving.registry)
    if core.audit is not None:
        core.audit.restrict(serving.registry)
    if serving.scrapes is not None:
        serving.scrapes.collectors = added.collectors


def _end_turn(core: Core) -> Callable[[], bool]:
    ends = core.added.turn_ends
    return ends[0] if len(ends) == 1 else lambda: sum(end() for end in ends) > 0


def _services(core: Core) -> tuple[Service, ...]:
    """In starting order; see ``Service`` for the order in which they finish."""
    serving = core.serving
    return (
        Service(serving.watchdog.run, is_awaited=True, needs_process=True),
        *((Service(core.audit.run, is_awaited=True),) if core.audit is not None else ()),
        # Table writers. An embedded broker has none: its tables are small, its clock may be fake.
        *(
            Service(saved.run, finish=saved.finish, needs_process=True)
            for saved in core.added.tables
        ),
        # It supervises its own tasks.
        Service(core.store.run, is_awaited=True, is_supervised=False),
        Service(core.peers.run),
        *core.added.services,
        Service(serving.pace.sliced_work.run),
        Service(serving.pace.fetches.run),
        Service(serving.frames.relieve_pressure),
        Service(partial(core.statistics.run, core.store.clock.now_ms)),
        *_client_services(core),
        # The server handles the errors of each client; any other error must end the broker.
        Service(
            partial(serving.network.serve, serving.listener, serving.server),
            is_awaited=True,
            is_supervised=False,
        ),
        Service(
            core.registration.run,
            finish=core.registration.unregister,
            stage=StopStage.DEPART,
            is_awaited=True,
        ),
    )


def _client_services(core: Core) -> tuple[Service, ...]:
    clients, clock, offsets = core.clients, core.store.clock, core.tables.offsets
    long_polling, consumers = clients.long_polling, clients.consumers
    expiry = ClientExpiry(consumers, clients.producers, core.changes, clock)
    return (
        Service(clients.requests.run),
        Service(long_polling.run, finish=long_polling.answer_all, stage=StopStage.ANSWER),
        Service(consumers.run),
        Service(core.pull_watch.run),
        Service(expiry.run),
        Service(partial(expire_locks, consumers, clock)),
        Service(
            partial(offsets.run, lambda: core.config.flush_consumer_offset_interval / 1000),
            finish=offsets.persist,
        ),
    )
