"""How far each level is delivered: config/delayOffset.json, as Apache RocketMQ keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.inner.marks import Mark
from headrace_broker.persistence import load_table, next_version
from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_broker.inner.marks import Marks
    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile

DELAY_OFFSETS_FILE: Final = "delayOffset.json"
_MARK_NAME = "schedule"


class _Table(msgspec.Struct, rename="camel", kw_only=True):
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    offset_table: dict[int, int] = msgspec.field(default_factory=dict)


class DelayOffsets:
    """The file of the next queue offset of each level.

    saved: what it holds, by level from 1. log_offset: what was delivered before this physical
    offset is counted in it; None if another broker wrote the file.
    """

    def __init__(self, file: ConfigFile, marks: Marks, now_ms: NowMs) -> None:
        """Raises StoreFormatError when what is there can't be read."""
        self._file = file
        self._marks = marks
        self._now_ms = now_ms
        loaded = load_table(file, lambda data: fastjson.decode(data, _Table)) or _Table()
        self.saved = loaded.offset_table
        self.log_offset = marks.log_offset(_MARK_NAME, _by_name(self.saved))
        self._version = loaded.data_version

    def body(self, offsets: Mapping[int, int]) -> bytes:
        """Offsets as GET_ALL_DELAY_OFFSET answers them."""
        return fastjson.dumps(_fields(offsets, self._version))

    def save(self, offsets: dict[int, int], log_offset: int) -> None:
        """Write offsets, in one thread at a time. Raises OSError.

        log_offset: of the log that is on disk; what was delivered before it is counted.
        """
        self._version = next_version(self._version, self._now_ms())
        self._file.save(fastjson.dumps(_fields(offsets, self._version), pretty=True))
        self._marks.save(_MARK_NAME, Mark(_by_name(offsets), log_offset))
        self.saved, self.log_offset = offsets, log_offset


def _fields(offsets: Mapping[int, int], version: DataVersion) -> dict[str, object]:
    return {"dataVersion": version, "offsetTable": dict(sorted(offsets.items()))}


def _by_name(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(level): offset for level, offset in offsets.items()}
