"""The quotas of a running daemon, which cost nothing while there are none."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import trio

from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_daemon.metrics.samples import Samples
    from headrace_daemon.quotas.metering import Metering
    from headrace_daemon.quotas.table import QuotaTable

    AnyMetering = TypeVar("AnyMetering", bound=Metering)
else:
    AnyMetering = TypeVar("AnyMetering")

# Users, topics and groups that a page of metrics names.
_NAMES_MAX: Final = 1000


class Quotas(Generic[AnyMetering]):
    """The meters of a table's quotas.

    new_metering: imports and makes them, once there is a quota.
    connect: called after each change with the meters, or None while there is no quota.
    metering: the meters, once there was a quota.
    """

    def __init__(
        self,
        table: QuotaTable,
        new_metering: Callable[[], AnyMetering],
        connect: Callable[[AnyMetering | None], None],
    ) -> None:
        self.table, self._new_metering, self._connect = table, new_metering, connect
        self.metering: AnyMetering | None = None
        self._is_used = trio.Event()
        table.on_change = self._changed
        if len(table):
            self._changed()

    def _changed(self) -> None:
        if self.metering is None:
            self.metering = self._new_metering()
            self._is_used.set()
        self.metering.forget()
        self._connect(self.metering if len(self.table) else None)

    async def run(self) -> None:
        """Read clients again whose time is over, until cancelled."""
        await self._is_used.wait()
        assert self.metering is not None
        await self.metering.run()

    async def collect(self, samples: Samples) -> None:
        """See ``Collect``."""
        from headrace_daemon.metrics.daemon_metrics import QUOTA_HELD, QUOTA_REFUSED

        metering = self.metering
        if metering is not None:
            counted = (QUOTA_HELD, metering.held), (QUOTA_REFUSED, metering.refused)
            for metric, counts in counted:
                for (of, name), number in islice(counts.items(), _NAMES_MAX):
                    samples.add(metric, number, of, name)
        await take_break()
