"""Files with the number of waiting messages by topic, in Apache's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.persistence import load_table, next_version
from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile
    from headrace_protocol.bodies import TopicConfig

# The file, and the name of the counts in it.
TIMERS: Final = ("timermetrics", "timingCount")
TRANSACTIONS: Final = ("transactionMetrics", "transactionCount")


class _Count(msgspec.Struct, rename="camel"):
    count: int = 0
    time_stamp: int = 0


class _Table(msgspec.Struct, rename="camel", kw_only=True):
    """One of both is there."""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    timing_count: dict[str, _Count] = {}
    transaction_count: dict[str, _Count] = {}


class TopicCounts:
    """The file; a topic stays in it after its last message has gone, until it is deleted."""

    def __init__(
        self,
        file: ConfigFile,
        name: str,
        now_ms: NowMs,
        get_topic: Callable[[str], TopicConfig | None],
    ) -> None:
        """name: of the counts in the file. get_topic: a topic, or None if it does not exist.

        Raises StoreFormatError if the file can't be read.
        """
        self._file = file
        self._name = name
        self._now_ms, self._get_topic = now_ms, get_topic
        table = load_table(file, lambda data: fastjson.decode(data, _Table)) or _Table()
        self._version = table.data_version
        self._counts = table.timing_count or table.transaction_count
        self._saved = self._text()

    def body(self, counts: Mapping[str, int]) -> bytes:
        """The file's text with these counts, and 0 for all other topics that exist."""
        known = {topic: each.count for topic, each in self._counts.items()}
        now = {
            topic: count
            for topic, count in {**dict.fromkeys(known, 0), **counts}.items()
            if count or self._get_topic(topic) is not None
        }
        if now != known:
            now_ms = self._now_ms()
            self._counts = {
                topic: self._counts[topic] if known.get(topic) == count else _Count(count, now_ms)
                for topic, count in now.items()
            }
            self._version = next_version(self._version, now_ms)
        return self._text()

    def _text(self) -> bytes:
        return fastjson.dumps({"dataVersion": self._version, self._name: self._counts})

    def save(self, body: bytes) -> None:
        """Write the file if the text has changed. Raises OSError."""
        if body != self._saved:
            self._file.save(body)
            self._saved = body
