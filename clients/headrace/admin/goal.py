"""The ends up to which a command reads the queues of a topic, and the parts that it can't read."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

import trio

from headrace.admin.failures import NotFound
from headrace.admin.options import PATIENCE
from headrace.admin.output import counted, queue_text
from headrace.errors import QueuePartAway, RouteNotFound
from headrace.tasks import gather
from headrace.whole import require_whole
from headrace_daemon.command import warn
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.bounds import QUEUE_NUMS_MAX
from headrace_protocol.statictopic.mapping import logic_broker_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Iterable, Mapping

    from headrace.admin.options import Patience
    from headrace.consumer.pull import PullConsumer
    from headrace.errors import HeadraceError

_NAMED_MAX = 10


class PartialRead(NotFound):
    """Messages that a command was to read are unreadable now."""


class Goal:
    """The ends of a topic's queues at first; brokers that do not tell them are asked again.

    ends: of the queues that can be read. give_up_ms: see ``Patience``.
    """

    def __init__(
        self,
        topic: str,
        queues: Iterable[MessageQueue],
        end_of: Callable[[MessageQueue], Awaitable[int]],
        patience: Patience = PATIENCE,
        *,
        allow_partial: bool | None = None,
    ) -> None:
        """end_of: asks for the end of a queue. Raises HeadraceError.

        allow_partial: what can't be read is no error; None if the command has no such option.
        """
        self.ends: dict[MessageQueue, int] = {}
        self.give_up_ms = patience.give_up_s * 1000
        self._topic = topic
        self._allow_partial = allow_partial
        self._skipped: list[str] = []
        self._missing: dict[MessageQueue, HeadraceError | None] = dict.fromkeys(queues)
        # Those of missing queues too. An end stays as it was at first.
        self._known_ends: dict[MessageQueue, int] = {}
        self._end_of = end_of
        self._pause_s = patience.pause_s
        self._give_up_at = trio.current_time() + patience.give_up_s
        self._look_at = 0.0

    async def look(self) -> dict[MessageQueue, int]:
        """The ends of queues to begin with; asks for unknown ones at most once a second."""
        if not self._missing or trio.current_time() < self._look_at:
            return {}
        queues = list(self._missing)
        outcomes = dict(zip(queues, await gather(self._find_end, queues), strict=True))
        found = {queue: end for queue, end in outcomes.items() if isinstance(end, int)}
        self._missing = {
            queue: error for queue, error in outcomes.items() if not isinstance(error, int)
        }
        self._look_at = trio.current_time() + self._pause_s
        self.ends |= found
        return found

    async def _find_end(self, queue: MessageQueue) -> int:
        if queue not in self._known_ends:
            self._known_ends[queue] = await self._end_of(queue)
        return self._known_ends[queue]

    def failed(self, queue: MessageQueue, error: HeadraceError) -> None:
        """A queue with a known end can't be read yet; ``look`` returns it again."""
        del self.ends[queue]
        self._missing[queue] = error

    def skip(self, queue: MessageQueue, at: int, error: HeadraceError) -> int | None:
        """The offset behind a part of a queue that is away; None if that is unknown."""
        if not isinstance(error, QueuePartAway) or not at < error.next_offset:
            return None
        next_offset = min(error.next_offset, self.ends[queue])
        self._skipped.append(f"{queue_text(queue)} from offset {at} to {next_offset}: {error}")
        return next_offset

    async def pause(self) -> None:
        """Wait until the next look."""
        await trio.sleep_until(self._look_at)

    def is_over(self, at: Mapping[MessageQueue, int], failing: Container[MessageQueue]) -> bool:
        """True once all is read that can be.

        at: the next offset of each queue; one without counts as read. failing: queues that have
        been unreadable for long.
        """
        if self._missing and trio.current_time() < self._give_up_at:
            return False
        return all(queue in failing for queue in self.unread(at))

    def unread(self, at: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """The next offsets of the queues that are not read to the end."""
        return {queue: at[queue] for queue, end in self.ends.items() if at.get(queue, end) < end}

    def check(
        self, at: Mapping[MessageQueue, int], failures: Mapping[MessageQueue, HeadraceError]
    ) -> None:
        """Print what is not read. Raises PartialRead if there is any, unless a part is enough."""
        for text in self._skipped[:_NAMED_MAX]:
            warn(f"not read: {text}")
        parts = {queue: self._part_before_end(queue) for queue in self._missing}
        for queue in self.unread(at):
            parts[queue] = f" from offset {at[queue]} to {self.ends[queue]}"
        errors = {**failures, **self._missing}
        for queue, part in sorted(parts.items())[:_NAMED_MAX]:
            reason = errors.get(queue) or "its broker does not answer"
            warn(f"not read: {queue_text(queue)}{part}: {reason}")
        count = len(parts) + len(self._skipped)
        if count and not self._allow_partial:
            way_out = "repeat the command when the brokers are back"
            if self._allow_partial is not None:
                way_out += ", or accept a part with --allow-partial"
            raise PartialRead(
                f"topic {self._topic} could not be read in {counted(count, 'place')}: {way_out}"
            )

    def _part_before_end(self, queue: MessageQueue) -> str:
        end = self._known_ends.get(queue)
        return "" if end is None else f" up to offset {end}"


async def wait_for_topic(
    consumer: PullConsumer, topic: str, patience: Patience, *, for_ever: bool
) -> None:
    """Wait while all brokers with the topic are away, as for a broker with some of its queues.

    Raises RouteNotFound, unless ``for_ever`` once the patience is over.
    """
    give_up_at = math.inf if for_ever else trio.current_time() + patience.give_up_s
    is_told = False
    while True:
        try:
            await consumer.queues(topic)
        except RouteNotFound as error:
            if not error.retryable or trio.current_time() >= give_up_at:
                raise
            if not is_told:
                warn(f"waiting: {error}")
                is_told = True
        else:
            return
        await trio.sleep(patience.pause_s)


async def all_queues(
    consumer: PullConsumer, topic: str, *, allow_partial: bool = False
) -> list[MessageQueue]:
    """The queues of a topic, also on brokers that are away: these may come back in time.

    allow_partial: without them, with a warning.
    """
    queues = [*await consumer.queues(topic)]
    missing = await consumer.missing(topic)
    if allow_partial:
        require_whole(topic, missing, allow_partial=True, warn=warn)
        return queues
    # A route has all queues of a static topic, whoever is away.
    if any(queue.broker_name == logic_broker_name() for queue in queues):
        return queues
    away = (
        MessageQueue(topic, part.broker, queue_id)
        for part in missing
        for queue_id in part.queue_ids or ()
    )
    return [*queues, *islice(away, QUEUE_NUMS_MAX)]
