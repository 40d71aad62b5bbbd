"""A start that has much to read says how far it is, and can be stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog.testing
import trio

from headrace_broker import server
from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_broker.store import recovery
from headrace_broker.store.message_store import MessageStore
from headrace_protocol.drivers.network import MemoryNetwork
from tests.support.stores import crash, put

if TYPE_CHECKING:
    from pathlib import Path

RECORDS = 5000


def config_of_a_crashed_store(folder: Path) -> BrokerConfig:
    config = BrokerConfig(
        broker_name="b",
        bind_address="127.0.0.1",
        store_path_root_dir=folder,
        mapped_file_size_commit_log=1 << 20,
        max_hash_slot_num=100,
        max_index_num=400,
    )
    store = MessageStore(config.store_settings(bytes(8)))
    store.load()
    for number in range(RECORDS):
        put(store, store.queue("T", 0), b"%d" % number)
    crash(store)
    return config


@pytest.mark.slow
async def test_progress_is_told_and_a_stop_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SCAN_BYTES", 200)  # thousands of blocks
    monkeypatch.setattr(server, "_PROGRESS_S", 0.0)
    config = config_of_a_crashed_store(tmp_path)
    with structlog.testing.capture_logs() as logs, trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Broker(config, MemoryNetwork()).run)
            while not any(entry["event"] == "reading the log" for entry in logs):  # noqa: ASYNC110
                await trio.sleep(0.001)  # the thread that loads tells by its log alone
            nursery.cancel_scope.cancel()
    last = next(entry for entry in logs if entry["event"] == "store not opened")
    assert last["reason"].startswith("stopped after 0 MiB")
    assert not any(entry["event"] == "store open" for entry in logs)

    async with trio.open_nursery() as nursery:  # the same directory, unlocked
        with structlog.testing.capture_logs() as logs:
            await nursery.start(Broker(config, MemoryNetwork()).run)
        opened = next(entry for entry in logs if entry["event"] == "store open")
        assert opened["record_count"] == RECORDS
        nursery.cancel_scope.cancel()
