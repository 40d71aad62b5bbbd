"""The quotas of a running broker, which cost nothing while there are none."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import trio

from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.queue_directory import Lookup, QueueDirectory
    from headrace_broker.quotas.metering import Metering
    from headrace_broker.quotas.table import QuotaTable
    from headrace_broker.serving.frame_loop import FrameLoop
    from headrace_broker.statistics import BrokerStatistics
    from headrace_daemon.metrics.samples import Samples


class Quotas:
    """Connects the meters of a table's quotas while it has some.

    table: the quotas. new_metering: imports and makes meters, once there is a quota.
    """

    def __init__(
        self,
        table: QuotaTable,
        frames: FrameLoop,
        statistics: BrokerStatistics,
        long_polling: LongPolling,
        new_metering: Callable[[], Metering],
    ) -> None:
        self.table, self._frames, self._statistics = table, frames, statistics
        self._long_polling, self._new_metering = long_polling, new_metering
        self._metering: Metering | None = None
        self._is_used = trio.Event()
        table.on_change = self._changed
        if len(table):
            self._changed()

    def _changed(self) -> None:
        if self._metering is None:
            self._metering = self._new_metering()
            self._is_used.set()
        metering, statistics = self._metering, self._statistics
        long_polling = self._long_polling
        metering.forget()
        if len(self.table):
            self._frames.meter = metering
            statistics.on_put, statistics.on_get = metering.put, metering.get
            long_polling.check = metering.check_hold
        else:
            self._frames.meter = statistics.on_put = statistics.on_get = None
            long_polling.check = None

    def find_place(self, directory: QueueDirectory, lookup: Lookup) -> None:
        """See ``FindPlace``. Raises RequestError for a topic that may take nothing now."""
        if self._metering is not None:
            self._metering.find_place(directory, lookup)

    async def run(self) -> None:
        """Read clients again whose time is over, until cancelled."""
        await self._is_used.wait()
        assert self._metering is not None
        await self._metering.run()

    async def collect(self, samples: Samples) -> None:
        """See ``Collect``."""
        from headrace_broker.metrics import table

        metering = self._metering
        if metering is not None:
            for metric, counts in (
                (table.QUOTA_HELD, metering.held),
                (table.QUOTA_REFUSED, metering.refused),
            ):
                for (of, name), number in islice(counts.items(), table.PAIRS_MAX):
                    samples.add(metric, number, of, name)
        await take_break()
