"""Uploads the messages of all tiered topics, in groups.

Messages taken from the log wait in memory until their group is due. What ``sync`` has brought to
the tier is never delivered again; after an error or a crash, messages that the tier has already are
delivered once more and skipped.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.store.queues.queue_blocks import QueueNotFollowed
from headrace_broker.tiered.access.comparison import first_difference
from headrace_broker.tiered.access.standings import Event, State
from headrace_broker.tiered.container.stored_tier import Group
from headrace_protocol.columns import RecordColumns
from headrace_protocol.tier.driver import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.followers.follower_work import LocalQueue
    from headrace_broker.store.queues.queue_blocks import QueueBlock
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.access.standings import Name
    from headrace_broker.tiered.access.tier_access import TierAccess
    from headrace_broker.tiered.container.stored_tier import TierQueue
    from headrace_protocol.columns import Array

# Of all queues together; a block may add a few MiB.
_WAITING_BYTES_MAX: Final = 32 << 20


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

    standings: of all queues. The log keeps the messages of those that are given up; ``retry`` or a
    restart tries again.
    message_counts: uploaded since the start, by topic. waiting_bytes: of records in memory.
    """

    name = "tier"
    # Uploaded as one where the number of queues does not matter; a request for less costs as much.
    together_bytes = 16 << 20
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
        self.standings = access.standings
        self.message_counts: Counter[str] = Counter()
        self._exists = exists
        self._name_lives = name_lives
        self._access = access
        self._settings = settings
        # The queue that has waited longest is first.
        self._waiting: dict[Name, _Waiting] = {}
        self.waiting_bytes = 0
        # What a person has decided about queues that were given up, carried out by ``resume``: to
        # look once more, or to forget what the tier has from an offset on.
        self._decided: dict[Name, int | None] = {}

    def retry(self, names: Iterable[Name]) -> None:
        """Have ``resume`` look at queues that were given up as a restart would. On the loop."""
        self._decided.update(dict.fromkeys(names))

    def forget(self, name: Name, from_offset: int) -> None:
        """Have ``resume`` drop what the tier has from an offset on. On the loop."""
        self._decided[name] = from_offset

    # -- the store's side --------------------------------------------------------------------------

    def resume(self, queue: LocalQueue, queue_offset: int) -> int:
        """See ``Follower``. What the tier has from there on stays, and is indexed once more."""
        name = queue.name
        self._drop(name)
        self._access.open()
        with self._access.writing:
            self._end_old_lives()
            tier, now_ms = self._access.tier, self._access.now_ms()
            if name in self._decided:
                self._carry_out(name)
            if (damage := tier.damaged.get(name)) is not None:
                self.standings.apply(name, Event.FAIL, str(damage))
            if name not in self.standings.given_up:
                self._open(queue, now_ms)
            if (given_up := self.standings.given_up.get(name)) is not None:
                foreign_from = given_up.foreign_from
                return queue_offset if foreign_from is None else min(queue_offset, foreign_from)
            stored = tier.queues[name]
            if stored.commit_offset > queue_offset:
                self._check(name, tier.index_again(*name, queue_offset, now_ms))
            return min(stored.commit_offset, queue_offset)

    def _open(self, queue: LocalQueue, now_ms: int) -> None:
        """Have the tier continue a queue, if it has that one's messages. Raises OSError."""
        name, tier = queue.name, self._access.tier
        self._note_first_life(name[0])
        if name not in tier.queues:
            self._check_write(name, tier.create([name], now_ms))
        if self.standings.state(name) is State.TRUSTED:
            return
        difference = first_difference(tier.queues[name], queue)
        if isinstance(difference, Failure):
            self._check(name, difference)
        elif difference is None:
            self.standings.apply(name, Event.SAME)
            self._note_life(name[0])
        else:
            self._refuse(name, tier.queues[name], difference)

    def _carry_out(self, name: Name) -> None:
        """Do what a person has decided about a queue. Raises OSError."""
        tier, now_ms = self._access.tier, self._access.now_ms()
        # Taken out first, since the next decision may come meanwhile.
        forget_from = self._decided.pop(name)
        failure = tier.reopen(name, now_ms)
        if failure is None and forget_from is not None:
            failure = tier.cut(name, forget_from, now_ms)
        if failure is not None:
            self._decided.setdefault(name, forget_from)
            raise OSError(str(failure))
        self.standings.apply(name, Event.RESET)

    def follow(self, block: QueueBlock) -> None:
        """See ``Follower``. Raises OSError, QueueNotFollowed."""
        name = block.topic, block.queue_id
        if (given_up := self.standings.given_up.get(name)) is not None:
            raise QueueNotFollowed(
                f"queue {block.topic}/{block.queue_id} is not uploaded: {given_up.reason}"
            )
        with self._access.writing:
            group = self._waiting.setdefault(name, _Waiting())
            group.add(block.records, block.units["tags_code"])
            self.waiting_bytes += len(block.records.data)
            settings = self._settings
            if self._access.tier.takes_all:
                if self.waiting_bytes >= self.together_bytes:
                    self._append(list(self._waiting))
                return
            if group.count >= settings.commit_count or group.byte_count >= settings.commit_bytes:
                self._append([name])
            while self.waiting_bytes > _WAITING_BYTES_MAX:
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
        self.standings.apply(name, Event.RESET)
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
        if not over:  # called for each queue, so don't look through all of them
            return
        for name in {*self._waiting, *self.standings.given_up, *self.standings.trusted}:
            if name[0] in over:
                self._drop(name)
                self.standings.apply(name, Event.RESET)
        self._access.end_old_lives()

    def _note_first_life(self, topic: str) -> None:
        """Note the life of a topic of which the tier has no message yet. Raises OSError."""
        lives, tier = self._access.lives, self._access.tier
        if lives.is_current(topic):
            return
        for name, queue in list(tier.queues.items()):
            # Without a message to compare; nothing is lost with it.
            if name[0] == topic and 0 < queue.commit_offset == queue.min_offset:
                self._access.delete(*name)
        if not any(name[0] == topic for name in (*tier.queues, *tier.damaged)):
            tier.sync()
            lives.note(topic)

    def _note_life(self, topic: str) -> None:
        lives = self._access.lives
        if not lives.is_current(topic) and not any(
            name[0] == topic for name in self.standings.given_up
        ):
            lives.note(topic)

    # -- groups ------------------------------------------------------------------------------------

    def _drop(self, name: Name) -> None:
        group = self._waiting.pop(name, None)
        if group is not None:
            self.waiting_bytes -= group.byte_count

    def _append(self, names: list[Name]) -> None:
        """Upload what waits of queues: of one, or of any if the tier takes all. Raises OSError."""
        tier = self._access.tier
        groups = {name: self._missing(name) for name in names}
        self._name_lives({topic for topic, _ in names})
        self._check_write(names[0], tier.append_all(groups, self._access.now_ms()))
        for name, group in groups.items():
            self.message_counts[name[0]] += len(group.records)
            self.waiting_bytes -= self._waiting.pop(name).byte_count

    def _missing(self, name: Name) -> Group:
        """The waiting messages of a queue that the tier lacks. Raises OSError."""
        records, codes = self._waiting[name].join()
        queue = self._access.tier.queues[name]
        is_new = records.queue_offset >= queue.commit_offset
        if is_new.all():
            return Group(records, codes)
        return Group(records.select(is_new), codes[is_new])

    def _refuse(self, name: Name, queue: TierQueue, from_offset: int) -> None:
        """Give up a queue of which the tier has other messages."""
        self._access.lives.forget([name[0]])
        reason = (
            f"{queue.name.path}: from queue offset {from_offset} on the tier has other messages "
            "than the log: the local store was replaced, restored from a back-up, or has lost its "
            "end. Uploads and reads of the tier stop until you decide: headrace tier forget "
            f"{name[0]} --queue {name[1]}"
        )
        self.standings.apply(name, Event.DIFFERENT, reason, from_offset)

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
            self.standings.apply(name, Event.FAIL, str(failure))
        raise OSError(str(failure))
