"""The number of timers that wait, by topic (``config/timermetrics``), and rates."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from headrace_broker.persistence import load_table, next_version
from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile

TIMER_METRICS_FILE: Final = "timermetrics"
_SAMPLES: Final = 10


class _Count(msgspec.Struct, rename="camel"):
    count: int = 0
    time_stamp: int = 0


class _Table(msgspec.Struct, rename="camel", kw_only=True):
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    timing_count: dict[str, _Count] = msgspec.field(default_factory=dict)


class TimerMetrics:
    """The file. Its counts come from the timers that wait, whatever it held at the start."""

    def __init__(self, file: ConfigFile, now_ms: NowMs) -> None:
        """Raises StoreFormatError if the file can't be read."""
        self._file = file
        self._now_ms = now_ms
        self._saved = b""
        self._table = load_table(file, lambda data: fastjson.decode(data, _Table)) or _Table()

    def body(self, counts: Mapping[bytes, int]) -> bytes:
        """The file's text with these counts."""
        table, now_ms = self._table, self._now_ms()
        wanted = {name.decode(errors="replace"): count for name, count in counts.items()}
        changed = {
            name: _Count(wanted.get(name, 0), now_ms)
            for name in (*wanted, *table.timing_count)
            if wanted.get(name, 0) != getattr(table.timing_count.get(name), "count", None)
        }
        if changed:
            table.timing_count = {**table.timing_count, **changed}
            table.data_version = next_version(table.data_version, now_ms)
        return fastjson.dumps(
            {"dataVersion": table.data_version, "timingCount": table.timing_count}
        )

    def save(self, body: bytes) -> None:
        """Write the file if the text has changed. Raises OSError."""
        if body != self._saved:
            self._file.save(body)
            self._saved = body


class Rate:
    """A count, and its growth over the last samples."""

    def __init__(self) -> None:
        self.count = 0
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES + 1)

    def sample(self) -> None:
        """Take a sample."""
        self._samples.append((trio.current_time(), self.count))

    @property
    def rate(self) -> float:
        """Per second; 0 before the second sample."""
        if len(self._samples) < 2:
            return 0.0
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - start) if end > start else 0.0
