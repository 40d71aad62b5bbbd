"""Rebuilds the compaction log of a queue from another broker that has the queue.

A broker that has lost the older files of a compaction log, but has the same messages from some
queue offset on, pulls the older ones from a master, merges both and compacts them. Messages are
pulled, not files, because the master's runs replace its files meanwhile.

1. The checkpoint of a rebuild is saved before the first pull, and after each part is on disk.
2. Messages are pulled from offset 0 to the first one of the queue's own log, and from there on
   delete markers to its end: runs here may have dropped theirs before what they hide has come.
3. One forced run over both parts, whose swap puts the result in place.
4. What was pulled is removed. A start in between repeats the rebuild without effect.
Source: docs/compaction.md "Rebuild".
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import structlog
import trio

from headrace_broker.compaction.compactor import Request
from headrace_broker.compaction.master import Master
from headrace_broker.compaction.replica import RebuildCheckpoint
from headrace_broker.compaction.throttle import RunStopped
from headrace_broker.store.errors import StoreError
from headrace_protocol.drivers.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace_broker.compaction.compactor import Compactor
    from headrace_broker.compaction.master import Pulled
    from headrace_broker.compaction.queues import CompactedQueue, CompactedQueues, Name
    from headrace_broker.peers.peers import Peers
    from headrace_broker.topics.attributes import CompactionPolicy
    from headrace_protocol.columns import Array

log = structlog.get_logger("headrace.broker")

# Between two saves of the checkpoint; a start pulls again what came after the last.
_SAVE_BYTES: Final = 16 << 20
_RUN_ENDS_S: Final = 1.0


class OtherQueue(Exception):
    """The other broker's queue is not the one that this broker has."""


class UnknownSource(Exception):
    """A request names an address to which nobody has this broker connect."""


class Source(NamedTuple):
    """The broker to rebuild from. is_admitted: a rebuild from it has begun before."""

    address: str
    is_admitted: bool = False


class Rebuild:
    """One rebuild of one queue; its methods run in threads, and hold the lock of the queues."""

    def __init__(self, queues: CompactedQueues, name: Name, now_ms: int) -> None:
        self._queues = queues
        self._name = name
        self._now_ms = now_ms
        self._unsaved_bytes = 0
        self._own_units: Array | None = None
        self.checkpoint = RebuildCheckpoint("", 0, 0, 0)

    def begin(self, address: str, retention_ms: int) -> bool:
        """Resume or begin; False if nothing is missing. Raises OSError, StoreError.

        Resumed is a rebuild from the same address, until its delete markers may have been dropped.
        """
        with self._queues.lock:
            queue = self._current()
            if queue is None:
                return False
            oldest = self._queues.oldest_offset(*self._name)
            saved = queue.replica.saved()
            if not oldest:
                queue.replica.discard()
                return False
            segments = queue.log.segments
            if segments:
                self._own_units = segments[0].read_units()
            if (
                saved is not None
                and saved.address == address
                and self._now_ms - saved.started_ms < retention_ms
                and saved.hides_from <= oldest
                and queue.replica.resume(saved)
            ):
                self.checkpoint = saved
                return True
            # Runs may have dropped the last messages, delete markers among them.
            read_end = queue.state_file.load().position
            end = max(queue.log.next_offset, oldest, read_end)
            self.checkpoint = RebuildCheckpoint(address, self._now_ms, oldest, end)
            queue.replica.begin(self.checkpoint)
            return True

    def take(self, pulled: Pulled) -> None:
        """Append what was pulled. Raises OSError, StoreError, OtherQueue."""
        checkpoint, records = self.checkpoint, pulled.records
        with self._queues.lock:
            queue = self._current()
            if queue is None:
                return
            if records is not None:
                self._check(pulled)
                kept = records.select(records.queue_offset < checkpoint.end)
                self._unsaved_bytes += queue.replica.append(kept, checkpoint.hides_from)
            if pulled.position is None and pulled.max_offset < checkpoint.hides_from:
                raise OtherQueue(
                    f"its queue ends at {pulled.max_offset}, before {checkpoint.hides_from}, where "
                    "the messages of this broker begin: name a broker that has the whole queue"
                )
            position = checkpoint.end if pulled.position is None else pulled.position
            self.checkpoint = msgspec.structs.replace(checkpoint, position=position)
            if self._unsaved_bytes >= _SAVE_BYTES or self.is_complete():
                queue.replica.save(self.checkpoint)
                self._unsaved_bytes = 0

    def is_complete(self) -> bool:
        """True if all that is missing was pulled, or the queue is gone."""
        return self.checkpoint.position >= self.checkpoint.end or self._current() is None

    def _current(self) -> CompactedQueue | None:
        return self._queues.all().get(self._name)

    def _check(self, pulled: Pulled) -> None:
        """Raise OtherQueue if one of the first own messages is another one there."""
        records, units = pulled.records, self._own_units
        if records is None or units is None:
            return
        common, here, there = np.intersect1d(
            units["queue_offset"], records.queue_offset, assume_unique=True, return_indices=True
        )
        is_other = units["store_timestamp"][here] != records.store_timestamp[there]
        if is_other.any():
            raise OtherQueue(
                f"its message at queue offset {common[is_other][0]} is not that of this broker: "
                "name a broker whose queue has the same messages"
            )

    def discard(self) -> None:
        """Remove what was pulled. Raises OSError."""
        with self._queues.lock:
            queue = self._current()
            if queue is not None:
                queue.replica.discard()

    def merge(self, compactor: Compactor, request: Request) -> bool:
        """Put the result in place; False while another run compacts the queue.

        Raises OSError, StoreError, RunStopped.
        """
        with self._queues.lock:
            queue = self._current()
            older = queue.replica.older(self.checkpoint.hides_from) if queue is not None else None
        if older is not None and compactor.merge(request, older) is None:
            return self._current() is None
        with self._queues.lock:
            self._queues.rebuilt(self._name)
        self.discard()
        return True


class Rebuilds:
    """Rebuilds queues one after another, by request and where a start finds unfinished ones."""

    def __init__(
        self,
        compactor: Compactor,
        policy_of: Callable[[str], CompactionPolicy | None],
        peers: Peers,
        is_source: Callable[[str], Awaitable[bool]],
        now_ms: Callable[[], int],
        map_bytes_max: int,
    ) -> None:
        """policy_of: the policy of a topic, None if it is not compacted.

        is_source: whether queues may be rebuilt from an address; raises HeadraceError.
        """
        self._queues = compactor.queues
        self._compactor = compactor
        self._policy_of = policy_of
        self._peers, self._is_source = peers, is_source
        self._now_ms = now_ms
        self._map_bytes_max = map_bytes_max
        self._pending: dict[Name, Source] = {}
        self._problems: dict[Name, str] = {}
        self._wakeup = trio.Event()
        # Called after each rebuild: the follower resumes a queue whose log was lost.
        self.on_rebuilt: Callable[[], None] = lambda: None

    def load(self) -> None:
        """Find unfinished rebuilds. Raises OSError, StoreError."""
        for name, queue in self._queues.all().items():
            checkpoint = queue.replica.saved()
            if checkpoint is None:
                queue.replica.discard()
            else:
                self._pending[name] = Source(checkpoint.address, is_admitted=True)

    def request(self, topic: str, address: str) -> None:
        """Rebuild the queues of a topic from a broker."""
        for name in self._queues.all():
            if name[0] == topic:
                self._pending[name] = Source(address)
                self._problems.pop(name, None)
        self._wakeup.set()

    def is_pending(self, topic: str) -> bool:
        """True if a queue of a topic is being rebuilt, or is to be."""
        return any(name[0] == topic for name in self._pending)

    def problem(self, topic: str) -> str:
        """The reason why the last rebuild of a topic has failed; "" if it has not."""
        problems = self._problems.items()
        return next((text for name, text in sorted(problems) if name[0] == topic), "")

    async def run(self) -> None:
        """Rebuild until cancelled."""
        while True:
            while self._pending:
                name, source = next(iter(self._pending.items()))
                try:
                    await self._serve(name, source)
                finally:
                    if self._pending.get(name) == source:
                        del self._pending[name]
            self._wakeup = trio.Event()
            await self._wakeup.wait()

    async def _serve(self, name: Name, source: Source) -> None:
        address = source.address
        try:
            await self._check(source)
            await self.rebuild(name, address)
        except RunStopped:
            return
        except (HeadraceError, OSError, StoreError, OtherQueue, UnknownSource) as error:
            topic, queue_id = name
            self._problems[name] = f"{topic}/{queue_id} not rebuilt from {address}: {error}"
            log.error("queue not rebuilt", queue=name, master=address, reason=str(error))

    async def _check(self, source: Source) -> None:
        """Raise UnknownSource, HeadraceError."""
        if not (source.is_admitted or await self._is_source(source.address)):
            raise UnknownSource(
                "no nameserver knows a broker at this address: let it register, or list it in "
                "rebuildSources of this broker"
            )

    async def rebuild(self, name: Name, address: str) -> None:
        """Rebuild a queue from the broker at an address, or resume that.

        Raises HeadraceError, OSError, StoreError, OtherQueue, RunStopped.
        """
        policy = self._policy_of(name[0])
        if policy is None or name not in self._queues.all():
            return
        rebuild = Rebuild(self._queues, name, self._now_ms())
        begin = partial(rebuild.begin, address, policy.delete_retention_ms)
        if not await trio.to_thread.run_sync(begin):
            return
        try:
            await self._pull(rebuild, name, address)
        except OtherQueue:
            await trio.to_thread.run_sync(rebuild.discard)
            raise
        request = Request(name, policy, self._now_ms(), self._map_bytes_max, is_forced=True)
        merge = partial(rebuild.merge, self._compactor, request)
        while True:
            if await trio.to_thread.run_sync(merge):
                break
            await trio.sleep(_RUN_ENDS_S)
        self.on_rebuilt()
        log.info("queue rebuilt", queue=name, master=address)

    async def _pull(self, rebuild: Rebuild, name: Name, address: str) -> None:
        if rebuild.is_complete():
            return
        async with self._peers.hold(address):
            master = Master(self._peers, address, *name)
            while not rebuild.is_complete():
                pulled = await master.pull(rebuild.checkpoint.position)
                await trio.to_thread.run_sync(rebuild.take, pulled)
            await master.leave()
