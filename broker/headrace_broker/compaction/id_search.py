"""Searches compaction logs for a message by the id that its producer gave it.

Source: docs/compaction.md "Reading"; tests/broker/compaction/test_compaction_queries.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_protocol.message import UNIQ_KEY, decode_records

if TYPE_CHECKING:
    from headrace_broker.compaction.log_reader import LogReader

# Searched at once, some 0.2 ms.
_STEP_BYTES: Final = 1 << 20


class IdSearch:
    """One search, log by log; ``found`` has the records."""

    def __init__(self, message_id: str, begin_ms: int, part_count: int, bytes_max: int) -> None:
        """begin_ms: earliest store time. part_count: messages read at once. bytes_max: in all."""
        self.found: list[bytes] = []
        self._id = message_id
        self._text = f"{UNIQ_KEY}\x01{message_id}".encode(errors="surrogatepass")
        self._begin_ms = begin_ms
        self._part_count = part_count
        self._bytes_left = bytes_max
        self._log: LogReader | None = None
        self._offset: int | None = None

    def begin(self, log: LogReader) -> None:
        """Search another log."""
        self._log, self._offset = log, None

    def step(self) -> bool:
        """Search the next part of the log; returns whether more follows. Raises NotReady."""
        log = self._log
        assert log is not None
        if self._offset is None:
            _, self._offset = log.offsets_around(self._begin_ms)
        if self._offset is None or self._offset > log.last_offset or self._bytes_left <= 0:
            return False
        part = log.get(self._offset, self._part_count, _STEP_BYTES, None, log.last_offset + 1)
        self._offset = part.next_offset
        self._bytes_left -= part.body_bytes
        data = b"".join(part.buffers)
        if self._text in data:
            self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        at = 0
        for message in decode_records(data):
            if message.properties.get(UNIQ_KEY) == self._id:
                self.found.append(data[at : at + message.size])
            at += message.size
