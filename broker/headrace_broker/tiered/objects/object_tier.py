"""All queues of a broker in an object store; see ``StoredTier`` and docs/tier-format.md.

An upload is one object with the records of all queues, and one replacement of the manifest. The
directories of objects since the last checkpoint are the manifest's tail; a checkpoint writes what
they say into catalogs. So neither depends on the number of queues.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace_broker.tiered.container.flat_queue import with_offsets
from headrace_broker.tiered.container.stored_tier import Group, byte_limits
from headrace_broker.tiered.container.tier_index import record_keys
from headrace_broker.tiered.objects.batch import (
    KEY_ITEM,
    Batch,
    Content,
    build,
    read_directory,
)
from headrace_broker.tiered.objects.inventory import Inventory
from headrace_broker.tiered.objects.key_index import KeyIndex
from headrace_broker.tiered.objects.manifest_file import ManifestFile
from headrace_broker.tiered.objects.merge import Merger, choose
from headrace_broker.tiered.objects.object_queue import Piece
from headrace_broker.tiered.objects.part_reader import PartReader
from headrace_broker.tiered.objects.sizes import DAY_MS, SIZES, ObjectSizes
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.tier.driver import Failed, Failure, FailureKind, expect, returns_failure
from headrace_protocol.tier.rows import Named, ObjectRow, Part, encode, read_named, reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace_broker.tiered.container.stored_tier import Limits, Name
    from headrace_broker.tiered.objects.object_queue import ObjectQueue
    from headrace_protocol.tier.driver import PutDriver
    from headrace_protocol.tier.paths import Home

DATA: Final = "data"
CATALOGS: Final = "catalogs"
# How long an object is kept for readers that found it in an older manifest.
_UNUSED_MS: Final = 600_000


class ObjectTier:
    """The queues as parts of objects; see ``StoredTier``.

    An uploaded object counts from the replacement of the manifest on. What expiry, deletion and
    merge change counts in memory at once, and in the store from the next checkpoint on.
    """

    takes_all = True

    def __init__(self, driver: PutDriver, home: Home, sizes: ObjectSizes = SIZES) -> None:
        self.damaged: dict[Name, Failure] = {}
        self.driver = driver
        self.folder = home.folder
        self.reader = PartReader(driver, self.folder, sizes.read_bytes)
        self.inventory = Inventory(home.broker, self.reader, sizes)
        self.index = KeyIndex(self.inventory, self.reader, sizes.window_items)
        # Held for each change of inventory and manifest.
        self.lock = Lock()
        self._home = home
        self._sizes = sizes
        self._manifest: ManifestFile | None = None
        self._is_loaded = False
        self._unused: list[tuple[str, int]] = []
        self._merger: Merger | None = None
        # Sources that can't be read as they were written.
        self._spoiled: set[str] = set()
        self._swept_ms = self._latest_ms = 0

    @property
    def queues(self) -> Mapping[Name, ObjectQueue]:
        """As ``StoredTier.queues``."""
        return self.inventory.queues

    @property
    def manifest(self) -> ManifestFile:
        """The manifest, which must be open."""
        assert self._manifest is not None
        return self._manifest

    def new_manifest(self) -> ManifestFile:
        """The manifest, not read yet."""
        return ManifestFile(self.driver, self.folder, *self._home)

    def _new_name(self, folder: str, now_ms: int) -> str:
        self._latest_ms = now_ms
        return self.manifest.new_name(folder, now_ms)

    # -- start -------------------------------------------------------------------------------------

    @returns_failure
    def start(self, now_ms: int) -> None:
        """As ``StoredTier.start``. Fails with DAMAGED without a manifest to objects."""
        self._latest_ms = now_ms
        if self._is_loaded:
            return
        if self._manifest is None:
            self._open_manifest()
        self._load()
        self._is_loaded = True

    def reopen(self, _name: Name, _now_ms: int) -> Failure | None:
        """As ``StoredTier.reopen``: a manifest names what is whole, so no queue is damaged."""

    @returns_failure
    def cut(self, name: Name, queue_offset: int, now_ms: int) -> None:
        """As ``StoredTier.cut``. What is kept of a part is put as an object of its own."""
        queue = self.queues.get(name)
        if queue is None:
            return
        kept = [piece for piece in queue.state.pieces if piece.part.first < queue_offset]
        part = kept[-1].part if kept and kept[-1].part.end > queue_offset else None
        row = self._put_beginning(name, part, queue_offset, now_ms) if part is not None else None
        with self.lock:
            self.inventory.cut(name, queue_offset)
            if row is not None:
                self.inventory.add_unlisted(row)
            expect(self.checkpoint(now_ms))

    def _put_beginning(self, name: Name, part: Part, queue_offset: int, now_ms: int) -> ObjectRow:
        """Put an object with the records of a part that are before an offset."""
        queue = self.queues[name]
        found = expect(queue.units(part.first, queue_offset - part.first))
        offsets = np.arange(part.first, queue_offset)
        records = expect(queue.records(found.units, offsets, check_bodies=True))
        group = Group(records, found.units["tags_code"])
        batch = build(self._new_name(DATA, now_ms), _contents(name, part.log_base, group))
        expect(self.put(batch.row.name, batch.data))
        return batch.row

    @returns_failure
    def look(self) -> None:
        """Open the queues for reading only, beside a broker that may run.

        Fails as ``start``, and with MISSING without a manifest.
        """
        self._manifest = self.new_manifest()
        expect(self._manifest.look())
        self._load()

    def adopt(self, manifest: ManifestFile, rows: list[ObjectRow], now_ms: int) -> Failure | None:
        """Have a manifest name these objects, and nothing else but where queues have ended."""
        self._manifest = manifest
        ended = {name: queue.state for name, queue in self.queues.items() if queue.state.end}
        self.inventory = Inventory(self._home.broker, self.reader, self._sizes)
        self.inventory.load(Named([], rows), [])
        for name, state in ended.items():
            if name not in self.queues:
                self.inventory.new_queue(name).state = state._replace(pieces=())
        return self.checkpoint(now_ms)

    def named(self) -> set[str]:
        """The objects that must stay: all that the manifest names, or named until recently."""
        inventory = self.inventory
        named = {*inventory.objects, *inventory.catalogs, *inventory.unused}
        named |= {name for name, _ in self._unused}
        if self._merger is not None:
            named |= {row.name for row, _ in self._merger.made}
        return named

    def _open_manifest(self) -> None:
        """Take the manifest over, unless it is missing or older than the objects."""
        # Before the manifest is read: a broker that still runs names what it has put.
        entries = expect(self.driver.entries(f"{self.folder}/{DATA}"))
        manifest = self.new_manifest()
        failure = manifest.look()
        if failure is None:
            failure = self.check_age(manifest, [entry.path for entry in entries])
        elif failure.kind is FailureKind.MISSING:
            failure = _missing(manifest, len(entries))
        expect(failure)
        manifest = self.new_manifest()
        expect(manifest.take())
        self._manifest = manifest

    @returns_failure
    def check_age(self, manifest: ManifestFile, paths: Iterable[str]) -> None:
        """DAMAGED for a manifest that is an old copy. paths: of the data objects.

        What a crash or a failed replacement has left continues a queue where the manifest says that
        it ends. An object that continues it further on was uploaded after another one.
        """
        named = manifest.manifest.epoch, manifest.manifest.number
        newer = [path for path in paths if epoch_and_number(path) > named]
        if not newer:
            return
        known = ObjectTier(self.driver, self._home)
        expect(known.look())
        for path in newer:
            row = read_directory(self.driver, path)
            if isinstance(row, Failure) and row.kind is FailureKind.UNREACHABLE:
                raise Failed(row)
            if not isinstance(row, Failure) and known._is_behind(row, path):
                reason = (
                    f"is an old copy: it does not name what was uploaded before {path}; run "
                    "headrace tier rebuild, or restore the newest copy"
                )
                raise Failed(Failure(FailureKind.DAMAGED, manifest.path, reason))

    def _is_behind(self, row: ObjectRow, path: str) -> bool:
        """True if an upload that the manifest does not name follows another such upload."""
        if epoch_and_number(path)[0] > self.manifest.manifest.epoch:
            return True
        ends = {name: queue.log_end for name, queue in self.queues.items()}
        return not row.level and any(
            part.log_base > ends.get((topic, part.queue_id), 0)
            for topic, parts in row.parts.items()
            for part in parts
        )

    def _load(self) -> None:
        manifest = self.manifest.manifest
        found = expect(read_named(self.driver, f"{self.folder}/", manifest))
        self.inventory.load(found, manifest.tail)

    @returns_failure
    def create(self, queues: Iterable[Name], now_ms: int) -> None:
        """As ``StoredTier.create``; the store is asked only if a deletion must come first."""
        with self.lock:
            if self.inventory.is_changed:
                expect(self.checkpoint(now_ms))
            for name in queues:
                self.inventory.new_queue(name)

    # -- upload ------------------------------------------------------------------------------------

    def append_all(self, groups: Mapping[Name, Group], now_ms: int) -> Failure | None:
        """As ``StoredTier.append_all``. Fails with CHANGED once another broker has taken over."""
        if self.manifest.replaced is not None:
            return self.manifest.replaced
        contents: list[Content] = []
        for name in sorted(groups):
            if len(groups[name].records):
                contents += _contents(name, self.queues[name].log_end, groups[name])
        if not contents:
            return None
        batch = build(self._new_name(DATA, now_ms), contents)
        failure = self.put(batch.row.name, batch.data)
        return failure or self._name(batch, now_ms)

    def put(self, name: str, data: bytearray | bytes) -> Failure | None:
        """Store an object of a new name."""
        path = self.reader.path(name)
        put = self.driver.put(path, data)
        if isinstance(put, str):
            return None
        if put.kind is FailureKind.EXISTS and self.driver.size(path) == len(data):
            # Nobody else has this name: the driver repeated a put whose answer was lost.
            return None
        return put

    def _name(self, batch: Batch, now_ms: int) -> Failure | None:
        """Have the manifest name an uploaded object: from then on its records are kept."""
        with self.lock:
            inventory, manifest = self.inventory, self.manifest
            catalogs = manifest.manifest.catalogs
            failure = manifest.commit(catalogs, [*inventory.tail, batch.directory])
            if failure is None:
                inventory.add(batch.row, batch.directory)
                if len(inventory.tail) >= self._sizes.tail:
                    # The records are kept even if this fails; the next upload tries again.
                    self.checkpoint(now_ms)
            return failure

    def index_again(
        self, topic: str, queue_id: int, queue_offset: int, now_ms: int
    ) -> Failure | None:
        """As ``StoredTier.index_again``: objects have the keys of their records."""

    # -- checkpoints -------------------------------------------------------------------------------

    @returns_failure
    def checkpoint(self, now_ms: int) -> None:
        """Write what has changed into catalogs, and have the manifest name these instead."""
        inventory = self.inventory
        kept, new = inventory.kept(), []
        for rows in inventory.rows_beside(kept):
            data = encode(rows)
            named = reference(self._new_name(CATALOGS, now_ms), 0, data)
            expect(self.put(named.name, data))
            new.append((named, rows))
        expect(self.manifest.commit([*kept, *(named for named, _ in new)], []))
        self._unused += [(name, now_ms) for name in inventory.written(kept, new)]

    def sync(self) -> None:
        """As ``StoredTier.sync``."""
        with self.lock:
            failure = None
            if self.inventory.is_changed:
                failure = self.checkpoint(self._latest_ms)
        if failure is not None:
            raise OSError(str(failure))

    # -- removal -----------------------------------------------------------------------------------

    def delete(self, topic: str, queue_id: int) -> Failure | None:
        """As ``StoredTier.delete``; the next ``sync`` or upload of a new life makes it last."""
        with self.lock:
            self.inventory.delete((topic, queue_id))
        return None

    def clean_up(
        self, before_ms: Callable[[str], int] | None, now_ms: int, limits: Limits | None = None
    ) -> list[Failure]:
        """As ``StoredTier.clean_up``. The manifest goes first, so it names nothing that is gone."""
        if self.manifest.replaced is not None:
            return []
        with self.lock:
            if before_ms is not None:
                for name in self.queues:
                    self.inventory.expire(name, before_ms(name[0]))
                for topic, bytes_max in byte_limits(limits or {}).items():
                    self.inventory.shrink(topic, bytes_max)
            failure = self.checkpoint(now_ms) if self.inventory.is_changed else None
        failures = [failure or self._delete_unused(now_ms) or self._sweep(now_ms)]
        return [failure for failure in failures if failure is not None]

    def _delete_unused(self, now_ms: int) -> Failure | None:
        with self.lock:
            due = [name for name, since_ms in self._unused if since_ms + _UNUSED_MS < now_ms]
        failure = self._delete(due)
        if failure is None:
            with self.lock:
                self._unused = [item for item in self._unused if item[0] not in set(due)]
        return failure

    def _delete(self, names: list[str]) -> Failure | None:
        return self.driver.delete([self.reader.path(name) for name in names]) if names else None

    @returns_failure
    def _sweep(self, now_ms: int) -> None:
        """Once in a while delete old objects that the manifest does not name."""
        if now_ms < self._swept_ms + self._sizes.sweep_ms:
            return
        found: list[str] = []
        for folder in (DATA, CATALOGS):
            entries = expect(self.driver.entries(f"{self.folder}/{folder}"))
            found += [entry.path.removeprefix(f"{self.folder}/") for entry in entries]
        # After the listing. A broker that was replaced does not know what its successor names, and
        # one that had no answer not what the manifest names.
        with self.lock:
            if self._merger is not None:  # may have stored an object that it has not noted yet
                return
            expect(self.manifest.settle())
            named = self.named()
        age_ms = self._sizes.sweep_ms
        old = [name for name in found if name not in named and is_old(name, now_ms, age_ms)]
        expect(self._delete(old))
        self._swept_ms = now_ms

    # -- merge -------------------------------------------------------------------------------------

    def merge(self, now_ms: int) -> bool | Failure:
        """As ``StoredTier.merge``: one object, or the checkpoint after the last one."""
        if self.manifest.replaced is not None:
            return False
        if self._merger is None:
            with self.lock:
                sources = choose(self.inventory.objects.values(), self._spoiled, self._sizes.runs)
                if not sources:
                    return False
                self._merger = Merger(
                    self.driver, self.reader, self.index, sources, self._sizes.object_bytes
                )
        merger = self._merger
        failure = (self._make if merger.left else self._finish)(merger, now_ms)
        if failure is None:
            return True
        self._merger = None
        if failure.kind is FailureKind.MISSING and not merger.has_all_of(self.inventory.objects):
            return True  # a source was dropped meanwhile: the next merge does without it
        return failure

    def _make(self, merger: Merger, now_ms: int) -> Failure | None:
        name = self._new_name(DATA, now_ms)
        batch = merger.make(name)
        if isinstance(batch, Failure):
            if batch.kind in {FailureKind.DAMAGED, FailureKind.SHORT}:
                # Others are merged without it.
                self._spoiled.add(batch.path.removeprefix(f"{self.folder}/"))
            return batch
        failure = self.put(name, batch.data)
        if failure is None:
            merger.note_made(batch.row)
        return failure

    def _finish(self, merger: Merger, now_ms: int) -> Failure | None:
        """Replace what was merged; parts that were dropped meanwhile don't come back."""
        with self.lock:
            for row, joints in merger.made:
                parts = {part.number: part for found in row.parts.values() for part in found}
                for number, joint in enumerate(joints):
                    new = Piece(row.name, parts[number])
                    self.inventory.replace(joint.name, joint.pieces, new, row)
            self._merger = None
            return self.checkpoint(now_ms)

    def close(self) -> None:
        """As ``StoredTier.close``."""


def _missing(manifest: ManifestFile, count: int) -> Failure | None:
    """DAMAGED if there are objects without a manifest."""
    if not count:
        return None
    reason = (
        f"is missing, but there are {count} objects: restore it, run headrace tier rebuild, or "
        "move the folder of this broker away to begin anew"
    )
    return Failure(FailureKind.DAMAGED, manifest.path, reason)


def epoch_and_number(path: str) -> tuple[int, int]:
    """Epoch and number in an object's name; zeros for another name."""
    epoch, _, rest = path.rpartition("/")[2].partition("-")
    number = rest.partition("-")[0]
    return (int(epoch), int(number)) if epoch.isdecimal() and number.isdecimal() else (0, 0)


def is_old(name: str, now_ms: int, age_ms: int = DAY_MS) -> bool:
    """True if an object has that age; one with another name is never old."""
    text = name.rpartition("-")[2]
    return text.isdecimal() and int(text) + age_ms < now_ms


def _contents(name: Name, log_base: int, group: Group) -> list[Content]:
    """The parts of a group: one, and one more for each gap in its queue offsets."""
    offsets = group.records.queue_offset
    breaks = (np.flatnonzero(offsets[1:] != offsets[:-1] + 1) + 1).tolist()
    found = []
    for first, end in zip([0, *breaks], [*breaks, len(offsets)], strict=True):
        records = group.records.select(slice(first, end))
        units = np.empty(len(records), UNIT_DTYPE)
        units["physical_offset"] = log_base + np.cumsum(records.size) - records.size
        units["size"] = records.size
        units["tags_code"] = group.tags_codes[first:end]
        numbers, hashes = record_keys(name[0], records)
        keys = np.zeros(len(numbers), KEY_ITEM)
        keys["key_hash"], keys["record"] = hashes, numbers
        data = with_offsets(records, units["physical_offset"])
        times = records.store_timestamp
        found.append(Content(*name, int(offsets[first]), log_base, units, times, [data], keys))
        log_base += len(data)
    return found
