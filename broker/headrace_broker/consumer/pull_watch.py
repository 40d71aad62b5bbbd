"""Queues that no member of a live group pulls: the group never gets their messages.

Pulls note only the number of the current look, so they need no clock. Between two looks lie 10 s,
and a queue is reported at the first look that finds it without a pull for 30 s.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker.consumer.groups import BROADCASTING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headrace_broker.consumer.groups import ConsumerGroup, ConsumerManager
    from headrace_protocol.serving import RunLong

    QueueCount = Callable[[str], int]

log = structlog.get_logger("headrace.broker")

_LOOK_S = 10.0
# One more than 30 s take, since the pull may have come at any moment before its first look.
_LOOKS_MAX = 4
_PUSH = "CONSUME_PASSIVELY"
_GROUPS_SHOWN = 10


class LastPull:
    """The client that last pulled a queue for a group, and the time.

    look: number of a look of ``PullWatch``. address: of the client; empty before the first pull.
    """

    __slots__ = ("address", "is_reported", "look")

    def __init__(self, look: int) -> None:
        self.look = look
        self.address = ""
        self.is_reported = False


class PullWatch:
    """Looks for queues without pulls.

    look: number of the current look; pulls put it into their ``LastPull``.
    """

    def __init__(
        self, consumers: ConsumerManager, queue_count: QueueCount, run_long: RunLong
    ) -> None:
        """queue_count: number of queues of a topic that can be read; 0 for a missing topic."""
        self.look = 0
        self._consumers = consumers
        self._queue_count = queue_count
        self._run_long = run_long
        # By group, then by topic and queue id.
        self._pulls: dict[str, dict[tuple[str, int], LastPull]] = {}
        # By group, the number of queues without pulls.
        self._idle: Counter[str] = Counter()

    def last_pull(self, group: str, topic: str, queue_id: int) -> LastPull:
        """The entry of a queue; a new one counts as pulled now."""
        pulls = self._pulls.setdefault(group, {})
        key = topic, queue_id
        return pulls.get(key) or pulls.setdefault(key, LastPull(self.look))

    def held(self, pull: LastPull, timeout_s: float) -> None:
        """Count a pull that waits for messages as one that is repeated until it is answered."""
        pull.look = self.look + int(timeout_s // _LOOK_S)

    def pulls_of(self, group: str) -> Mapping[tuple[str, int], LastPull]:
        """The pulls of a group by topic and queue id."""
        return self._pulls.get(group, {})

    def age_s(self, pull: LastPull) -> float:
        """Seconds since a pull, in steps of the looks."""
        return max(0, self.look - pull.look) * _LOOK_S

    def is_idle(self, group: ConsumerGroup, pull: LastPull) -> bool:
        """True for a queue that should be pulled, and was not for 30 s."""
        return _must_pull(group) and self._is_old(pull)

    def _is_old(self, pull: LastPull) -> bool:
        return self.look - pull.look >= _LOOKS_MAX

    def runtime_info(self) -> dict[str, str]:
        """Number of queues without pulls, and some of their groups, for GET_BROKER_RUNTIME_INFO."""
        return {
            "queuesWithoutPulls": str(sum(self._idle.values())),
            "groupsWithoutPulls": ",".join(islice(self._idle, _GROUPS_SHOWN)),
        }

    async def run(self) -> None:
        """Look at intervals, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            self.look += 1
            self._run_long(self.find_idle_queues())

    def find_idle_queues(self) -> Iterator[None]:
        """Report queues that were not pulled since they were reported last."""
        idle: Counter[str] = Counter()
        for name in self._consumers.names():
            group = self._consumers.group(name)
            if group is not None and _must_pull(group):
                for topic in list(group.subscriptions):
                    idle[name] += self._look_at(name, topic)
                    yield
        self._idle = +idle
        for name in list(self._pulls):
            if self._consumers.group(name) is None:
                del self._pulls[name]
            yield

    def _look_at(self, group: str, topic: str) -> int:
        """Report idle queues of a topic; return their number."""
        pulls = [self.last_pull(group, topic, each) for each in range(self._queue_count(topic))]
        idle = {number for number, pull in enumerate(pulls) if self._is_old(pull)}
        new = [number for number in sorted(idle) if not pulls[number].is_reported]
        for number, pull in enumerate(pulls):
            pull.is_reported = number in idle
        if new:
            log.error(
                "queues without pulls for 30 s, their messages are not consumed",
                group=group,
                topic=topic,
                queues=new,
                members=len(self._consumers.members(group)),
                remedy="restart the member that should own them, unless it is busy with earlier "
                "messages",
            )
        return len(idle)


def _must_pull(group: ConsumerGroup) -> bool:
    """True if each queue of a group should always have a pull; others choose when to pull."""
    return group.data.consume_type == _PUSH and group.data.message_model != BROADCASTING
