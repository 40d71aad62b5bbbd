"""Messages, the store, and what waits."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

from headrace_broker.metrics import table
from headrace_broker.metrics.table import PAIRS_MAX, TOPICS_MAX
from headrace_broker.metrics.timed_frames import TimedFrameLoop
from headrace_daemon.metrics.histogram import Histogram
from headrace_protocol.system_topics import RETRY_PREFIX
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.groups import ProducerManager
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.serving.frame_loop import FrameLoop
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.metrics.samples import Samples

_HOUR_S = 3600
_STORAGE = "local", "disk"
_UNKNOWN = -1


class TrafficMetrics:
    """Collects what went in and out, of the first topics and groups with traffic and in total."""

    def __init__(
        self, statistics: BrokerStatistics, topics: TopicTable, topics_max: int = TOPICS_MAX
    ) -> None:
        self._statistics = statistics
        self._topics = topics
        self._topics_max = topics_max

    async def __call__(self, samples: Samples) -> None:
        """See ``Collect``."""
        statistics = self._statistics
        samples.add(table.STORED_MESSAGES, statistics.puts.count)
        samples.add(table.STORED_BYTES, statistics.puts.body_bytes)
        samples.add(table.DELIVERED_MESSAGES, statistics.gets.count)
        samples.add(table.DELIVERED_BYTES, statistics.gets.body_bytes)
        topic_puts, group_gets = statistics.topic_puts, statistics.group_gets
        samples.add(table.OMITTED, max(len(topic_puts) - self._topics_max, 0), "topics")
        for topic, counter in list(islice(topic_puts.items(), self._topics_max)):
            labels = topic, self._is_system(topic)
            samples.add(table.MESSAGES_IN, counter.count, *labels)
            samples.add(table.BYTES_IN, counter.body_bytes, *labels)
            await take_break()
        samples.add(table.OMITTED, max(len(group_gets) - PAIRS_MAX, 0), "readers")
        for (group, topic), counter in list(islice(group_gets.items(), PAIRS_MAX)):
            is_retry = "true" if topic.startswith(RETRY_PREFIX) else "false"
            reader = group, topic, is_retry, self._is_system(topic)
            samples.add(table.MESSAGES_OUT, counter.count, *reader)
            samples.add(table.BYTES_OUT, counter.body_bytes, *reader)
            await take_break()

    def _is_system(self, topic: str) -> str:
        return "true" if self._topics.is_system(topic) else "false"


class StoreMetrics:
    """Collects where the store stands, and how long flushes of the log take."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._flushes = Histogram()
        store.flusher.on_log_flush = self._flushes.add

    async def __call__(self, samples: Samples) -> None:
        """See ``Collect``."""
        store = self._store.statistics()
        full_in_hours = store.cleaner.full_in_hours
        behind_bytes = store.max_offset - store.dispatched_offset
        samples.add(table.WRITABLE, store.refusal is None)
        samples.add(table.DISK_RATIO, store.disk_ratio)
        samples.add(table.DISK_FULL, math.inf if full_in_hours is None else full_in_hours * _HOUR_S)
        samples.add(table.FLUSH_BEHIND, store.max_offset - store.flushed_offset, *_STORAGE)
        samples.add(table.DISPATCH_BEHIND, behind_bytes, *_STORAGE)
        samples.add(table.STORAGE_SIZE, store.disk_used_bytes, *_STORAGE)
        samples.add(table.LOG_BYTES, store.max_offset - store.min_offset)
        samples.add(table.QUEUES, store.queue_count)
        samples.add(table.RING_FILL, store.ring_fill)
        for taker, count in store.behind_rows.items():
            samples.add(table.TAKER_BEHIND, count, taker)
        for follower in store.followers:
            samples.add(table.FOLLOWER_BEHIND, follower.behind_messages, follower.name)
            samples.add(table.FOLLOWER_BEHIND_SECONDS, follower.behind_seconds, follower.name)
            samples.add(table.FOLLOWER_FAILING, follower.problem_seconds, follower.name)
        samples.add(table.REMOVED_FILES, store.cleaner.removed_files)
        samples.add_histogram(table.FLUSH_SECONDS, self._flushes)
        await take_break()
        log = self._store.commit_log
        oldest_ms = await samples.read(lambda: log.store_timestamp_at(log.min_offset), _UNKNOWN)
        if oldest_ms != _UNKNOWN:
            age_ms = 0 if oldest_ms is None else self._store.clock.now_ms() - oldest_ms
            samples.add(table.RESERVE_TIME, max(age_ms, 0), *_STORAGE)


class ServingMetrics:
    """Collects sizes of tables, clients, what waits, and how long sends take."""

    def __init__(
        self,
        config: BrokerConfig,
        topics: TopicTable,
        groups: SubscriptionGroups,
        producers: ProducerManager,
        long_polling: LongPolling,
        frames: FrameLoop,
    ) -> None:
        self._config = config
        self._topics = topics
        self._groups = groups
        self._producers = producers
        self._long_polling = long_polling
        self._frames = frames

    async def __call__(self, samples: Samples) -> None:
        """See ``Collect``."""
        samples.add(table.TOPICS, len(self._topics))
        samples.add(table.GROUPS, len(self._groups))
        samples.add(table.PERMISSION, self._config.broker_permission)
        samples.add(table.PRODUCERS, self._producers.member_count)
        samples.add(table.HELD_PULLS, self._long_polling.held_count)
        if isinstance(self._frames, TimedFrameLoop):
            samples.add_histogram(table.SEND_SECONDS, self._frames.send_times)
        await take_break()
