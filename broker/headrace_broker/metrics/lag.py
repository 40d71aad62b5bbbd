"""The lag of groups, in messages and time."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from headrace_broker.metrics.table import (
    CONSUMERS,
    INFLIGHT,
    LAG_LATENCY,
    LAG_MESSAGES,
    OMITTED,
    PAIRS_MAX,
)
from headrace_broker.queue_directory import Lookup, Use
from headrace_broker.topics.attributes import is_compacted
from headrace_protocol.system_topics import RETRY_PREFIX
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from headrace_broker.consumer.groups import ConsumerManager
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.unconsumed import UnconsumedOffsets
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.metrics.samples import Samples

# Pairs of topic and group that are looked at for those that count.
_LOOKED_AT_MAX: Final = 20_000
_QUEUES_MAX: Final = 100_000
# Some 50 µs of work.
_AT_ONCE: Final = 32
_NOTHING: Final = -1
_UNKNOWN: Final = -2


class GroupMetrics:
    """Collects the lag of the groups that the clean-up waits for; see ``UnconsumedOffsets``.

    A message that was stored earlier lies further ahead in the log, so of all queues of a pair only
    the first offset is read. Those found are kept until the group commits: without that a
    scrape would read old units from the disk again for each queue of an abandoned group. In a
    compacted topic the first message of each queue is read, since its unit has its store time.

    pairs_max: most pairs of topic and group on the page. queues_max: most queues of those.
    """

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        directory: QueueDirectory,
        offsets: ConsumerOffsets,
        consumers: ConsumerManager,
        unconsumed: UnconsumedOffsets,
    ) -> None:
        self._store = store
        self._topics = topics
        self._directory = directory
        self._offsets = offsets
        self._consumers = consumers
        self._unconsumed = unconsumed
        self.pairs_max, self.queues_max = PAIRS_MAX, _QUEUES_MAX
        # By queue and group, queue offset and physical offset of the first unconsumed message: as
        # of the last scrape, and of this one.
        self._known: dict[tuple[StoreQueue, str], tuple[int, int]] = {}
        self._found: dict[tuple[StoreQueue, str], tuple[int, int]] = {}

    async def __call__(self, samples: Samples) -> None:
        """See ``Collect``."""
        for group, count in self._consumers.member_counts(self.pairs_max):
            samples.add(CONSUMERS, count, group)
        await take_break()
        pairs, omitted_count = await self._pairs()
        unknown_count = 0
        self._known, self._found = self._found, {}
        for topic, group in pairs:
            is_known = await self._add(samples, topic, group)
            unknown_count += not is_known
        samples.add(OMITTED, omitted_count, "groups")
        samples.add(OMITTED, unknown_count, "lag_ages")

    async def _pairs(self) -> tuple[list[tuple[str, str]], int]:
        """Topics with their groups, and how many more there are."""
        committed = self._offsets.pairs(_LOOKED_AT_MAX)
        connected = self._consumers.pairs(_LOOKED_AT_MAX)
        pairs: list[tuple[str, str]] = []
        omitted_count = queue_count = 0
        for number, (topic, group) in enumerate(dict.fromkeys(chain(committed, connected))):
            if not number % _AT_ONCE:
                await take_break()
            config = self._topics.get(topic)
            if config is None or not self._unconsumed.counts(group, topic):
                continue
            if (
                len(pairs) < self.pairs_max
                and queue_count + config.read_queue_nums <= self.queues_max
            ):
                pairs.append((topic, group))
                queue_count += config.read_queue_nums
            else:
                omitted_count += 1
        return pairs, omitted_count

    async def _add(self, samples: Samples, topic: str, group: str) -> bool:
        """Add what one group has yet to consume of a topic; returns whether its age is known."""
        config = self._topics.get(topic)
        is_in_log = config is None or not is_compacted(config)
        look = self._look if is_in_log else self._look_at_compacted
        lag, first, is_known = 0, _NOTHING, True
        outs: list[int] = []
        for queue_id in range(config.read_queue_nums if config else 0):
            if not queue_id % _AT_ONCE:
                await take_break()
            count, found = await look(samples, topic, group, queue_id)
            lag += count
            if (out := self._offsets.count_out(group, topic, queue_id)) is not None:
                outs.append(out)
            is_known &= found != _UNKNOWN
            if found >= 0:
                first = min(found, first) if first >= 0 else found
        stored_ms = (await self._stored_ms(samples, first)) if is_in_log else first
        labels = group, topic, *_flags(self._topics, topic)
        samples.add(LAG_MESSAGES, lag, *labels)
        if outs:
            samples.add(INFLIGHT, sum(outs), *labels)
        if not is_known or stored_ms == _UNKNOWN:
            return False
        age_ms = self._store.clock.now_ms() - stored_ms if stored_ms >= 0 else 0
        samples.add(LAG_LATENCY, max(age_ms, 0), *labels)
        return True

    async def _look(
        self, samples: Samples, topic: str, group: str, queue_id: int
    ) -> tuple[int, int]:
        """Number of messages that a group has yet to consume, and the first one's offset."""
        count = 0

        def look() -> tuple[int, int]:
            nonlocal count
            # Anew each time: while it waited the topic may have been deleted.
            queue = self._store.find_queue(topic, queue_id)
            if queue is None:
                return 0, _NOTHING
            low, end = self._store.source(queue).known_range()
            start = self._start(group, topic, queue_id, low)
            count = max(end - start, 0)
            return (count, self._physical_offset(queue, group, start)) if count else (0, _NOTHING)

        found = await samples.read(look, None)
        return (count, _UNKNOWN) if found is None else found

    async def _look_at_compacted(
        self, samples: Samples, topic: str, group: str, queue_id: int
    ) -> tuple[int, int]:
        """As ``_look``, with the store time of the first message, which may have left the log."""
        await take_break()  # a search takes longer than a look at a plain queue
        count = 0

        def look() -> tuple[int, int]:
            nonlocal count
            config = self._topics.get(topic)
            if config is None:
                return 0, _NOTHING
            source = self._directory.local(Lookup(config, queue_id, Use.LIST)).source
            low, end = source.known_range()
            start = max(self._start(group, topic, queue_id, low), low)
            count = max(end - start, 0)
            if not count:
                return 0, _NOTHING
            stored_ms = source.store_time_at(start)
            missing = source.missing_from(start)
            return count - missing, _NOTHING if stored_ms is None else stored_ms

        found = await samples.read(look, None)
        return (count, _UNKNOWN) if found is None else found

    def _start(self, group: str, topic: str, queue_id: int, low: int) -> int:
        """The offset that a group has committed, else where it has pulled up to, else ``low``."""
        start = self._offsets.query(group, topic, queue_id)
        if start is None:
            start = self._offsets.query_pull(group, topic, queue_id)
        return low if start is None else start

    def _physical_offset(self, queue: StoreQueue, group: str, start: int) -> int:
        """Physical offset of the first message from ``start`` on that is there. Raises NotReady."""
        log_min_offset = self._store.commit_log.min_offset
        known = self._known.get((queue, group))
        if known is not None and known[0] == start and known[1] >= log_min_offset:
            physical_offset = known[1]
        else:
            physical_offset = self._read_physical_offset(queue, start, log_min_offset)
        self._found[queue, group] = start, physical_offset
        return physical_offset

    def _read_physical_offset(self, queue: StoreQueue, start: int, log_min_offset: int) -> int:
        source = self._store.source(queue)
        if source.has_unit(start):
            physical_offset = source.unit(start)[0]
            if physical_offset >= log_min_offset:
                return physical_offset
        start = max(start, source.min_offset())
        return source.unit(start)[0] if source.has_unit(start) else _NOTHING

    async def _stored_ms(self, samples: Samples, physical_offset: int) -> int:
        if physical_offset < 0:
            return _NOTHING
        read = partial(self._store.commit_log.store_timestamp_at, physical_offset)
        stored_ms = await samples.read(read, _UNKNOWN)
        return _NOTHING if stored_ms is None else stored_ms


def _flags(topics: TopicTable, topic: str) -> tuple[str, str]:
    """Values of is_retry and is_system."""
    return _text(topic.startswith(RETRY_PREFIX)), _text(topics.is_system(topic))


def _text(flag: bool) -> str:
    return "true" if flag else "false"
