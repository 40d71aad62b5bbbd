"""Tiered storage as a feature: imported only where it is switched on."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace_broker.feature import Feature, Followed

if TYPE_CHECKING:
    from headrace_broker.core import Core
    from headrace_broker.store.reader import KeySource
    from headrace_broker.tiered.access.status import TierState
    from headrace_broker.tiered.access.tiered_storage import TieredStorage
    from headrace_daemon.metrics.samples import Collect


def build(core: Core) -> Feature:
    """See ``Feature``. Raises StoreFormatError, OSError."""
    config = core.config
    if not config.message_store_plug_in:
        from headrace_broker.tiered.off import NoTier

        return Feature(processors=(NoTier(),))
    from headrace_broker.tiered.access.decisions import TierDecisions
    from headrace_broker.tiered.access.plan import TierPlanRequests
    from headrace_broker.tiered.access.status import TierStatusRequests
    from headrace_broker.tiered.access.tiered_storage import TieredStorage
    from headrace_protocol.tier.paths import Home

    topics = core.tables.topics
    home = Home(config.broker_cluster_name, config.broker_name)
    settings = config.tier_settings(config.store_path_root_dir, home)
    assert settings is not None
    tier = TieredStorage(settings, core.store, topics)
    return Feature(
        sources=(tier.find_source,),
        key_sources=_key_sources(core, tier),
        followers=(
            Followed(
                tier.upload,
                tier.follow,
                settings.commit_ms / 1000,
                lambda: not config.delete_untiered_enable,
            ),
        ),
        unconsumed=(tier.unconsumed,),
        processors=(
            TierStatusRequests(tier.state),
            TierPlanRequests(tier.reader, topics),
            TierDecisions(tier.state),
        ),
        services=tier.services(),
        collectors=core.collectors(partial(_collector, tier.state)),
        runtime_info=(tier.runtime_info,),
    )


def _key_sources(core: Core, tier: TieredStorage) -> tuple[KeySource, ...]:
    from headrace_broker.tiered.access.lookups import TierLookups
    from headrace_broker.tiered.access.settings import StorageLevel

    is_read = tier.settings.level is not StorageLevel.DISABLE
    return (TierLookups(core.store, tier.reader),) if is_read else ()


def _collector(state: TierState) -> Collect:
    from headrace_broker.tiered.access.collector import TierMetrics

    return TierMetrics(state)
