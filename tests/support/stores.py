"""Small stores for tests: real files, a clock that is set, a disk that can be made to fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from headrace_broker.clock import Clock
from headrace_broker.store.files.filesystem import Files, Paged
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.queues.consume_queue import ConsumeQueue
from headrace_broker.store.reader import Reader, WantedMessages
from headrace_broker.store.settings import StoreSettings
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import GetResult, GetStatus
from headrace_protocol.errors import NotReady
from headrace_protocol.frame import Buffer
from headrace_protocol.inner_batch import unwrap_messages
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import StoredMessage, decode_records, encode_properties

Result = TypeVar("Result")
HOST = bytes((10, 0, 0, 1)) + (4711).to_bytes(4, "big")


class SetClock:
    """Clocks that stand still until they are moved."""

    def __init__(self, ms: int = 1_700_000_000_000) -> None:
        self.ms = ms
        # By how much the wall clock was set ahead, or back; no time has passed then.
        self.jumped_ms = 0

    def now_ms(self) -> int:
        return self.ms

    def steady_ms(self) -> int:
        return self.ms - self.jumped_ms

    def jump(self, ms: int) -> None:
        """Set the wall clock ahead, or back."""
        self.ms += ms
        self.jumped_ms += ms


class _OpenStore(MessageStore):
    """A store that is known to be open until it is closed, or let go of by a crash."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        _open_stores[self] = None

    def abandon(self) -> None:
        _open_stores.pop(self, None)
        super().abandon()


_open_stores: dict[MessageStore, None] = {}


def close_stores() -> None:
    """Close what a test has left open, the youngest first."""
    while _open_stores:
        store, _ = _open_stores.popitem()
        store.close()


def forget_stores() -> None:
    """Leave open what a simulated machine had open when it ended."""
    _open_stores.clear()


class FaultyFiles(Files):
    """The real file system with a disk that can be full or broken, and is never waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.is_broken = False
        self.is_unwritable = False
        self.is_unreadable = False
        self.synced: list[str] = []

    def apart(self) -> FaultyFiles:
        """As ``Files.apart``; without faults."""
        return FaultyFiles()

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        if self.is_unreadable and flags == os.O_RDONLY:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(path, flags)

    def allocate(self, descriptor: int, position: int, byte_count: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(descriptor, position, byte_count)

    def write(self, descriptor: int, data: Buffer, position: int) -> None:
        if self.is_unwritable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().write(descriptor, data, position)

    def fdatasync(self, descriptor: int) -> None:
        if self.is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def fsync(self, descriptor: int) -> None:
        self.fdatasync(descriptor)

    def is_cached(self, _file: Paged, _start: int, _end: int) -> bool:
        return True

    def fsync_directory(self, path: Path) -> None:
        if not path.is_dir():
            raise FileNotFoundError(path)


def small_settings(root: Path, **changes: Any) -> StoreSettings:
    sizes = {
        "commit_log_file_bytes": 4096,
        "consume_queue_file_bytes": 200,
        "index_slot_count": 10,
        "index_entry_count": 20,
        "ring_rows": 64,
    }
    return StoreSettings(root=root, **{**sizes, **changes})


def open_store(
    root: Path,
    clock: Clock | None = None,
    files: Files | None = None,
    **changes: Any,
) -> MessageStore:
    """A loaded store. ``close_stores`` closes it, if the test leaves it open."""
    store = new_store(root, clock, files, **changes)
    store.load()
    return store


def new_store(
    root: Path, clock: Clock | None = None, files: Files | None = None, **changes: Any
) -> MessageStore:
    """A store that is not loaded; otherwise as ``open_store``."""
    return _OpenStore(small_settings(root, **changes), clock or SetClock(), files or FaultyFiles())


def crash(store: MessageStore) -> None:
    """Let go of a store as a killed process would: what it wrote stays, nothing is finished."""
    store.abandon()


def held(folder: Path) -> list[str]:
    """Descriptors and maps that this process has of files below a folder, removed ones too."""
    process = Path("/proc/self")
    maps = (process / "maps").read_text().splitlines()
    # That of the listing itself is gone by then.
    descriptors = [str(path.readlink()) for path in (process / "fd").iterdir() if path.is_symlink()]
    return [name for name in (*maps, *descriptors) if str(folder) in name]


def put(
    store: MessageStore,
    queue: StoreQueue,
    body: Buffer = b"body",
    *,
    dispatch: bool = True,
    sys_flag: int = 0,
    **properties: str,
) -> int:
    """Append one message and make it readable; returns its physical offset."""
    store.write_path.begin()
    raw = encode_properties(properties)
    code = tags_code(properties.get("TAGS"))
    physical_offset = store.write_path.append((queue, body, raw, code, 0, sys_flag, 1, 0), HOST)
    if dispatch:
        store.write_path.publish()
    return physical_offset


def read_all(store: MessageStore, queue: StoreQueue) -> list[StoredMessage]:
    """Everything a consumer gets from the queue's beginning on."""
    messages: list[StoredMessage] = []
    offset = ready(lambda: store.source(queue).min_offset())
    while (result := get_ready(store, queue, offset)).status is GetStatus.FOUND:
        records = (m for buffer in result.buffers for m in decode_records(buffer))
        messages += unwrap_messages(records)
        offset = result.next_offset
    return messages


def units_from(queue: ConsumeQueue, first: int) -> list[tuple[int, int, int]]:
    return [queue.unit(offset) for offset in range(first, queue.max_offset)]


def get_ready(store: MessageStore, queue: StoreQueue, offset: int) -> GetResult:
    """A few messages, after what has to be done before."""
    return ready(lambda: store.source(queue).get(offset, 7, 3000, None))


def query_index(store: MessageStore | Reader, *query: Any) -> list[int]:
    """The records that a query by key finds without a wait. Raises NotReady."""
    asked = store.query_index(WantedMessages(*query))
    while asked.step():
        pass
    return asked.found


def ready(read: Callable[[], Result]) -> Result:
    """Its result, after all that it has to wait for."""
    while True:
        try:
            return read()
        except NotReady as wait:
            wait.fetch()
