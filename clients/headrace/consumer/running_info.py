"""A consumer's report about itself for administrators (GET_CONSUMER_RUNNING_INFO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol import fastjson

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.consumer.process_queue import ProcessQueue
    from headrace.consumer.subscription import Subscription


def running_info(
    process_queues: Iterable[ProcessQueue],
    subscriptions: Iterable[Subscription],
    *,
    ordered: bool,
    strategy: str,
    started_ms: int,
) -> bytes:
    """Body of the response. started_ms: when the consumer was opened, in ms since 1970."""
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
                "PROP_CLIENT_VERSION": "headrace",
                "PROP_CONSUMER_START_TIMESTAMP": str(started_ms),
                "PROP_CONSUMEORDERLY": str(ordered).lower(),
                "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
                "allocateMessageQueueStrategy": strategy,
            },
            "statusTable": {},
            "subscriptionSet": [subscription.data() for subscription in subscriptions],
        }
    )
