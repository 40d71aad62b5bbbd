"""Delivered offsets of the levels: ``positions/schedule.json``.

``config/delayOffset.json`` is for Apache's brokers. A start reads it back, and what it counts
beyond our own file was delivered by one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.persistence import load_table, next_version
from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile
    from headrace_broker.store.files.positions import PositionFile

DELAY_OFFSETS_FILE: Final = "delayOffset.json"


class DeliveredLevels(msgspec.Struct, frozen=True, rename="camel"):
    """Delivered offsets of the levels, as a start finds them.

    levels: queue offset of the next message of each level, from 1. log_offset: what was delivered
    before this physical offset is counted in them.
    """

    levels: dict[int, int]
    log_offset: int


class _Table(msgspec.Struct, rename="camel", kw_only=True):
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    offset_table: dict[int, int] = msgspec.field(default_factory=dict)


class DelayOffsets:
    """The next queue offset of each level on disk.

    saved: by level from 1. log_offset: what was delivered before this physical offset is counted
    in them; None if another broker has delivered since.
    """

    def __init__(
        self, export: ConfigFile, position: PositionFile[DeliveredLevels], now_ms: NowMs
    ) -> None:
        """Raises StoreFormatError when what is there can't be read."""
        self._export = export
        self._position = position
        self._now_ms = now_ms
        loaded = load_table(export, lambda data: fastjson.decode(data, _Table)) or _Table()
        self._version = loaded.data_version
        own = position.load() or DeliveredLevels({}, -1)
        exported = loaded.offset_table
        ahead = {level: at for level, at in exported.items() if at > own.levels.get(level, 0)}
        self.saved = own.levels | ahead
        self.log_offset = None if ahead or own.log_offset < 0 else own.log_offset

    def body(self, offsets: Mapping[int, int]) -> bytes:
        """Offsets as GET_ALL_DELAY_OFFSET answers them."""
        return fastjson.dumps(_fields(offsets, self._version))

    def save(self, offsets: dict[int, int], log_offset: int) -> None:
        """Write offsets, in one thread at a time. Raises OSError.

        log_offset: of the log that is on disk; what was delivered before it is counted.
        """
        self._version = next_version(self._version, self._now_ms())
        self._position.save(DeliveredLevels(offsets, log_offset))
        self._export.save(fastjson.dumps(_fields(offsets, self._version), pretty=True))
        self.saved, self.log_offset = offsets, log_offset


def _fields(offsets: Mapping[int, int], version: DataVersion) -> dict[str, object]:
    return {"dataVersion": version, "offsetTable": dict(sorted(offsets.items()))}
