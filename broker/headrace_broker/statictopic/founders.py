"""What a broker must learn of a static topic that is new there but not in the cluster.

Its incarnation id derives from the epoch at which the topic was created, which only the brokers of
that time know. Apache's tools do not send attributes, such as that the topic is compacted.
Source: docs/protocol.md "Topics"; tests/broker/test_static_founders.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from headrace_broker.statictopic.remote import Answer
from headrace_broker.statictopic.table import INCARNATION_PREFIX
from headrace_protocol.bodies import TopicConfigAndQueueMapping
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.fastjson import MalformedJson

if TYPE_CHECKING:
    from headrace_broker.statictopic.remote import OtherBrokers

_LIMIT_S: Final = 3.0


class Founder(NamedTuple):
    """A topic as another broker has it."""

    incarnation: str
    attributes: dict[str, str]


# Gets None if no other broker has the topic.
OnFound = Callable[[Founder | None], None]


class Founders:
    """Asks the other brokers of a topic for its incarnation id and attributes."""

    def __init__(
        self, find_brokers: Callable[[str], Awaitable[list[str]]], brokers: OtherBrokers
    ) -> None:
        """find_brokers: the other brokers that have a topic. Raises HeadraceError."""
        self._find_brokers = find_brokers
        self._brokers = brokers
        self._asked: deque[tuple[str, OnFound]] = deque()
        self._has_work = trio.Event()
        self._is_running = False

    def find(self, topic: str, on_found: OnFound) -> None:
        """Call back within three seconds; immediately while ``run`` does not run."""
        if self._is_running:
            self._asked.append((topic, on_found))
            self._has_work.set()
        else:
            on_found(None)

    async def run(self) -> None:
        """Ask until cancelled."""
        self._is_running = True
        try:
            while True:
                while self._asked:
                    topic, on_found = self._asked.popleft()
                    on_found(await self._find(topic))
                await self._has_work.wait()
                self._has_work = trio.Event()
        finally:
            self._is_running = False

    async def _find(self, topic: str) -> Founder | None:
        with trio.move_on_after(_LIMIT_S):
            try:
                for broker in await self._find_brokers(topic):
                    founder = await self._ask(broker, topic)
                    if founder is not None:
                        return founder
            except HeadraceError:
                return None
        return None

    async def _ask(self, broker: str, topic: str) -> Founder | None:
        fields = {"topic": topic}
        outcome = await self._brokers.request(broker, RequestCode.GET_TOPIC_CONFIG, fields)
        if not isinstance(outcome, Answer):
            return None
        incarnation = str(outcome.fields.get("incarnation") or "")
        if not incarnation.startswith(INCARNATION_PREFIX):
            return None
        try:
            config = TopicConfigAndQueueMapping.decode(b"".join(outcome.body))
        except MalformedJson:
            return None
        return Founder(incarnation, config.attributes)
