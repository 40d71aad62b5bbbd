"""The fence: a broker that was away must not take messages for queues that moved meanwhile.

Before the broker takes messages for static topics, and at every period of its registration, it asks
nameservers for the routes of the topics that it leads queues of. A newer epoch that claims such a
queue for another broker stops it here until this broker's mapping is newer still.

Source: docs/static-topics.md "Failures"; tests/broker/statictopic/test_static_fence.py.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.statictopic.close import answer_held
from headrace_broker.statictopic.queue_life import Claim, Event, State, Stop
from headrace_daemon.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Generator

    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.peers.nameservers import Nameservers
    from headrace_broker.statictopic.table import MappingTable
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.statictopic.mapping import MappingInfo, TopicMapping

log = structlog.get_logger("headrace.broker")

_FIRST_LOOK_S: Final = 3.0
_QUEUES_AT_ONCE: Final = 256


class Fence:
    """Compares the mappings with the nameservers' routes."""

    def __init__(
        self,
        table: MappingTable,
        topics: TopicTable,
        store: MessageStore,
        long_polling: LongPolling,
        nameservers: Nameservers,
    ) -> None:
        self._table = table
        self._topics = topics
        self._store = store
        self._long_polling = long_polling
        self._nameservers = nameservers
        self._has_looked = trio.Event()

    def load(self) -> None:
        """Take no messages for static topics before the first look."""
        self._table.is_verified = not (self._nameservers.addresses and len(self._table))

    async def run(self) -> None:
        """Wait for the first look; without one, go by this broker's mappings."""
        if self._table.is_verified:
            return
        with trio.move_on_after(_FIRST_LOOK_S) as look:
            await self._has_looked.wait()
        if look.cancelled_caught:
            log.warning(
                "no nameserver has answered which brokers lead the queues of static topics: using "
                "this broker's own mappings",
                waited_s=_FIRST_LOOK_S,
                remedy="start the nameservers first",
            )
            self._verified()

    def _verified(self) -> None:
        if not self._table.is_verified:
            self._table.is_verified = True
            self._table.leads_changed()
            self._topics.registration_changed()

    async def look(self, nameserver: str) -> None:
        """Compare all mappings with the routes that a nameserver has. Raises HeadraceError."""
        led = [mapping.topic for mapping in self._table.all() if mapping.led()]
        for topic, infos in (await self._nameservers.infos(nameserver, led)).items():
            await in_slices(self.compare(topic, infos))
        self._has_looked.set()
        self._verified()

    def compare(self, topic: str, infos: dict[str, MappingInfo]) -> Generator[None, None, None]:
        """Stop the queues of a topic that another broker claims with a newer epoch."""
        mapping = self._table.get(topic)
        if mapping is None:
            return
        newer = [
            info
            for info in infos.values()
            if info.bname != mapping.bname and info.epoch > mapping.epoch
        ]
        for info in newer:
            yield from self._stop(mapping, info)
        yield

    def _stop(self, mapping: TopicMapping, info: MappingInfo) -> Generator[None, None, None]:
        """Stop the queues that another broker claims, unless a newer mapping comes meanwhile."""
        topic, led = mapping.topic, mapping.led()
        claim = Claim(info.epoch, info.bname)
        claimed = iter(info.curr_id_map.keys() & led.keys())
        count = 0
        while some := list(islice(claimed, _QUEUES_AT_ONCE)):
            if self._table.get(topic) is not mapping:
                break
            new = [queue for queue in some if self._table.apply(topic, queue, Event.CLAIM, claim)]
            count += len(new)
            for queue in new:
                answer_held(self._store, self._long_polling, topic, led[queue])
            if new:
                self._table.leads_changed()
            yield
        if count:
            log.warning(
                "static topic's queues stopped",
                topic=topic,
                count=count,
                reason=Stop(State.FENCED, claim).reason,
            )
            self._topics.registration_changed()
