"""The tier of a broker: its follower, its sources, and its clean-up."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.queue_directory import Use
from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.tiered.access.lives import LIVES_FILE, Lives
from headrace_broker.tiered.access.saved_tables import TableSaver
from headrace_broker.tiered.access.settings import StorageLevel
from headrace_broker.tiered.access.status import TierState
from headrace_broker.tiered.access.tier_access import TierAccess
from headrace_broker.tiered.access.tier_reader import TierReader
from headrace_broker.tiered.access.tiered_source import TieredSource
from headrace_broker.tiered.access.upload import Upload
from headrace_broker.topics.attributes import (
    CLEANUP_POLICY,
    COMPACTED,
    TIERED,
    is_batched,
    topic_limits,
)
from headrace_daemon.services import Service, StopStage
from headrace_protocol.outages import Outages
from headrace_protocol.tier.driver import Failure

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from headrace_broker.queue_directory import Lookup
    from headrace_broker.store.followers.following import Following
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_broker.store.retention.topic_floors import TopicLimit
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.bodies import TopicConfig

log = structlog.get_logger("headrace.broker")

_RETRY_S: Final = 10.0
# A stop waits so long for all that is still to be written to the tier.
_STOP_S: Final = 10.0
_MERGE_S: Final = 60.0
_TABLES_S: Final = 60.0
_WATCH_S: Final = 60.0
# Names of outages.
_LOCATION: Final = "the location of the tier"
_UPLOAD: Final = "the upload of queues that are given up"
# Tables, merges and clean-up, which fail together when the location is away.
_UPKEEP: Final = "the upkeep of the tier"
# After a change of the topics, whose files are written meanwhile.
_CHANGED_TABLES_S: Final = 1.0
# A stop waits so long for the tier to take the tables.
_LAST_TABLES_S: Final = 5.0
_SHOWN: Final = {Use.INSPECT, Use.LIST}
_READS: Final = {Use.PULL, Use.READ, Use.BEGIN, *_SHOWN}


class TieredStorage:
    """The tier of a running broker.

    settings: its own. access: opens its queues. reader: of its messages. upload: its follower.
    tables: the tables of the store that are saved there. state: how far all of it is.
    """

    def __init__(
        self,
        settings: TierSettings,
        store: MessageStore,
        topics: TopicTable,
    ) -> None:
        """Raises StoreFormatError, OSError."""
        self.settings = settings
        self._store = store
        self._topics = topics
        lives = Lives(
            ConfigFile(settings.root / "config" / LIVES_FILE, store.fs),
            topics.incarnations.of,
            lambda topic: bool(store.queues_of(topic)),
        )
        self.access = TierAccess(settings, store.fs, store.clock.now_ms, lives)
        self.reader = TierReader(self.access, settings)
        self.tables = TableSaver(
            lambda: self.access.drivers.marked,
            settings.home,
            settings.root,
            store.fs,
            self.access.topics,
            lives,
        )
        self.upload = Upload(self.access, settings, self._wants, self._exists, self._name_lives)
        self.state = TierState(store, topics, settings, self.access, self.reader, self.upload)
        self._topics_changed = trio.Event()
        topics.subscribe(lambda _topic: self._topics_changed.set())
        # Apart from the threads of all other work: the store may hang.
        self._threads = trio.CapacityLimiter(1)
        self._merging = trio.CapacityLimiter(1)
        self._saving = trio.CapacityLimiter(1)
        self._watching = trio.CapacityLimiter(1)
        self._outages = Outages(log.error, ended=log.warning)

    def follow(self, following: Following) -> None:
        """Note how the store runs the upload."""
        self.state.following = following

    def _exists(self, topic: str) -> bool:
        return self._topics.get(topic) is not None

    def _wants(self, topic: str) -> bool:
        config = self._topics.get(topic)
        return config is not None and not self._topics.is_system(topic) and _is_tiered(config)

    def find_source(self, lookup: Lookup, queue: StoreQueue) -> TieredSource | None:
        """The source of a queue of a user's topic; see ``QueueDirectory``."""
        is_read = lookup.use in _READS and self.settings.level is not StorageLevel.DISABLE
        is_whole = queue.consume_queue.is_batch  # the tier has records of one message each
        if not is_read or is_whole or self._topics.is_system(queue.topic):
            return None
        local = self._store.source(queue)
        is_shown_only = lookup.use in _SHOWN
        return TieredSource(
            queue, local, self.reader, self.settings.level, is_shown_only=is_shown_only
        )

    def unconsumed(self, lowest: LowestUnconsumed) -> LowestUnconsumed:
        """The messages that must stay in the log for groups: none that the tier has.

        What is not uploaded yet stays because this follower needs it.
        """
        if self.settings.level is StorageLevel.DISABLE:
            return lowest

        def lowest_local(
            topic: str, queue_ids: Iterable[int]
        ) -> Generator[None, None, Mapping[int, tuple[int, str]]]:
            found = yield from lowest(topic, queue_ids)
            return {
                queue_id: (offset, group)
                for queue_id, (offset, group) in found.items()
                if not self._is_kept(topic, queue_id, offset)
            }

        return lowest_local

    def _is_kept(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        if not self.access.lives.is_current(topic) or self.access.standings.is_foreign(
            (topic, queue_id)
        ):
            return False
        queue = self.access.queue(topic, queue_id)
        return queue is not None and queue.min_offset <= queue_offset < queue.commit_offset

    # -- services ----------------------------------------------------------------------------------

    def services(self) -> tuple[Service, ...]:
        """The tier's tasks."""
        return (
            Service(self._run_clean_up, self.load, finish=self._hurry, stage=StopStage.ANSWER),
            Service(self._run_expiry),
            Service(self._run_merges),
            Service(self._run_watch),
            # The broker's tables, once they are on disk.
            Service(self._run_tables, finish=self._save_last_tables, stage=StopStage.COPY),
        )

    async def _run_tables(self) -> None:
        while True:
            self._topics_changed = trio.Event()
            await self._save_tables()
            with trio.move_on_after(_TABLES_S):
                await self._topics_changed.wait()
            await trio.sleep(_CHANGED_TABLES_S)

    async def _save_last_tables(self) -> None:
        with trio.move_on_after(_LAST_TABLES_S):
            await self._save_tables()

    async def _save_tables(self) -> None:
        if not self.settings.is_lasting:
            return
        try:
            now_ms = self.access.now_ms()
            # A put is whole or nothing, so it may be left alone.
            await trio.to_thread.run_sync(
                self.tables.save, now_ms, limiter=self._saving, abandon_on_cancel=True
            )
        except (OSError, StoreError) as error:
            self._outages.failed(_UPKEEP, f"tables are not saved: {error}", "tables")
        else:
            self._outages.worked(_UPKEEP, "tables")

    def _name_lives(self, topics: Iterable[str]) -> None:
        if self.settings.is_lasting:
            self.tables.name_lives(topics, self.access.now_ms())

    def load(self) -> None:
        """Open the tier; if its store is away, the follower and the readers try again."""
        try:
            self.access.open(self.reader.open_s)
        except OSError as error:
            self._outages.failed(_LOCATION, error)

    async def _run_watch(self) -> None:
        """Check the location, and log its outages and those of queues that are given up."""
        while True:
            await trio.sleep(_WATCH_S)
            try:
                wait_s = self.reader.open_s
                await trio.to_thread.run_sync(self.access.look, wait_s, limiter=self._watching)
            except (OSError, StoreError) as error:
                self._outages.failed(_LOCATION, error)
            else:
                if _LOCATION in self._outages.names:
                    self._outages.worked(_LOCATION)
                    self.state.following.retry()
            given_up = self.state.given_up()
            if given_up:
                (topic, queue_id), first = next(iter(given_up.items()))
                reason = f"{len(given_up)} queues, the first is {topic}/{queue_id}: {first.reason}"
                self._outages.failed(_UPLOAD, reason)
            else:
                self._outages.worked(_UPLOAD)

    def _hurry(self) -> None:
        """Have a location that does not answer delay the stop no longer than this."""
        self.access.drivers.limits.end_by(monotonic() + _STOP_S)

    async def _run_expiry(self) -> None:
        """Drop what was read and is not read any further."""
        while True:
            await trio.sleep(self.settings.read_ahead.expire_s / 2)
            await trio.to_thread.run_sync(self.reader.expire)

    async def _run_merges(self) -> None:
        while True:
            has_more = False
            try:
                has_more = await trio.to_thread.run_sync(self._merge, limiter=self._merging)
            except (OSError, StoreError) as error:
                self._outages.failed(_UPKEEP, f"a merge failed: {error}", "merges")
            else:
                self._outages.worked(_UPKEEP, "merges")
            await trio.sleep(0 if has_more else _MERGE_S)

    def _merge(self) -> bool:
        """Join some small pieces, if there are any. In a thread. Raises OSError."""
        self.access.open()
        merged = self.access.tier.merge(self.access.now_ms())
        if isinstance(merged, Failure):
            raise OSError(str(merged))
        return merged

    async def _run_clean_up(self) -> None:
        while True:
            wait_s = self.settings.clean_ms / 1000
            try:
                limits = self.limits()
                await trio.to_thread.run_sync(self.clean_up, limits, limiter=self._threads)
            except (OSError, StoreError) as error:
                self._outages.failed(_UPKEEP, f"clean-up failed: {error}", "clean-up")
                wait_s = min(wait_s, _RETRY_S)
            else:
                self._outages.worked(_UPKEEP, "clean-up")
            await trio.sleep(wait_s)

    def limits(self) -> dict[str, TopicLimit]:
        """The topics' own limits; those of bytes less what only the log has."""
        return {
            topic: limit
            if limit.reserved_bytes is None
            else limit._replace(
                reserved_bytes=max(limit.reserved_bytes - self.state.behind_bytes(topic), 0)
            )
            for topic, limit in topic_limits(self._topics.all()).items()
        }

    def clean_up(self, limits: Mapping[str, TopicLimit]) -> None:
        """Delete what has expired and what deletions left. In a thread.

        Raises OSError, StoreFormatError.
        """
        self.access.open()
        now_ms = self.access.now_ms()

        def before_ms(topic: str) -> int:
            own_ms = limits[topic].reserved_ms if topic in limits else None
            return now_ms - (self.settings.reserved_ms if own_ms is None else own_ms)

        with self.access.writing:
            failures = self.access.tier.clean_up(
                before_ms if self.settings.deletes else None, now_ms, limits
            )
        for failure in failures:
            raise OSError(str(failure))

    # -- state -------------------------------------------------------------------------------------

    def runtime_info(self) -> dict[str, str]:
        """Numbers for GET_BROKER_RUNTIME_INFO."""
        given_up, drivers = self.state.given_up(), self.access.drivers
        first = min(given_up.values(), key=lambda each: each.since_ms, default=None)
        return {
            "tierOpen": str(self.access.is_open).lower(),
            "tierPlaceProblem": drivers.problem,
            "tierPlaceProblemSeconds": str(round(drivers.problem_seconds)),
            "tierProblem": self.reader.breaker.problem,
            "tierStuckQueues": str(len(given_up)),
            "tierForeignQueues": str(self.upload.standings.foreign_count()),
            "tierStuckReason": first.reason if first else "",
            "tierStuckSinceMs": str(first.since_ms if first else 0),
            "tierUnansweredOperations": str(drivers.limits.abandoned_count),
            "tierReadAheadBytes": str(self.reader.blocks.byte_count),
        }


def _is_tiered(topic: TopicConfig) -> bool:
    attributes = topic.attributes
    is_plain = attributes.get(CLEANUP_POLICY) != COMPACTED and not is_batched(topic)
    return is_plain and attributes.get(TIERED) != "false"
