"""Replies to messages that a client has sent with ``Producer.request``."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from headrace.errors import ConfigurationError, HeadraceError, NoQueue
from headrace.messages import check_size
from headrace.values import now_ms, plain_body
from headrace_protocol import message as record
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import SendMessageHeaderV2
from headrace_protocol.system_topics import DEFAULT_TOPIC, reply_topic

if TYPE_CHECKING:
    from headrace.instance import ClientInstance
    from headrace.received import ReceivedMessage

# Values of MSG_TYPE.
REPLY: Final = "reply"
# A broker waits 10 s for the requester.
_TIMEOUT_MS: Final = 12_000
# Passed from the request to its reply, unchanged.
_PASSED_BACK: Final = (record.CORRELATION_ID, record.REPLY_TO_CLIENT, record.TTL)


async def reply(
    instance: ClientInstance, group: str, message: ReceivedMessage, body: bytes
) -> None:
    """Reply to a message through the broker that it is from, or else another of its cluster.

    group: of the replier. Raises ConfigurationError for a message that nobody waits for, and the
    first broker's error if no broker passes the reply on.
    """
    body = plain_body(body)
    system = message.stored.properties
    cluster = system.get(record.CLUSTER)
    if not (cluster and system.get(record.CORRELATION_ID) and system.get(record.REPLY_TO_CLIENT)):
        raise ConfigurationError(
            f"{message} cannot be replied to: its sender did not ask for a reply (Producer.request)"
        )
    topic = reply_topic(cluster)
    check_size(topic, len(body), has_key=False)
    properties = {record.MSG_TYPE: REPLY} | {name: system.get(name, "") for name in _PASSED_BACK}
    header = SendMessageHeaderV2(
        producer_group=group,
        topic=topic,
        default_topic=DEFAULT_TOPIC,
        default_topic_queue_nums=1,
        queue_id=0,
        sys_flag=0,
        born_timestamp=now_ms(),
        flag=0,
        properties=record.encode_properties(properties).decode(),
    )
    first_error: HeadraceError | None = None
    for address in await _addresses(instance, message, topic):
        try:
            response = await instance.request(
                address, RequestCode.SEND_REPLY_MESSAGE_V2, header, body, timeout_ms=_TIMEOUT_MS
            )
            response.expect()
        except HeadraceError as error:
            first_error = first_error or error
        else:
            return
    raise first_error or NoQueue(topic, "write to")


async def _addresses(instance: ClientInstance, message: ReceivedMessage, topic: str) -> list[str]:
    """The brokers to try: first the one of the request, to which the requester is connected."""
    found: list[str] = []
    with suppress(HeadraceError):
        found.append(await instance.stored_at(message.queue, message.stored.store_host))
    with suppress(HeadraceError):
        found += (await instance.route(topic)).masters()
    return list(dict.fromkeys(found))
