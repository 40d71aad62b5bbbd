"""Static topics as a feature."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace_broker.feature import Feature
from headrace_broker.statictopic.changes import StaticTopicChanges
from headrace_broker.statictopic.cleanup import MappingCleanup
from headrace_broker.statictopic.close import wake_held
from headrace_broker.statictopic.deliver import Deliveries
from headrace_broker.statictopic.fence import Fence
from headrace_broker.statictopic.forward import Forwarding
from headrace_broker.statictopic.founders import Founders
from headrace_broker.statictopic.groups import StaticGroups
from headrace_broker.statictopic.key_lookups import StaticKeyLookups
from headrace_broker.statictopic.leaders import Leaders
from headrace_broker.statictopic.left_groups import LeftGroups
from headrace_broker.statictopic.locks import StaticLocks
from headrace_broker.statictopic.places import StaticPlaces
from headrace_broker.statictopic.positions import StaticPositions
from headrace_broker.statictopic.reader import StaticReader
from headrace_broker.statictopic.remote_queue import RemoteReader
from headrace_broker.statictopic.requests import StaticRequests
from headrace_broker.statictopic.traffic import StaticTraffic
from headrace_broker.statictopic.undecided import UndecidedQueues
from headrace_broker.statictopic.work import Workers
from headrace_broker.topics.rules import QueueMoves
from headrace_daemon.services import Service

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.core import Core
    from headrace_daemon.metrics.samples import Collect
    from headrace_protocol.serving import Registry


class _Shared(NamedTuple):
    """Parts that serve requests for queues elsewhere."""

    forwarding: Forwarding
    remote: RemoteReader
    leaders: Leaders
    positions: StaticPositions
    workers: Workers


def build(core: Core) -> Feature:
    """See ``Feature``."""
    topics, mappings, _, _ = core.tables
    shared = _shared(core)
    forwarding, remote, leaders, positions, workers = shared
    founders = Founders(core.config.broker_name, core.nameservers.find_infos, core.peers)
    changes = _changes(core, founders, workers)
    changes.restore_topics()
    fence = Fence(mappings, topics, core.store, core.clients.long_polling, core.nameservers)
    undecided = UndecidedQueues(mappings, topics, core.store.clock.now_ms)
    places = StaticPlaces(leaders, partial(StaticReader, leaders, remote), positions)
    traffic = StaticTraffic(mappings, remote, forwarding)
    return Feature(
        places=(mappings.reject_unusable, places.place),
        targets=(Deliveries(leaders, core.own_queues, core.peers).find_target,),
        topic_rules=(changes,),
        before_registration=(fence.look,),
        guards=_guards(core, shared),
        processors=(changes,),
        services=(
            Service(fence.run, fence.load),
            Service(undecided.run),
            Service(_cleanup(core, changes).run),
            Service(remote.run),
            Service(founders.run),
            Service(forwarding.run),
        ),
        collectors=core.collectors(partial(_collector, traffic)),
        runtime_info=(traffic.runtime_info, changes.runtime_info, undecided.runtime_info),
    )


def _shared(core: Core) -> _Shared:
    config, peers, consumers = core.config, core.peers, core.clients.consumers

    def timeout_ms() -> int:
        return config.forward_timeout

    subscription = consumers.subscription_for_pull
    forwarding = Forwarding(peers, core.nameservers.find_infos, subscription, timeout_ms)
    remote = RemoteReader(peers, subscription, lambda: core.store.clock.steady_ms() / 1000)
    workers = Workers(config.broker_name, peers)
    forwarding.registry = workers.registry = core.serving.registry
    leaders = Leaders(core.tables.mappings, peers.known_address, forwarding.pass_on)
    forwarding.leaders = leaders
    positions = StaticPositions(core.tables.offsets, leaders, peers)
    core.tables.mappings.subscribe(core.tables.topics.lookups_changed)
    return _Shared(forwarding, remote, leaders, positions, workers)


def _changes(core: Core, founders: Founders, workers: Workers) -> StaticTopicChanges:
    topics, mappings, groups, offsets = core.tables
    return StaticTopicChanges(
        mappings,
        topics,
        core.directory,
        core.store,
        offsets,
        groups,
        core.clients.long_polling,
        QueueMoves(lambda: core.added.moves),
        founders,
        workers,
        core.changes,
        core.registration,
    )


def _cleanup(core: Core, changes: StaticTopicChanges) -> MappingCleanup:
    return MappingCleanup(
        core.tables.mappings,
        core.store,
        core.peers,
        changes.is_changing,
        lambda: core.added.inner_consumers,
        LeftGroups(core.config.broker_name, core.tables.offsets, core.peers),
        core.directory.source_to_list,
    )


def _guards(core: Core, shared: _Shared) -> tuple[Callable[[Registry], None], ...]:
    """Guards that take over requests for queues of static topics."""
    leaders, workers, positions = shared.leaders, shared.workers, shared.positions
    store, clients, config = core.store, core.clients, core.config
    groups = StaticGroups(
        leaders,
        workers,
        positions,
        core.tables.groups,
        clients.consumers,
        core.tables.offsets,
        lambda: config.use_server_side_reset_offset,
        partial(wake_held, store, clients.long_polling),
    )
    return (
        StaticRequests(leaders, workers, positions).add_to,
        StaticLocks(leaders, workers, store.clock.steady_ms).add_to,
        groups.add_to,
        StaticKeyLookups(leaders, workers).add_to,
    )


def _collector(traffic: StaticTraffic) -> Collect:
    from headrace_broker.statictopic.collector import StaticTopicMetrics

    return StaticTopicMetrics(traffic)
