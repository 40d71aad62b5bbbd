"""Microseconds per message of the store's stages: python -m tests.bench.store_micro [FOLDER]."""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.settings import StoreSettings
from headrace_protocol.message import encode_batch, encode_properties

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.store_queue import StoreQueue

PROPERTIES = encode_properties(
    {
        "UNIQ_KEY": "7F00000128B430946E0967F9F22001C4",
        "WAIT": "true",
        "TAGS": "TagA",
        "CLUSTER": "DefaultCluster",
    }
)
HOST = b"\x7f\0\0\1\0\0\x2a\x2a"
ROUNDS = 200


def measure(name: str, count: int, step: Callable[[], object], rounds: int = ROUNDS) -> None:
    """Print the median and best round, each of ``count`` messages."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    times.sort()
    median, best = times[rounds // 2], times[0]
    sys.stdout.write(f"{name:34}{median / count * 1e6:8.3f}{best / count * 1e6:8.3f}\n")


def appender(store: MessageStore, queues: list[StoreQueue], body: bytes) -> Callable[[], None]:
    """Appends 100 messages round robin."""
    turns = [queues[number % len(queues)] for number in range(100)]

    def step() -> None:
        store.write_path.begin()
        append = store.write_path.append
        for queue in turns:
            append(queue, body, PROPERTIES, 1234, 0, 0, 1, HOST, 0)

    return step


def run(store: MessageStore) -> None:
    """All stages, after a round that makes files and touches their pages."""
    queues = [store.queue("TopicTest", number) for number in range(4)]
    path = store.write_path
    sys.stdout.write(f"{'microseconds per message':34}{'median':>8}{'best':>8}\n")
    for body_bytes in (100, 1024):
        step = appender(store, queues, bytes(body_bytes))
        measure(f"append {body_bytes} B", 100, step)
        path.publish()
        store.index_tick()
    step = appender(store, queues, bytes(100))

    def step_and_publish() -> None:
        step()
        path.publish()

    measure("append + publish, 100 rows", 100, step_and_publish)
    for _ in range(100):
        step()
    measure("dispatch in bulk, 10 000 rows", 10_000, path.publish, 1)
    store.index_tick()
    for _ in range(80):
        step()
    path.publish()
    measure("index, 8 000 rows", 8000, store.index_tick, 1)
    batch = memoryview(encode_batch([(0, bytes(100), PROPERTIES)] * 100))

    def append_and_publish() -> None:
        path.append_batch(queues[0], batch, 0, 1, HOST, 0)
        path.publish()

    measure("batch of 100 + publish", 100, append_and_publish)
    store.index_tick()
    alone = store.queue("Alone", 0)
    appender(store, [alone], bytes(100))()
    path.publish()
    everything, tag = None, frozenset((1234,))
    for name, queue in (("scattered", queues[0]), ("adjacent", alone)):
        measure(
            f"get 32, {name}, per pull",
            1,
            partial(store.source(queue).get, 0, 32, 1 << 18, everything),
        )
    measure("get 32, by tag, per pull", 1, lambda: store.source(alone).get(0, 32, 1 << 18, tag))


def main() -> None:
    """Run in FOLDER or a temporary one."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as folder:
        settings = StoreSettings(
            root=Path(folder) / "store",
            commit_log_file_bytes=1 << 26,
            index_slot_count=500_000,
            index_entry_count=2_000_000,
        )
        store = MessageStore(settings)
        store.load()
        gc.freeze()
        run(store)
        store.close()


if __name__ == "__main__":
    main()
