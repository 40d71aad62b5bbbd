"""Quotas as a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.feature import Feature
from headrace_broker.quotas.processor import QuotaProcessor
from headrace_broker.quotas.quotas import Quotas
from headrace_broker.quotas.table import QuotaTable
from headrace_daemon.services import Service

if TYPE_CHECKING:
    from headrace_broker.core import Core
    from headrace_broker.quotas.metering import Metering


def build(core: Core) -> Feature:
    """See ``Feature``. Raises StoreFormatError if the quotas can't be read."""
    table = QuotaTable(core.file("quotas.json"))
    serving, long_polling = core.serving, core.clients.long_polling

    def new_metering() -> Metering:
        from headrace_broker.quotas.metering import Metering

        return Metering(
            table,
            serving.registry,
            serving.server.hold_back,
            core.tables.topics.lookups_changed,
            long_polling,
        )

    quotas = Quotas(table, serving.frames, core.statistics, long_polling, new_metering)
    return Feature(
        places=(quotas.find_place,),
        processors=(QuotaProcessor(table, core.changes),),
        tables=(table.saved,),
        services=(Service(quotas.run),),
        collectors=core.collectors(lambda: quotas.collect),
    )
