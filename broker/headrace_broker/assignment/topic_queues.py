"""The queues of topics on all brokers, as a nameserver knows them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.drivers.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from headrace_protocol.bodies import MessageQueue

_KEPT_MS: Final = 30_000
# Between look-ups while no nameserver answers.
_RETRY_MS: Final = 1000
_TOPICS_MAX: Final = 10_000


class _Kept(NamedTuple):
    queues: Sequence[MessageQueue]
    until_ms: int


class TopicQueues:
    """Queues by topic, kept for 30 s, or for as long as no nameserver answers.

    look_up: asks a nameserver; None for a topic without a route. Raises HeadraceError.
    own: this broker's queues of a topic, for a broker that no nameserver knows.
    """

    def __init__(
        self,
        look_up: Callable[[str], Awaitable[Sequence[MessageQueue] | None]],
        own: Callable[[str], Sequence[MessageQueue]],
        now_ms: Callable[[], int],
    ) -> None:
        self._look_up = look_up
        self._own = own
        self._now_ms = now_ms
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def of(self, topic: str) -> Sequence[MessageQueue]:
        """The readable queues of a topic in RocketMQ's order; none if it has no route."""
        kept = self._kept.get(topic)
        if kept is not None and self._now_ms() < kept.until_ms:
            return kept.queues
        try:
            found = await self._look_up(topic)
        except HeadraceError:
            queues = self._own(topic) if kept is None else kept.queues
            self._keep(topic, queues, _RETRY_MS)
            return queues
        queues = self._own(topic) if found is None else found
        self._keep(topic, queues, _KEPT_MS)
        return queues

    def _keep(self, topic: str, queues: Sequence[MessageQueue], for_ms: int) -> None:
        self._kept.pop(topic, None)
        if not queues:
            return
        self._kept[topic] = _Kept(queues, self._now_ms() + for_ms)
        if len(self._kept) > _TOPICS_MAX:
            self._kept.popitem(last=False)
