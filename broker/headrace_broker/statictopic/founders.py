"""Questions to other brokers about a static topic that is new here but not in the cluster.

Its incarnation id derives from the epoch at which the topic was created, which only the brokers of
that time know. Apache's tools do not send attributes, such as that the topic is compacted.
Source: docs/protocol.md "Topics"; tests/broker/statictopic/test_static_founders.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from headrace_broker.peers.callers import FOUNDERS
from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic.table import INCARNATION_PREFIX
from headrace_protocol.admin_headers import TopicConfigResponseHeader
from headrace_protocol.bodies import TopicConfigAndQueueMapping
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.errors import HeadraceError

if TYPE_CHECKING:
    from headrace_broker.peers.peers import Peers
    from headrace_broker.statictopic.forward import FindInfos

_LIMIT_S: Final = 3.0


class Founder(NamedTuple):
    """A topic as another broker has it."""

    incarnation: str
    attributes: dict[str, str]


# Gets None if no other broker has the topic.
OnFound = Callable[[Founder | None], None]


class Founders:
    """Asks the other brokers of a topic for its incarnation id and attributes."""

    def __init__(self, broker_name: str, find_infos: FindInfos, peers: Peers) -> None:
        """find_infos: the brokers' mappings of a topic. Raises HeadraceError."""
        self._broker_name = broker_name
        self._find_infos = find_infos
        self._peers = peers
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
                infos = await self._find_infos(topic)
            except HeadraceError:
                return None
            for info in infos:
                if info.bname != self._broker_name:
                    founder = await self._ask(info.bname, topic)
                    if founder is not None:
                        return founder
        return None

    async def _ask(self, broker: str, topic: str) -> Founder | None:
        ask = Ask(broker, RequestCode.GET_TOPIC_CONFIG, {"topic": topic})
        try:
            response = await self._peers.ask(FOUNDERS, ask)
            incarnation = response.header(TopicConfigResponseHeader).incarnation or ""
            if not incarnation.startswith(INCARNATION_PREFIX):
                return None
            attributes = response.decode(TopicConfigAndQueueMapping).attributes
        except HeadraceError:
            return None
        return Founder(incarnation, attributes)
