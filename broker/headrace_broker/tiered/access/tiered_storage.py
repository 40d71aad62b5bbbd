"""The tier of a broker: its follower, its sources, and its clean-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.queue_directory import Use
from headrace_broker.store.errors import StoreError
from headrace_broker.tiered.access.settings import StorageLevel
from headrace_broker.tiered.access.tier_access import TierAccess
from headrace_broker.tiered.access.tier_reader import TierReader
from headrace_broker.tiered.access.tiered_source import TieredSource
from headrace_broker.tiered.access.upload import Upload
from headrace_broker.topics.attributes import CLEANUP_POLICY, COMPACTED, TIERED, topic_limits
from headrace_daemon.services import Service

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace_broker.queue_directory import Lookup
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.bodies import TopicConfig

log = structlog.get_logger("headrace.broker")

_RETRY_S: Final = 10.0
_READS: Final = {Use.PULL, Use.READ, Use.BEGIN, Use.INSPECT, Use.LIST}


class TieredStorage:
    """The tier of a running broker. upload: its follower."""

    def __init__(self, settings: TierSettings, store: MessageStore, topics: TopicTable) -> None:
        self._settings = settings
        self._store = store
        self._topics = topics
        self._access = TierAccess(settings, store.fs, store.clock.now_ms)
        self._reader = TierReader(self._access, settings)
        self.upload = Upload(self._access, settings, self._wants)
        # Apart from the threads of all other work: the store may hang.
        self._threads = trio.CapacityLimiter(1)

    def connect(self) -> None:
        """Have the store's queues followed. Raises StoreFormatError, OSError."""
        self._store.followers.add(self.upload, save_s=self._settings.commit_ms / 1000)

    def _wants(self, topic: str) -> bool:
        config = self._topics.get(topic)
        return config is not None and not self._topics.is_system(topic) and _is_tiered(config)

    def find_source(self, lookup: Lookup, queue: StoreQueue) -> TieredSource | None:
        """The source of a queue of a user's topic; see ``QueueDirectory``."""
        is_read = lookup.use in _READS and self._settings.level is not StorageLevel.DISABLE
        if not is_read or self._topics.is_system(queue.topic):
            return None
        local = self._store.source(queue)
        return TieredSource(queue, local, self._reader, self._settings.level)

    def unconsumed(self, lowest: LowestUnconsumed) -> LowestUnconsumed:
        """What must stay in the log until groups have consumed it: nothing that the tier has.

        What is not uploaded yet stays because this follower needs it.
        """
        if self._settings.level is StorageLevel.DISABLE:
            return lowest

        def lowest_local(topic: str, queue_ids: Iterable[int]) -> Mapping[int, tuple[int, str]]:
            found = lowest(topic, queue_ids)
            return {
                queue_id: (offset, group)
                for queue_id, (offset, group) in found.items()
                if not self._is_kept(topic, queue_id, offset)
            }

        return lowest_local

    def _is_kept(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        queue = self._access.queue(topic, queue_id)
        return queue is not None and queue.min_offset <= queue_offset < queue.commit_offset

    # -- services ----------------------------------------------------------------------------------

    def services(self) -> tuple[Service, ...]:
        """The tier's tasks."""
        return (
            Service(self._run_clean_up, self._load),
            Service(self._run_expiry),
        )

    def _load(self) -> None:
        """Open the tier; if its store is away, the follower and the readers try again."""
        try:
            self._access.open()
        except OSError as error:
            log.error("tier not open, retrying", reason=str(error))

    async def _run_expiry(self) -> None:
        """Drop what was read and is not read any further."""
        while True:
            await trio.sleep(self._settings.expire_ms / 2000)
            self._reader.expire()

    async def _run_clean_up(self) -> None:
        while True:
            wait_s = self._settings.clean_ms / 1000
            try:
                limits_ms = self._limits_ms()
                await trio.to_thread.run_sync(self._clean_up, limits_ms, limiter=self._threads)
            except (OSError, StoreError) as error:
                log.error("clean-up of the tier failed, retrying", reason=str(error))
                wait_s = min(wait_s, _RETRY_S)
            await trio.sleep(wait_s)

    def _limits_ms(self) -> dict[str, int]:
        """Ages at which messages expire, of the topics that set one."""
        limits = topic_limits(self._topics.all()).items()
        return {name: limit.reserved_ms for name, limit in limits if limit.reserved_ms is not None}

    def _clean_up(self, limits_ms: Mapping[str, int]) -> None:
        """Upload full index files, delete what has expired and what deletions left. In a thread.

        Raises OSError, StoreFormatError.
        """
        self._access.open()
        with self._access.writing:
            tier, now_ms = self._access.tier, self._access.now_ms()
            failures = [tier.index.upload(now_ms) if tier.index is not None else None]
            if self._settings.deletes:
                for topic, queue_id in list(tier.queues):
                    before_ms = now_ms - limits_ms.get(topic, self._settings.reserved_ms)
                    failures.append(tier.expire(topic, queue_id, before_ms, now_ms))
                if tier.index is not None:
                    longest_ms = max([self._settings.reserved_ms, *limits_ms.values()])
                    failures.append(tier.index.expire(now_ms - longest_ms))
            failures.append(tier.sweep())
        for failure in failures:
            if failure is not None:
                raise OSError(str(failure))

    # -- state -------------------------------------------------------------------------------------

    def runtime_info(self) -> dict[str, str]:
        """Numbers for GET_BROKER_RUNTIME_INFO."""
        return {
            "tierOpen": str(self._access.is_open).lower(),
            "tierProblem": self._reader.breaker.problem,
            "tierStuckQueues": str(len(self.upload.stuck)),
            "tierReadAheadBytes": str(self._reader.blocks.byte_count),
        }


def _is_tiered(topic: TopicConfig) -> bool:
    attributes = topic.attributes
    return attributes.get(TIERED) != "false" and attributes.get(CLEANUP_POLICY) != COMPACTED
