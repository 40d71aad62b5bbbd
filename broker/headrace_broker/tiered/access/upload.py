"""Uploads the messages of all tiered topics, in groups.

Messages taken from the log wait in memory until their group is due. What ``sync`` has brought to
the tier is never delivered again; after an error or a crash, messages that the tier has already are
delivered once more and skipped.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from headrace_broker.store.queues.queue_blocks import QueueNotFollowed
from headrace_broker.tiered.container.stored_tier import Group
from headrace_broker.tiered.driver.interface import Failure, FailureKind
from headrace_protocol.columns import RecordColumns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.queues.queue_blocks import QueueBlock
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.access.tier_access import TierAccess
    from headrace_broker.tiered.container.stored_queue import StoredQueue
    from headrace_protocol.columns import Array

log = structlog.get_logger("headrace.broker")

Name = tuple[str, int]

# Of all queues together; a block may add a few MiB.
_WAITING_BYTES_MAX: Final = 32 << 20
# Uploaded as one where the number of queues does not matter; a request for less costs as much.
_TOGETHER_BYTES: Final = 16 << 20


class _Waiting:
    """Messages of a queue that wait for their upload."""

    def __init__(self) -> None:
        self.records: list[RecordColumns] = []
        self.codes: list[Array] = []
        self.count = self.byte_count = 0

    def add(self, records: RecordColumns, codes: Array) -> None:
        self.records.append(records)
        self.codes.append(codes)
        self.count += len(records)
        self.byte_count += len(records.data)

    def join(self) -> Group:
        """All records, and their tags codes."""
        codes, records = np.concatenate(self.codes), self.records
        if len(records) == 1:
            return Group(records[0], codes)
        lengths = np.array([len(part.data) for part in records])
        begins = np.cumsum(lengths) - lengths
        starts = [part.start + begin for part, begin in zip(records, begins, strict=True)]
        sizes = np.concatenate([part.size for part in records])
        data = b"".join([part.data for part in records])
        return Group(RecordColumns(data, np.concatenate(starts), sizes), codes)


class Upload:
    """The follower that uploads; see ``Follower``.

    stuck: why queues can't be uploaded. The log keeps their messages; a restart tries again.
    message_counts: uploaded since the start, by topic.
    """

    name = "tier"
    # The tier may be away; a start uploads what is missing.
    is_part_of_stop = False

    def __init__(
        self,
        access: TierAccess,
        settings: TierSettings,
        wants: Callable[[str], bool],
        exists: Callable[[str], bool],
        name_lives: Callable[[Iterable[str]], None] = lambda _topics: None,
    ) -> None:
        """exists: whether there is a topic.

        name_lives: called with the topics of messages before these are uploaded. Raises OSError.
        """
        self.wants = wants
        self.stuck: dict[Name, str] = {}
        self.message_counts: Counter[str] = Counter()
        self._exists = exists
        self._name_lives = name_lives
        self._access = access
        self._settings = settings
        # The queue that has waited longest is first.
        self._waiting: dict[Name, _Waiting] = {}
        self._waiting_bytes = 0
        # Queues of which the first message that the tier has already is still to be compared.
        self._unproven: set[Name] = set()

    # -- the store's side --------------------------------------------------------------------------

    def resume(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """See ``Follower``. What the tier has from there on stays, and is indexed once more."""
        name = topic, queue_id
        self._drop(name)
        self._access.open()
        with self._access.writing:
            self._end_old_lives()
            tier, now_ms = self._access.tier, self._access.now_ms()
            if (damage := tier.damaged.get(name)) is not None:
                self._note_stuck(name, str(damage))
            if name in self.stuck:
                return queue_offset
            is_known = self._is_life_known(topic)
            if name not in tier.queues:
                self._check_write(name, tier.create([name], now_ms))
            queue = tier.queues[name]
            if queue.commit_offset > queue_offset or not is_known:
                self._unproven.add(name)
            if queue.commit_offset > queue_offset:
                self._check(name, tier.index_again(topic, queue_id, queue_offset, now_ms))
            return min(queue.commit_offset, queue_offset)

    def follow(self, block: QueueBlock) -> None:
        """See ``Follower``. Raises OSError, QueueNotFollowed."""
        name = block.topic, block.queue_id
        if (reason := self.stuck.get(name)) is not None:
            raise QueueNotFollowed(
                f"queue {block.topic}/{block.queue_id} is not uploaded: {reason}"
            )
        with self._access.writing:
            group = self._waiting.setdefault(name, _Waiting())
            group.add(block.records, block.units["tags_code"])
            self._waiting_bytes += len(block.records.data)
            settings = self._settings
            if self._access.tier.takes_all:
                if self._waiting_bytes >= _TOGETHER_BYTES:
                    self._append(list(self._waiting))
                return
            if group.count >= settings.commit_count or group.byte_count >= settings.commit_bytes:
                self._append([name])
            while self._waiting_bytes > _WAITING_BYTES_MAX:
                self._append([next(iter(self._waiting))])

    def sync(self) -> None:
        """See ``Follower``."""
        with self._access.writing:
            if self._access.is_open:
                self._end_old_lives()
            while self._waiting:
                names = list(self._waiting)
                self._append(names if self._access.tier.takes_all else names[:1])
            if self._access.is_open:
                self._access.tier.sync()

    def gone(self, topic: str, queue_id: int) -> None:
        """See ``Follower``. Of a topic that still exists, a queue that is gone was lost."""
        name = topic, queue_id
        self._drop(name)
        self.stuck.pop(name, None)
        self._access.open()
        with self._access.writing:
            self._end_old_lives()
            if not self._exists(topic):
                self._access.delete(*name)

    def used(self) -> list[tuple[MappedFile, int]]:
        """See ``Follower``. The tier's files have checks of their own."""
        return []

    def close(self) -> None:
        """See ``Follower``."""
        self._access.close()

    # -- lives of topics ---------------------------------------------------------------------------

    def _end_old_lives(self) -> None:
        """Forget and delete queues of topics that were deleted or made again. Raises OSError."""
        over = self._access.lives.over()
        for name in [*self._waiting, *self.stuck]:
            if name[0] in over:
                self._drop(name)
                self.stuck.pop(name, None)
        self._access.end_old_lives()

    def _is_life_known(self, topic: str) -> bool:
        """Whether the tier has no other life of a topic; false if that is to be proven."""
        lives, tier = self._access.lives, self._access.tier
        if lives.is_current(topic):
            return True
        for name, queue in list(tier.queues.items()):
            # Without a message to compare; nothing is lost with it.
            if name[0] == topic and 0 < queue.commit_offset == queue.min_offset:
                self._access.delete(*name)
        if any(name[0] == topic for name in (*tier.queues, *tier.damaged)):
            return False
        tier.sync()
        lives.note(topic)
        return True

    def _note_life(self, topic: str) -> None:
        lives = self._access.lives
        if not lives.is_current(topic) and not any(name[0] == topic for name in self.stuck):
            lives.note(topic)

    # -- groups ------------------------------------------------------------------------------------

    def _drop(self, name: Name) -> None:
        group = self._waiting.pop(name, None)
        if group is not None:
            self._waiting_bytes -= group.byte_count
        self._unproven.discard(name)

    def _append(self, names: list[Name]) -> None:
        """Upload what waits of queues: of one, or of any if the tier takes all. Raises OSError."""
        tier = self._access.tier
        groups = {name: self._missing(name) for name in names}
        self._name_lives({topic for topic, _ in names})
        self._check_write(names[0], tier.append_all(groups, self._access.now_ms()))
        for name, group in groups.items():
            self.message_counts[name[0]] += len(group.records)
            self._waiting_bytes -= self._waiting.pop(name).byte_count

    def _missing(self, name: Name) -> Group:
        """What the tier does not have yet of what waits of a queue. Raises OSError."""
        records, codes = self._waiting[name].join()
        queue = self._access.tier.queues[name]
        is_new = records.queue_offset >= queue.commit_offset
        if name in self._unproven:
            self._prove(name, queue, records.select(~is_new))
        if is_new.all():
            return Group(records, codes)
        return Group(records.select(is_new), codes[is_new])

    def _prove(self, name: Name, queue: StoredQueue, known: RecordColumns) -> None:
        """Check that the tier has this queue, and not another one of its name. Raises OSError."""
        kept = known.select(known.queue_offset >= queue.min_offset)
        if len(kept):
            self._compare(name, queue, kept)
        elif len(known):
            self._check_age(name, queue, known)
            return
        self._unproven.discard(name)
        self._note_life(name[0])

    def _compare(self, name: Name, queue: StoredQueue, kept: RecordColumns) -> None:
        offset = int(kept.queue_offset[0])
        found = queue.units(offset, 1)
        self._check(name, found if isinstance(found, Failure) else None)
        assert not isinstance(found, Failure)
        if not len(found.units) or found.first != offset:  # in a gap of the tier
            return
        head = queue.head(int(found.units["physical_offset"][0]))
        self._check(name, head if isinstance(head, Failure) else None)
        assert not isinstance(head, Failure)
        if (head.size, head.store_ms) != (int(kept.size[0]), int(kept.store_timestamp[0])):
            self._refuse(name, queue, offset)

    def _check_age(self, name: Name, queue: StoredQueue, expired: RecordColumns) -> None:
        """What precedes the messages of the tier must be older than these.

        All may have expired, of a topic whose life is known.
        """
        if queue.min_offset == queue.commit_offset:
            return
        oldest_ms = queue.store_time(queue.min_offset)
        self._check(name, oldest_ms if isinstance(oldest_ms, Failure) else None)
        assert not isinstance(oldest_ms, Failure)
        if int(expired.store_timestamp[-1]) > oldest_ms:
            self._refuse(name, queue, int(expired.queue_offset[-1]))

    def _refuse(self, name: Name, queue: StoredQueue, queue_offset: int) -> None:
        self._access.lives.forget([name[0]])
        reason = (
            f"the tier has another message at queue offset {queue_offset}: the local store was "
            "replaced or has lost its end; delete the topic, or move its folder in the tier "
            "away and start again"
        )
        self._check(name, Failure(FailureKind.DAMAGED, queue.name.path, reason))

    def _check_write(self, name: Name, failure: Failure | None) -> None:
        """As ``_check``, but a failure of a tier that takes all is not that of one queue."""
        if failure is not None and self._access.tier.takes_all:
            raise OSError(str(failure))
        self._check(name, failure)

    def _check(self, name: Name, failure: Failure | None) -> None:
        """Raise OSError after a failure; unless a retry may help, the queue is stuck."""
        if failure is None:
            return
        if failure.kind is not FailureKind.UNREACHABLE:
            self._note_stuck(name, str(failure))
        raise OSError(str(failure))

    def _note_stuck(self, name: Name, reason: str) -> None:
        if name not in self.stuck:
            self.stuck[name] = reason
            log.error("queue is not uploaded", queue=f"{name[0]}/{name[1]}", reason=reason)
