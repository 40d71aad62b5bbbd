"""The trace of a message: what its clients wrote about it, and where brokers have it now."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from headrace.admin.queries import QueryAdmin
from headrace.admin.requests import BrokerProblem
from headrace.errors import HeadraceError, RouteNotFound
from headrace_protocol.compression import UNREADABLE
from headrace_protocol.message_ids import decode_host
from headrace_protocol.system_topics import DLQ_PREFIX, RETRY_PREFIX, TRACE_TOPIC
from headrace_protocol.trace_records import (
    Code,
    EndTransaction,
    Kind,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TraceRecord,
    decode_trace,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.admin.queries import QueuedMessage
    from headrace.received import ReceivedMessage

# Messages of the trace topic about one message.
_COUNT_MAX = 1000
_KINDS: dict[int, str] = {
    Kind.HALF: " of a transaction's half",
    Kind.DELAYED: " of a delayed message",
}
_STATES = {"COMMIT_MESSAGE": "committed", "ROLLBACK_MESSAGE": "rolled back"}


class TraceEvent(msgspec.Struct, frozen=True):
    """One thing that happened to a message.

    time_ms: in ms since 1970. client: address of the client that tells it; "" if a broker does.
    retries: deliveries before this one. waits_until_ms: of a message that waits; None if a
    transaction decides.
    """

    time_ms: int
    event: str
    group: str = ""
    client: str = ""
    retries: int = 0
    detail: str = ""
    waits_until_ms: int | None = None


class UnreadTraces(HeadraceError):
    """What clients wrote about a message is in part not read."""

    def __init__(self, message_id: str, reason: str) -> None:
        super().__init__(f"the trace of message {message_id} is only a part: {reason}")
        self.message_id = message_id


class TraceAdmin(QueryAdmin):
    """The method of Admin that follows a message."""

    async def trace(
        self,
        message_id: str,
        topic: str | None = None,
        *,
        trace_topic: str = TRACE_TOPIC,
        problems: list[BrokerProblem] | None = None,
    ) -> list[TraceEvent]:
        """Events of the message with a producer's id, in order.

        topic: the message's, which a trace of its send also names. trace_topic: where its clients
        write their traces, also those of RocketMQ's Java client.
        Raises UnreadTraces for traces that it can't read, and for more than 1,000 messages of
        them at a broker.
        """
        reported: list[tuple[str, TraceRecord]] = []
        with suppress(RouteNotFound):
            found = await self.query_by_key(
                trace_topic,
                message_id,
                max_count=_COUNT_MAX + 1,  # one more tells whether there are more
                problems=problems,
            )
            unreadable: dict[str, str] = {}
            records = list(_reported(found, unreadable))
            reported = [each for each in records if each[1].message_id == message_id]
            unread = *_too_many(found), *unreadable.items()
            masters = await self._topic_masters(trace_topic) if unread else {}
            for broker, reason in unread:
                error = UnreadTraces(message_id, reason)
                if problems is None:
                    raise error
                problems.append(BrokerProblem(broker, masters.get(broker, ""), error))
        events = list(_events(reported))
        for name in [topic] if topic else _topics(reported):
            events += await self._at_brokers(message_id, name, problems)
        for group in sorted({each.group for each in events if each.event == "delivered"}):
            events += await self._returned(message_id, group, problems)
        return sorted(events, key=lambda each: each.time_ms)

    async def _at_brokers(
        self, message_id: str, topic: str, problems: list[BrokerProblem] | None
    ) -> list[TraceEvent]:
        with suppress(RouteNotFound):
            stored = await self.query_by_id(message_id, topic, problems=problems)
            queued = await self.queued(topic, message_id, by_id=True, problems=problems)
            return [_stored("stored", each) for each in stored] + list(map(_waits, queued))
        return []

    async def _returned(
        self, message_id: str, group: str, problems: list[BrokerProblem] | None
    ) -> list[TraceEvent]:
        """A message that a group has sent back: where it waits, or its dead letter."""
        found: list[TraceEvent] = []
        with suppress(RouteNotFound):
            retry = f"{RETRY_PREFIX}{group}"
            queued = await self.queued(retry, message_id, by_id=True, problems=problems)
            found += [msgspec.structs.replace(_waits(each), group=group) for each in queued]
        with suppress(RouteNotFound):
            dead = await self.query_by_id(message_id, f"{DLQ_PREFIX}{group}", problems=problems)
            found += [_stored("dead letter", each, group) for each in dead]
        return found


def _too_many(found: Iterable[ReceivedMessage]) -> Iterator[tuple[str, str]]:
    """The brokers that have more messages than are read, each with the reason."""
    counts = Counter(message.queue.broker_name for message in found)
    for broker, count in counts.items():
        if count > _COUNT_MAX:
            reason = f"only its newest {_COUNT_MAX} messages are read, others with --max or --until"
            yield broker, f"{reason} of `headrace message query` in the trace topic"


def _reported(
    found: Iterable[ReceivedMessage], unreadable: dict[str, str]
) -> Iterator[tuple[str, TraceRecord]]:
    """The records of messages of the trace topic, each with its client's address.

    unreadable: gets the brokers with messages that can't be read, each with its first error.
    """
    for message in found:
        try:
            body = message.body
        except UNREADABLE as error:
            unreadable.setdefault(message.queue.broker_name, str(error))
            continue
        client = decode_host(message.stored.born_host)[0]
        for each in decode_trace(body.decode(errors="replace")):
            yield client, each


def _topics(reported: Iterable[tuple[str, TraceRecord]]) -> list[str]:
    names = (each.topic for _, each in reported if isinstance(each, Pub | EndTransaction | Recall))
    return list(dict.fromkeys(filter(None, names)))


def _events(reported: list[tuple[str, TraceRecord]]) -> Iterator[TraceEvent]:
    before = {each.request_id: each for _, each in reported if isinstance(each, SubBefore)}
    for client, each in reported:
        if isinstance(each, Pub):
            yield _sent(each, client)
        elif isinstance(each, SubBefore):
            yield TraceEvent(each.time_ms, "delivered", each.group, client, each.retries)
        elif isinstance(each, SubAfter):
            yield _processed(each, client, before.get(each.request_id))
        elif isinstance(each, EndTransaction):
            event = _STATES.get(each.state, "undecided")
            detail = "asked by the broker" if each.is_check else ""
            yield TraceEvent(each.time_ms, event, each.group, client, detail=detail)
        else:
            event = "recalled" if each.success else "recall rejected"
            yield TraceEvent(each.time_ms, event, each.group, client)


def _sent(pub: Pub, client: str) -> TraceEvent:
    event = "sent" if pub.success else "send failed"
    kind = _KINDS.get(pub.kind, "")
    detail = f"{pub.body_bytes} bytes{kind} to {pub.store_host or 'a broker'} in {pub.cost_ms} ms"
    return TraceEvent(pub.time_ms, event, pub.group, client, detail=detail)


def _processed(after: SubAfter, client: str, before: SubBefore | None) -> TraceEvent:
    time_ms = after.time_ms or (before.time_ms + after.cost_ms if before else 0)
    group = after.group or (before.group if before else "")
    code = Code(after.code).name.lower() if after.code in set(Code) else str(after.code)
    reason = "" if after.success else f", {code}"
    return TraceEvent(
        time_ms,
        "processed" if after.success else "failed",
        group,
        client,
        before.retries if before else 0,
        f"after {after.cost_ms} ms{reason}",
    )


def _stored(event: str, message: ReceivedMessage, group: str = "") -> TraceEvent:
    queue = message.queue
    return TraceEvent(
        message.store_timestamp_ms,
        event,
        group,
        retries=message.reconsume_times,
        detail=f"{queue.topic}/{queue.broker_name}/{queue.queue_id} at {message.queue_offset}",
    )


def _waits(queued: QueuedMessage) -> TraceEvent:
    return TraceEvent(
        queued.message.store_timestamp_ms,
        "waits",
        retries=queued.message.reconsume_times,
        detail=f"at {queued.message.queue.broker_name}",
        waits_until_ms=queued.until_ms,
    )
