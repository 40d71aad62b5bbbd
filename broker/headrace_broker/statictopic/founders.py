"""The incarnation id of a static topic that is new at this broker but not in the cluster.

It derives from the epoch at which the topic was created, which only the brokers of that time know.
Source: docs/protocol.md "Topics"; tests/broker/test_static_founders.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import trio

from headrace_broker.statictopic.remote import Answer
from headrace_broker.statictopic.table import INCARNATION_PREFIX
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.errors import HeadraceError

if TYPE_CHECKING:
    from headrace_broker.statictopic.remote import OtherBrokers

_LIMIT_S: Final = 3.0

# Gets the id, None if no other broker has one.
OnFound = Callable[[str | None], None]


class Founders:
    """Asks the other brokers of a topic for its incarnation id."""

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
        """Call back with the id within three seconds; immediately while ``run`` does not run."""
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

    async def _find(self, topic: str) -> str | None:
        with trio.move_on_after(_LIMIT_S):
            try:
                for broker in await self._find_brokers(topic):
                    incarnation = await self._ask(broker, topic)
                    if incarnation.startswith(INCARNATION_PREFIX):
                        return incarnation
            except HeadraceError:
                return None
        return None

    async def _ask(self, broker: str, topic: str) -> str:
        fields = {"topic": topic}
        outcome = await self._brokers.request(broker, RequestCode.GET_TOPIC_CONFIG, fields)
        found = outcome.fields.get("incarnation") if isinstance(outcome, Answer) else None
        return str(found or "")
