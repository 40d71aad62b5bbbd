"""Messages of a pipeline that wait to be sent: a backlog per queue, an outlet per broker."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from headrace.producer.block import ends_of_requests
from headrace.producer.publication import usable
from headrace.producer.selector import queue_index

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from headrace.messages import EncodedMessage
    from headrace.producer.encoding import Target
    from headrace.producer.publication import Publication
    from headrace_protocol.drivers.aio import AsyncConnection

# One for the broker to work on, and one for it to start next. With more, each request would be
# smaller, and small requests cost more per message.
_REQUESTS_MAX = 2


class Outlet:
    """A broker, to which a pipeline has at most two requests in flight.

    connection: the latest connection to the broker; None before the first.
    """

    __slots__ = ("_in_flight", "_is_scheduled", "_ready", "_send_next", "connection")

    def __init__(self, send_next: Callable[[Outlet, Backlog], None]) -> None:
        """send_next: sends a backlog's next request; ``request_done`` reports the request's end."""
        self.connection: AsyncConnection | None = None
        self._send_next = send_next
        self._ready: deque[Backlog] = deque()
        self._in_flight = 0
        self._is_scheduled = False

    @property
    def is_open(self) -> bool:
        """True while messages can be sent."""
        return self.connection is not None and self.connection.is_open

    def add(self, backlog: Backlog) -> None:
        """Schedule a backlog that has messages and no request in flight."""
        self._ready.append(backlog)
        self._schedule()

    def request_done(self) -> None:
        """Record that a request is no longer in flight."""
        self._in_flight -= 1
        self._schedule()

    def _schedule(self) -> None:
        """Send when the connection's writer is free; more messages may be waiting by then."""
        if self._is_scheduled or not self._ready or self._in_flight >= _REQUESTS_MAX:
            return
        self._is_scheduled = True
        if self.connection is not None and self.connection.is_open:
            self.connection.before_write(self._fill)
        else:
            self._fill()

    def _fill(self) -> None:
        while self._ready and self._in_flight < _REQUESTS_MAX:
            backlog = self._ready.popleft()
            if backlog.messages:
                self._in_flight += 1
                self._send_next(self, backlog)
        self._is_scheduled = False


class Backlog:
    """Messages waiting for one queue; to keep their order, one request at a time is in flight.

    newest_tick: tick at which the newest message was accepted, at the latest.
    """

    __slots__ = (
        "_noted_count",
        "_taken_count",
        "is_busy",
        "messages",
        "newest_tick",
        "outlet",
        "target",
    )

    def __init__(self, target: Target, outlet: Outlet) -> None:
        self.target = target
        self.outlet = outlet
        self.messages: list[EncodedMessage] = []
        self.is_busy = False
        self.newest_tick = self._noted_count = self._taken_count = 0

    def put(self, message: EncodedMessage) -> None:
        """Append a message."""
        messages = self.messages
        messages.append(message)
        if len(messages) == 1 and not self.is_busy:
            self.outlet.add(self)

    def note_tick(self, tick: int) -> None:
        """Note the messages accepted since the last call: cheaper than a time for each of them."""
        count = self._taken_count + len(self.messages)
        if count != self._noted_count:
            self._noted_count, self.newest_tick = count, tick

    def take(self, single_from_bytes: int) -> list[EncodedMessage]:
        """Remove the messages of the next request: all that wait, up to about BLOCK_BYTES.

        single_from_bytes: larger or equal bodies get requests of their own, as do delayed
        messages.
        """
        assert not self.is_busy
        self.is_busy = True
        messages = self.messages
        sizes = list(map(len, [message.body for message in messages]))
        end = next(ends_of_requests(sizes))
        delays = [message.is_delayed for message in messages]
        if any(delays) or max(sizes) >= single_from_bytes:
            kinds = zip(range(end), sizes, delays, strict=False)
            single = (at for at, size, delay in kinds if delay or size >= single_from_bytes)
            end = max(1, next(single, end))
        self.messages = messages[end:]
        self._taken_count += end
        return messages[:end]

    def request_done(self) -> None:
        """Allow the next request: the current one has succeeded or finally failed."""
        self.is_busy = False
        if self.messages:
            self.outlet.add(self)


class TopicBacklogs:
    """The backlogs of one topic, in the queue order on which the choice by key is based.

    current: the backlog for messages without a key.
    """

    __slots__ = ("_next", "backlogs", "current", "publication")

    def __init__(self, publication: Publication, backlog: Callable[[Target], Backlog]) -> None:
        """backlog: returns the backlog of a target."""
        self.publication = publication
        self.backlogs = [backlog(target) for target in publication.targets]
        self.current = self.backlogs[0]
        self._next = 0

    def backlog_of(self, message: EncodedMessage) -> Backlog:
        """The backlog that a message goes to now."""
        key = message.key
        if key:
            return self.backlogs[queue_index(key, len(self.backlogs))]
        return self.current

    def advance(self, avoid: Container[str]) -> None:
        """Select the next backlog, preferably one of a healthy broker with no request in flight."""
        backlogs = self.backlogs
        in_order = backlogs[self._next :] + backlogs[: self._next]
        targets = set(usable([backlog.target for backlog in in_order], avoid))
        candidates = [backlog for backlog in in_order if backlog.target in targets]
        idle = (backlog for backlog in candidates if not backlog.is_busy)
        self.current = next(idle, candidates[0])
        self._next = (backlogs.index(self.current) + 1) % len(backlogs)
