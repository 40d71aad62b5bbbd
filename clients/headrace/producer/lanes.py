"""A pipeline's messages on their way: a lane for each queue, an outlet for each broker."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from headrace.producer.block import ends_of_requests
from headrace.producer.selector import queue_index

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from headrace.messages import Message
    from headrace.producer.encoding import Target
    from headrace.producer.publication import Publication
    from headrace_protocol.drivers.aio import AsyncConnection

# One that the broker works on, and one that it finds when it is done. With more, each would be
# smaller, and small ones cost more.
_REQUESTS_MAX = 2


class Outlet:
    """A broker, which gets at most two requests of a pipeline at once.

    connection: the last one that was open; None before the first.
    """

    __slots__ = ("_is_scheduled", "_leave", "_ready", "_under_way", "connection")

    def __init__(self, leave: Callable[[Outlet, Lane], None]) -> None:
        """leave: called with a lane whose next request may leave; ``landed`` ends it."""
        self.connection: AsyncConnection | None = None
        self._leave = leave
        self._ready: deque[Lane] = deque()
        self._under_way = 0
        self._is_scheduled = False

    @property
    def is_open(self) -> bool:
        """Whether messages can leave."""
        return self.connection is not None and self.connection.is_open

    def add(self, lane: Lane) -> None:
        """Messages of a lane wait, and nothing of it is under way."""
        self._ready.append(lane)
        self._schedule()

    def landed(self) -> None:
        """A request is not under way any more."""
        self._under_way -= 1
        self._schedule()

    def _schedule(self) -> None:
        """Let lanes leave when the connection's writer is free: more may have come by then."""
        if self._is_scheduled or not self._ready or self._under_way >= _REQUESTS_MAX:
            return
        self._is_scheduled = True
        if self.connection is not None and self.connection.is_open:
            self.connection.before_write(self._fill)
        else:
            self._fill()

    def _fill(self) -> None:
        while self._ready and self._under_way < _REQUESTS_MAX:
            lane = self._ready.popleft()
            if lane.messages:
                self._under_way += 1
                self._leave(self, lane)
        self._is_scheduled = False


class Lane:
    """Messages for one queue. One request at a time is under way, so that their order is kept."""

    __slots__ = ("is_busy", "messages", "outlet", "target")

    def __init__(self, target: Target, outlet: Outlet) -> None:
        self.target = target
        self.outlet = outlet
        self.messages: list[Message] = []
        self.is_busy = False

    def put(self, message: Message) -> None:
        """Let a message wait for its turn."""
        messages = self.messages
        messages.append(message)
        if len(messages) == 1 and not self.is_busy:
            self.outlet.add(self)

    def take(self, alone_from_bytes: int) -> list[Message]:
        """The messages of the next request: what is there, up to about BLOCK_BYTES.

        alone_from_bytes: bodies of this size and more get requests of their own, as do delayed
        messages.
        """
        assert not self.is_busy
        self.is_busy = True
        messages = self.messages
        sizes = [len(message.body) for message in messages]
        end = next(ends_of_requests(sizes))
        delays = [message.delay_level for message in messages]
        if any(delays) or max(sizes) >= alone_from_bytes:
            kinds = zip(range(end), sizes, delays, strict=False)
            alone = (at for at, size, delay in kinds if delay or size >= alone_from_bytes)
            end = max(1, next(alone, end))
        self.messages = messages[end:]
        return messages[:end]

    def done(self) -> None:
        """What was taken is at its end: the next may leave."""
        self.is_busy = False
        if self.messages:
            self.outlet.add(self)


class TopicLanes:
    """The lanes of one topic, in the order in which keys count its queues.

    current: where messages without a key go now.
    """

    __slots__ = ("_next", "current", "lanes", "publication")

    def __init__(self, publication: Publication, lane: Callable[[Target], Lane]) -> None:
        """lane: finds or makes the lane of a target."""
        self.publication = publication
        self.lanes = [lane(target) for target in publication.targets]
        self.current = self.lanes[0]
        self._next = 0

    def of(self, message: Message) -> Lane:
        """Where a message goes now."""
        if message.key:
            return self.lanes[queue_index(message.key, len(self.lanes))]
        return self.current

    def turn(self, avoid: Container[str]) -> None:
        """Go on to the next lane in turn: of a sound broker, and with nothing under way."""
        lanes = self.lanes
        in_turn = lanes[self._next :] + lanes[: self._next]
        sound = [lane for lane in in_turn if lane.target.queue.broker_name not in avoid] or in_turn
        self.current = next((lane for lane in sound if not lane.is_busy), sound[0])
        self._next = (lanes.index(self.current) + 1) % len(lanes)
