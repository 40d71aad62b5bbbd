"""RECALL_MESSAGE (370), LIST_TIMERS, GET_TIMER_METRICS (61) and GET_TIMER_CHECK_POINT (60).

Source: docs/protocol.md "Timers"; tests/broker/timer/test_timers.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.processors.send_answers import rejection
from headrace_broker.store.errors import StoreError
from headrace_broker.timer.arrivals import key_hash
from headrace_broker.timer.demand import SLOT_MS
from headrace_protocol import fastjson
from headrace_protocol.bodies import WaitingMessage
from headrace_protocol.bounds import ITEMS_MAX
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import (
    ListTimersHeader,
    RecallMessageHeader,
    RecallMessageResponseHeader,
)
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import encode_properties
from headrace_protocol.recall_handle import RecallHandle, decode_recall_handle
from headrace_protocol.rights.late import sees_all, visible_topics
from headrace_protocol.serving import Reply
from headrace_protocol.system_topics import TIMER_TOPIC
from headrace_protocol.waiting import sliced

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.processors.send import SendProcessor
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.timer.timers import Timers
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.serving import Registry, Request

_RECALL_TAG: Final = "_RECALL_TAG_"
_FOREVER_MS: Final = 2**63 - 1


class TimerProcessor:
    """Serves requests about timers."""

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        timers: Timers,
        config: BrokerConfig,
        sends: SendProcessor,
    ) -> None:
        self._store = store
        self._topics = topics
        self._timers = timers
        self._config = config
        self._sends = sends

    def register(self, registry: Registry) -> None:
        """Serve the codes."""
        registry.route(RequestCode.RECALL_MESSAGE, self.recall)
        registry.route_long(RequestCode.LIST_TIMERS, self.list_timers)
        registry.route(RequestCode.GET_TIMER_METRICS, self.metrics)
        registry.route(RequestCode.GET_TIMER_CHECK_POINT, self.checkpoint)

    async def list_timers(self, request: Request) -> Reply:
        """LIST_TIMERS: the first timers that wait, and how many there are."""
        header = request.header(ListTimersHeader)
        topics = await self._wanted(request, header)
        until_ms = _FOREVER_MS if header.until_timestamp is None else header.until_timestamp
        waiting, count = self._timers.waiting, min(max(header.max_num, 0), ITEMS_MAX)
        rows = await sliced(waiting.first_due(topics, until_ms, count))
        messages = [
            WaitingMessage(physical_offset=int(row["physical_offset"]), due_ms=int(row["due_ms"]))
            for row in rows
        ]
        written = await fastjson.dumps_list_sliced(messages)
        counts = waiting.counts()
        total = waiting.count if topics is None else sum(counts.get(each, 0) for each in topics)
        return Reply(body=fastjson.dumps_parts({"messages": written, "count": total}))

    async def _wanted(self, request: Request, header: ListTimersHeader) -> list[bytes] | None:
        """The topics whose timers are listed; None for all."""
        if header.topic:
            return [header.topic.encode()]
        if sees_all(request):
            return None
        return list(await visible_topics(request, list(self._timers.waiting.counts()), _name))

    def metrics(self, _request: Request) -> Reply:
        """GET_TIMER_METRICS: number of timers that wait, by topic."""
        return Reply(body=(self._timers.files.metrics_body(),))

    def checkpoint(self, _request: Request) -> Reply:
        """GET_TIMER_CHECK_POINT: the contents of config/timercheck if it were saved now."""
        return Reply(body=(self._timers.checkpoint().encode(),))

    def recall(self, request: Request) -> Reply | None:
        """RECALL_MESSAGE: drop the timer of a handle."""
        header = request.header(RecallMessageHeader)
        if not self._config.recall_message_enable:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                "recall failed, operation is forbidden: recallMessageEnable=false",
            )
        self._topics.check_broker_writable()
        self._topics.expect(header.topic)
        handle = self._handle(header)
        self._check_waiting(handle)
        try:
            self._append(request, header, handle)
        except StoreError as error:
            raise rejection(error, TIMER_TOPIC) from None
        self._timers.recall(*_timer(handle))
        return self._sends.reply_confirmed(
            request, Reply(RecallMessageResponseHeader(msg_id=handle.uniq_key))
        )

    def _handle(self, header: RecallMessageHeader) -> RecallHandle:
        handle = decode_recall_handle(header.recall_handle)
        if handle is None:
            raise _refused("recall handle is invalid")
        if handle.topic != header.topic:
            raise _refused(f"topic not match: the handle is of a message to {handle.topic}")
        if handle.broker_name != (name := self._config.broker_name):
            raise _refused(f"the message was sent to broker {handle.broker_name}, this is {name}")
        return handle

    def _check_waiting(self, handle: RecallHandle) -> None:
        """Raise RequestError if certainly no such timer waits."""
        timers, timer = self._timers, _timer(handle)
        if handle.time_ms - self._store.clock.now_ms() > self._config.timer_max_delay_sec * 1000:
            raise _refused("no timer waits for that long (timerMaxDelaySec): the handle is forged")
        if timers.has(*timer):
            return
        is_past = handle.time_ms <= self._store.clock.now_ms()
        if timers.is_caught_up or timers.is_recalled(*timer) or is_past:
            raise _refused(
                "no such message waits: it was delivered or recalled, or the handle is forged"
            )

    def _append(self, request: Request, header: RecallMessageHeader, handle: RecallHandle) -> None:
        now_ms = self._store.commit_log.now_ms
        properties = {
            "UNIQ_KEY": handle.uniq_key,
            "TAGS": _RECALL_TAG,
            "TIMER_DEL_UNIQKEY": handle.uniq_key,
            "TIMER_DELIVER_MS": str(handle.time_ms),
            "TIMER_OUT_MS": str((handle.time_ms - 1) // SLOT_MS * SLOT_MS),
            "REAL_TOPIC": handle.topic,
            "REAL_QID": "0",
            "BORN_TIMESTAMP": str(now_ms),
            "PGROUP": header.producer_group or "",
        }
        self._store.write_path.append(
            (
                self._store.queue(TIMER_TOPIC, 0),
                b"0",
                encode_properties({name: value for name, value in properties.items() if value}),
                tags_code(_RECALL_TAG),
                0,
                0,
                now_ms,
                0,
            ),
            request.channel.host_bytes,
        )
        self._timers.wake()


def _name(topic: bytes) -> str:
    return topic.decode(errors="replace")


def _timer(handle: RecallHandle) -> tuple[int, bytes, int]:
    """Slot, topic and key of a handle's timer."""
    slot = (handle.time_ms - 1) // SLOT_MS
    return slot, handle.topic.encode(), key_hash(handle.uniq_key.encode())


def _refused(reason: str) -> RequestError:
    return RequestError(ResponseCode.ILLEGAL_OPERATION, f"recall failed, {reason}")
