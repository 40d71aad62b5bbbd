"""Brokers that come and go beside the one of the fixture ``mq``, each in a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from headrace.embedded import LOOPBACK, Embedded, _start, _Thread
from headrace_broker.clock import Clock
from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker

_SMALL_FILES: dict[str, Any] = {
    "mapped_file_size_commit_log": 1024 * 1024,
    "mapped_file_size_consume_queue": 20 * 1000,
    "max_hash_slot_num": 2000,
    "max_index_num": 8000,
    "clean_file_forcibly_enable": False,  # however full the disk of the machine is
    "compaction_mapped_file_size": 1024 * 1024,
    "compaction_cq_mapped_file_size": 46_000,
    # Compaction and tiers take what is flushed.
    "flush_commit_log_least_pages": 0,
}


@contextmanager
def broker(
    mq: Embedded, folder: Path, name: str, clock: Clock | None = None, **settings: Any
) -> Iterator[Broker]:
    """Another broker of the cluster, for the length of a block; its files are in ``folder``."""
    config = BrokerConfig(
        broker_name=name,
        bind_address=LOOPBACK,
        listen_port=settings.pop("listen_port", 0),
        fast_listen_port=0,
        namesrv_addr=mq.nameserver,
        store_path_root_dir=folder,
        **(_SMALL_FILES | settings),
    )
    running = Broker(config, clock=clock)

    @asynccontextmanager
    async def run() -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            await _start(stack, running.run)
            yield running

    thread = _Thread(run)
    thread.start()
    try:
        yield running
    finally:
        thread.stop()
