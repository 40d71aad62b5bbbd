"""One byte of a closed store is changed: fsck finds it, and so does the broker before it serves it.

``python -m tests.store_tools.corruption --count N --seed SEED`` runs more than the tests do; a
failure names the seed that repeats it.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headrace_broker.store.errors import StoreError, StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile, ConfigSource
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.settings import StoreSettings
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store_tools.directory import open_directory
from headrace_broker.store_tools.fsck import check
from headrace_broker.store_tools.seal_check import seal
from tests.support.damage import fill_store
from tests.support.golden import golden_settings, golden_store
from tests.support.stores import FaultyFiles, SetClock, query_index, small_settings

# What only the peer serves.
_LEFT_OUT = shutil.ignore_patterns("timerwheel", "timerlog", "compaction")
View = dict[Any, Any]


class Subject(NamedTuple):
    """A closed, sealed store; what it serves; its files that hold anything."""

    name: str
    root: Path
    settings: Callable[[Path], StoreSettings]
    view: View
    files: list[Path]


class Flip(NamedTuple):
    """A byte of a file, and what is added to its bits."""

    path: Path
    position: int
    change: int

    def apply(self, root: Path) -> None:
        """Change it in a store, as rot does: without moving the file's time."""
        path = root / self.path
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(self.position)
            value = file.read(1)[0]
            file.seek(self.position)
            file.write(bytes((value ^ self.change,)))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def subjects(folder: Path) -> list[Subject]:
    """A store of ours and one of the peer."""
    ours, peers = folder / "ours", folder / "peers"
    fill_store(ours)
    shutil.copytree(golden_store("clean"), peers, ignore=_LEFT_OUT)
    # Of the tables that the peer wrote only the next change makes files with a checksum.
    for path in (peers / "config").glob("*.json"):
        ConfigFile(path).save(path.read_bytes())
    return [
        _subject("ours", ours, lambda root: small_settings(root, ring_rows=1024)),
        _subject("peers", peers, golden_settings),
    ]


def _subject(name: str, root: Path, settings: Callable[[Path], StoreSettings]) -> Subject:
    with open_directory(root, settings(root)) as directory:
        report = check(directory, lambda _count: None)
        assert not report.damage
        seal(directory, report.log_end)
    files = [path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()]
    files = [path for path in files if (root / path).stat().st_size]
    subject = Subject(name, root, settings, {}, files)
    return subject._replace(view=served(subject, None))


def flip_of(subject: Subject, chance: random.Random) -> Flip:
    """Files with more bytes in use are hit more often; of small ones none is spared."""
    path = chance.choices(subject.files, [_weight(subject.root / p) for p in subject.files])[0]
    used = len((subject.root / path).read_bytes().rstrip(b"\0"))
    # Now and then behind what is in use.
    end = (subject.root / path).stat().st_size if chance.random() < 0.1 else max(used, 1)
    return Flip(path, chance.randrange(end), chance.choice((1 << chance.randrange(8), 0xFF)))


def _weight(path: Path) -> int:
    return len(path.read_bytes().rstrip(b"\0")) + 200


# --- what a store serves -------------------------------------------------------------------


@contextmanager
def spoiled(subject: Subject, flip: Flip | None) -> Iterator[tuple[MessageStore, Path]]:
    """A copy of the store, not loaded yet."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        shutil.copytree(subject.root, root)
        if flip:
            flip.apply(root)
        store = MessageStore(subject.settings(root), SetClock(), FaultyFiles())
        yield store, root
        store.abandon()


def served(subject: Subject, flip: Flip | None) -> View:
    """All that can be read. Raises StoreError."""
    with spoiled(subject, flip) as (store, root):
        store.load()
        return {name: read() for name, read in reads(store, root)}


def reads(store: MessageStore, root: Path) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Everything that can be asked, by name."""
    for queue in store.queues:
        low, high = queue.consume_queue.first_offset, store.source(queue).max_offset()
        if high:
            place = queue.topic, queue.queue_id
            yield place, partial(_bounds, store, queue)
            for queue_offset in range(low, high):
                yield (*place, queue_offset), partial(_record, store, queue, queue_offset)
    for number in range(60):
        topic, key = "ABC"[number % 3], f"x{number}"
        yield ("key", key), partial(query_index, store, topic, key, 9, 0, 1 << 62)
    for path in sorted((root / "config").glob("*.json")):
        yield path.name, partial(_text, path)


def _bounds(store: MessageStore, queue: StoreQueue) -> tuple[int, int, int]:
    at = store.source(queue).offset_by_time(1_700_000_030_000)
    return store.source(queue).min_offset(), store.source(queue).max_offset(), at


def _record(store: MessageStore, queue: StoreQueue, queue_offset: int) -> bytes:
    result = store.source(queue).get(queue_offset, 1, 1 << 20, None)
    return b"".join(map(bytes, result.buffers))


def _text(path: Path) -> bytes:
    file = ConfigFile(path)
    text = file.load()
    if file.source is not ConfigSource.FILE:
        raise StoreFormatError(path, file.problem, "its backup was read")
    return (text or b"").strip()


# --- the promises --------------------------------------------------------------------------


def fsck_outcome(subject: Subject, flip: Flip) -> str:
    """found or harmless. Raises AssertionError when neither is true."""
    flip.apply(subject.root)
    try:
        with open_directory(subject.root, subject.settings(subject.root)) as directory:
            report = check(directory, lambda _count: None)
    finally:
        flip.apply(subject.root)
    if report.damage:
        return "found by fsck"
    assert served(subject, flip) == subject.view, f"{flip}: not found, but served"
    return "harmless to fsck"


def start_outcome(subject: Subject, flip: Flip) -> str:
    """Found at the start, when first read, or harmless. Raises AssertionError otherwise."""
    left = dict(subject.view)
    refused = 0
    with spoiled(subject, flip) as (store, root):
        try:
            store.load()
        except StoreError:
            return "found at the start"
        for name, read in reads(store, root):
            wanted = left.pop(name, None)
            try:
                assert read() == wanted, f"{flip}: {name} is served wrong"
            except StoreError:
                refused += 1
    assert not left, f"{flip}: {list(left)} is not served"
    return "found when read" if refused else "harmless to a start"


PROMISES = (fsck_outcome, start_outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--count", type=int, default=10_000)
    arguments = parser.parse_args()
    outcomes: collections.Counter[str] = collections.Counter()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        stores = subjects(Path(folder))
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            subject = stores[seed % len(stores)]
            flip = flip_of(subject, random.Random(seed))
            kind = f"{subject.name} {flip.path.parts[0]}"
            try:
                for promise in PROMISES:
                    outcomes[f"{kind}: {promise(subject, flip)}"] += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                failed += 1
                sys.stdout.write(f"seed {seed} failed: {flip} {type(error).__name__}: {error}\n")
    for outcome, count in sorted(outcomes.items()):
        sys.stdout.write(f"{outcome} {count}\n")
    sys.stdout.write(f"{arguments.count} flips, of which {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
