"""Progress of consumer groups: config/consumerOffset.json.

The file holds every queue of every group, so a save encodes only the entries that changed since the
last one and joins them with the rest, in a thread. Only copying the changes happens on the loop, in
slices: an entry that changes before its turn is copied first, so a save holds one moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import structlog
import trio

from headrace_broker.host_budget import HostBudget
from headrace_broker.persistence import (
    field_text,
    file_text,
    load_table,
    next_version,
    table_text,
    warn_if_missing,
    with_breaks,
)
from headrace_daemon.slices import in_slices
from headrace_protocol import fastjson
from headrace_protocol.bodies import ConsumerOffsetSerializeWrapper, DataVersion
from headrace_protocol.outages import Outages
from headrace_protocol.waiting import at_once

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from headrace_broker.host_budget import Host
    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile

log = structlog.get_logger("headrace.broker")

_COMMITS_PER_VERSION = 500
_QUEUES_AT_ONCE = 500
# Entries of all queues that a save copies in one slice, less than a millisecond.
_COPIED_AT_ONCE = 4096
# Memory of a group in a topic, and of each queue, in both tables and the text of their file.
_PAIR_BYTES = 4096
_QUEUE_BYTES = 256
# Memory of a queue that a pull creates before its first message arrives, with the target and
# the watch of that pull.
_EMPTY_QUEUE_BYTES = 2048

Key = tuple[str, str]  # topic, group
Offsets = dict[int, int]  # queue id -> queue offset
# Group, topic, queue id (None: all), and the offset (None: there is none any more).
OnMoved = Callable[[str, str, int | None, int | None], None]


class _Table:
    """Offsets by topic and group, with the encoded text of each pair cached until it changes."""

    def __init__(self, loaded: dict[str, Offsets]) -> None:
        self.offsets: dict[Key, Offsets] = {_split(key): value for key, value in loaded.items()}
        # Dicts, so that the file has the order of the changes.
        self._changed: dict[Key, None] = dict.fromkeys(self.offsets)
        # By topic, group and queue, offsets that the file has in the place of these.
        self._saved: dict[Key, Offsets] = {}
        self._uncopied: dict[Key, None] = {}  # changes that a save has yet to copy
        self._copies: dict[Key, Offsets | None] = {}
        self._texts: dict[Key, bytes] = {}  # owned by the thread that saves

    def put(self, key: Key, queue_id: int, offset: int, saved: int | None = None) -> None:
        """saved: the offset that the file has instead."""
        offsets = self.offsets.get(key)
        if offsets is None or offsets.get(queue_id) != offset:
            self._before_change(key)
            self.offsets.setdefault(key, {})[queue_id] = offset
        if saved is not None or self._saved:
            self._save_as(key, queue_id, None if saved == offset else saved)

    def _save_as(self, key: Key, queue_id: int, saved: int | None) -> None:
        found = self._saved.get(key, {})
        if found.get(queue_id) == saved:
            return
        self._before_change(key)
        if saved is not None:
            self._saved.setdefault(key, found)[queue_id] = saved
            return
        del found[queue_id]
        if not found:
            del self._saved[key]

    def add(self, key: Key) -> None:
        self._before_change(key)
        self.offsets[key] = {}

    def remove(self, key: Key, queue_id: int) -> None:
        self._before_change(key)
        self._save_as(key, queue_id, None)
        del self.offsets[key][queue_id]

    def delete(self, key: Key) -> None:
        if key in self.offsets:
            self._before_change(key)
            del self.offsets[key]
            self._saved.pop(key, None)

    def _before_change(self, key: Key) -> None:
        if key in self._uncopied:
            self._copy(key)
        self._changed[key] = None

    def _copy(self, key: Key) -> None:
        del self._uncopied[key]
        offsets = self.offsets.get(key)
        self._copies[key] = None if offsets is None else offsets | self._saved.get(key, {})

    def begin_copying(self) -> None:
        """Fix the state that a save writes."""
        self._uncopied, self._changed = {**self._uncopied, **self._changed}, {}

    def copy_changes(self) -> Iterator[None]:
        """Copy the pairs that had changed at that moment; yields now and then."""
        copied = 0
        for key in list(self._uncopied):
            if key in self._uncopied:
                self._copy(key)
                copied += 1 + len(self._copies[key] or ())
                if copied >= _COPIED_AT_ONCE:
                    copied = 0
                    yield

    def take_changes(self) -> dict[Key, Offsets | None]:
        """The copies of the pairs that changed since the last call; None for deleted ones."""
        copies, self._copies = self._copies, {}
        return copies

    def text(self, changes: dict[Key, Offsets | None]) -> bytes:
        """The table as its field in the file; for one thread at a time."""
        for key, offsets in with_breaks(changes.items()):
            if offsets is None:
                self._texts.pop(key, None)
            else:
                self._texts[key] = _pair_text(key, offsets)
        return table_text(self._texts.values())

    def groups_text(self) -> bytes:
        """The topics of each group, as another field; after ``text``, in the same thread."""
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for topic, group in with_breaks(self._texts):
            groups[group].append(topic)
        return table_text(
            fastjson.dumps(group) + b":" + field_text(sorted(topics), 2)
            for group, topics in with_breaks(groups.items())
        )

    def rows(self) -> Iterator[tuple[str, Offsets]]:
        """Rows as in message bodies; the table may change during iteration."""
        for key in list(self.offsets):
            if (offsets := self.offsets.get(key)) is not None:
                yield f"{key[0]}@{key[1]}", dict(offsets)


class ConsumerOffsets:
    """Committed and pulled offsets of all groups, and resets for their next pulls.

    is_ours: False if another broker had written the file last, at the start. on_moved: called when
    anybody but ``settle`` changes an offset. before_save: awaited before what changed is saved;
    returns why it can't be. None while no group pops. save_problem: the same for a save that waits
    for nothing, when all else is on disk. count_out: the number of messages that a group has taken
    out of a queue and not acknowledged; None if it does not pop the queue.
    """

    def __init__(self, file: ConfigFile, now_ms: NowMs, budget: HostBudget | None = None) -> None:
        """Load the table. Raises StoreFormatError if its file can't be read."""
        self._budget = budget or HostBudget()
        # Topic -> queues that count for a host because a pull created them.
        self._created: dict[str, set[int]] = {}
        self._counted: set[Key] = set()  # pairs that count for a host, even without offsets yet
        self._file = file
        self._outages = Outages(log.error, ended=log.warning)
        self._now_ms = now_ms
        found = load_table(file, _parse)
        loaded = found or ConsumerOffsetSerializeWrapper()
        self.is_ours = file.is_ours
        self.data_version: DataVersion = loaded.data_version
        self._committed = _Table(loaded.offset_table)
        self._pulled = _Table(loaded.pull_offset_table)
        self._topics_of: defaultdict[str, set[str]] = defaultdict(set)
        self._groups_of: defaultdict[str, set[str]] = defaultdict(set)
        for key in self._committed.offsets:
            self._index_pair(key)
        self._resets: dict[Key, Offsets] = {}
        # Of logic queues of static topics: here, so that they end with their group and topic.
        self.logic_resets: dict[Key, Offsets] = {}
        self.logic_known: dict[Key, dict[int, tuple[int, int]]] = {}  # gen of the leader, offset
        self.logic_gens: dict[Key, Offsets] = {}  # gen of the item of the last commit
        self._commits = 0
        self.on_moved: OnMoved | None = None
        self.before_save: Callable[[], Awaitable[OSError | None]] | None = None
        self.save_problem: Callable[[], OSError | None] = lambda: None
        self.count_out: Callable[[str, str, int], int | None] = lambda *_: None
        self._is_running = False
        self._is_awaited = trio.Event()
        self._waiting: list[Callable[[Exception | None], None]] = []
        # A new file is written at once, so that a missing one means that it was lost.
        self._is_dirty = found is None
        if found is None:
            warn_if_missing(
                file, "all groups start as new ones: they skip messages or get them again"
            )
            with suppress(OSError):  # such as a full disk; the next save retries
                self.persist()

    # -- progress ----------------------------------------------------------------------------------

    def make_room(self, group: str, topic: str, queue_id: int, host: Host) -> None:
        """Count the memory of a group's progress in a queue for ``host``, unless it has some.

        Raises RequestError if that exceeds the host's budget.
        """
        key = (topic, group)
        tables = [table.offsets.get(key, {}) for table in self._tables()]
        if not any(queue_id in offsets for offsets in tables):
            self._keep(key, 1 + max(map(len, tables)), host)

    def make_rooms(self, group: str, topic: str, queue_count: int, host: Host) -> None:
        """Count the memory of a group's progress in so many queues, if it has some in fewer.

        Raises RequestError if that exceeds the host's budget.
        """
        key = (topic, group)
        known = max(len(table.offsets.get(key, ())) for table in self._tables())
        if queue_count > known:
            self._keep(key, queue_count, host)

    def _keep(self, key: Key, queue_count: int, host: Host) -> None:
        self._budget.keep(host, ("offsets", *key), _PAIR_BYTES + queue_count * _QUEUE_BYTES)
        self._counted.add(key)

    def make_queue_room(self, topic: str, queue_id: int, host: Host) -> None:
        """Count the memory of an empty queue, which a pull creates, for ``host``.

        Raises RequestError if that exceeds the host's budget.
        """
        self._budget.keep(host, ("queue", topic, queue_id), _EMPTY_QUEUE_BYTES)
        self._created.setdefault(topic, set()).add(queue_id)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Record that ``group`` has consumed the queue up to ``offset``, which may decrease.

        Returns False, and records nothing, while a reset of the queue is pending.
        """
        key = (topic, group)
        if self._resets and queue_id in self._resets.get(key, ()):
            return False
        self._put(key, queue_id, offset)
        self._commits += 1
        if self._commits % _COMMITS_PER_VERSION == 0:
            self.data_version = next_version(self.data_version, self._now_ms())
        return True

    def settle(self, group: str, topic: str, queue_id: int, offset: int, saved: int) -> None:
        """Record what a group that pops has consumed; it knows of all resets.

        saved: what the file says instead, for other brokers.
        """
        key = (topic, group)
        take_reset(self._resets, key, queue_id)
        self._record(key, queue_id, offset, saved)

    def expect(self, group: str, topic: str) -> None:
        """Note that ``group`` reads ``topic``, also if it has committed nothing at this broker.

        It may have yet to reach this broker's queues of a static topic.
        """
        key = (topic, group)
        if key not in self._committed.offsets:
            self._index_pair(key)
            self._committed.add(key)
            self._is_dirty = True

    def withdraw(self, group: str, topic: str, queue_id: int) -> None:
        """Remove the committed offset of ``group`` in a queue that it has yet to reach again."""
        self.expect(group, topic)
        if queue_id in self._committed.offsets[topic, group]:
            self._committed.remove((topic, group), queue_id)
            self._is_dirty = True
            if self.on_moved is not None:
                self.on_moved(group, topic, queue_id, None)

    def commit_pull(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Record that ``group`` has received the messages before ``offset``."""
        self._pulled.put((topic, group), queue_id, offset)
        self._is_dirty = True

    def query(self, group: str, topic: str, queue_id: int) -> int | None:
        """The committed offset, where ``group`` resumes; None if it has committed nothing."""
        offsets = self._committed.offsets.get((topic, group))
        return None if offsets is None else offsets.get(queue_id)

    def query_pull(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset up to which ``group`` has pulled; None if it has not."""
        offsets = self._pulled.offsets.get((topic, group))
        return None if offsets is None else offsets.get(queue_id)

    def offsets_of(self, group: str, topic: str) -> Offsets:
        """Committed offsets by queue id, as a copy."""
        return dict(self._committed.offsets.get((topic, group), {}))

    def count(self, group: str, topic: str) -> int:
        """The number of queues in which ``group`` has committed something."""
        return len(self._committed.offsets.get((topic, group), ()))

    def topics_of(self, group: str) -> set[str]:
        """Topics in which ``group`` has committed offsets, and those of ``expect``."""
        return set(self._topics_of.get(group, ()))

    def groups_of(self, topic: str) -> set[str]:
        """Groups that have committed offsets in ``topic``, and those of ``expect``."""
        return set(self._groups_of.get(topic, ()))

    def pairs(self, count_max: int) -> list[Key]:
        """The first topics and groups in the table that have committed something."""
        return list(islice(self._committed.offsets, count_max))

    # -- resets ------------------------------------------------------------------------------------

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Make ``group`` resume at ``offset``; its next pull of the queue gets that offset."""
        key = (topic, group)
        self._put(key, queue_id, offset)
        self._resets.setdefault(key, {})[queue_id] = offset

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset at which a pull must resume after a reset, returned once; None without one."""
        return take_reset(self._resets, (topic, group), queue_id)

    def clone(
        self, source_group: str, target_group: str, topic: str
    ) -> Generator[None, None, None]:
        """Copy the offsets of ``source_group`` to ``target_group``; yields now and then."""
        for number, (queue_id, offset) in enumerate(self.offsets_of(source_group, topic).items()):
            self._put((topic, target_group), queue_id, offset)
            if not number % _QUEUES_AT_ONCE:
                yield

    # -- deletion ----------------------------------------------------------------------------------

    def delete_topic(self, topic: str) -> Generator[None, None, None]:
        """Remove the progress of all groups in ``topic``; yields now and then."""
        yield from self._delete(lambda key: key[0] == topic)
        for number, queue_id in enumerate(self._created.pop(topic, ())):
            self._budget.drop(("queue", topic, queue_id))
            if not number % _QUEUES_AT_ONCE:
                yield

    def delete_group(self, group: str) -> Generator[None, None, None]:
        """Remove the progress of ``group``; yields now and then."""
        yield from self._delete(lambda key: key[1] == group)

    # -- file --------------------------------------------------------------------------------------

    def committed(self) -> Iterator[tuple[str, Offsets]]:
        """Committed offsets by "topic@group"; the table may change during iteration."""
        return self._committed.rows()

    def pulled(self) -> Iterator[tuple[str, Offsets]]:
        """Pulled offsets, in the same form."""
        return self._pulled.rows()

    def topics_by_group(self) -> Iterator[tuple[str, list[str]]]:
        """The topics in which each group has committed offsets."""
        for group in list(self._topics_of):
            yield group, sorted(self._topics_of.get(group, ()))

    def take_snapshot(self) -> Generator[None, None, Callable[[], bytes] | None]:
        """A function that encodes the file's new content; None if nothing has changed.

        Yields now and then. A thread may call the function, since it reads no shared table;
        snapshots must be saved in order.
        """
        if not self._is_dirty:
            return None
        self._is_dirty = False
        version = self.data_version
        for table in self._tables():
            table.begin_copying()
        for table in self._tables():
            yield from table.copy_changes()
        committed, pulled = self._committed.take_changes(), self._pulled.take_changes()
        return partial(self._encode, version, committed, pulled)

    def _encode(
        self,
        version: DataVersion,
        committed: dict[Key, Offsets | None],
        pulled: dict[Key, Offsets | None],
    ) -> bytes:
        offsets = self._committed.text(committed)
        return file_text(
            {
                "dataVersion": field_text(version),
                "groupTopicMap": self._committed.groups_text(),
                "offsetTable": offsets,
                "pullOffsetTable": self._pulled.text(pulled),
            }
        )

    def save_snapshot(self, snapshot: Callable[[], bytes], problem: OSError | None = None) -> None:
        """Write a snapshot, in any thread.

        problem: why it can't be written. Raises OSError; the next snapshot then includes the
        unwritten changes.
        """
        try:
            text = snapshot()
            if problem is not None:
                raise problem
            self._file.save(text)
        except OSError:
            self._is_dirty = True
            raise

    def when_saved(self, then: Callable[[Exception | None], None]) -> None:
        """Call back once all changes so far are on disk, or with the error that prevented it.

        While ``run`` does not run, they are written at once. Raises OSError then.
        """
        if self._is_running:
            self._waiting.append(then)
            self._is_awaited.set()
        else:
            self.persist()
            then(None)

    async def run(self, interval_s: Callable[[], float]) -> None:
        """Write changes at intervals, and sooner for those that wait, until cancelled."""
        self._is_running = True
        try:
            while True:
                with trio.move_on_after(interval_s()):
                    await self._is_awaited.wait()
                self._is_awaited = trio.Event()
                waiting, self._waiting = self._waiting, []
                # A save that was given up halfway would take its changes along.
                with trio.CancelScope(shield=True):
                    problem = await self._save()
                for then in waiting:
                    then(problem)
        finally:
            self._is_running = False

    async def _save(self) -> OSError | None:
        if (snapshot := await in_slices(self.take_snapshot())) is not None:
            place = f"the place of {self._file.path}"
            try:
                problem = None if self.before_save is None else await self.before_save()
                await trio.to_thread.run_sync(self.save_snapshot, snapshot, problem)
            except OSError as error:
                self._outages.failed(place, error)
                return error
            self._outages.worked(place)
        return None

    def persist(self) -> None:
        """Write the file if something has changed. Raises OSError."""
        if (snapshot := at_once(self.take_snapshot())) is not None:
            self.save_snapshot(snapshot, self.save_problem())

    def _keys(self) -> Iterator[Key]:
        tables = (table.offsets for table in self._tables())
        return chain(*tables, self._counted, *self._logic_tables())

    def _matching(self, is_wanted: Callable[[Key], bool]) -> Generator[None, None, list[Key]]:
        found = []
        keys = list(self._keys())
        for start in range(0, len(keys), _COPIED_AT_ONCE):
            found += [key for key in keys[start : start + _COPIED_AT_ONCE] if is_wanted(key)]
            yield
        return found

    def _logic_tables(self) -> Iterator[dict[Key, Any]]:
        yield self.logic_resets
        yield self.logic_known
        yield self.logic_gens

    def _tables(self) -> Iterator[_Table]:
        yield self._committed
        yield self._pulled

    def _put(self, key: Key, queue_id: int, offset: int) -> None:
        self._record(key, queue_id, offset)
        if self.on_moved is not None:
            topic, group = key
            self.on_moved(group, topic, queue_id, offset)

    def _record(self, key: Key, queue_id: int, offset: int, saved: int | None = None) -> None:
        if key not in self._committed.offsets:
            self._index_pair(key)
        self._committed.put(key, queue_id, offset, saved)
        self._is_dirty = True

    def _index_pair(self, key: Key) -> None:
        topic, group = key
        self._topics_of[group].add(topic)
        self._groups_of[topic].add(group)

    def _delete(self, is_wanted: Callable[[Key], bool]) -> Iterator[None]:
        for key in (yield from self._matching(is_wanted)):
            topic, group = key
            self._committed.delete(key)
            self._pulled.delete(key)
            self._resets.pop(key, None)
            for table in self._logic_tables():
                table.pop(key, None)
            self._budget.drop(("offsets", *key))
            self._counted.discard(key)
            _discard(self._topics_of, group, topic)
            _discard(self._groups_of, topic, group)
            self._is_dirty = True
            if self.on_moved is not None:
                self.on_moved(group, topic, None, None)
            yield


def take_reset(table: dict[Key, Offsets], key: Key, queue_id: int) -> int | None:
    """Take a reset out of a table of them."""
    if not table:
        return None
    resets = table.get(key, {})
    offset = resets.pop(queue_id, None)
    if not resets:
        table.pop(key, None)
    return offset


def _discard(index: dict[str, set[str]], name: str, value: str) -> None:
    values = index.get(name, set())
    values.discard(value)
    if not values:
        index.pop(name, None)


def _parse(data: bytes) -> ConsumerOffsetSerializeWrapper:
    wrapper = ConsumerOffsetSerializeWrapper.decode(data)
    for key in (*wrapper.offset_table, *wrapper.pull_offset_table):
        if "@" not in key:
            raise ValueError(f"offset table key {key!r}: expected topic@group")
    return wrapper


def _split(key: str) -> Key:
    topic, _, group = key.partition("@")
    return topic, group


def _pair_text(key: Key, offsets: Offsets) -> bytes:
    # Formatted by hand, because there are so many.
    name = fastjson.dumps(f"{key[0]}@{key[1]}").decode()
    pairs = ",\n\t\t\t".join([f"{queue_id}:{offset}" for queue_id, offset in offsets.items()])
    return f"{name}:{{\n\t\t\t{pairs}\n\t\t}}".encode()
