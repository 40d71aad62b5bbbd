"""Staged writes as a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.feature import Feature
from headrace_broker.staging.processor import StagingProcessor
from headrace_broker.staging.staging import Staging
from headrace_daemon.services import Service

if TYPE_CHECKING:
    from headrace_broker.core import Core


def build(core: Core) -> Feature:
    """See ``Feature``."""
    staging = Staging(
        core.store,
        core.config.broker_name,
        core.config.staged_reserved_ms,
        core.statistics.put,
        core.own_queues,
        core.budget,
        core.serving.supervisor.start_soon,
        core.serving.pace.sliced_work.start,
    )
    return Feature(
        scans=(staging.scan,),
        moves=(staging,),
        processors=(StagingProcessor(core.store, core.messages.bulk, staging),),
        # It supervises its own tasks.
        services=(Service(staging.run, staging.load, is_awaited=True, is_supervised=False),),
    )
