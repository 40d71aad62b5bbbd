"""Demands: what a message asks of the broker beyond being stored in the queue it was sent to.

One table. Its rows apply in order, each to the message as the rows before it left it. A row
without an ``apply`` function is a demand that this broker does not serve; messages that make it
are rejected.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from headrace_broker.store.log.commit_log import BatchItems
    from headrace_protocol.message import Buffer

# A property with one of these values makes no demand.
_UNSET = frozenset({"", "0", "false"})


class SentMessage(msgspec.Struct):
    r"""A message on its way into the log, as demands see and change it.

    topic, queue_id: the queue that it will be stored in. sys_flag: of its record.
    tags_code: of its unit. properties: each as ``name\x01value``, with "" at the end.
    reconsume_times, max_reconsume_times: as the producer sent them. born_host: of the producer.
    recall_ms: of a timer, what a handle to recall it names; 0 of any other message.
    body: None in a check of messages that must be stored unchanged; record_bytes, of the largest
    of them, is known then.
    """

    topic: str
    queue_id: int
    properties: list[str]
    tags_code: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    born_host: bytes = b""
    recall_ms: int = 0
    body: Buffer | None = None
    record_bytes: int = 0

    @classmethod
    def property_items(cls, raw: bytes) -> list[str]:
        """``properties`` of a stored record."""
        text = raw.decode(errors="surrogateescape")
        return [*(item for item in text.split("\x02") if item), ""]

    @property
    def raw_properties(self) -> bytes:
        """``properties`` as the log holds them."""
        return "\x02".join(self.properties).encode(errors="surrogateescape")

    def values(self) -> dict[str, str]:
        """The properties by name, without empty ones; of equal names the last wins."""
        pairs = (item.partition("\x01")[::2] for item in self.properties)
        return {name: value for name, value in pairs if value}

    def put(self, properties: Mapping[str, str], dropped: Iterable[str] = ()) -> None:
        """Set properties, at the end, and drop those of the names in ``dropped``."""
        replaced = {*properties, *dropped}
        kept = [item for item in self.properties if item.partition("\x01")[0] not in replaced]
        items = [f"{name}\x01{value}" for name, value in properties.items()]
        self.properties = [*(item for item in kept if item), *items, ""]


class QuickCheck(Protocol):
    """Sees at a glance that what a topic demands leaves messages to one queue unchanged.

    False may also mean that a look at each message must tell.
    """

    def passes(self, properties: str) -> bool:
        """True if a single message is stored unchanged."""

    def passes_items(self, items: BatchItems) -> bool:
        """True if all items of a batch are."""

    def passes_all(self, properties: Sequence[bytes], record_bytes: int) -> bool:
        """True if all records with these properties are, the largest of ``record_bytes``."""


class TopicDemand(NamedTuple):
    """A queue to which every message makes a demand.

    takes_empty: whether messages need no body. quick: spares messages that it passes the demand.
    """

    takes_empty: bool
    quick: QuickCheck | None


class Demand(NamedTuple):
    """One row: which messages make the demand, and how it changes them.

    description: such messages, in the plural, for rejections.
    properties: a message makes the demand if it has one of these, not empty, 0 or false;
    sys_flags: or if one of these bits is set;
    matches_topic: or if this is true of its topic. Called when a queue is looked up.
    apply: changes the message and has no other effect, since the message may still be rejected.
    Raises RequestError to reject it.
    admit: raises RequestError if a producer's host may not make the demand now. Set only if the
    change depends on nothing but topic, queue, flags and properties of the message, and on
    UNIQ_KEY at most as a text to copy: then ``apply`` runs once for many messages.
    takes_empty: whether messages to topics that match need no body.
    is_delay: whether it has the message wait for a time; a message of a transaction makes such a
    demand once it is committed.
    quick: the check of a queue, by topic and queue id; None where each message must be looked at.
    """

    description: str
    properties: tuple[str, ...] = ()
    sys_flags: int = 0
    matches_topic: Callable[[str], bool] | None = None
    apply: Callable[[SentMessage], None] | None = None
    admit: Callable[[bytes], None] | None = None
    takes_empty: bool = False
    is_delay: bool = False
    quick: Callable[[str, int], QuickCheck | None] | None = None

    def cause(self, message: SentMessage) -> str | None:
        """The flags, property or topic by which a message makes this demand; None if it doesn't."""
        if message.sys_flag & self.sys_flags:
            return _flags_text(message.topic, message.sys_flag)
        if self.properties:
            for item in message.properties:
                name, _, value = item.partition("\x01")
                if name in self.properties and makes_demand(value):
                    return f"property {name}={value}"
        if self.matches_topic is not None and self.matches_topic(message.topic):
            return f"topic {message.topic}"
        return None


class MessageDemands:
    """The table of demands, with unions over its rows for a quick check of each message.

    properties, sys_flags: all that may make a demand.
    """

    def __init__(self, demands: Iterable[Demand] = ()) -> None:
        self.set(demands)

    def set(self, demands: Iterable[Demand]) -> None:
        """Set the rows, before any message comes."""
        self._demands = tuple(demands)
        self.properties = frozenset(name for demand in self._demands for name in demand.properties)
        self.sys_flags = 0
        for demand in self._demands:
            self.sys_flags |= demand.sys_flags
        self._marks = [f"\x02{name}\x01".encode() for name in sorted(self.properties)]
        # Names of one row share their start. A single byte is found at a tenth of the cost of a
        # text, so bytes that batches rarely have are looked for first.
        starts = [_common_start(demand.properties) for demand in self._demands if demand.properties]
        self._item_marks = [start.encode() for start in starts]
        self._item_letters = _rare_letters(starts)

    def of_topic(self, topic: str, queue_id: int) -> TopicDemand | None:
        """The demand of every message to a queue; None if not every one makes one."""
        demands = [
            each for each in self._demands if each.matches_topic and each.matches_topic(topic)
        ]
        if not demands:
            return None
        find_quick = demands[0].quick if len(demands) == 1 else None
        return TopicDemand(
            any(demand.takes_empty for demand in demands),
            find_quick(topic, queue_id) if find_quick else None,
        )

    def check_flags(self, topic: str, sys_flag: int) -> None:
        """Raise RequestError if a bit makes a demand that is not served."""
        for demand in self._demands:
            if sys_flag & demand.sys_flags and demand.apply is None:
                raise _not_served(demand, _flags_text(topic, sys_flag))

    def apply(self, message: SentMessage) -> None:
        """Change a message as it demands. Raises RequestError."""
        for demand in self._demands:
            cause = demand.cause(message)
            if cause is not None:
                if demand.apply is None:
                    raise _not_served(demand, cause)
                demand.apply(message)

    def apply_for(self, name: str, message: SentMessage) -> None:
        """Change a message as the demand of one property has it. Raises RequestError."""
        for demand in self._demands:
            if name in demand.properties and demand.apply is not None:
                demand.apply(message)

    def apply_to_all(self, message: SentMessage) -> Callable[[bytes], None] | None:
        """Change a message as ``apply`` does, if the change holds for all that are like it.

        Returns the ``admit`` to call for each of them; None if the change doesn't hold for them.
        Raises RequestError.
        """
        made = [demand for demand in self._demands if demand.cause(message) is not None]
        if len(made) != 1 or made[0].apply is None or made[0].admit is None:
            return None
        made[0].apply(message)
        return made[0].admit

    def check_items(self, items: BatchItems) -> None:
        """Raise RequestError if an item of a batch makes a demand."""
        ends = items.ends
        for letter in self._item_letters:
            if letter in ends:
                if any(mark in ends for mark in self._item_marks):
                    self._check_each(items)
                return

    def check_items_of(
        self, topic: str, queue_id: int, quick: QuickCheck | None, items: BatchItems
    ) -> None:
        """As ``check_items``, for a queue to which every message makes a demand."""
        if quick is not None and quick.passes_items(items):
            self.check_items(items)
        else:
            self._check_each_of(topic, queue_id, items.properties(), items.record_bytes_max)

    def _check_each(self, items: BatchItems) -> None:
        for number, raw in enumerate(items.properties(), 1):
            message = SentMessage("", 0, raw.decode(errors="replace").split("\x02"))
            for demand in self._demands:
                if demand.properties and (cause := demand.cause(message)):
                    raise _not_in_batch(demand, f"item {number}, {cause}")

    def check_block(
        self,
        topic: str,
        queue_id: int,
        properties: Sequence[bytes],
        of_topic: TopicDemand | None,
        *,
        sys_flag: int = 0,
        record_bytes: int = 0,
    ) -> None:
        """Raise RequestError unless a block of messages can be stored unchanged.

        properties: the distinct ones of the messages, as the log holds them.
        of_topic: what every message to the queue demands. sys_flag: bits that all messages have.
        record_bytes: size of the largest record, used if every message makes a demand.
        """
        text = b"\x02" + b"\x02".join(properties)
        may_demand = any(mark in text for mark in self._marks) or sys_flag & self.sys_flags
        if not may_demand and of_topic is not None:
            quick = of_topic.quick
            may_demand = quick is None or not quick.passes_all(properties, record_bytes)
        if may_demand:
            self._check_each_of(topic, queue_id, properties, record_bytes, sys_flag)

    def _check_each_of(
        self,
        topic: str,
        queue_id: int,
        properties: Sequence[bytes],
        record_bytes: int,
        sys_flag: int = 0,
    ) -> None:
        for raw in properties:
            items = raw.decode(errors="replace").split("\x02")
            message = SentMessage(topic, queue_id, items, sys_flag=sys_flag)
            message.record_bytes = record_bytes
            self._check_unchanged(message)

    def _check_unchanged(self, message: SentMessage) -> None:
        for demand in self._demands:
            cause = demand.cause(message)
            if cause is None:
                continue
            if demand.apply is None:
                raise _not_served(demand, cause)
            before = msgspec.structs.replace(message, properties=list(message.properties))
            demand.apply(message)
            if message != before:
                raise _not_in_batch(demand, cause)


def _common_start(names: tuple[str, ...]) -> str:
    first, last = min(names), max(names)
    same = 0
    while same < len(first) and first[same] == last[same]:
        same += 1
    return first[:same]


def _rare_letters(names: Iterable[str]) -> list[int]:
    """A few bytes, one of which is in each name.

    If possible, none is a hexadecimal digit or in the usual names.
    """
    usual = frozenset("0123456789ABCDEFUNIQ_KEYSTAGSWAIT")
    left = {name: set(name) - usual or {name[0]} for name in names}
    letters: list[int] = []
    while left:
        counts = Counter(itertools.chain.from_iterable(sorted(each) for each in left.values()))
        [(letter, _)] = counts.most_common(1)
        letters.append(ord(letter))
        left = {name: each for name, each in left.items() if letter not in each}
    return letters


def _not_in_batch(demand: Demand, cause: str) -> RequestError:
    return RequestError(
        ResponseCode.MESSAGE_ILLEGAL,
        f"{demand.description} in a batch ({cause}): send them one by one, nothing was stored",
    )


def makes_demand(value: str) -> bool:
    """True if a property of the table makes its demand with this value."""
    return value not in _UNSET


def _flags_text(topic: str, sys_flag: int) -> str:
    return f"sysFlag {sys_flag} to {topic}"


def _not_served(demand: Demand, cause: str) -> RequestError:
    return RequestError(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        f"{demand.description} are not served by this broker ({cause}): send without, "
        "nothing was stored",
    )
