"""Settings of POP: a part of the table in ``config.py``."""

from __future__ import annotations

from pydantic import BaseModel

from headrace_broker.settings.setting import setting


class PopFields(BaseModel):
    """The settings, under the peer's names."""

    pop_polling_size: int = setting(
        1024,
        "Maximum number of a group's POP requests waiting for one queue, or for a whole topic.",
        reloadable=True,
        ge=0,
        le=1_000_000,
    )
    max_pop_polling_size: int = setting(
        100_000, "Maximum number of waiting POP requests.", reloadable=True, ge=0, le=10_000_000
    )
    enable_pop_message_threshold: bool = setting(
        False,
        "Stop POPs of a queue while a group has more than popInflightMessageThreshold of its "
        "messages out.",
        reloadable=True,
    )
    pop_inflight_message_threshold: int = setting(
        10_000,
        "Maximum number of messages of one queue that a group has out before its POPs get no more "
        "of it, with enablePopMessageThreshold.",
        reloadable=True,
        ge=0,
        le=2**31 - 1,
    )
    pop_from_retry_probability: int = setting(
        20,
        "Share of POP requests that look for messages to retry first; all others look last.",
        unit="percent",
        reloadable=True,
        ge=0,
        le=100,
    )
    revive_interval: int = setting(
        20,
        "Step of the times at which unacknowledged messages become visible again: each waits for "
        "the end of its step. Apache's default is 1000.",
        unit="ms",
        ge=1,
        le=60_000,
    )
    pop_revive_max_attempt_times: int = setting(
        16,
        "Maximum number of attempts to store an unacknowledged message again.",
        reloadable=True,
        ge=1,
        le=1000,
    )
    pop_response_return_actual_retry_topic: bool = setting(
        False,
        "Deliver retried messages under their retry topic instead of their original topic.",
        reloadable=True,
    )
    enable_retry_topic_v2: bool = setting(
        False,
        "Store messages to retry in %RETRY%GROUP+TOPIC instead of %RETRY%GROUP_TOPIC.",
        reloadable=True,
    )
    retrieve_message_from_pop_retry_topic_v1: bool = setting(
        True,
        "With enableRetryTopicV2, take messages from %RETRY%GROUP_TOPIC too.",
        reloadable=True,
    )
    revive_queue_num: int = setting(8, "Number of revive queues that handles name.", ge=1, le=998)
