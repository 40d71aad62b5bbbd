"""Settings of POP: a part of the table in ``config.py``."""

from __future__ import annotations

from pydantic import BaseModel

from headrace_broker.settings.setting import setting


class PopFields(BaseModel):
    """The settings, under the peer's names."""

    pop_polling_size: int = setting(
        1024,
        "Most POP requests of a group that wait for one queue, or for all queues of a topic.",
        reloadable=True,
        ge=0,
        le=1_000_000,
    )
    max_pop_polling_size: int = setting(
        100_000, "Most POP requests that wait.", reloadable=True, ge=0, le=10_000_000
    )
    pop_from_retry_probability: int = setting(
        20,
        "Share of POP requests that look for messages to retry first; all others look last.",
        unit="percent",
        reloadable=True,
        ge=0,
        le=100,
    )
    pop_revive_max_attempt_times: int = setting(
        16,
        "Attempts to store a message again that was not acknowledged in time.",
        reloadable=True,
        ge=1,
        le=1000,
    )
    pop_response_return_actual_retry_topic: bool = setting(
        False,
        "Messages to retry name their retry topic; else the topic that they were sent to.",
        reloadable=True,
    )
    enable_retry_topic_v2: bool = setting(
        False,
        "Messages to retry go to %RETRY%GROUP+TOPIC instead of %RETRY%GROUP_TOPIC.",
        reloadable=True,
    )
    retrieve_message_from_pop_retry_topic_v1: bool = setting(
        True,
        "With enableRetryTopicV2, take messages from %RETRY%GROUP_TOPIC too.",
        reloadable=True,
    )
    revive_queue_num: int = setting(8, "Revive queues that handles of messages name.", ge=1, le=998)
