"""The requests of every broker, whatever features it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.cluster.expected_store import BegunWithout
from headrace_broker.consumer.own_groups import guard_own_groups
from headrace_broker.feature import Feature
from headrace_broker.message_demands import Demand
from headrace_broker.processors.admin_broker import AdminBrokerProcessor
from headrace_broker.processors.admin_groups import AdminGroupsProcessor
from headrace_broker.processors.admin_topics import AdminTopicsProcessor
from headrace_broker.processors.broker_stats import BrokerStatsProcessor
from headrace_broker.processors.client import ClientProcessor
from headrace_broker.processors.dashboard import DashboardProcessor
from headrace_broker.processors.members import MembersProcessor
from headrace_broker.processors.message_types import type_demand
from headrace_broker.processors.query import QueryProcessor
from headrace_broker.topics.rules import TopicRules
from headrace_protocol.message import INNER_BATCH

if TYPE_CHECKING:
    from headrace_broker.core import Core
    from headrace_broker.feature import Processor


def build(core: Core) -> Feature:
    """See ``Feature``."""
    config, (topics, mappings, groups, _) = core.config, core.tables
    begun = BegunWithout(config, core.nameservers, core.store.flusher.stop_writing)
    # Before all others, which change messages.
    types = (type_demand(topics.get),) if config.enforce_message_type else ()
    return Feature(
        # Only the broker makes them, of the batches to topics with batch queues.
        demands=(*types, Demand("inner batches", sys_flags=INNER_BATCH)),
        before_registration=(begun.look,),
        guards=(guard_own_groups,),
        processors=(
            core.messages.sends,
            core.messages.pulls,
            core.messages.bulk,
            QueryProcessor(
                core.store,
                core.directory,
                lambda: core.added.key_sources,
                lambda: core.added.inner_consumers,
            ),
            *_clients(core),
            *_administration(core),
        ),
        # The mappings first: after a crash, a topic without its mapping would look plain.
        tables=(
            mappings.saved,
            mappings.marks.saved,
            topics.incarnations.saved,
            topics.saved,
            groups.saved,
            core.filters.saved,
        ),
        runtime_info=(
            core.store.followers.runtime_info,
            core.messages.delivery.runtime_info,
            core.pull_watch.runtime_info,
            *((core.audit.runtime_info,) if core.audit is not None else ()),
        ),
    )


def _clients(core: Core) -> tuple[Processor, ...]:
    """Requests of producers and consumers."""
    (topics, _, groups, offsets), clients = core.tables, core.clients
    steady_ms = core.store.clock.steady_ms
    return (
        ClientProcessor(
            core.store,
            topics,
            core.directory,
            groups,
            clients.consumers,
            clients.producers,
            clients.long_polling,
            offsets,
            clients.locks,
            steady_ms,
            core.filters,
        ),
        MembersProcessor(
            core.store,
            clients.consumers,
            clients.locks,
            core.pull_watch,
            clients.requests,
            topics.readable_queues,
        ),
    )


def _administration(core: Core) -> tuple[Processor, ...]:
    config, store, clients, changes = core.config, core.store, core.clients, core.changes
    topics, mappings, groups, offsets = core.tables
    return (
        AdminTopicsProcessor(
            config,
            store,
            topics,
            core.directory,
            offsets,
            clients.long_polling,
            core.statistics,
            changes,
            core.registration.when_registered,
            mappings,
            TopicRules(lambda: core.added.topic_rules),
        ),
        AdminGroupsProcessor(
            config,
            topics,
            core.directory,
            groups,
            clients.consumers,
            clients.producers,
            offsets,
            clients.long_polling,
            core.statistics,
            store.clock.now_ms,
            changes,
            core.filters,
        ),
        DashboardProcessor(
            topics,
            groups,
            clients.consumers,
            clients.producers,
            offsets,
            store.clock,
            changes,
        ),
        BrokerStatsProcessor(config, store, topics, core.statistics, changes),
        AdminBrokerProcessor(
            config,
            store,
            topics,
            offsets,
            core.statistics,
            store.clock.now_ms,
            changes,
            core.health,
            core.audit.settings_changed if core.audit is not None else None,
        ),
    )
