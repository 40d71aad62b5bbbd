"""A disk that fails as disks do, behind the store's ``Files``: for tests and simulations.

What was written lies in real files below ``root``, which the store reads and maps as always; what
is durable lies here, beside it: for each file its bytes, for each folder its names. A sync copies
the one to the other. When the power goes, each page that differs may be there, be gone, or be torn
between two sectors; so may each name, in the order in which a folder changed. Nothing is promised
that POSIX does not promise: a new file's name needs a sync of its folder, whatever some file
systems do beyond that. Who is killed leaves all that he wrote, and the next life goes on with what
of it is not durable yet.

A seed decides everything; ``faults`` counts what happened.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from headrace_broker.clock import Clock
from headrace_broker.store.files.filesystem import DiskUsage, Files, Paged

PAGE_BYTES = 4096
SECTOR_BYTES = 512
WRITE_BACK_PROBABILITY = 0.05
ROOMY = DiskUsage(used_bytes=0, usable_bytes=1 << 40)
# Each file is held twice and compared as a whole, so a simulation sets the sizes of its files.
FILE_BYTES_MAX = 8 << 20
# Of a life: the power goes, the program is killed, or neither.
ENDINGS = ("cut", "kill", "")


FAULT_NAMES = {
    "write": "failed write",
    "sync": "failed sync",
    "read": "failed read",
    "cold": "cold read",
}


class PowerCut(BaseException):
    """The machine is off. No program handles that, so it is no Exception."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """The probability of a failure, at each operation of its kind."""

    write: float = 0.0  # EIO after a part was written
    sync: float = 0.0  # EIO; what was to be synced may be gone for good
    read: float = 0.0  # EIO when a file is opened to read from the disk
    cold: float = 0.0  # what is asked for is not in memory


class Image(NamedTuple):
    """All that a folder holds. files: by path below the root, folders: parents first.

    times_ns: when each file was written last.
    """

    folders: list[Path]
    files: dict[Path, bytes]
    times_ns: dict[Path, int]

    def write_to(self, root: Path) -> None:
        """Make ``root`` hold this and nothing else."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for folder in self.folders:
            (root / folder).mkdir()
        for path, data in self.files.items():
            (root / path).write_bytes(data)
            os.utime(root / path, ns=(self.times_ns[path], self.times_ns[path]))

    def flip_bit(self, rng: Random, below: str = "") -> Path | None:
        """Change one bit of what a file holds; returns the file, None if none holds anything."""
        used = [path for path, data in self.files.items() if below in str(path) and any(data)]
        if not used:
            return None
        path = rng.choice(sorted(used))
        data = bytearray(self.files[path])
        at = rng.randrange(len(data.rstrip(b"\0")))
        data[at] ^= 1 << rng.randrange(8)
        self.files[path] = bytes(data)
        return path


# -- one file and one folder -----------------------------------------------------------------------


@dataclass
class _File:
    """An inode, kept open.

    durable: its bytes on the disk. sizes: the length there, then those it was given since.
    gone: pages that a failed sync dropped, as they were written; the kernel takes them for clean.
    time_ns: when it was written last, by the simulation's clock.
    """

    descriptor: int
    durable: bytearray = field(default_factory=bytearray)
    sizes: list[int] = field(default_factory=lambda: [0])
    gone: dict[int, bytes] = field(default_factory=dict)
    time_ns: int = 0

    def __del__(self) -> None:
        os.close(self.descriptor)

    def name(self) -> str:
        return str(Path(f"/proc/self/fd/{self.descriptor}").readlink())

    def written(self) -> bytes:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)

    def resized(self) -> None:
        size = os.fstat(self.descriptor).st_size
        assert size <= FILE_BYTES_MAX, self.name()
        if size != self.sizes[-1]:
            self.sizes.append(size)

    def written_anew(self, start: int, end: int) -> None:
        """The kernel takes these bytes for dirty, whatever was dropped there before."""
        for page in range(start // PAGE_BYTES, -(-end // PAGE_BYTES)):
            self.gone.pop(page, None)

    def sync(self) -> None:
        """All that was written is durable, without what is gone."""
        self.resized()
        self._resize_durable(len(self.sizes) - 1)
        self._write_back(self.dirty_pages())

    def write_some_back(self, rng: Random) -> None:
        """The kernel writes pages when it likes, in any order."""
        self._resize_durable(rng.randrange(len(self.sizes)))
        dirty = self.dirty_pages()
        self._write_back(rng.sample(dirty, rng.randint(0, len(dirty))))

    def drop_dirty(self, rng: Random) -> int:
        """A sync has failed: what it did not write will never be; returns how many pages."""
        self.write_some_back(rng)
        written, dropped = self.written(), self.dirty_pages()
        self.gone.update((page, _page(written, page)) for page in dropped)
        return len(dropped)

    def dirty_pages(self) -> list[int]:
        """Pages that a sync would write: they differ, below the durable length."""
        written = self.written()
        differing = _differing_pages(self.durable, written)
        return [page for page in differing if self.gone.get(page) != _page(written, page)]

    def _write_back(self, pages: list[int]) -> None:
        written = self.written()
        for page in pages:
            self._put(page, _page(written, page)[: len(self.durable) - page * PAGE_BYTES])

    def _put(self, page: int, data: bytes) -> None:
        self.durable[page * PAGE_BYTES : page * PAGE_BYTES + len(data)] = data

    def _resize_durable(self, step_count: int) -> None:
        for size in self.sizes[1 : step_count + 1]:
            del self.durable[size:]
            self.durable.extend(bytes(size - len(self.durable)))
        del self.sizes[:step_count]

    def after_power_cut(self, rng: Random, faults: Counter[str]) -> bytes:
        """The files that are found when the power is back, without the pages of gone syncs."""
        self.resized()
        self._resize_durable(rng.randrange(len(self.sizes)))
        written, fates = self.written(), []
        for page in self.dirty_pages():
            fate = rng.choice(("kept page", "lost page", "torn page"))
            fates.append(fate)
            if fate != "kept page":
                faults[fate] += 1
            if fate != "lost page":
                self._tear(page, _page(written, page), rng, is_torn=fate == "torn page")
        if "kept page" in fates and "lost page" in fates[: fates.index("kept page")]:
            faults["reordered write-back"] += 1
        return bytes(self.durable)

    def _tear(self, page: int, data: bytes, rng: Random, *, is_torn: bool) -> None:
        for at in range(0, len(data), SECTOR_BYTES):
            start = page * PAGE_BYTES + at
            if start < len(self.durable) and not (is_torn and rng.random() < 0.5):
                end = min(start + SECTOR_BYTES, len(self.durable))
                self.durable[start:end] = data[at : at + end - start]


def _page(data: bytes, page: int) -> bytes:
    return data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


def _differing_pages(durable: bytearray, written: bytes) -> list[int]:
    common = min(len(durable), len(written))
    ours = np.frombuffer(durable, np.uint8, common)
    theirs = np.frombuffer(written, np.uint8, common)
    whole = common - common % PAGE_BYTES
    differs = (ours[:whole] != theirs[:whole]).reshape(-1, PAGE_BYTES).any(axis=1)
    pages: list[int] = np.flatnonzero(differs).tolist()
    if (ours[whole:] != theirs[whole:]).any():
        pages.append(whole // PAGE_BYTES)
    return pages


Names = dict[str, int]  # inode by name


@dataclass
class _Folder:
    """versions: the names on the disk, then those that changes made of them, in order.

    Open, as files are, so that its inode's number is not given to another one.
    """

    path: Path
    versions: list[Names] = field(default_factory=lambda: [{}])
    descriptor: int = -1

    def __post_init__(self) -> None:
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.descriptor)


# -- the disk --------------------------------------------------------------------------------------


class FaultyFiles(Files):
    """The files below one folder, for one life of a program: until it ends.

    From then on every operation raises PowerCut. After a power cut ``image`` is what the next life
    finds; who stops or is killed leaves what he wrote where it is.

    cut_after, kill_after: operations until the power goes, or the program is killed. cut_at_sync:
    the power goes when something is to be synced. is_full: there is no room for more. usage: what
    the disk says of itself, whether it is or not. clock: that of the files' times, else the
    machine's.
    """

    def __init__(
        self,
        root: Path,
        rng: Random,
        rates: FaultRates | None = None,
        before: FaultyFiles | None = None,
    ) -> None:
        """before: the life before, if the machine is on since; else what is there is durable."""
        super().__init__()
        self._changed_directories = _Ordered()
        self.root = root
        self.rng = rng
        self.rates = rates or FaultRates()
        self.faults: Counter[str] = Counter()
        self.operation_count = 0
        self.cut_after = self.kill_after = -1
        self.cut_at_sync = False
        self.is_full = False
        self.usage = ROOMY
        self.clock: Clock | None = None
        self.is_calm = False
        self.is_over = False
        self.image: Image | None = None
        self._open: set[int] = set()
        # Called with the name of each fault when it happens.
        self.on_fault: Callable[[str], None] = lambda _name: None
        root.mkdir(parents=True, exist_ok=True)
        self._root_inode = root.stat().st_ino
        self.inodes: dict[int, _File] = {}
        self.folders: dict[int, _Folder] = {self._root_inode: _Folder(self.root)}
        if before is None:
            self._begin()
        else:
            assert before.is_over
            assert before.image is None
            self.inodes, self.folders = before.inodes, before.folders

    def apart(self) -> FaultyFiles:
        """As ``Files.apart``: one disk has all files, and its faults."""
        return self

    def _begin(self) -> None:
        self._find_all(self.root)
        for file in self.inodes.values():
            file.sync()
        for folder in self.folders.values():
            del folder.versions[:-1]

    # -- the end of a life -------------------------------------------------------------------------

    def cut_power(self) -> None:
        """Turn the machine off."""
        if self.image is None:
            if not self.is_over:
                self._look_everywhere()
            self.is_over = True
            self.image = self._after_power_cut()
            self.inodes.clear()  # and so closed, whoever still knows this life
            self.folders.clear()
            self._note("power cut")

    def kill(self) -> None:
        """End the program, as kill -9 does."""
        if not self.is_over:
            self.stop()
            self._note("kill")

    def end_in(self, operations: int, *, is_cut: bool) -> None:
        """The power goes, or the program is killed, after so many more operations."""
        end = self.operation_count + operations
        self.cut_after, self.kill_after = (end, -1) if is_cut else (-1, end)

    def cut_power_or_kill(self) -> None:
        """Either, at random; after a kill the machine is on, with what a failed sync dropped."""
        if self.rng.random() < 0.5:
            self.cut_power()
        else:
            self.kill()

    def stop(self) -> None:
        """The program has ended by itself."""
        if not self.is_over:
            self._look_everywhere()
            self.is_over = True

    def as_written(self) -> Image:
        """The files that somebody finds while the machine is on."""
        return self._read(
            {inode: folder.versions[-1] for inode, folder in self.folders.items()}, _File.written
        )

    def _after_power_cut(self) -> Image:
        names = {inode: self.rng.choice(folder.versions) for inode, folder in self.folders.items()}
        return self._read(names, lambda file: file.after_power_cut(self.rng, self.faults))

    def _read(self, names: dict[int, Names], content: Callable[[_File], bytes]) -> Image:
        image = Image([], {}, {})
        waiting = [(Path(), self._root_inode)]
        while waiting:
            place, inode = waiting.pop()
            if names[inode] != self.folders[inode].versions[-1]:
                self.faults["lost name"] += 1
            for name, child in sorted(names[inode].items()):
                if child in self.folders:
                    image.folders.append(place / name)
                    waiting.append((place / name, child))
                else:
                    file = self.inodes[child]
                    image.files[place / name] = content(file)
                    image.times_ns[place / name] = os.fstat(file.descriptor).st_mtime_ns
        return image

    # -- what the store asks -----------------------------------------------------------------------

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        self.operate()
        if flags == os.O_RDONLY:
            self._fail_at("read", path)
        is_new = bool(flags & os.O_CREAT) and not path.exists()
        if is_new:
            self._need_room(path)
        descriptor = super().open(path, flags)
        self._open.add(descriptor)
        if is_new:
            self._look(path.parent)
            self._set_time(descriptor, self._file(descriptor))
        elif flags & os.O_TRUNC:
            self._file(descriptor).resized()
        return descriptor

    def close(self, descriptor: int) -> None:
        # Also after the end: a descriptor is this process's, not the disk's.
        self._open.discard(descriptor)
        super().close(descriptor)

    def close_all(self) -> None:
        """Close the descriptors that the life has left open, as the end of its process would."""
        while self._open:
            self.close(next(iter(self._open)))

    def allocate(self, descriptor: int, position: int, byte_count: int) -> None:
        self.operate()
        self._need_room(None)
        super().allocate(descriptor, position, byte_count)
        self._changed(descriptor)

    def truncate(self, descriptor: int, byte_count: int) -> None:
        self.operate()
        super().truncate(descriptor, byte_count)
        self._changed(descriptor)

    def clear(self, descriptor: int, position: int, byte_count: int) -> None:
        self.operate()
        super().clear(descriptor, position, byte_count)
        self._file(descriptor).written_anew(position, position + byte_count)
        self._changed(descriptor)

    def write(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        self.operate()
        if self._happens("write"):
            part = memoryview(data)[: self.rng.randrange(len(data) + 1)]
            super().write(descriptor, part, position)
            self._set_time(descriptor, self._file(descriptor))
            raise _error(errno.EIO)
        super().write(descriptor, data, position)
        self._file(descriptor).written_anew(position, position + len(data))
        self._changed(descriptor)

    def _changed(self, descriptor: int) -> None:
        file = self._file(descriptor)
        self._set_time(descriptor, file)
        file.resized()

    def _set_time(self, descriptor: int, file: _File) -> None:
        if self.clock is not None:
            file.time_ns = self.clock.now_ms() * 1_000_000
            os.utime(descriptor, ns=(file.time_ns, file.time_ns))

    def fsync(self, descriptor: int) -> None:
        self.fdatasync(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        if self.cut_at_sync:
            self.cut_power()
        self.operate()
        file = self._file(descriptor)
        if os.fstat(descriptor).st_mtime_ns != file.time_ns:
            # A mapped write, which the machine's clock has dated.
            self._set_time(descriptor, file)
        if self._happens("sync"):
            file.resized()
            self.faults["page dropped by a failed sync"] += file.drop_dirty(self.rng)
            raise _error(errno.EIO)
        file.sync()

    def fsync_directory(self, path: Path) -> None:
        self.operate()
        self._fail_at("sync", path)
        folder = self._look(path)
        del folder.versions[:-1]

    def make_directories(self, directory: Path) -> None:
        self.operate()
        super().make_directories(directory)
        self._look(directory)

    def is_cached(self, file: Paged, start: int, end: int) -> bool:
        self.operate()
        # What the kernel holds is no seed's to decide, but it can be asked.
        super().is_cached(file, start, end)
        return not self._happens("cold")

    def disk_usage(self, path: Path) -> DiskUsage:
        assert path == self.root
        self.operate()
        return self.usage

    def rename(self, source: Path, target: Path) -> None:
        self.operate()
        super().rename(source, target)
        self._look(target.parent)

    def link(self, source: Path, target: Path) -> None:
        self.operate()
        super().link(source, target)
        self._look(target.parent)

    def unlink(self, path: Path) -> None:
        self.operate()
        super().unlink(path)
        self._look(path.parent)

    # -- faults ------------------------------------------------------------------------------------

    def end_after(self, operations: int, ending: str) -> None:
        """End the life after so many operations. ending: one of ENDINGS, but for the last."""
        if ending == "cut":
            self.cut_after = operations
        else:
            self.kill_after = operations

    def operate(self) -> None:
        """Every operation begins with this; the power may go, and pages go to the disk."""
        if not self.is_over and self.operation_count == self.cut_after:
            self.cut_power()
        elif self.operation_count == self.kill_after:
            self.kill()
        if self.is_over:
            raise PowerCut
        self.operation_count += 1
        if self.inodes and self.rng.random() < WRITE_BACK_PROBABILITY:
            self.rng.choice(list(self.inodes.values())).write_some_back(self.rng)

    def _happens(self, kind: str) -> bool:
        rate: float = getattr(self.rates, kind)
        if not rate or self.is_calm or self.rng.random() >= rate:
            return False
        self._note(FAULT_NAMES[kind])
        return True

    def _note(self, fault: str) -> None:
        self.faults[fault] += 1
        self.on_fault(fault)

    def _fail_at(self, kind: str, path: Path) -> None:
        if self._happens(kind):
            raise _error(errno.EIO, path)

    def _need_room(self, path: Path | None) -> None:
        if self.is_full:
            self._note("full disk")
            raise _error(errno.ENOSPC, path)

    # -- what there is -----------------------------------------------------------------------------

    def _file(self, descriptor: int) -> _File:
        return self.inodes[os.fstat(descriptor).st_ino]

    def _look(self, path: Path) -> _Folder:
        """Note what a folder holds now, and those above it that are new."""
        inode = path.stat().st_ino
        folder = self.folders.get(inode)
        if folder is None:
            folder = self.folders[inode] = _Folder(path)
            self._look(path.parent)
        names = {name: self._known(path / name, status) for name, status in _listing(path)}
        if names != folder.versions[-1]:
            folder.versions.append(names)
        return folder

    def _known(self, path: Path, status: os.stat_result) -> int:
        inode = status.st_ino
        if stat.S_ISDIR(status.st_mode):
            if inode not in self.folders:
                self.folders[inode] = _Folder(path)
                self._look(path)
        elif inode not in self.inodes:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.inodes[inode] = _File(descriptor, time_ns=status.st_mtime_ns)
            self.inodes[inode].resized()
        return inode

    def _look_everywhere(self) -> None:
        for folder in list(self.folders.values()):
            if folder.path.exists():
                self._look(folder.path)

    def _find_all(self, path: Path) -> None:
        self._look(path)
        for each in sorted(path.rglob("*")):
            if each.is_dir():
                self._look(each)


def next_life(
    root: Path, rng: Random, rates: FaultRates | None = None, before: FaultyFiles | None = None
) -> FaultyFiles:
    """The disk as a life finds it after the one ``before``, whatever that ended by."""
    if before is not None and before.image is not None:
        before.image.write_to(root)
        before = None
    return FaultyFiles(root, rng, rates, before)


class _Ordered(set[Path]):
    """Gives its members in the same order in every process."""

    def pop(self) -> Path:
        first = min(self)
        self.remove(first)
        return first


def _listing(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            yield entry.name, entry.stat(follow_symlinks=False)


def _error(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([str(path)] if path else []))
