"""Progress of consumer groups: config/consumerOffset.json.

The file holds every queue of every group, so a save encodes only the entries that changed since the
last one and joins them with the rest, in a thread. Only copying the changes happens on the loop.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING

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
from headrace_protocol import fastjson
from headrace_protocol.bodies import ConsumerOffsetSerializeWrapper, DataVersion
from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_broker.host_budget import Host
    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile

log = structlog.get_logger("headrace.broker")

_COMMITS_PER_VERSION = 500
_QUEUES_AT_ONCE = 500
# Memory of a group in a topic, and of each queue, in both tables and the text of their file.
_PAIR_BYTES = 4096
_QUEUE_BYTES = 256
# Memory of a queue that a pull creates before its first message arrives.
_EMPTY_QUEUE_BYTES = 1536

Key = tuple[str, str]  # topic, group
Offsets = dict[int, int]  # queue id -> queue offset


class _Table:
    """Offsets by topic and group, with the encoded text of each pair cached until it changes."""

    def __init__(self, loaded: dict[str, Offsets]) -> None:
        self.offsets: dict[Key, Offsets] = {_split(key): value for key, value in loaded.items()}
        # A dict, so that the file has the order of the changes.
        self.changed: dict[Key, None] = dict.fromkeys(self.offsets)
        self._texts: dict[Key, bytes] = {}  # owned by the thread that saves

    def put(self, key: Key, queue_id: int, offset: int) -> None:
        offsets = self.offsets.get(key)
        if offsets is None:
            offsets = self.offsets[key] = {}
        if offsets.get(queue_id) != offset:
            offsets[queue_id] = offset
            self.changed[key] = None

    def remove(self, key: Key, queue_id: int) -> None:
        del self.offsets[key][queue_id]
        self.changed[key] = None

    def delete(self, key: Key) -> None:
        if self.offsets.pop(key, None) is not None:
            self.changed[key] = None

    def take_changes(self) -> dict[Key, Offsets | None]:
        """Copies of the pairs that changed since the last call; None for deleted ones."""
        changed, self.changed = self.changed, {}
        offsets = self.offsets
        return {key: dict(offsets[key]) if key in offsets else None for key in changed}

    def text(self, changes: dict[Key, Offsets | None]) -> bytes:
        """The table as its field in the file; for one thread at a time."""
        for key, offsets in with_breaks(changes.items()):
            if offsets is None:
                self._texts.pop(key, None)
            else:
                self._texts[key] = _pair_text(key, offsets)
        return table_text(self._texts.values())

    def rows(self) -> Iterator[tuple[str, Offsets]]:
        """Rows as in message bodies; the table may change during iteration."""
        for key in list(self.offsets):
            if (offsets := self.offsets.get(key)) is not None:
                yield f"{key[0]}@{key[1]}", dict(offsets)


class ConsumerOffsets:
    """Committed and pulled offsets of all groups, and resets for their next pulls."""

    def __init__(self, file: ConfigFile, now_ms: NowMs, budget: HostBudget | None = None) -> None:
        """Load the table. Raises StoreFormatError if its file can't be read."""
        self._budget = budget or HostBudget()
        # Topic -> queues that count for a host because a pull created them.
        self._created: dict[str, set[int]] = {}
        self._counted: set[Key] = set()  # pairs that count for a host, even without offsets yet
        self._file = file
        self._outages = Outages(log.error)
        self._now_ms = now_ms
        found = load_table(file, _parse)
        loaded = found or ConsumerOffsetSerializeWrapper()
        self.data_version: DataVersion = loaded.data_version
        self._committed = _Table(loaded.offset_table)
        self._pulled = _Table(loaded.pull_offset_table)
        self._topics_of: defaultdict[str, set[str]] = defaultdict(set)
        self._groups_of: defaultdict[str, set[str]] = defaultdict(set)
        for key in self._committed.offsets:
            self._index_pair(key)
        self._resets: dict[Key, Offsets] = {}
        self._commits = 0
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
            queues = 1 + max(map(len, tables))
            self._budget.keep(host, ("offsets", *key), _PAIR_BYTES + queues * _QUEUE_BYTES)
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

    def withdraw(self, group: str, topic: str, queue_id: int) -> None:
        """Remove the committed offset of ``group`` in a queue, as if it had committed nothing."""
        if queue_id in self._committed.offsets.get((topic, group), ()):
            self._committed.remove((topic, group), queue_id)
            self._is_dirty = True

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

    def topics_of(self, group: str) -> set[str]:
        """Topics in which ``group`` has committed offsets."""
        return set(self._topics_of.get(group, ()))

    def groups_of(self, topic: str) -> set[str]:
        """Groups that have committed offsets in ``topic``."""
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
        if not self._resets:
            return None
        key = (topic, group)
        resets = self._resets.get(key, {})
        offset = resets.pop(queue_id, None)
        if not resets:
            self._resets.pop(key, None)
        return offset

    def clone(self, source_group: str, target_group: str, topic: str) -> Iterator[None]:
        """Copy the offsets of ``source_group`` to ``target_group``; yields now and then."""
        for number, (queue_id, offset) in enumerate(self.offsets_of(source_group, topic).items()):
            self._put((topic, target_group), queue_id, offset)
            if not number % _QUEUES_AT_ONCE:
                yield

    # -- deletion ----------------------------------------------------------------------------------

    def delete_topic(self, topic: str) -> None:
        """Remove the progress of all groups in ``topic``."""
        self._delete([key for key in self._keys() if key[0] == topic])
        for queue_id in self._created.pop(topic, ()):
            self._budget.drop(("queue", topic, queue_id))

    def delete_group(self, group: str) -> None:
        """Remove the progress of ``group``."""
        self._delete([key for key in self._keys() if key[1] == group])

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

    def take_snapshot(self) -> Callable[[], bytes] | None:
        """A function that encodes the file's new content; None if nothing has changed.

        A thread may call it, since it reads no shared table; snapshots must be saved in order.
        """
        if not self._is_dirty:
            return None
        self._is_dirty = False
        committed, pulled = self._committed.take_changes(), self._pulled.take_changes()
        version = self.data_version
        groups = {group: list(topics) for group, topics in self._topics_of.items()}
        return lambda: file_text(
            {
                "dataVersion": field_text(version),
                "groupTopicMap": _groups_text(groups),
                "offsetTable": self._committed.text(committed),
                "pullOffsetTable": self._pulled.text(pulled),
            }
        )

    def save_snapshot(self, snapshot: Callable[[], bytes]) -> None:
        """Write a snapshot, in any thread.

        Raises OSError; the next snapshot then includes the unwritten changes.
        """
        try:
            self._file.save(snapshot())
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
                problem = await self._save()
                for then in waiting:
                    then(problem)
        finally:
            self._is_running = False

    async def _save(self) -> OSError | None:
        if (snapshot := self.take_snapshot()) is not None:
            place = f"the place of {self._file.path}"
            try:
                await trio.to_thread.run_sync(self.save_snapshot, snapshot)
            except OSError as error:
                self._outages.failed(place, error)
                return error
            self._outages.worked(place)
        return None

    def persist(self) -> None:
        """Write the file if something has changed."""
        if (snapshot := self.take_snapshot()) is not None:
            self.save_snapshot(snapshot)

    def _keys(self) -> Iterator[Key]:
        return chain(self._committed.offsets, self._pulled.offsets, self._counted)

    def _tables(self) -> Iterator[_Table]:
        yield self._committed
        yield self._pulled

    def _put(self, key: Key, queue_id: int, offset: int) -> None:
        if key not in self._committed.offsets:
            self._index_pair(key)
        self._committed.put(key, queue_id, offset)
        self._is_dirty = True

    def _index_pair(self, key: Key) -> None:
        topic, group = key
        self._topics_of[group].add(topic)
        self._groups_of[topic].add(group)

    def _delete(self, keys: list[Key]) -> None:
        for key in keys:
            topic, group = key
            self._committed.delete(key)
            self._pulled.delete(key)
            self._resets.pop(key, None)
            self._budget.drop(("offsets", *key))
            self._counted.discard(key)
            _discard(self._topics_of, group, topic)
            _discard(self._groups_of, topic, group)
            self._is_dirty = True


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


def _groups_text(groups: dict[str, list[str]]) -> bytes:
    return table_text(
        fastjson.dumps(group) + b":" + field_text(sorted(topics), 2)
        for group, topics in with_breaks(groups.items())
    )
