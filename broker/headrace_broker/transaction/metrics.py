"""Number of undecided transactions by topic: config/transactionMetrics, in Apache's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.persistence import load_table, next_version
from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion

if TYPE_CHECKING:
    from collections import Counter

    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile

METRICS_FILE: Final = "transactionMetrics"


class _Metric(msgspec.Struct, rename="camel"):
    count: int = 0
    time_stamp: int = 0


class _Table(msgspec.Struct, rename="camel", kw_only=True):
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    transaction_count: dict[str, _Metric] = msgspec.field(default_factory=dict)


class TransactionMetrics:
    """The file; a topic stays in it after its last transaction is decided."""

    def __init__(self, file: ConfigFile, now_ms: NowMs) -> None:
        """Raises StoreFormatError if the file can't be read."""
        self._file = file
        self._now_ms = now_ms
        loaded = load_table(file, lambda data: fastjson.decode(data, _Table)) or _Table()
        self._version, self._metrics = loaded.data_version, loaded.transaction_count

    def save(self, counts: Counter[str]) -> None:
        """Write the counts if they have changed. Raises OSError."""
        topics = {*self._metrics, *counts}
        old = {topic: metric.count for topic, metric in self._metrics.items()}
        changed = [topic for topic in topics if old.get(topic) != counts[topic]]
        if not changed:
            return
        now_ms = self._now_ms()
        version = next_version(self._version, now_ms)
        metrics = {**self._metrics, **{topic: _Metric(counts[topic], now_ms) for topic in changed}}
        table = _Table(data_version=version, transaction_count=metrics)
        self._file.save(fastjson.dumps(msgspec.to_builtins(table)))
        self._version, self._metrics = version, metrics
