"""Request-reply as a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.feature import Feature
from headrace_broker.reply.processor import ReplyProcessor

if TYPE_CHECKING:
    from headrace_broker.core import Core


def build(core: Core) -> Feature:
    """See ``Feature``."""
    replies = ReplyProcessor(
        core.config,
        core.store,
        core.messages.sends,
        core.clients.producers,
        core.clients.requests,
        core.serving.server.host_log,
    )
    return Feature(
        processors=(replies,),
        collectors=core.collectors(lambda: replies.collect),
    )
