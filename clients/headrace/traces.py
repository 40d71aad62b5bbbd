"""RocketMQ's message trace: records of sends and deliveries, written into a topic.

Records wait in memory, at most ``PENDING_BYTES_MAX`` of them, and leave in messages of up to
128,000 bytes. What has no room, or can't be sent, is dropped, counted and logged: a program that
is traced works as without. The trace topic itself is never traced.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from headrace.errors import HeadraceError
from headrace.messages import Message, encoded
from headrace.producer.block import DEFAULT_COMPRESSION
from headrace.producer.sender import Sender
from headrace.received import MessageBatch, ReceivedMessage
from headrace.values import now_ms
from headrace_protocol import message as record
from headrace_protocol import trace_records as records
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message_ids import decode_offset_message_id, host_text
from headrace_protocol.trace_records import Code, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.instance import ClientInstance
    from headrace.messages import SendResult
    from headrace.producer.block import Block
    from headrace.settlement import Settlement
    from headrace.telemetry import ProcessSpan, SendSpan, Tracing
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.headers import EndTransactionHeader
    from headrace_protocol.trace_records import TraceRecord

_log = logging.getLogger("headrace.client")

PENDING_BYTES_MAX: Final = 4 << 20
# The ids of a message's records are its keys, which must fit in its properties.
_KEYS_BYTES_MAX: Final = 16_000
# What separates properties is a blank in keys.
_NO_MARKS: Final = str.maketrans("\x01\x02", "  ")
_WRITE_S: Final = 1.0
_REPORT_S: Final = 30.0
# The name that RocketMQ gives its own.
_GROUP: Final = "_INNER_TRACE_PRODUCER"
_DELIVERY_TIMEOUT_MS: Final = 10_000
_DELAYS: Final = tuple(
    name.encode()
    for name in (
        record.DELAY,
        record.TIMER_DELAY_MS,
        record.TIMER_DELAY_SEC,
        record.TIMER_DELIVER_MS,
    )
)


class _Pending(NamedTuple):
    """A record that waits. keys: those by which it is found, separated by blanks."""

    text: bytes
    keys: bytes

    @property
    def size(self) -> int:
        """Bytes of both."""
        return len(self.text) + len(self.keys)


class Traces:
    """The trace of one client. dropped: number of records that were not written."""

    def __init__(self, instance: ClientInstance, topic: str) -> None:
        self.dropped = 0
        self._topic = topic
        self._group = instance.producer_group or ""
        self._sender = Sender(
            instance,
            _GROUP,
            timeout_ms=3000,
            delivery_timeout_ms=_DELIVERY_TIMEOUT_MS,
            compression=DEFAULT_COMPRESSION,
            is_traced=False,
        )
        # The oldest first.
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        # Blocking code has messages in threads of its own. A collection of garbage may end a
        # delivery, and so trace it, while this thread holds the lock.
        self._lock = threading.RLock()
        self._open: dict[tuple[MessageQueue, int], _Processing] = {}
        self._reported = 0
        self._reported_at = -_REPORT_S
        self._problem: object = f"more than {PENDING_BYTES_MAX} bytes of them waited"

    # -- what happens to messages ------------------------------------------------------------------

    def of_block(self) -> Traces:
        """The same for a block of the program."""
        return self

    def send(self, block: Block) -> _Sending | None:
        """Trace a request that begins now; None for one to the trace topic."""
        return None if block.topic == self._topic else _Sending(self, block)

    def received(self, batch: MessageBatch, group: str | None, _started_ns: int) -> None:
        """Trace a delivery whose end is not observed."""
        if group is not None:
            self._before(batch, group)

    def taken(self, messages: Sequence[ReceivedMessage], group: str, started_ns: int) -> None:
        """Nothing: the processing of each message is traced."""

    def settled(self, settlement: Settlement) -> None:
        """Nothing: the processing of each message is traced."""

    def process(
        self,
        what: ReceivedMessage | MessageBatch,
        group: str,
        *,
        is_current: bool = True,  # noqa: ARG002 - as Tracing
    ) -> _Processing:
        """Trace a delivery until the program is done with it."""
        processing = _Processing(self, group, self._before(what, group))
        for place, *_ in processing.messages:
            self._open[place] = processing
        return processing

    def returned(self, message: ReceivedMessage) -> None:
        """Note that a consumer has sent a message back."""
        place = message.queue, message.queue_offset
        processing = self._open.get(place)
        if processing is not None:
            processing.returned.add(place)

    def transaction_ended(self, end: EndTransactionHeader, address: str) -> None:
        """Trace the decision on a message at a broker."""
        is_committed = end.commit_or_rollback == record.TRANSACTION_COMMIT
        self.put(
            records.EndTransaction(
                now_ms(),
                self._group,
                end.topic or "",
                end.msg_id,
                store_host=address,
                transaction_id=end.transaction_id or "",
                state="COMMIT_MESSAGE" if is_committed else "ROLLBACK_MESSAGE",
                is_check=bool(end.from_transaction_check),
            ),
            end.msg_id,
        )

    def recalled(self, topic: str, message_id: str, *, success: bool) -> None:
        """Trace a recall."""
        self.put(records.Recall(now_ms(), self._group, topic, message_id, success), message_id)

    def _before(self, what: ReceivedMessage | MessageBatch, group: str) -> list[_Delivered]:
        if what.queue.topic == self._topic:
            return []
        request_id, time_ms = os.urandom(16).hex().upper(), now_ms()
        found: list[_Delivered] = []
        for message in what if isinstance(what, MessageBatch) else [what]:
            # Reading a damaged message raises an error where its handler can catch it.
            with suppress(CorruptRecord):
                place = message.queue, message.queue_offset
                message_id, keys = message.message_id, message.key
                before = records.SubBefore(
                    time_ms, group, request_id, message_id, message.reconsume_times, keys
                )
                self.put(before, message_id, keys)
                found.append((place, request_id, message_id, keys))
        return found

    def done(self, processing: _Processing) -> None:
        """Trace the end of a delivery."""
        time_ms = now_ms()
        for place, request_id, message_id, keys in processing.messages:
            self._open.pop(place, None)
            is_returned = place in processing.returned
            after = records.SubAfter(
                request_id,
                message_id,
                time_ms - processing.started_ms,
                not is_returned,
                keys,
                Code.FAILED if is_returned else Code.SUCCESS,
                time_ms,
                processing.group,
            )
            self.put(after, message_id, keys)

    def sent(
        self, block: Block, outcome: SendResult | BaseException | None, started_ms: int
    ) -> None:
        """Trace a request that has ended; without an outcome it was sent one-way."""
        cost_ms = now_ms() - started_ms
        success = not isinstance(outcome, BaseException)
        stored: list[tuple[str, str]] = []
        if outcome is not None and not isinstance(outcome, BaseException):
            stored = [(each.message_id, each.offset_message_id) for each in outcome.of_each()]
        if len(stored) != len(block):
            stored = [(each, "") for each in block.message_ids or [""] * len(block)]
        for (message_id, offset_id), (body_bytes, raw) in zip(stored, block.of_each(), strict=True):
            tags, keys = (_text(raw, name) for name in (record.TAGS, record.KEYS))
            pub = records.Pub(
                started_ms,
                self._group,
                block.topic,
                message_id,
                tags,
                keys,
                _host_in(offset_id),
                body_bytes,
                cost_ms,
                _kind(raw),
                offset_id,
                success,
            )
            self.put(pub, message_id, keys)

    # -- records -----------------------------------------------------------------------------------

    def put(self, trace_record: TraceRecord, *keys: str) -> None:
        """Add a record, which is found by these keys; it is dropped without room."""
        own_keys = " ".join(filter(None, keys)).translate(_NO_MARKS)
        pending = _Pending(records.encode_trace(trace_record).encode(), own_keys.encode())
        size = pending.size
        with self._lock:
            if self._pending_bytes + size > PENDING_BYTES_MAX:
                self.dropped += 1
                return
            self._pending.append(pending)
            self._pending_bytes += size

    async def run(self) -> None:
        """Write what waits once a second, until cancelled."""
        while True:
            await anyio.sleep(_WRITE_S)
            await self.write()

    async def write(self) -> None:
        """Write all that waits."""
        while self._pending:
            with self._lock:
                message, count = self._next_message()
            try:
                outgoing, _ = self._sender.encode(encoded(message))
                await self._sender.send(self._topic, self._sender.by_key(b""), outgoing)
            except HeadraceError as error:
                self.dropped += count
                self._problem = error
        self._report()

    def _next_message(self) -> tuple[Message, int]:
        texts: list[bytes] = []
        # A dict keeps the order, and each id once.
        keys: dict[bytes, None] = {}
        body_bytes = keys_bytes = 0
        while self._pending:
            pending = self._pending[0]
            body_bytes += len(pending.text)
            keys_bytes += len(pending.keys) + 1
            if texts and (body_bytes > records.BODY_BYTES_MAX or keys_bytes > _KEYS_BYTES_MAX):
                break
            self._pending.popleft()
            self._pending_bytes -= pending.size
            texts.append(pending.text)
            keys.update(dict.fromkeys(pending.keys.split()))
        # Only the keys of a single record may be too long; it is not found by those cut off.
        key = b" ".join(keys)[:_KEYS_BYTES_MAX].decode(errors="ignore")
        return Message(self._topic, b"".join(texts), key=key), len(texts)

    def _report(self) -> None:
        now = anyio.current_time()
        if self.dropped > self._reported and now >= self._reported_at + _REPORT_S:
            count, self._reported, self._reported_at = (
                self.dropped - self._reported,
                self.dropped,
                now,
            )
            _log.warning("dropped %d trace records: %s", count, self._problem)


# Queue and offset, request id, message id, keys.
_Delivered = tuple[tuple["MessageQueue", int], str, str, str]


class _Sending:
    """A request under way."""

    __slots__ = ("_block", "_started_ms", "_traces")

    def __init__(self, traces: Traces, block: Block) -> None:
        self._traces = traces
        self._block = block
        self._started_ms = now_ms()

    def add_to(self, block: Block) -> None:
        """A trace adds nothing to messages."""

    def end(self, outcome: SendResult | BaseException | None) -> None:
        """Trace the outcome of the last attempt."""
        self._traces.sent(self._block, outcome, self._started_ms)


class _Processing:
    """Messages that the program has. returned: those that it sent back."""

    __slots__ = ("_traces", "group", "messages", "returned", "started_ms")

    def __init__(self, traces: Traces, group: str, messages: list[_Delivered]) -> None:
        self._traces = traces
        self.group = group
        self.messages = messages
        self.returned: set[tuple[MessageQueue, int]] = set()
        self.started_ms = now_ms()

    def end(self) -> None:
        """Trace the end of processing."""
        self._traces.done(self)


class Both:
    """Two observers as one: OpenTelemetry's and RocketMQ's."""

    def __init__(self, *observers: Tracing) -> None:
        self._observers = observers

    def of_block(self) -> Both:
        """Both of a block of the program."""
        return Both(*(each.of_block() for each in self._observers))

    def send(self, block: Block) -> _BothSpans:
        """Start both spans of a request."""
        found = (each.send(block) for each in self._observers)
        return _BothSpans([span for span in found if span is not None])

    def received(self, batch: MessageBatch, group: str | None, started_ns: int) -> None:
        """Pass it to both."""
        for each in self._observers:
            each.received(batch, group, started_ns)

    def taken(self, messages: Sequence[ReceivedMessage], group: str, started_ns: int) -> None:
        """Pass it to both."""
        for each in self._observers:
            each.taken(messages, group, started_ns)

    def settled(self, settlement: Settlement) -> None:
        """Pass it to both."""
        for each in self._observers:
            each.settled(settlement)

    def process(
        self, what: ReceivedMessage | MessageBatch, group: str, *, is_current: bool = True
    ) -> _BothProcessing:
        """Start both spans of processing."""
        return _BothProcessing(
            [each.process(what, group, is_current=is_current) for each in self._observers]
        )


class _BothSpans:
    def __init__(self, spans: list[SendSpan]) -> None:
        self._spans = spans

    def add_to(self, block: Block) -> None:
        for span in self._spans:
            span.add_to(block)

    def end(self, outcome: SendResult | BaseException | None) -> None:
        for span in self._spans:
            span.end(outcome)


class _BothProcessing:
    def __init__(self, spans: list[ProcessSpan]) -> None:
        self._spans = spans

    def end(self) -> None:
        for span in self._spans:
            span.end()


def _text(raw: bytes, name: str) -> str:
    return record.property_text(record.property_value(raw, name.encode()))


def _kind(raw: bytes) -> Kind:
    if record.property_value(raw, b"TRAN_MSG"):
        return Kind.HALF
    is_delayed = any(record.property_value(raw, name) for name in _DELAYS)
    return Kind.DELAYED if is_delayed else Kind.NORMAL


def _host_in(offset_message_id: str) -> str:
    """The broker's address in an offset message id; "" without one."""
    try:
        return host_text(decode_offset_message_id(offset_message_id)[0])
    except ValueError:
        return ""
