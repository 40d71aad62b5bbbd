"""The processors of clients and of administration, one part of the list in ``assembly``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.processors.admin_broker import AdminBrokerProcessor
from headrace_broker.processors.admin_groups import AdminGroupsProcessor
from headrace_broker.processors.admin_topics import AdminTopicsProcessor
from headrace_broker.processors.client import ClientProcessor
from headrace_broker.processors.members import MembersProcessor

if TYPE_CHECKING:
    from headrace_broker.health import Health
    from headrace_broker.parts import Parts, Processor


def client_processors(parts: Parts) -> tuple[Processor, ...]:
    """Those of producers and consumers themselves."""
    return (
        ClientProcessor(
            parts.store,
            parts.topics,
            parts.directory,
            parts.groups,
            parts.consumers,
            parts.producers,
            parts.offsets,
            parts.locks,
            parts.store.clock.steady_ms,
        ),
    )


def admin_processors(parts: Parts, health: Health) -> tuple[Processor, ...]:
    """Those of administration."""
    config, store, topics, offsets = parts.config, parts.store, parts.topics, parts.offsets
    now_ms, statistics, changes = store.clock.now_ms, parts.statistics, parts.changes
    return (
        AdminTopicsProcessor(
            config,
            store,
            topics,
            parts.directory,
            offsets,
            parts.long_polling,
            statistics,
            changes,
            parts.registration.when_registered,
            parts.static.mappings,
            parts.mapping_changes,
        ),
        parts.mapping_changes,
        AdminGroupsProcessor(
            config,
            topics,
            parts.directory,
            parts.groups,
            parts.consumers,
            parts.producers,
            offsets,
            parts.long_polling,
            statistics,
            now_ms,
            changes,
        ),
        MembersProcessor(
            parts.consumers,
            parts.locks,
            parts.pull_watch,
            parts.client_requests,
            topics.readable_queues,
            store.clock.steady_ms,
        ),
        AdminBrokerProcessor(config, store, topics, offsets, statistics, now_ms, changes, health),
    )
