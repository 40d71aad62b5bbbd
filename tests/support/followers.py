"""A follower that copies what it reads."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headrace_broker.store.files.cold_files import ColdFiles
from headrace_broker.store.files.filesystem import Files, read_file
from headrace_broker.store.files.mapped_file import MappedFile
from headrace_broker.store.files.positions import Name
from headrace_broker.store.followers.follower_work import LocalQueue
from headrace_broker.store.queues.queue_blocks import QueueBlock, QueueView
from headrace_protocol.message import decode_records
from tests.support.broker import BrokerUnderTest

# Before each record: its queue offset and size.
_HEAD = struct.Struct(">qi")


def local_queue(broker: BrokerUnderTest, topic: str) -> LocalQueue:
    """Queue 0 of a topic, as a follower is given it."""
    files = broker.store.queue(topic, 0).consume_queue
    view = QueueView(topic, 0, ColdFiles(files.files), files.max_offset)
    return LocalQueue(view, 0, ColdFiles(broker.store.commit_log.files))


class CopyingFollower:
    """Appends the records of each queue to a file of its own; ``topics`` are those it wants."""

    name = "copies"
    is_part_of_stop = False

    def __init__(self, folder: Path, files: Files, topics: tuple[str, ...] | None = None) -> None:
        self.folder = folder
        self.files = files
        self.topics = topics
        self.resumed: list[tuple[str, int, int]] = []
        self.blocks: list[tuple[str, int, int, int]] = []
        self.told_gone: list[Name] = []
        self._ends: dict[Name, int] = {}
        self._unsynced: set[Path] = set()

    # -- what the store asks -----------------------------------------------------------------------

    def wants(self, topic: str) -> bool:
        return self.topics is None or topic in self.topics

    def resume(self, queue: LocalQueue, queue_offset: int) -> int:
        topic, queue_id = queue.name
        self.resumed.append((topic, queue_id, queue_offset))
        path = self.path(topic, queue_id)
        end = 0
        if path.exists():
            # A process that was killed may have made it, and never synced its name.
            self.files.mark_names_unsynced(self.folder)
            for at, offset, record in _entries(read_file(path)):
                if offset >= queue_offset:
                    break
                end = at + _HEAD.size + len(record)
            descriptor = self.files.open(path)
            try:
                self.files.truncate(descriptor, end)
            finally:
                self.files.close(descriptor)
        self._ends[topic, queue_id] = end
        return queue_offset

    def follow(self, block: QueueBlock) -> None:
        self.blocks.append((block.topic, block.queue_id, block.first, block.end))
        path = self.path(block.topic, block.queue_id)
        records = block.records
        data = b"".join(
            _HEAD.pack(offset, size) + bytes(records.record(number))
            for number, (offset, size) in enumerate(
                zip(records.queue_offset.tolist(), records.size.tolist(), strict=True)
            )
        )
        if not self.folder.exists():
            self.files.make_directories(self.folder)
        descriptor = self.files.open(path) if path.exists() else self.files.create(path)
        try:
            self.files.write(descriptor, data, self._ends[block.topic, block.queue_id])
        finally:
            self.files.close(descriptor)
        self._ends[block.topic, block.queue_id] += len(data)
        self._unsynced.add(path)

    def sync(self) -> None:
        for path in sorted(self._unsynced):
            descriptor = self.files.open(path)
            try:
                self.files.fsync(descriptor)
            finally:
                self.files.close(descriptor)
        self._unsynced.clear()
        self.files.sync_names()

    def gone(self, topic: str, queue_id: int) -> None:
        self.told_gone.append((topic, queue_id))
        self._ends.pop((topic, queue_id), None)
        path = self.path(topic, queue_id)
        self._unsynced.discard(path)
        with suppress(FileNotFoundError):
            self.files.unlink(path)

    def used(self) -> list[tuple[MappedFile, int]]:
        return []

    def close(self) -> None:
        pass

    # -- what tests ask ----------------------------------------------------------------------------

    def path(self, topic: str, queue_id: int) -> Path:
        return self.folder / f"{topic}@{queue_id}"

    def copied(self) -> dict[Name, list[tuple[int, bytes]]]:
        """Queue offset and body of what was copied, by queue."""
        copied: dict[Name, list[tuple[int, bytes]]] = {}
        for path in sorted(self.folder.glob("*@*")):
            topic, _, queue_id = path.name.rpartition("@")
            copied[topic, int(queue_id)] = [
                (offset, next(iter(decode_records(record))).body)
                for _, offset, record in _entries(read_file(path))
            ]
        return copied


def _entries(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The start, queue offset and record of each entry, up to a torn one."""
    at = 0
    while at + _HEAD.size <= len(data):
        offset, size = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + size
        if size <= 0 or end > len(data):
            return
        yield at, offset, data[at + _HEAD.size : end]
        at = end
