"""Producer, consumers and admin client for headrace and Apache RocketMQ.

Names are imported on first use, so importing this package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not lazy: the submodule of the same name would shadow the function.
from headrace.embedded import embedded as embedded

if TYPE_CHECKING:
    from headrace import blocking as blocking
    from headrace import errors as errors
    from headrace.admin.client import Admin as Admin
    from headrace.consumer.pull import PullConsumer as PullConsumer
    from headrace.consumer.push import Consumer as Consumer
    from headrace.consumer.simple import SimpleConsumer as SimpleConsumer
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.messages import Message as Message
    from headrace.messages import SendResult as SendResult
    from headrace.popped import PoppedMessage as PoppedMessage
    from headrace.producer.producer import Producer as Producer
    from headrace.received import MessageBatch as MessageBatch
    from headrace.received import ReceivedMessage as ReceivedMessage
    from headrace.rights import Rule as Rule
    from headrace.table.client import Change as Change
    from headrace.table.client import Table as Table
    from headrace.typed import Topic as Topic
    from headrace_protocol.bodies import MessageQueue as MessageQueue

_HOMES = {
    "Admin": "headrace.admin.client",
    "Change": "headrace.table.client",
    "Consumer": "headrace.consumer.push",
    "HeadraceError": "headrace.errors",
    "Message": "headrace.messages",
    "MessageBatch": "headrace.received",
    "MessageQueue": "headrace_protocol.bodies",
    "Producer": "headrace.producer.producer",
    "PullConsumer": "headrace.consumer.pull",
    "ReceivedMessage": "headrace.received",
    "Rule": "headrace.rights",
    "PoppedMessage": "headrace.popped",
    "SendResult": "headrace.messages",
    "SimpleConsumer": "headrace.consumer.simple",
    "Table": "headrace.table.client",
    "Topic": "headrace.typed",
}
_MODULES = ("blocking", "errors")

__all__ = ["embedded", *_HOMES, *_MODULES]  # noqa: PLE0604 - all of them are strings


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"headrace.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
