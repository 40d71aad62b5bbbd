"""Compacted topics as a feature."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace_broker.compaction.compaction import Compaction
from headrace_broker.feature import Feature, Followed
from headrace_broker.message_demands import Demand
from headrace_daemon.services import Service

if TYPE_CHECKING:
    from headrace_broker.core import Core
    from headrace_daemon.metrics.samples import Collect


def build(core: Core) -> Feature:
    """See ``Feature``."""
    topics, own_queues = core.tables.topics, core.own_queues
    compaction = Compaction(
        core.config, core.store, topics, core.nameservers, own_queues, core.directory
    )
    demand = Demand(
        "delete markers with a body",
        matches_topic=compaction.demand.matches,
        apply=compaction.demand.serve,
        takes_empty=True,
        quick=compaction.find_check,
    )
    return Feature(
        sources=(compaction.find_source,),
        key_sources=(compaction.lookups,),
        followers=(Followed(compaction.follower, compaction.follow),),
        unconsumed=(compaction.unconsumed,),
        demands=(demand,),
        processors=(compaction.lookups, compaction.requests),
        services=(
            Service(compaction.schedule.run, compaction.load, finish=compaction.finish),
            Service(compaction.rebuilds.run),
            Service(compaction.index_builds.run),
        ),
        collectors=core.collectors(partial(_collector, compaction)),
        runtime_info=(compaction.runtime_info,),
    )


def _collector(compaction: Compaction) -> Collect:
    from headrace_broker.compaction.collector import CompactionMetrics

    return CompactionMetrics(compaction.schedule.totals)
