"""Compacted topics of a broker: puts the parts together."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

import trio

from headrace_broker.compaction.checkpoint import PositionCheckpoint
from headrace_broker.compaction.compactor import Compactor
from headrace_broker.compaction.follower import CompactionFollower
from headrace_broker.compaction.index_builds import IndexBuilds
from headrace_broker.compaction.key_check import KeyCheck
from headrace_broker.compaction.keys import KeyDemand
from headrace_broker.compaction.lookups import KeyLookups
from headrace_broker.compaction.queues import CompactedQueues
from headrace_broker.compaction.rebuilds import Rebuilds
from headrace_broker.compaction.requests import CompactionRequests
from headrace_broker.compaction.schedule import CompactionSchedule
from headrace_broker.compaction.source import CompactedSource
from headrace_broker.compaction.throttle import Throttle
from headrace_broker.compaction.units import FileSizes
from headrace_broker.compaction.worker import index_in_process, run_here, run_in_process
from headrace_broker.config import split_list
from headrace_broker.topics.attributes import CompactionPolicy, is_compacted

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from headrace_broker.compaction.keys import LogicQueues
    from headrace_broker.config import BrokerConfig
    from headrace_broker.peers.nameservers import Nameservers
    from headrace_broker.queue_directory import Lookup, QueueDirectory
    from headrace_broker.store.followers.following import Following
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics.table import TopicTable


class Compaction:
    """The parts of compacted topics that ``feature`` lists.

    queues: their logs. demand: what their messages must have. follower: copies their messages.
    """

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        topics: TopicTable,
        nameservers: Nameservers,
        own_queues: LogicQueues,
        directory: QueueDirectory,
    ) -> None:
        """own_queues: those of static topics."""
        sizes = FileSizes.of(
            config.compaction_mapped_file_size, config.compaction_cq_mapped_file_size
        )
        self._store = store
        self._topics = topics
        self._logic_queues = own_queues
        self._message_bytes_max = config.max_message_size
        self._record_bytes_max = sizes.record_bytes_max
        self._positions = PositionCheckpoint(store.root, store.fs)
        self.queues = CompactedQueues(store, topics, sizes, self._positions)
        self.demand = KeyDemand(topics.get, sizes.record_bytes_max, own_queues)
        self.follower = CompactionFollower(self.queues)
        # Shared by all that reads many messages.
        throttle = Throttle(
            lambda: config.compaction_bytes_per_second, lambda: store.ring.pressure() is not None
        )
        runner = run_in_process if store.use_threads else partial(run_here, fs=store.fs)
        require_free, now_ms = store.commit_log.room.require_free, store.clock.now_ms
        self.compactor = Compactor(self.queues, self._positions, runner, throttle, require_free)
        self.schedule = CompactionSchedule(
            self.compactor, self._policy, own_queues.has_older, config, now_ms, Random()
        )
        # A broker that shares its process with a program doesn't start others.
        indexer = index_in_process if store.use_threads else None
        self.index_builds = IndexBuilds(self.queues, indexer, throttle)
        self.lookups = KeyLookups(store, topics, directory, self.queues, self.index_builds)

        async def is_source(address: str) -> bool:
            listed = split_list(config.rebuild_sources)
            return address in listed or await nameservers.knows(address)

        self.rebuilds = Rebuilds(
            self.compactor,
            self._policy,
            nameservers.peers,
            is_source,
            now_ms,
            config.max_offset_map_size,
        )
        self.requests = CompactionRequests(
            topics, self.schedule, self.rebuilds, own_queues.is_static
        )

    def _policy(self, topic: str) -> CompactionPolicy | None:
        config = self._topics.get(topic)
        return CompactionPolicy.of(config) if config is not None else None

    def unconsumed(self, lowest: LowestUnconsumed) -> LowestUnconsumed:
        """Let clean-up remove messages of compacted topics, consumed or not."""

        def lowest_of_others(
            topic: str, queue_ids: Iterable[int]
        ) -> Generator[None, None, Mapping[int, tuple[int, str]]]:
            if self.queues.wants(topic):
                return {}
            return (yield from lowest(topic, queue_ids))

        return lowest_of_others

    def follow(self, following: Following) -> None:
        """Note how the store runs the follower."""
        self.queues.synced_offset = following.synced_offset
        self.rebuilds.on_rebuilt = following.retry

    def load(self) -> None:
        """Open all compaction logs. Raises OSError, StoreError."""
        self._positions.load()
        self.queues.load()
        self.rebuilds.load()

    async def finish(self) -> None:
        """For the stop. Raises OSError."""
        await trio.to_thread.run_sync(self.queues.sync_indexes)

    def runtime_info(self) -> dict[str, str]:
        """For GET_BROKER_RUNTIME_INFO."""
        lost = self.queues.lost()
        return {
            "compactionDropped": str(self.schedule.totals.dropped_count),
            **self.index_builds.runtime_info(),
            "compactionLostQueues": str(len(lost)),
            "compactionLostReason": lost[0] if lost else "",
        }

    def find_check(self, topic: str, queue_id: int) -> KeyCheck | None:
        """The quick check of a queue; None where a single message may be too large."""
        config = self._topics.get(topic)
        policy = self._policy(topic)
        if config is None or policy is None or self._message_bytes_max > self._record_bytes_max:
            return None
        here = self._logic_queues.of_keys(topic, queue_id, config.write_queue_nums)
        return KeyCheck(*here, policy.key_queue, self._record_bytes_max)

    def find_source(self, lookup: Lookup, queue: StoreQueue) -> CompactedSource | None:
        """The source of a compacted queue; see ``FindSource``."""
        if not is_compacted(lookup.topic):
            return None
        return CompactedSource(self._store.source(queue), partial(self.queues.find, queue))
