"""Kinds of messages, and topics that take only one (``message.type``).

Source: docs/protocol.md "Topic attributes"; tests/broker/processors/test_message_types.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from headrace_broker.message_demands import Demand, makes_demand
from headrace_broker.topics.attributes import MESSAGE_TYPE
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.message import (
    DELAY,
    KEYS,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace_broker.message_demands import QuickCheck, SentMessage
    from headrace_broker.store.log.commit_log import BatchItems
    from headrace_protocol.bodies import TopicConfig

_NORMAL: Final = "NORMAL"
_FIFO, _DELAY, _TRANSACTION = "FIFO", "DELAY", "TRANSACTION"
_KINDS: Final = frozenset({_NORMAL, _FIFO, _DELAY, _TRANSACTION})
# What makes a message one of a kind; the first kind that it is wins.
_MARKS: Final[Mapping[str, tuple[str, Callable[[str], bool]]]] = {
    "TRAN_MSG": (_TRANSACTION, lambda value: value.lower() == "true"),
    DELAY: (_DELAY, makes_demand),
    TIMER_DELIVER_MS: (_DELAY, makes_demand),
    TIMER_DELAY_SEC: (_DELAY, makes_demand),
    TIMER_DELAY_MS: (_DELAY, makes_demand),
    "__SHARDINGKEY": (_FIFO, bool),
}
_ORDER: Final = (_TRANSACTION, _DELAY, _FIFO)
_KEYED: Final = re.compile(f"(?:^|\x02){KEYS}\x01[^\x02]")
_MARK: Final = re.compile(f"(?:^|\x02)({'|'.join(_MARKS)})\x01([^\x02]*)")


def kind_of(properties: str) -> str:
    """The kind of a message with these properties, which are separated as on the wire."""
    found = set()
    for name, value in _MARK.findall(properties):
        kind, is_made = _MARKS[name]
        if is_made(value):
            found.add(kind)
    return next((kind for kind in _ORDER if kind in found), _NORMAL)


def _is_taken(wanted: str, properties: str) -> bool:
    """Whether a topic takes a message; one for FIFO also takes those with a key.

    Producers of headrace keep the messages of a key in order, and write no sharding key.
    """
    kind = kind_of(properties)
    is_keyed = wanted == _FIFO and kind == _NORMAL and bool(_KEYED.search(properties))
    return kind == wanted or is_keyed


def type_demand(find_topic: Callable[[str], TopicConfig | None]) -> Demand:
    """Rejects messages of another kind than their topic takes."""
    types = _MessageTypes(find_topic)
    return Demand(
        "messages of another kind",
        matches_topic=lambda topic: types.wanted(topic) is not None,
        apply=types.check,
        quick=types.find_quick,
    )


class _MessageTypes:
    def __init__(self, find_topic: Callable[[str], TopicConfig | None]) -> None:
        self._find_topic = find_topic

    def wanted(self, topic: str) -> str | None:
        """The kind that a topic takes; None if it takes all."""
        config = self._find_topic(topic)
        kind = config.attributes.get(MESSAGE_TYPE) if config is not None else None
        return kind if kind in _KINDS else None

    def check(self, message: SentMessage) -> None:
        """See ``Demand.apply``."""
        wanted, properties = self.wanted(message.topic), "\x02".join(message.properties)
        if wanted is not None and not _is_taken(wanted, properties):
            kind = kind_of(properties)
            key = "give it a key, or " if (wanted, kind) == (_FIFO, _NORMAL) else ""
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"topic {message.topic} takes {wanted} messages ({MESSAGE_TYPE}), and this is a "
                f"{kind} one: {key}send it to another topic, since this broker has "
                "enforceMessageType=true; nothing was stored",
            )

    def find_quick(self, topic: str, _queue_id: int) -> QuickCheck | None:
        """See ``Demand.quick``."""
        wanted = self.wanted(topic)
        return None if wanted is None else _OneKind(wanted)


class _OneKind:
    """See ``QuickCheck``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def passes(self, properties: str) -> bool:
        return _is_taken(self._kind, properties)

    def passes_items(self, items: BatchItems) -> bool:
        return self.passes_all(items.properties(), 0)

    def passes_all(self, properties: Sequence[bytes], record_bytes: int) -> bool:  # noqa: ARG002
        return all(self.passes(text.decode(errors="replace")) for text in properties)
