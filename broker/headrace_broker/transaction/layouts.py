"""Layouts of halves: the properties that halves share are read once.

Source: tests/broker/transaction/test_transaction_layouts.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.inner.layouts import Layouts
from headrace_broker.message_demands import SentMessage
from headrace_broker.transaction.halves import HalfNames, committed_properties
from headrace_protocol.message import tags_code_of

if TYPE_CHECKING:
    from collections.abc import Callable

# Names before the two values that are the producer's id of the message.
_ID_NAMES: Final = (b"UNIQ_KEY", b"__transactionId__")


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
        # Copies differ in their first offset.
        self._layouts = Layouts(self._layout, _ID_NAMES, lambda half: half.first_offset is None)

    def __len__(self) -> int:
        return len(self._layouts)

    def read(self, properties: bytes) -> tuple[HalfLayout, bytes]:
        """The layout of a half, and the properties of its committed message.

        properties: of the half, without the record's checksum.
        """
        layout, keys, mark = self._layouts.read(properties)
        return layout, keys + mark.join(layout.parts)

    def _layout(self, properties: bytes, mark: bytes) -> HalfLayout:
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
