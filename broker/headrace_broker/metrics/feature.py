"""The metrics of every broker, whatever features it has: a feature that needs a monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.feature import Feature

if TYPE_CHECKING:
    from headrace_broker.core import Core


def build(core: Core) -> Feature:
    """See ``Feature``; empty without a monitor."""
    if core.serving.scrapes is None:
        return Feature()
    from headrace_broker.consumer.unconsumed import UnconsumedOffsets
    from headrace_broker.metrics.broker_metrics import ServingMetrics, StoreMetrics, TrafficMetrics
    from headrace_broker.metrics.lag import GroupMetrics
    from headrace_daemon.metrics.daemon_metrics import DaemonMetrics
    from headrace_daemon.services import Service

    serving, store, clients = core.serving, core.store, core.clients
    topics, _, groups, offsets = core.tables
    counting = UnconsumedOffsets(offsets, groups, clients.consumers)
    return Feature(
        services=(Service(core.serving.scrapes.run),),
        collectors=(
            DaemonMetrics(
                serving.server,
                serving.registry,
                serving.watchdog,
                core.health.unexpected_errors,
                core.audit,
            ),
            ServingMetrics(
                core.config,
                topics,
                groups,
                clients.producers,
                clients.long_polling,
                serving.frames,
            ),
            StoreMetrics(store),
            TrafficMetrics(core.statistics, topics),
            GroupMetrics(store, topics, core.directory, offsets, clients.consumers, counting),
        ),
    )
