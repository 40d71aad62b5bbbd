"""The place of a queue: this broker, another one, or nowhere.

Every request for a queue goes header -> place -> work. It names a topic, a queue and its use of the
queue, and gets a place by these rules, in order:

1. The topic exists.
2. Broker and topic permit the use.
3. The first of ``places`` that returns a place decides.
4. The topic has the queue; or the queue still holds messages, and the use doesn't create queues.
5. The queue is read through the first source that one of ``sources`` returns, else from the store.

A feature that moves or renames queues adds a function to ``places``; one that stores messages
elsewhere adds one to ``sources``. Results are cached until topics change. Code that gives a queue
another place or source must call ``TopicTable.lookups_changed``.

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
from headrace_protocol.serving import ServedElsewhere

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.store.store_source import Boundary, GetResult
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.serving import Request, Work


class Use(enum.Enum):
    """The use that a request makes of a queue.

    SEND and PULL need a permission and create the queue in memory; they name the queue as clients
    do. DELIVER is a SEND of the broker's own, for a message that waited; it needs no permission,
    since the message was accepted with one. All others name a queue
    of this broker's store: READ is a PULL by another broker, BEGIN finds where reading can begin:
    at the oldest message, or at a time. INSPECT is everything else about one queue: its end, its
    units, the positions of a group. LIST is INSPECT for each queue of a topic, as in statistics.
    """

    SEND = enum.auto()
    DELIVER = enum.auto()
    PULL = enum.auto()
    READ = enum.auto()
    BEGIN = enum.auto()
    INSPECT = enum.auto()
    LIST = enum.auto()

    @property
    def creates_queue(self) -> bool:
        """True if the queue is created if nothing has been written to it yet."""
        return self in _CREATES_QUEUE


_READS: Final = frozenset((Use.PULL, Use.READ))
_CREATES_QUEUE: Final = frozenset((Use.SEND, Use.DELIVER, *_READS))


class Reader(Protocol):
    """One queue as pulls read it. Offsets are those that clients see.

    Every method except ``known_range`` may raise NotReady, or ServedElsewhere.
    """

    def get(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
        /,
    ) -> GetResult:
        """Records from ``queue_offset`` on; see ``StoreSource.get``."""

    def get_bulk(
        self,
        queue_offset: int,
        count_max: int,
        bytes_max: int,
        tags: frozenset[int] | None,
        /,
    ) -> GetResult:
        """Like ``get``, with the units of the records in front."""

    def known_range(self) -> tuple[int, int]:
        """The lowest offset as far as it is known, and one past the highest; never waits."""


class Source(Reader, Protocol):
    """A reader of a queue, also by time and for statistics."""

    def min_offset(self) -> int:
        """Offset of the oldest message."""

    def max_offset(self) -> int:
        """One past the offset of the newest message."""

    def offset_by_time(self, timestamp_ms: int, boundary: Boundary = "LOWER", /) -> int:
        """Offset for a store time; see ``StoreSource.offset_by_time``."""

    def store_time_at(self, queue_offset: int, /) -> int | None:
        """Store time of a message in ms; None if the queue doesn't have the message."""

    def missing_from(self, queue_offset: int, /) -> int:
        """Number of offsets from ``queue_offset`` on whose messages were compacted."""

    def record_bytes(self) -> int:
        """Bytes of the queue's records; see ``StoreSource.record_bytes``."""

    def unit(self, queue_offset: int, /) -> tuple[int, int, int]:
        """Physical offset, size and tags code of a message between min_offset and max_offset."""


class GroupPositions(Protocol):
    """The positions of groups in a queue, with the queue ids and offsets that clients see."""

    def commit(self, group: str, topic: str, queue_id: int, offset: int, /) -> bool:
        """Record what a group has consumed; see ``ConsumerOffsets.commit``."""

    def commit_pull(self, group: str, topic: str, queue_id: int, offset: int, /) -> None:
        """Record what a group has received."""

    def take_reset(self, group: str, topic: str, queue_id: int, /) -> int | None:
        """The offset at which a pull must resume after a reset, returned once."""


# A reader that applies a filter: its text, and what applies it to a source.
MakeFiltered = Callable[[str, Callable[["Reader"], "Reader"]], "Reader"]


class Here(NamedTuple):
    """A queue that this broker serves.

    queue: appended to by sends, waited on by held pulls. None if nothing was ever written to it and
    the use doesn't create queues. source: reads the queue.
    reader: what pulls read instead; None if it is ``source``.
    queue_id: as clients know the queue. offset_delta: the offset that clients see minus that of the
    queue; None while that is undecided.
    positions: where the positions of groups is kept; None for the table of this broker's queues.
    no_position: reported in statistics for a group that has committed nothing; -1 where its
    position may be in another queue.
    filtered: makes a reader with a filter; None where ``source`` is to be read through one.
    """

    queue: StoreQueue | None
    source: Source
    queue_id: int
    offset_delta: int | None = 0
    reader: Reader | None = None
    positions: GroupPositions | None = None
    no_position: int = 0
    filtered: MakeFiltered | None = None


class Elsewhere(NamedTuple):
    """A queue that another broker serves.

    pass_on: sends a request for the queue there; None if the client must ask for the route.
    """

    broker_name: str
    address: str
    pass_on: Callable[[Request], Work] | None = None

    def rejection(self, topic: str, queue_id: int) -> RequestError:
        """The error for any request for the queue; it passes the request on if that is possible.

        Apache's broker answers every such request with NOT_LEADER_FOR_QUEUE, and its clients then
        fetch the route again.
        """
        code = ResponseCode.NOT_LEADER_FOR_QUEUE
        remark = (
            f"queue {queue_id} of topic {topic} is served by broker {self.broker_name} at "
            f"{self.address}: ask for the route again"
        )
        if self.pass_on is None:
            return RequestError(code, remark)
        return ServedElsewhere(code, remark, self.pass_on)


Place = Here | Elsewhere | RequestError


BeforeCreate = Callable[[bool], None]


def _allow(_is_new: bool) -> None:
    pass


class Lookup(NamedTuple):
    """A request for the place of a queue.

    queue_id: negative in a SEND that leaves the choice of the queue to the broker.
    before_create: called before the queue is created in memory, with whether it is new; raises
    RequestError to prevent that.
    """

    topic: TopicConfig
    queue_id: int
    use: Use
    before_create: BeforeCreate = _allow


FindPlace = Callable[["QueueDirectory", Lookup], Place | None]
FindSource = Callable[[Lookup, "StoreQueue"], Source | None]

_EMPTY: Final = EmptySource()
# About 300 bytes each.
_CACHED_MAX: Final = 10_000


class QueueDirectory:
    """Looks up the places of queues, and caches those that are here."""

    def __init__(
        self,
        broker_name: str,
        store: MessageStore,
        topics: TopicTable,
    ) -> None:
        self._broker_name = broker_name
        self._store = store
        self._topics = topics
        self._places: Sequence[FindPlace] = ()
        self._sources: Sequence[FindSource] = ()
        # Sends and pulls have caches of their own, with more than the place.
        self._cache: dict[tuple[str, int, Use], Here] = {}
        self.cached_max = _CACHED_MAX
        self._cache_change = -1

    def ask(self, places: Sequence[FindPlace], sources: Sequence[FindSource]) -> None:
        """Ask these in order from now on; the first result that is not None decides."""
        self._places = places
        self._sources = sources

    def resolve(
        self, topic: str, queue_id: int, use: Use, before_create: BeforeCreate = _allow
    ) -> Place:
        """The place of a queue, or why it has none.

        before_create: see ``Lookup``.
        """
        if self._cache_change != self._topics.change_count or len(self._cache) >= self.cached_max:
            self._cache.clear()
            self._cache_change = self._topics.change_count
        cached = self._cache.get((topic, queue_id, use))
        if cached is not None:
            return cached
        place = self._look_up(topic, queue_id, use, before_create)
        # Topics don't change when the first send creates a queue, so its absence is not cached.
        if isinstance(place, Here) and place.queue is not None and not use.creates_queue:
            self._cache[topic, queue_id, use] = place
        return place

    def _look_up(self, topic: str, queue_id: int, use: Use, before_create: BeforeCreate) -> Place:
        try:
            lookup = Lookup(self._permitted_topic(topic, use), queue_id, use, before_create)
            for find_place in self._places:
                if (place := find_place(self, lookup)) is not None:
                    return place
            return self.local(lookup)
        except RequestError as error:
            return error

    def serve(
        self, topic: str, queue_id: int, use: Use, before_create: BeforeCreate = _allow
    ) -> Here:
        """A queue that must be here. Raises RequestError.

        before_create: see ``Lookup``.
        """
        place = self.resolve(topic, queue_id, use, before_create)
        if isinstance(place, Here):
            return place
        raise place.rejection(topic, queue_id) if isinstance(place, Elsewhere) else place

    def find(self, topic: str, queue_id: int, use: Use) -> Here | None:
        """A queue that need not exist; None if it doesn't, or may not be used.

        Raises RequestError only if another broker serves the queue.
        """
        place = self.resolve(topic, queue_id, use)
        if isinstance(place, Elsewhere):
            raise place.rejection(topic, queue_id)
        return place if isinstance(place, Here) else None

    def source_to_list(self, topic: str, queue_id: int) -> Source | None:
        """The source of a queue for LIST; None if another broker serves the queue.

        Raises RequestError.
        """
        place = self.resolve(topic, queue_id, Use.LIST)
        if isinstance(place, RequestError):
            raise place
        return place.source if isinstance(place, Here) else None

    def local(self, lookup: Lookup) -> Here:
        """This broker's own queue, without asking ``places``. Raises RequestError."""
        queue = self._queue(lookup)
        if queue is None:
            return Here(None, _EMPTY, lookup.queue_id)
        return Here(queue, self._source(lookup, queue), queue.queue_id)

    def local_source(self, lookup: Lookup) -> Source:
        """The source of this broker's own queue; an empty one if nothing was written to it."""
        queue = self._store.find_queue(lookup.topic.topic_name, lookup.queue_id)
        return _EMPTY if queue is None else self._source(lookup, queue)

    def _permitted_topic(self, topic: str, use: Use) -> TopicConfig:
        if use in _READS:
            return self._topics.check_readable(topic)
        config = self._topics.expect(topic)
        if use is Use.SEND:
            self._topics.check_writable(config)
        return config

    def _queue(self, lookup: Lookup) -> StoreQueue | None:
        topic, queue_id, use, before_create = lookup
        if use is Use.SEND and queue_id < 0:
            queue_id = _any_queue(topic)
        name = topic.topic_name
        queue = self._store.find_queue(name, queue_id)
        if queue is not None and not use.creates_queue:
            return queue
        self._check_queue_id(topic, queue_id, use)
        if not use.creates_queue:
            return None
        before_create(queue is None)
        return self._store.queue(name, queue_id)

    def _check_queue_id(self, topic: TopicConfig, queue_id: int, use: Use) -> None:
        count, suffix = max(topic.read_queue_nums, topic.write_queue_nums), ""
        if use in _READS:
            count, suffix = topic.read_queue_nums, " to read"
        if not 0 <= queue_id < count:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"queue {queue_id} of topic {topic.topic_name} on broker {self._broker_name}: "
                f"there are {count}{suffix}, ask for the route again",
            )

    def _source(self, lookup: Lookup, queue: StoreQueue) -> Source:
        for find_source in self._sources:
            if (source := find_source(lookup, queue)) is not None:
                return source
        return self._store.source(queue)


def _any_queue(topic: TopicConfig) -> int:
    """A random queue, for a producer that names none. Raises RequestError."""
    if not topic.write_queue_nums:
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"topic {topic.topic_name} has no queue to write to: give it some with "
            f"`headrace topic create {topic.topic_name} --queues N`",
        )
    return random.randrange(topic.write_queue_nums)
