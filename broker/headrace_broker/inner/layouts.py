"""Layouts: properties that messages have in common are read once.

Source: tests/broker/inner/test_delivery.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

from headrace_broker.store.log.record_checksum import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

L = TypeVar("L")

_KEPT: Final = 1000
_BYTES_MAX: Final = 1024
_KEYS: Final = b"KEYS\x01"
_ID: Final = b"UNIQ_KEY\x01"


class Layouts(Generic[L]):
    """The parts of properties that do not depend on the values of KEYS and UNIQ_KEY."""

    def __init__(
        self,
        read: Callable[[bytes, bytes], L],
        id_names: Sequence[bytes],
    ) -> None:
        r"""Create the table.

        read: called with properties, each ended by a separator and without KEYS if it was the
        first, and the UNIQ_KEY's value as ``\x01value\x02``. The result may depend on any other
        value and on the positions of this one in the text.
        id_names: the properties with this value, in their order, in each layout that is kept.
        """
        self._read = read
        self._id_names = list(id_names)
        self._known: dict[tuple[bytes, ...], L] = {}

    def __len__(self) -> int:
        return len(self._known)

    def read(self, properties: bytes) -> tuple[L, bytes, bytes]:
        """The layout, and KEYS and the UNIQ_KEY's value as they stand in the properties."""
        start = properties.find(b"\x02") + 1 if properties.startswith(_KEYS) else 0
        keys, rest = properties[:start], properties[start:]
        if not rest.endswith(SEPARATOR):
            rest += SEPARATOR
        id_at = rest.find(_ID) + len(_ID)
        mark = b"\x01%s\x02" % rest[id_at : rest.find(b"\x02", id_at)]
        parts = tuple(rest.split(mark))
        layout = self._known.get(parts)
        if layout is None:
            layout = self._read(rest, mark)
            if self._is_kept(parts):
                if len(self._known) >= _KEPT:
                    self._known.clear()
                self._known[parts] = layout
        return layout, keys, mark

    def _is_kept(self, parts: tuple[bytes, ...]) -> bool:
        names = [part.rpartition(b"\x02")[2] for part in parts[:-1]]
        return names == self._id_names and sum(map(len, parts)) <= _BYTES_MAX
