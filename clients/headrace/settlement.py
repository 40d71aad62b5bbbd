"""The end of messages that are out, as observers of a client see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.received import ReceivedMessage


class Settlement(NamedTuple):
    """A request that settles messages that are out, or extends their time.

    how: "ack", "extend", "retry" or "reject".
    """

    how: str
    messages: Sequence[ReceivedMessage]
    group: str
    started_ns: int
    error: BaseException | None
