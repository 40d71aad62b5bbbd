"""A start that has much to read says how far it is, and can be stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog.testing
import trio

from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker, log_progress
from headrace_broker.settings.of_store import store_settings
from headrace_broker.store.log import commit_log
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.recovery import LoadStage
from headrace_daemon.network import MemoryNetwork
from tests.support.running import in_background, small_config
from tests.support.stores import crash, put

RECORDS = 5000


def config_of_a_crashed_store(folder: Path, queues: int = 1) -> BrokerConfig:
    config = small_config(folder, broker_name="b")
    store = MessageStore(store_settings(config, bytes(8)))
    store.load()
    for number in range(RECORDS):
        put(store, store.queue("T", number % queues), b"%d" % number)
    crash(store)
    return config


@pytest.mark.slow
async def test_progress_is_told_and_a_stop_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "SCAN_BYTES", 200)  # thousands of blocks
    config = config_of_a_crashed_store(tmp_path)
    broker = Broker(config, MemoryNetwork())
    broker.progress_s = 0.0
    with structlog.testing.capture_logs() as logs, trio.fail_after(30):
        async with in_background(broker.run):
            while not any(entry["event"] == "reading the log" for entry in logs):  # noqa: ASYNC110
                await trio.sleep(0.001)  # the thread that loads tells by its log alone
    last = next(entry for entry in logs if entry["event"] == "store not opened")
    assert "checking 1 of 1 queues and reading 0 MiB of the log" in last["reason"]
    assert not any(entry["event"] == "store open" for entry in logs)

    async with trio.open_nursery() as nursery:  # the same directory, unlocked
        with structlog.testing.capture_logs() as logs:
            await nursery.start(Broker(config, MemoryNetwork()).run)
        opened = next(entry for entry in logs if entry["event"] == "store open")
        assert opened["record_count"] == RECORDS
        nursery.cancel_scope.cancel()


async def test_queues_are_counted_before_the_log_is_read(
    tmp_path: Path,
) -> None:
    """In the log, and in what /ready answers meanwhile."""
    reports = []

    def note(stage: LoadStage, done: int, most: int) -> None:
        reports.append(broker.readiness.report()[1])
        log_progress(stage, done, most)

    config = config_of_a_crashed_store(tmp_path, queues=3)
    broker = Broker(config, MemoryNetwork(), on_progress=note)
    broker.progress_s = 0.0
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(broker.run)
            nursery.cancel_scope.cancel()
    told = [entry for entry in logs if entry["event"] in {"checking queues", "reading the log"}]
    assert [(entry.get("done"), entry.get("of")) for entry in told[:3]] == [(1, 3), (2, 3), (3, 3)]
    assert {entry["event"] for entry in told[3:]} == {"reading the log"}
    assert [report["doneQueues"] for report in reports[:3]] == [1, 2, 3]
    assert {report["queues"] for report in reports} == {3}
    assert reports[2]["doneBytes"] == 0 < reports[3]["doneBytes"] <= reports[3]["atMostBytes"]


async def test_a_table_that_is_missing_beside_messages_is_missed(tmp_path: Path) -> None:
    config = config_of_a_crashed_store(tmp_path)
    names = ["consumerOffset.json", "subscriptionGroup.json", "topics.json"]

    async def missed() -> list[str]:
        """Warnings of a start; the broker is stopped at once."""
        with structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                await nursery.start(Broker(config, MemoryNetwork()).run)
                nursery.cancel_scope.cancel()
        warnings = [entry for entry in logs if entry["event"].startswith("file missing beside")]
        assert all(entry["log_level"] == "warning" for entry in warnings)
        assert all(entry["meaning"] and entry["remedy"] for entry in warnings)
        return sorted(Path(entry["path"]).name for entry in warnings)

    assert await missed() == names
    assert await missed() == []  # nobody has committed, and yet there is a file
    for name in names:
        (tmp_path / "config" / name).unlink()
        (tmp_path / "config" / f"{name}.bak").unlink(missing_ok=True)
        assert await missed() == [name]
    config = config.model_copy(update={"store_path_root_dir": tmp_path / "new"})
    assert await missed() == []
