"""What a message asks of the broker besides being stored where it was sent: one table.

The rows are asked in their order, each about the message as those before it left it. A row without
a function is a demand that this broker does not serve: such a message is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace_broker.store.log.commit_log import BatchItems

# With these values a property asks for nothing.
_NOTHING = frozenset({"", "0", "false"})


class SentMessage(msgspec.Struct):
    r"""A message on its way into the log, as a row sees and changes it.

    topic, queue_id: where it will be stored. sys_flag: of its record.
    tags_code: of its unit. properties: ``name\x01value`` each, and "" at the end.
    reconsume_times, max_reconsume_times: as its producer sent them.
    """

    topic: str
    queue_id: int
    properties: list[str]
    tags_code: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    max_reconsume_times: int | None = None


class Demand(NamedTuple):
    """A row: who makes the demand, and what becomes of the message.

    what: names such messages in refusals.
    properties: a message makes the demand by having one of these, other than empty, 0 or false.
    sys_flags: or by having one of these bits.
    of_topic: or by being sent to a topic of which this is true; asked when a queue is looked up.
    serve: changes the message, and nothing else: it may not be stored after all. Raises
    RequestError to refuse it.
    """

    what: str
    properties: tuple[str, ...] = ()
    sys_flags: int = 0
    of_topic: Callable[[str], bool] | None = None
    serve: Callable[[SentMessage], None] | None = None

    def made_by(self, message: SentMessage) -> str | None:
        """Which part of a message makes this demand, if any."""
        if message.sys_flag & self.sys_flags:
            return _flags_text(message.topic, message.sys_flag)
        if self.properties:
            for item in message.properties:
                name, _, value = item.partition("\x01")
                if name in self.properties and is_asking(value):
                    return f"property {name}={value}"
        if self.of_topic is not None and self.of_topic(message.topic):
            return f"topic {message.topic}"
        return None


class MessageDemands:
    """The table, with what a sender needs of it at once.

    properties, sys_flags: those that may make a demand, of all rows.
    has_topics: whether messages may make one by their topic.
    """

    def __init__(self, demands: Iterable[Demand]) -> None:
        self._demands = tuple(demands)
        self.properties = frozenset(name for demand in self._demands for name in demand.properties)
        self.sys_flags = 0
        for demand in self._demands:
            self.sys_flags |= demand.sys_flags
        self._of_topics = [demand.of_topic for demand in self._demands if demand.of_topic]
        self.has_topics = bool(self._of_topics)
        self._marks = [f"\x02{name}\x01".encode() for name in sorted(self.properties)]
        # Names of one row share their start. A single byte is found at a tenth of the cost of a
        # text, so one that batches rarely have is looked for first.
        starts = [_common_start(demand.properties) for demand in self._demands if demand.properties]
        self._item_marks = [(_rare_letter(start), start.encode()) for start in starts]

    def is_of_topic(self, topic: str) -> bool:
        """Whether each message to a topic makes a demand."""
        return any(is_of(topic) for is_of in self._of_topics)

    def check_flags(self, topic: str, sys_flag: int) -> None:
        """Raise RequestError for bits that ask for what is not served."""
        for demand in self._demands:
            if sys_flag & demand.sys_flags and demand.serve is None:
                raise _not_served(demand, _flags_text(topic, sys_flag))

    def serve(self, message: SentMessage) -> None:
        """Change a message as it demands. Raises RequestError."""
        for demand in self._demands:
            place = demand.made_by(message)
            if place is not None:
                if demand.serve is None:
                    raise _not_served(demand, place)
                demand.serve(message)

    def check_items(self, topic: str, items: BatchItems) -> None:
        """Raise RequestError for a batch with an item that makes a demand."""
        ends = items.ends()
        if any(letter in ends and mark in ends for letter, mark in self._item_marks):
            for number, raw in enumerate(items.properties(), 1):
                message = SentMessage(topic, 0, raw.decode(errors="replace").split("\x02"))
                for demand in self._demands:
                    if demand.properties and (place := demand.made_by(message)):
                        raise _not_in_batch(demand, f"item {number}, {place}")

    def check_block(
        self, topic: str, queue_id: int, properties: Sequence[bytes], sys_flag: int = 0
    ) -> None:
        """Raise RequestError for messages that can't be stored together, as they are.

        properties: the different ones that they have, as the log holds them.
        sys_flag: bits that all of them have.
        """
        text = b"\x02" + b"\x02".join(properties)
        may_ask = any(mark in text for mark in self._marks)
        if may_ask or sys_flag & self.sys_flags or self.is_of_topic(topic):
            for raw in properties:
                items = raw.decode(errors="replace").split("\x02")
                self._check_unchanged(SentMessage(topic, queue_id, items, sys_flag=sys_flag))

    def _check_unchanged(self, message: SentMessage) -> None:
        for demand in self._demands:
            place = demand.made_by(message)
            if place is None:
                continue
            if demand.serve is None:
                raise _not_served(demand, place)
            before = msgspec.structs.replace(message, properties=list(message.properties))
            demand.serve(message)
            if message != before:
                raise _not_in_batch(demand, place)


def _common_start(names: tuple[str, ...]) -> str:
    first, last = min(names), max(names)
    same = 0
    while same < len(first) and first[same] == last[same]:
        same += 1
    return first[:same]


def _rare_letter(name: str) -> int:
    """The first byte of a name that is neither in hexadecimal digits nor in the usual names."""
    usual = frozenset("0123456789ABCDEFUNIQ_KEYSTAGSWAIT")
    return ord(next((char for char in name if char not in usual), name[0]))


def _not_in_batch(demand: Demand, place: str) -> RequestError:
    return RequestError(
        ResponseCode.MESSAGE_ILLEGAL,
        f"{demand.what} in a batch ({place}): send them one by one, nothing was stored",
    )


def is_asking(value: str) -> bool:
    """Whether a property with this value asks for anything."""
    return value not in _NOTHING


def _flags_text(topic: str, sys_flag: int) -> str:
    return f"sysFlag {sys_flag} to {topic}"


def _not_served(demand: Demand, place: str) -> RequestError:
    return RequestError(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        f"{demand.what} are not served by this broker ({place}): send without, nothing was stored",
    )
