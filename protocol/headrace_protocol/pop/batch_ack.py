"""The body of BATCH_ACK_MESSAGE (200151): acks of many messages of one broker."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Final

import msgspec

from headrace_protocol.bodies import Body
from headrace_protocol.bounds import OutOfBounds, check_items, check_text
from headrace_protocol.headers import Int32, Int64  # noqa: TC001 - msgspec reads annotations
from headrace_protocol.pop.handle import Handle, TopicKind

if TYPE_CHECKING:
    from collections.abc import Iterable

# Messages of one ack lie this many offsets apart at most: a filter passes few of them.
BITS_MAX: Final = 64 * 1024
_TEXT_CHARS_MAX: Final = (BITS_MAX // 8 + 2) // 3 * 4
_KINDS: Final = {str(kind.value): kind for kind in TopicKind}


class BatchAck(Body):
    """Acks of messages that were popped together from one queue.

    topic: that of the POP, also for messages of its retry topics. retry: the kind of topic.
    bits: Java's BitSet in base64; bit n stands for the message at ``start_offset + n``.
    """

    # In the order in which fastjson writes them.
    bits: str = msgspec.field(name="b", default="")
    consumer_group: str = msgspec.field(name="c", default="")
    invisible_time: Int64 = msgspec.field(name="it", default=0)
    pop_time: Int64 = msgspec.field(name="pt", default=0)
    queue_id: Int32 = msgspec.field(name="q", default=0)
    retry: str = msgspec.field(name="r", default="0")
    revive_queue_id: Int32 = msgspec.field(name="rq", default=0)
    start_offset: Int64 = msgspec.field(name="so", default=0)
    topic: str = msgspec.field(name="t", default="")

    @classmethod
    def of(cls, topic: str, group: str, handle: Handle, offsets: Iterable[int]) -> BatchAck:
        """Acks of the messages at ``offsets``, whose handles differ in nothing else."""
        return cls(
            bits=encode_bits(offset - handle.start_offset for offset in offsets),
            consumer_group=group,
            invisible_time=handle.invisible_time,
            pop_time=handle.pop_time,
            queue_id=handle.queue_id,
            retry=str(handle.kind.value),
            revive_queue_id=handle.revive_queue_id,
            start_offset=handle.start_offset,
            topic=topic,
        )

    def handle(self, broker_name: str) -> Handle:
        """The handle that the messages share. Raises OutOfBounds for values that no handle has."""
        numbers = (self.start_offset, self.pop_time, self.invisible_time, self.queue_id)
        if min(*numbers, self.revive_queue_id) < 0 or self.retry not in _KINDS:
            raise OutOfBounds(
                f"an ack for {self.topic!r} has a negative number or no kind of topic"
            )
        return Handle(
            self.start_offset,
            self.pop_time,
            self.invisible_time,
            self.revive_queue_id,
            _KINDS[self.retry],
            broker_name,
            self.queue_id,
        )

    def offsets(self) -> list[int]:
        """Queue offsets of the messages, ascending. Raises OutOfBounds for malformed bits."""
        return [self.start_offset + bit for bit in decode_bits(self.bits)]


class BatchAckBody(Body):
    """The body of 200151."""

    acks: list[BatchAck] = msgspec.field(default_factory=list)
    broker_name: str = ""

    def check(self) -> None:
        """Raise OutOfBounds for too many acks."""
        check_items("acks", self.acks)


def encode_bits(bits: Iterable[int]) -> str:
    """Java's BitSet with these bits, in base64. Raises OutOfBounds for a bit beyond BITS_MAX."""
    number = 0
    for bit in bits:
        if not 0 <= bit < BITS_MAX:
            raise OutOfBounds(f"bit {bit}, expected 0 to {BITS_MAX - 1}")
        number |= 1 << bit
    return b64encode(number.to_bytes((number.bit_length() + 7) // 8, "little")).decode()


def decode_bits(text: str) -> list[int]:
    """The bits of a BitSet, ascending."""
    digits = f"{bitset(text):b}"[::-1]
    return [bit for bit, digit in enumerate(digits) if digit == "1"]


def bitset(text: str) -> int:
    """A BitSet as a number. Raises OutOfBounds unless it is one of at most BITS_MAX bits."""
    check_text("bits of acks", text, _TEXT_CHARS_MAX)
    try:
        return int.from_bytes(b64decode(text, validate=True), "little")
    except (ValueError, binascii.Error):
        raise OutOfBounds("the bits of acks are no base64") from None
