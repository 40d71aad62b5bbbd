"""SEND_REPLY_MESSAGE (324, 325): pushes a reply to the client that waits for it.

A requester is a producer that waits for the answer to one of its messages. Its client id and the
request's correlation id travel in the message, and come back in the reply. The broker finds the
client among the connected producers, and pushes the reply (326); only then is the replier answered.
Source: docs/protocol.md "Request and reply"; tests/broker/reply/test_replies.py.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import LocalProtocolError, RequestError
from headrace_protocol.headers import (
    PushReplyHeader,
    SendMessageHeader,
    SendMessageHeaderV2,
    SendMessageResponseHeader,
)
from headrace_protocol.message import (
    PROPERTIES_BYTES_MAX,
    PUSH_REPLY_TIME,
    REPLY_TO_CLIENT,
    property_value,
)
from headrace_protocol.message_ids import host_text
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import Until

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.groups import ProducerManager
    from headrace_broker.processors.send import SendProcessor
    from headrace_broker.store.message_store import MessageStore
    from headrace_daemon.host_log import HostLog
    from headrace_daemon.metrics.samples import Samples
    from headrace_daemon.serving.client_requests import Answer, ClientRequests
    from headrace_protocol.channel import Channel
    from headrace_protocol.serving import Registry, Request

_Header = SendMessageHeader | SendMessageHeaderV2

# Replies that a requester has not confirmed yet; more would let repliers fill its budget.
_PUSHED_MAX: Final = 1000


class ReplyProcessor:
    """Serves replies; a pushed one is also stored, where ``storeReplyMessageEnable`` says so."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        sends: SendProcessor,
        producers: ProducerManager,
        client_requests: ClientRequests,
        host_log: HostLog,
    ) -> None:
        self._config = config
        self._store_host = host_text(store.settings.store_host)
        self._sends = sends
        self._producers = producers
        self._client_requests = client_requests
        self._now_ms = store.clock.now_ms
        self._host_log = host_log
        self._outcomes: Counter[str] = Counter()

    def register(self, registry: Registry) -> None:
        """Route both requests."""
        registry.route(RequestCode.SEND_REPLY_MESSAGE, self.reply)
        registry.route(RequestCode.SEND_REPLY_MESSAGE_V2, self.reply_v2)

    async def collect(self, samples: Samples) -> None:
        """Count the replies by their outcome."""
        from headrace_broker.metrics.table import REPLIES

        for outcome, count in self._outcomes.items():
            samples.add(REPLIES, count, outcome)

    async def reply(self, request: Request) -> Reply | None:
        """SEND_REPLY_MESSAGE, whose header has the long names."""
        return await self._serve(request, request.header(SendMessageHeader), self._sends.send)

    async def reply_v2(self, request: Request) -> Reply | None:
        """SEND_REPLY_MESSAGE_V2."""
        return await self._serve(request, request.header(SendMessageHeaderV2), self._sends.send_v2)

    async def _serve(
        self, request: Request, header: _Header, store: Callable[[Request], Reply | None]
    ) -> Reply | None:
        properties = (header.properties or "").encode()
        self._check(request, header, len(properties))
        target = self._sends.target(request, header)
        client_id = property_value(properties, REPLY_TO_CLIENT.encode()).decode()
        if not client_id:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"{REPLY_TO_CLIENT} is null, can not reply message: the reply has no property with "
                "the client id of the requester",
            )
        await self._push(request, header, client_id)
        self._outcomes["pushed"] += 1
        if self._config.store_reply_message_enable and request.body:
            try:
                return store(request)
            except RequestError as error:
                # The requester has it, so the replier must not send it again.
                self._host_log.warning(
                    request.channel.address, "a reply was pushed and not stored", error=str(error)
                )
        # "0", since Apache's client wants an id.
        answer = SendMessageResponseHeader(msg_id="0", queue_id=target.queue_id, queue_offset=0)
        return Reply(answer)

    def _check(self, request: Request, header: _Header, properties_bytes: int) -> None:
        """Raise RequestError for a reply that is too large, before it is pushed.

        One without a body is pushed: client-go has no others. It is not stored.
        """
        topic, body_bytes_max = header.topic, self._config.max_message_size
        problem = None
        if header.batch:
            problem = f"a batch of replies to {topic}: send them one by one"
        elif len(request.body) > body_bytes_max or properties_bytes > PROPERTIES_BYTES_MAX:
            problem = (
                f"a reply to {topic} of {len(request.body)} bytes with properties of "
                f"{properties_bytes}: at most {body_bytes_max} and {PROPERTIES_BYTES_MAX} are taken"
            )
        if problem:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, problem)

    async def _push(self, request: Request, header: _Header, client_id: str) -> None:
        """Have the requester confirm the reply. Raises RequestError."""
        channel = self._producers.channel_of(client_id)
        if channel is None:
            self._outcomes["no requester"] += 1
            raise _not_pushed(f"push reply message fail, channel of <{client_id}> not found.")
        if self._client_requests.pending_count(channel) >= _PUSHED_MAX:
            self._outcomes["requester busy"] += 1
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"the client {client_id} has {_PUSHED_MAX} replies to confirm, retry later",
            )
        try:
            answer = await self._ask(channel, self._push_header(request, header), request)
        except LocalProtocolError as error:  # its header has more fields than the reply's
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL, f"a push of the reply: {error}"
            ) from None
        if answer is None or answer.command.code != ResponseCode.SUCCESS:
            self._outcomes["failed"] += 1
            why = "it did not answer in time, or has left"
            if answer is not None:
                why = f"its answer is code {answer.command.code}, {answer.command.remark}"
            raise _not_pushed(f"push reply message to {client_id} fail: {why}")

    async def _ask(
        self, channel: Channel, header: PushReplyHeader, request: Request
    ) -> Answer | None:
        code = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
        answer: Answer | None = await Until(
            "a requester",
            lambda run: self._client_requests.ask(channel, code, header, request.body, run.resume),
        )
        return answer

    def _push_header(self, request: Request, header: _Header) -> PushReplyHeader:
        now_ms = self._now_ms()
        return PushReplyHeader(
            producer_group=header.producer_group,
            topic=header.topic,
            default_topic=header.default_topic,
            default_topic_queue_nums=header.default_topic_queue_nums,
            queue_id=header.queue_id,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            flag=header.flag,
            properties=f"{_ended(header.properties)}{PUSH_REPLY_TIME}\x01{now_ms}\x02",
            reconsume_times=header.reconsume_times,
            unit_mode=bool(header.unit_mode),
            born_host=host_text(request.channel.host_bytes),
            store_host=self._store_host,
            store_timestamp=now_ms,
        )


def _ended(properties: str | None) -> str:
    """Properties to which others can be added."""
    if not properties or properties.endswith("\x02"):
        return properties or ""
    return f"{properties}\x02"


def _not_pushed(remark: str) -> RequestError:
    return RequestError(ResponseCode.SYSTEM_ERROR, remark)
