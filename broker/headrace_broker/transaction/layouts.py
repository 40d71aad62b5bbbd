"""Layouts of halves: the properties that halves share are read once.

Source: tests/broker/test_transaction_layouts.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.message_demands import SentMessage
from headrace_broker.transaction.halves import HalfNames, committed_properties
from headrace_protocol.message import tags_code_of

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT: Final = 1000
_BYTES_MAX: Final = 1024
_KEYS: Final = b"KEYS\x01"
_ID: Final = b"UNIQ_KEY\x01"
# Names before the two values that are the producer's id of the message.
_ID_NAMES: Final = [b"UNIQ_KEY", b"__transactionId__"]


class HalfLayout(NamedTuple):
    """The properties of a half without the values of KEYS, UNIQ_KEY and __transactionId__.

    group, topic, queue_id, first_offset: as in ``HalfNames``. tags_code: of the committed message.
    may_wait: whether the committed message asks for a delay. parts: of the committed message's
    properties, between the ids.
    """

    group: str
    topic: str
    queue_id: int
    first_offset: int | None
    tags_code: int
    may_wait: bool
    parts: tuple[bytes, ...]


class HalfLayouts:
    """Reads the properties of halves; those of a layout that is known cost no scan."""

    def __init__(self, may_wait: Callable[[SentMessage], bool]) -> None:
        """may_wait: whether a committed message asks for a delay; depends on its properties."""
        self._may_wait = may_wait
        self._known: dict[tuple[bytes, ...], HalfLayout] = {}

    def __len__(self) -> int:
        return len(self._known)

    def read(self, properties: bytes) -> tuple[HalfLayout, bytes]:
        """The layout of a half, and the properties of its committed message.

        properties: of the half, without the record's checksum.
        """
        start = properties.find(b"\x02") + 1 if properties.startswith(_KEYS) else 0
        keys, rest = properties[:start], properties[start:]
        id_at = rest.find(_ID) + len(_ID)
        mark = b"\x01%s\x02" % rest[id_at : rest.find(b"\x02", id_at)]
        parts = tuple(rest.split(mark))
        layout = self._known.get(parts)
        if layout is None:
            layout = self._layout(parts, mark)
            if _is_lasting(layout, parts):
                self._keep(parts, layout)
        return layout, keys + mark.join(layout.parts)

    def _layout(self, parts: tuple[bytes, ...], mark: bytes) -> HalfLayout:
        properties = mark.join(parts)
        names = HalfNames(properties)
        stored = committed_properties(properties)
        items = SentMessage.property_items(stored)
        return HalfLayout(
            names.group,
            names.topic,
            names.queue_id,
            names.first_offset,
            tags_code_of(properties),
            self._may_wait(SentMessage(names.topic, names.queue_id, items)),
            tuple(stored.split(mark)),
        )

    def _keep(self, parts: tuple[bytes, ...], layout: HalfLayout) -> None:
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[parts] = layout


def _is_lasting(layout: HalfLayout, parts: tuple[bytes, ...]) -> bool:
    """Whether the layout holds for all halves with these parts; copies differ in their numbers."""
    names = [part.rpartition(b"\x02")[2] for part in parts[:-1]]
    return names == _ID_NAMES and layout.first_offset is None and sum(map(len, parts)) <= _BYTES_MAX
