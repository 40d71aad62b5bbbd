"""Who serves a queue: this broker, another one, or nobody.

Each request goes header -> place -> work: it names a topic, a queue and its use of the queue, and
gets a place. The rules, in this order:

1. The topic exists.
2. Broker and topic permit the use.
3. The first of ``places`` that answers decides.
4. The topic has such a queue, or the queue still holds messages and is only looked at.
5. The queue is read through the first of ``sources`` that answers, else from the store.

A feature that moves queues adds a function to ``places``, one that stores messages elsewhere adds
a function to ``sources``. Both are asked once per queue and change of the topics, not per request;
whoever gives a queue another place or source calls ``TopicTable.lookups_changed``.

Source: docs/protocol.md "Topics"; tests/broker/test_queue_directory.py.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from headrace_broker.store.store_source import EmptySource
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.store.store_source import Boundary, GetResult
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.bodies import TopicConfig


class Use(enum.Enum):
    """What a request wants of a queue.

    SEND and PULL need a permission and make the queue in memory. DELIVER is a SEND of the broker's
    own, of a message that waited. BEGIN asks where reading can begin: at the oldest message, or at
    a time. LOOK is everything else about one queue: its end, its units, the progress of a group.
    LIST is LOOK for each queue of a topic, as in statistics.
    """

    SEND = enum.auto()
    DELIVER = enum.auto()
    PULL = enum.auto()
    BEGIN = enum.auto()
    LOOK = enum.auto()
    LIST = enum.auto()

    @property
    def makes_queue(self) -> bool:
        """Whether a queue is made that nothing was written to yet."""
        return self in _MAKES_QUEUE


_MAKES_QUEUE: Final = frozenset((Use.SEND, Use.DELIVER, Use.PULL))


class Source(Protocol):
    """Where the messages of one queue are read. Each method but ``known_range`` may raise NotReady.

    Offsets are those that clients see.
    """

    def get(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
        /,
    ) -> GetResult:
        """Records from ``queue_offset`` on, as ``StoreSource.get``."""

    def get_bulk(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
        /,
    ) -> GetResult:
        """As ``get``, with the records' units before them."""

    def min_offset(self) -> int:
        """The oldest message."""

    def max_offset(self) -> int:
        """Just after the newest message."""

    def known_range(self) -> tuple[int, int]:
        """``min_offset`` as far as it is known, and ``max_offset``, at once."""

    def offset_by_time(self, timestamp_ms: int, boundary: Boundary = "LOWER", /) -> int:
        """The offset for a store time, as ``StoreSource.offset_by_time``."""

    def store_time_at(self, queue_offset: int, /) -> int | None:
        """When a message was stored; None if it is not there."""

    def unit(self, queue_offset: int, /) -> tuple[int, int, int]:
        """Physical offset, size and tags code of a message between min_offset and max_offset."""


class Here(NamedTuple):
    """A queue that this broker serves.

    queue: what is appended to, and where held pulls wait. None if nothing was ever written to the
    queue and it is only looked at.
    """

    queue: StoreQueue | None
    source: Source


class Elsewhere(NamedTuple):
    """A queue that another broker serves."""

    broker_name: str
    address: str

    def refusal(self, topic: str, queue_id: int) -> RequestError:
        """The answer to any request for the queue that is not handed on.

        Apache's broker answers NOT_LEADER_FOR_QUEUE whatever is asked, and its clients ask for the
        route again.
        """
        return RequestError(
            ResponseCode.NOT_LEADER_FOR_QUEUE,
            f"queue {queue_id} of topic {topic} is served by broker {self.broker_name} at "
            f"{self.address}: ask for the route again",
        )


Place = Here | Elsewhere | RequestError


BeforeMade = Callable[[bool], None]


def _allow(_is_new: bool) -> None:
    pass


class Asked(NamedTuple):
    """What a place is looked up for; a negative queue id of a SEND leaves the choice open.

    before_made: called before a queue is made in memory, with whether it is new; raises
    RequestError to prevent that.
    """

    topic: TopicConfig
    queue_id: int
    use: Use
    before_made: BeforeMade = _allow


FindPlace = Callable[["QueueDirectory", Asked], Place | None]
FindSource = Callable[[Asked, "StoreQueue"], Source | None]

_EMPTY: Final = EmptySource()
# Of some 300 bytes each.
_KEPT_MAX: Final = 10_000


class QueueDirectory:
    """Looks up places."""

    def __init__(
        self,
        broker_name: str,
        store: MessageStore,
        topics: TopicTable,
        places: Sequence[FindPlace] = (),
        sources: Sequence[FindSource] = (),
    ) -> None:
        """places, sources: asked in order; the first that does not return None decides."""
        self._broker_name = broker_name
        self._store = store
        self._topics = topics
        self._places = places
        self._sources = sources
        # Queues that were looked at; sends and pulls keep theirs with more that they look up.
        self._kept: dict[tuple[str, int, Use], Here] = {}
        self._kept_change = -1

    def resolve(
        self, topic: str, queue_id: int, use: Use, before_made: BeforeMade = _allow
    ) -> Place:
        """Where a queue is served, or why it is not. Raises NotReady.

        before_made: see ``Asked``.
        """
        if self._kept_change != self._topics.change_count or len(self._kept) >= _KEPT_MAX:
            self._kept.clear()
            self._kept_change = self._topics.change_count
        kept = self._kept.get((topic, queue_id, use))
        if kept is not None:
            return kept
        place = self._look_up(topic, queue_id, use, before_made)
        # A queue that nothing was written to yet is made without a change of the tables.
        if isinstance(place, Here) and place.queue is not None and not use.makes_queue:
            self._kept[topic, queue_id, use] = place
        return place

    def _look_up(self, topic: str, queue_id: int, use: Use, before_made: BeforeMade) -> Place:
        try:
            asked = Asked(self._permitted(topic, use), queue_id, use, before_made)
            for find_place in self._places:
                if (place := find_place(self, asked)) is not None:
                    return place
            return self.local(asked)
        except RequestError as error:
            return error

    def serve(self, topic: str, queue_id: int, use: Use, before_made: BeforeMade = _allow) -> Here:
        """A queue that must be here. Raises RequestError, NotReady. before_made: see ``Asked``."""
        place = self.resolve(topic, queue_id, use, before_made)
        if isinstance(place, Here):
            return place
        raise place.refusal(topic, queue_id) if isinstance(place, Elsewhere) else place

    def find(self, topic: str, queue_id: int, use: Use) -> Here | None:
        """A queue that need not be there.

        Raises RequestError only if another broker serves the queue; NotReady.
        """
        place = self.resolve(topic, queue_id, use)
        if isinstance(place, Elsewhere):
            raise place.refusal(topic, queue_id)
        return place if isinstance(place, Here) else None

    def listed(self, topic: str, queue_id: int) -> Source | None:
        """The source of a queue for LIST; None if another broker serves it.

        Raises RequestError, NotReady.
        """
        place = self.resolve(topic, queue_id, Use.LIST)
        if isinstance(place, RequestError):
            raise place
        return place.source if isinstance(place, Here) else None

    def local(self, asked: Asked) -> Here:
        """A queue as this broker has it, whatever ``places`` say. Raises RequestError."""
        queue = self._queue(asked)
        return Here(queue, _EMPTY if queue is None else self._source(asked, queue))

    def _permitted(self, topic: str, use: Use) -> TopicConfig:
        if use is Use.PULL:
            return self._topics.check_readable(topic)
        config = self._topics.expect(topic)
        if use is Use.SEND:
            self._topics.check_writable(config)
        elif use is Use.DELIVER:
            self._topics.check_deliverable(config)
        return config

    def _queue(self, asked: Asked) -> StoreQueue | None:
        topic, queue_id, use, before_made = asked
        if use is Use.SEND and queue_id < 0:
            queue_id = _any_queue(topic)
        name = topic.topic_name
        queue = self._store.find_queue(name, queue_id)
        if queue is not None and not use.makes_queue:
            return queue
        self._check_queue_id(topic, queue_id, use)
        if not use.makes_queue:
            return None
        before_made(queue is None)
        return self._store.queue(name, queue_id)

    def _check_queue_id(self, topic: TopicConfig, queue_id: int, use: Use) -> None:
        count, what = max(topic.read_queue_nums, topic.write_queue_nums), ""
        if use is Use.PULL:
            count, what = topic.read_queue_nums, " to read"
        if not 0 <= queue_id < count:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"queue {queue_id} of topic {topic.topic_name} on broker {self._broker_name}: "
                f"there are {count}{what}, ask for the route again",
            )

    def _source(self, asked: Asked, queue: StoreQueue) -> Source:
        for find_source in self._sources:
            if (source := find_source(asked, queue)) is not None:
                return source
        return self._store.source(queue)


def _any_queue(topic: TopicConfig) -> int:
    """A queue for a message whose producer names none. Raises RequestError."""
    if not topic.write_queue_nums:
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"topic {topic.topic_name} has no queue to write to: give it some with "
            f"`headrace topic create {topic.topic_name} --queues N`",
        )
    return random.randrange(topic.write_queue_nums)
