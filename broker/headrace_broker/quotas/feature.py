"""Quotas as a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.feature import Feature
from headrace_broker.persistence import warn_of_backup
from headrace_broker.quotas.owners import Owners
from headrace_daemon.quotas.processor import QuotaProcessor
from headrace_daemon.quotas.quotas import Quotas
from headrace_daemon.quotas.table import FILE, QuotaTable
from headrace_daemon.services import Service

if TYPE_CHECKING:
    from headrace_broker.core import Core
    from headrace_broker.queue_directory import Lookup, QueueDirectory
    from headrace_broker.quotas.metering import BrokerMetering


def build(core: Core) -> Feature:
    """See ``Feature``. Raises AccessError or StoreFormatError for files that can't be read."""
    file = core.file(FILE)
    table = QuotaTable(file)
    warn_of_backup(file)
    serving, long_polling, tables = core.serving, core.clients.long_polling, core.tables
    owners = core.budget.makers = Owners(
        core.file("owners.json"),
        lambda: serving.frames.client,
        lambda query_id: sum(count(query_id) for count in core.added.staged_bytes),
    )
    owners.keep("topics", [topic.topic_name for topic in tables.topics.all()])
    owners.keep("groups", [group.group_name for group in tables.groups.all()])

    def new_metering() -> BrokerMetering:
        from headrace_broker.quotas.metering import BrokerMetering

        metering = BrokerMetering(
            table,
            serving.registry,
            serving.server.hold_back,
            tables.topics.lookups_changed,
            long_polling,
            owners,
        )
        metering.guard(serving.registry, has_rights=not core.rights.access.is_open)
        return metering

    def connect(metering: BrokerMetering | None) -> None:
        frames, statistics = serving.frames, core.statistics
        frames.meter = metering
        if metering is None:
            statistics.on_put = statistics.on_get = long_polling.check = owners.check_owned = None
        else:
            statistics.on_put, statistics.on_get = metering.put, metering.get
            long_polling.check, owners.check_owned = metering.check_hold, metering.check_owned

    quotas = Quotas(table, new_metering, connect)

    def find_place(directory: QueueDirectory, lookup: Lookup) -> None:
        if quotas.metering is not None:
            quotas.metering.find_place(directory, lookup)

    return Feature(
        places=(find_place,),
        processors=(QuotaProcessor(table, core.changes),),
        tables=(owners.saved,),
        services=(Service(quotas.run),),
        collectors=core.collectors(lambda: quotas.collect),
    )
