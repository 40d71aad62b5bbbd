"""Staged writes as a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.feature import Feature
from headrace_broker.staging.applying import Applying
from headrace_broker.staging.processor import StagingProcessor
from headrace_broker.staging.queries import Queries
from headrace_broker.staging.staging import Staging
from headrace_daemon.services import Service

if TYPE_CHECKING:
    from headrace_broker.core import Core


def build(core: Core) -> Feature:
    """See ``Feature``."""
    store, name = core.store, core.config.broker_name
    staging = Staging(
        store,
        Queries(store, core.budget),
        Applying(store, core.own_queues, name, core.statistics.put),
        core.config.staged_reserved_ms,
        core.serving.pace.sliced_work.start,
    )
    return Feature(
        scans=(staging.scan,),
        staged_bytes=(staging.queries.staged_bytes,),
        moves=(staging,),
        processors=(StagingProcessor(store, core.messages.bulk, staging),),
        services=(
            Service(staging.run_expiry, staging.load),
            Service(staging.run_flush),
            Service(staging.settlements.run),
            Service(staging.applying.run),
        ),
    )
