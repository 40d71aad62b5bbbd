"""Metrics of tiered storage."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.metrics import table
from headrace_broker.tiered.access.collector import TierMetrics
from headrace_daemon.metrics.samples import Metric, Samples
from headrace_protocol.errors import RequestError
from headrace_protocol.waiting import at_once
from tests.support.broker import BrokerUnderTest
from tests.support.stores import ready
from tests.support.tiered_broker import (
    TOPIC,
    expire_log,
    put,
    read_all,
    source,
    start,
    tier_of,
    upload,
)


def collect(broker: BrokerUnderTest) -> dict[Metric, dict[tuple[str, ...], Any]]:
    samples = Samples()
    at_once(TierMetrics(tier_of(broker).state)(samples))
    assert {*samples.values} - {table.OMITTED, table.STORAGE_SIZE} <= {*table.TIER_METRICS}
    return {metric: dict(rows) for metric, rows in samples.values.items()}


async def test_uploads_reads_and_what_is_behind(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    put(broker, 20, 3)
    broker.clock.ms += 5000
    assert read_all(broker) == [*range(23)]
    page = collect(broker)
    queue = TOPIC, "0", "commit_log"
    assert page[table.TIER_BEHIND] == {queue: 3}
    first_ms = ready(partial(source(broker).store_time_at, 20))
    assert first_ms is not None
    assert page[table.TIER_BEHIND_MS] == {queue: broker.clock.ms - first_ms}
    assert page[table.TIER_MESSAGES_UPLOADED] == {(TOPIC,): 20}
    tiered = page[table.TIER_MESSAGES_OUT][TOPIC,]
    assert 10 < tiered <= 20
    files = [path for path in (tmp_path / "tier").rglob("*") if path.is_file()]
    sizes = {path: path.stat().st_size for path in files if path.parent.name != "INDEX"}
    data_bytes = sum(size for path, size in sizes.items() if path.suffix != ".json")
    assert page[table.STORAGE_SIZE] == {("tiered", "blob"): data_bytes}
    assert page[table.TIER_UPLOAD_BYTES][()].total == sum(sizes.values())
    assert page[table.TIER_DOWNLOAD_BYTES][()].total > 0
    latencies = page[table.TIER_LATENCY]
    assert sum(latencies["write", "true"].counts) == sum(page[table.TIER_UPLOAD_BYTES][()].counts)
    assert ("write", "false") not in latencies
    upload(broker)
    assert collect(broker)[table.TIER_BEHIND] == {queue: 0}


async def test_a_read_counts_as_a_hit_only_if_memory_had_it(broker: BrokerUnderTest) -> None:
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    reader = source(broker)

    def counts() -> tuple[float, float]:
        page = collect(broker)
        return page[table.TIER_CACHE_ACCESS][()], page[table.TIER_CACHE_HIT][()]

    def kept() -> float:
        return collect(broker)[table.TIER_CACHE_COUNT][()]

    assert counts() == (0, 0)
    ready(lambda: reader.get(0, 4, 100_000, None))
    assert (counts(), kept()) == ((1, 0), 0)
    ready(lambda: reader.get(4, 4, 100_000, None))
    assert (counts(), kept()) == ((2, 0), 8)
    page = collect(broker)
    assert page[table.TIER_CACHE_BYTES][()] == tier_of(broker).reader.blocks.byte_count > 0
    ready(lambda: reader.get(8, 4, 100_000, None))
    assert (counts(), kept()) == ((3, 1), 0)


async def test_failures_are_counted_apart(tmp_path: Path) -> None:
    broker = start(tmp_path)
    put(broker, 0, 20)
    upload(broker)
    await expire_log(broker)
    for path in (tmp_path / "tier").rglob("COMMIT_LOG/*"):
        path.unlink()
    with pytest.raises(RequestError, match="No such file"):
        ready(lambda: source(broker).get(0, 4, 100_000, None))
    assert sum(collect(broker)[table.TIER_LATENCY]["read", "false"].counts) == 1
