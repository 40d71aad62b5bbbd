"""Retries and dead letters as a feature."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace_broker.feature import Feature
from headrace_broker.message_demands import Demand
from headrace_broker.retry.dead_letters import DeadLetters, is_retry_topic
from headrace_broker.retry.processor import SendBackProcessor
from headrace_protocol.message import DELAY

if TYPE_CHECKING:
    from headrace_broker.core import Core


def build(core: Core) -> Feature:
    """See ``Feature``."""
    topics, _, groups, _ = core.tables
    host_log = core.serving.server.host_log
    dead_letters = DeadLetters(topics, groups, core.clients.locks, host_log)
    send_backs = SendBackProcessor(
        core.store,
        core.messages.writer,
        dead_letters,
        partial(core.messages.delays.apply_for, DELAY),
        core.messages.sends,
        core.statistics.sent_back,
    )
    return Feature(
        demands=(Demand("retries", matches_topic=is_retry_topic, apply=dead_letters.serve),),
        processors=(send_backs,),
        runtime_info=(dead_letters.runtime_info,),
    )
