"""A consumer's reports about itself for administrators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol import __version__, fastjson
from headrace_protocol.admin_headers import GetConsumerStatusHeader
from headrace_protocol.bodies import ConsumerStatusBody

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.consumer.process_queue import ProcessQueue
    from headrace.consumer.rates import Rates
    from headrace.consumer.subscription import Subscription
    from headrace_protocol.bodies import ConsumerData, MessageQueue
    from headrace_protocol.connection import RequestReceived


def running_info(
    member: ConsumerData,
    process_queues: Iterable[ProcessQueue],
    subscriptions: Iterable[Subscription],
    rates: Rates,
    *,
    ordered: bool = False,
    strategy: str = "",
) -> bytes:
    """Body of the answer to GET_CONSUMER_RUNNING_INFO.

    rates: begun when the consumer was opened. strategy: how members share queues; empty if they
    share messages.
    """
    return fastjson.dumps(
        {
            "mqTable": {
                process_queue.queue: {
                    "cachedMsgCount": process_queue.message_count,
                    "commitOffset": process_queue.processed_offset,
                    "droped": process_queue.is_dropped,  # RocketMQ's spelling
                    "locked": ordered,
                }
                for process_queue in process_queues
            },
            "properties": {
                "PROP_CLIENT_VERSION": f"headrace {__version__}",
                "PROP_CONSUMER_START_TIMESTAMP": str(rates.started_ms),
                "PROP_CONSUMEORDERLY": str(ordered).lower(),
                "PROP_CONSUME_TYPE": member.consume_type,
                **({"allocateMessageQueueStrategy": strategy} if strategy else {}),
            },
            "statusTable": rates.report(),
            "subscriptionSet": [subscription.data() for subscription in subscriptions],
        }
    )


def consumer_status(
    process_queues: Mapping[MessageQueue, ProcessQueue], request: RequestReceived
) -> bytes:
    """Body of the answer to GET_CONSUMER_STATUS_FROM_CLIENT: the offsets of a topic's queues."""
    topic = request.command.header(GetConsumerStatusHeader).topic
    offsets = {
        queue: process_queue.processed_offset
        for queue, process_queue in process_queues.items()
        if queue.topic == topic and process_queue.processed_offset >= 0
    }
    return ConsumerStatusBody(message_queue_table=offsets).encode()
