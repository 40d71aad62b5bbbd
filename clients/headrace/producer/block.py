"""Blocks: messages of one topic that are sent to one queue in one request."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, repeat
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from headrace.messages import PROPERTIES_BYTES_MAX
from headrace.producer.encoding import BulkOutgoing, Outgoing
from headrace_protocol.compression import Codec, codec
from headrace_protocol.message import DELETE, UNIQ_KEY, encode_batch

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from headrace.messages import EncodedMessage

# Large enough to make the overhead of a request small, and small enough that a broker processes
# one block while the next one is encoded.
BLOCK_BYTES = 1024 * 1024
# Approximate size of a record without its body and properties.
RECORD_OVERHEAD_BYTES = 100

# What deletes a key at brokers that accept no empty body.
_DELETION_BODY = b"deleted"
_DELETION_PROPERTY = f"{DELETE}\x01true\x02".encode()


class Compression(NamedTuple):
    """Bodies of ``from_bytes`` and more are compressed."""

    from_bytes: int
    codec: Codec


# RocketMQ's.
DEFAULT_COMPRESSION = Compression(4096, codec("zlib"))


class Block:
    """Bodies and properties of messages, in order; not empty.

    properties: properties of each message, or one value for all, without the client's message ids.
    compression: of large bodies, if the request's format has a compression flag per message.
    sizes: size of each body in bytes.
    """

    __slots__ = ("_any_broker", "_compression", "bodies", "properties", "sizes", "topic")

    def __init__(
        self,
        topic: str,
        bodies: Sequence[bytes],
        properties: Sequence[bytes] | bytes = b"",
        compression: Compression | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.topic = topic
        self.bodies = bodies
        self.sizes = list(map(len, bodies)) if sizes is None else sizes
        self.properties = properties
        self._compression = compression
        self._any_broker: Outgoing | None = None

    @classmethod
    def of(
        cls, messages: Sequence[EncodedMessage], compression: Compression | None = None
    ) -> Block:
        """A block of messages of one topic."""
        bodies = [message.body for message in messages]
        properties = [message.properties for message in messages]
        return cls(messages[0].topic, bodies, properties if any(properties) else b"", compression)

    def __len__(self) -> int:
        return len(self.bodies)

    @property
    def message_ids(self) -> list[str] | None:
        """The client's ids of its messages; None while it is not encoded for any broker."""
        return self._any_broker.message_ids if self._any_broker else None

    def of_each(self) -> Iterator[tuple[int, bytes]]:
        """The body's size and the properties of each message."""
        known = self.properties
        return zip(self.sizes, repeat(known) if isinstance(known, bytes) else known, strict=False)

    def add_properties(self, encoded: bytes, unless: re.Pattern[bytes]) -> None:
        """Add properties to messages that have none that match, and room for them."""

        def extended(known: bytes) -> bytes:
            # Brokers add properties of their own within the same limit.
            is_full = len(known) + len(encoded) > PROPERTIES_BYTES_MAX // 2
            return known if is_full or unless.search(known) else known + encoded

        known = self.properties
        self.properties = (
            extended(known) if isinstance(known, bytes) else [extended(each) for each in known]
        )

    def parts(self) -> Iterator[Block]:
        """Split into blocks of about BLOCK_BYTES."""
        start = 0
        properties, sizes = self.properties, self.sizes
        for end in ends_of_requests(sizes, properties):
            part = properties if isinstance(properties, bytes) else properties[start:end]
            yield Block(self.topic, self.bodies[start:end], part, sizes=sizes[start:end])
            start = end

    def rows(self, rows: Sequence[int]) -> Block:
        """A block of the messages at these indexes."""
        bodies, properties = self.bodies, self.properties
        if not isinstance(properties, bytes):
            properties = [properties[row] for row in rows]
        return Block(self.topic, [bodies[row] for row in rows], properties)

    def for_headrace(self, born_timestamp_ms: int, born_host: bytes) -> BulkOutgoing:
        """The request to a headrace broker: complete records."""
        # Imported here because it loads numpy, which sending single messages does not need.
        from headrace_protocol.blocks import encode_records

        bodies, sys_flags = self._stored_bodies()
        encoded = encode_records(
            self.topic,
            bodies,
            self.properties,
            born_timestamp=born_timestamp_ms,
            born_host=born_host,
            sys_flag=sys_flags,
        )
        return BulkOutgoing(encoded)

    def for_any_broker(self, born_timestamp_ms: int, new_message_id: Callable[[], str]) -> Outgoing:
        """The request to any broker; identical in all attempts, including the message ids."""
        if self._any_broker is None:
            encode = self._single if len(self) == 1 else self._batch
            self._any_broker = encode(born_timestamp_ms, [new_message_id() for _ in self.bodies])
        return self._any_broker

    def _single(self, born_timestamp_ms: int, ids: list[str]) -> Outgoing:
        (properties,) = self._all_properties(ids)
        (body,), sys_flags = self._stored_bodies()
        body = body or _DELETION_BODY
        sys_flag = sys_flags if isinstance(sys_flags, int) else sys_flags[0]
        return Outgoing(body, sys_flag, born_timestamp_ms, properties.decode(), ids)

    def _batch(self, born_timestamp_ms: int, ids: list[str]) -> Outgoing:
        # Messages in a RocketMQ batch have no flag for compression.
        bodies = (body or _DELETION_BODY for body in self.bodies)
        items = zip(repeat(0), bodies, self._all_properties(ids), strict=False)
        return Outgoing(encode_batch(items), 0, born_timestamp_ms, "", ids, is_batch=True)

    def _stored_bodies(self) -> tuple[Sequence[bytes], Sequence[int] | int]:
        """The bodies as stored, and the sysFlag of each body or one for all."""
        bodies, compression = self.bodies, self._compression
        if compression is None or max(self.sizes) < compression.from_bytes:
            return bodies, 0
        stored, flags = list(bodies), [0] * len(bodies)
        for index, body in enumerate(bodies):
            if len(body) >= compression.from_bytes:
                stored[index], flags[index] = compression.codec.compress(body)
        return stored, flags

    def _all_properties(self, ids: list[str]) -> list[bytes]:
        properties = self.properties
        own: Iterable[bytes] = repeat(properties) if isinstance(properties, bytes) else properties
        if 0 in self.sizes:
            marks = (b"" if size else _DELETION_PROPERTY for size in self.sizes)
            own = map(add, own, marks)
        return [
            f"{UNIQ_KEY}\x01{uniq_key}\x02".encode() + rest
            for uniq_key, rest in zip(ids, own, strict=False)
        ]


def ends_of_requests(
    sizes: Sequence[int], properties: Sequence[bytes] | bytes = b""
) -> Iterator[int]:
    """End index of each request when splitting into about BLOCK_BYTES, or one larger message.

    sizes: size of each body in bytes.
    """
    count = len(sizes)
    overhead_bytes = RECORD_OVERHEAD_BYTES
    if isinstance(properties, bytes):
        overhead_bytes += len(properties)
        if sizes.count(sizes[0]) == count:
            step = max(1, BLOCK_BYTES // (overhead_bytes + sizes[0]))
            yield from (min(end, count) for end in range(step, count + step, step))
            return
    else:
        sizes = list(map(add, sizes, map(len, properties)))
    totals = list(accumulate(sizes, initial=0))

    def end_bytes(end: int) -> int:
        return totals[end] + end * overhead_bytes

    ends = range(len(totals))
    end = 0
    while end < count:
        limit = end_bytes(end) + BLOCK_BYTES
        end = max(end + 1, bisect_right(ends, limit, lo=end, key=end_bytes) - 1)
        yield end
