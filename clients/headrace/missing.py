"""Parts of a topic that can't be read: whose, which, why and since when."""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from headrace_protocol.departed import time_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.departed import DepartedBroker

_QUEUES_NAMED_MAX = 8


class MissingPart(NamedTuple):
    """Messages of a topic that cannot be read now.

    broker: "" if not even the nameserver knows it. queue_ids: the queues that lack messages, as a
    range if they may be many; none if only older messages of some queues of a static topic are
    missing; None if it is not about one topic.
    reason: a phrase that follows the broker's name. since_ms: ms since 1970; None if unknown.
    """

    broker: str
    queue_ids: Sequence[int] | None
    reason: str
    since_ms: int | None = None

    def __str__(self) -> str:
        who = f"broker {self.broker}" if self.broker else "an unknown broker"
        which = "" if self.queue_ids is None else f" ({_queues(self.queue_ids)})"
        return f"{who}{which} {self.why}"

    @property
    def why(self) -> str:
        """The reason, with the time."""
        if self.since_ms is None:
            return self.reason
        ago_s = max(0, round(time.time() - self.since_ms / 1000))
        return f"{self.reason} {ago_s} s ago (since {time_text(self.since_ms)})"


def departed_part(broker: DepartedBroker, queue_ids: Sequence[int] | None = None) -> MissingPart:
    """The part on a broker that left."""
    return MissingPart(broker.broker_name, queue_ids, broker.reason, broker.since)


def _queues(queue_ids: Sequence[int]) -> str:
    """Queues in words: "queues 0 to 3, 5"."""
    if not queue_ids:
        return "older messages of some queues"
    if isinstance(queue_ids, range) and len(queue_ids) > 1:  # perhaps a forged billion
        return f"queues {queue_ids[0]} to {queue_ids[-1]}"
    runs = [
        [queue_id for _, queue_id in run]
        for _, run in groupby(enumerate(sorted(queue_ids)), lambda pair: pair[1] - pair[0])
    ]
    named = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    if len(named) > _QUEUES_NAMED_MAX:
        named = [*named[:_QUEUES_NAMED_MAX], "..."]
    return f"queue{'s' if len(queue_ids) > 1 else ''} {', '.join(named)}"
