"""The fields of requests that name a logic queue: one row per code, by their names on the wire.

Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_offsets.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_broker.peers.peers import Ask
from headrace_protocol.codes import RequestCode
from headrace_protocol.rights.signature import ACCESS_KEY, SIGNATURE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_protocol.bodies import SubscriptionData
    from headrace_protocol.serving import Request
    from headrace_protocol.statictopic.mapping import MappingItem


class Row(NamedTuple):
    """The fields of a request and of its answer that depend on the queue.

    queue, offset, broker, default_topic: names of the request's fields; "" without such a field.
    answers: names of the answer's offsets.
    """

    queue: str = "queueId"
    offset: str = ""
    answers: tuple[str, ...] = ()
    broker: str = "bname"
    default_topic: str = ""

    @property
    def is_send(self) -> bool:
        """True if it stores messages, and must keep its order."""
        return bool(self.default_topic)


_SEND = Row(default_topic="defaultTopic")
_SEND_V2 = Row("e", broker="n", default_topic="c")
_PULL = Row(offset="queueOffset", answers=("nextBeginOffset", "minOffset", "maxOffset"))
_OFFSET = Row(answers=("offset",))

ROWS: Final[Mapping[int, Row]] = {
    RequestCode.SEND_MESSAGE: _SEND,
    RequestCode.SEND_MESSAGE_V2: _SEND_V2,
    RequestCode.SEND_BATCH_MESSAGE: _SEND_V2,
    RequestCode.BULK_SEND: _SEND,
    RequestCode.PULL_MESSAGE: _PULL,
    RequestCode.LITE_PULL_MESSAGE: _PULL,
    RequestCode.BULK_PULL: _PULL,
    RequestCode.QUERY_CONSUMER_OFFSET: _OFFSET,
    RequestCode.UPDATE_CONSUMER_OFFSET: Row(offset="commitOffset"),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _OFFSET,
    RequestCode.GET_MAX_OFFSET: _OFFSET,
    RequestCode.GET_MIN_OFFSET: _OFFSET,
    RequestCode.GET_EARLIEST_MSG_STORETIME: Row(),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: Row(),
    RequestCode.QUERY_CONSUME_QUEUE: Row(offset="index"),
}

# What a client signs with: a request to another broker is this broker's own.
_SIGNED: Final = frozenset((ACCESS_KEY, SIGNATURE, "SecurityToken"))
FORWARDED: Final = "forwarded"
# In the answers to passed requests: the broker to ask the next time.
LEADER: Final = "leader"


def fields_of(request: Request) -> dict[str, str]:
    """The fields of a client's request, to ask another broker on its behalf.

    That broker does not judge the client, since this one has.
    """
    fields = request.command.ext()
    return {name: fields[name] for name in fields if name not in _SIGNED}


# What a group wants, by its heartbeats: group, topic, version. Raises RequestError.
Subscription = Callable[[str, str, int], "SubscriptionData"]
_HAS_SUBSCRIPTION: Final = 0x4


def add_subscription(fields: dict[str, str], find: Subscription) -> None:
    """Complete the fields of a pull: another broker may not know the group's subscriptions.

    Raises RequestError if this broker does not know them either.
    """
    flags = int(fields["sysFlag"])
    # A BULK_PULL always has its subscription, and no version of one.
    if not flags & _HAS_SUBSCRIPTION and "subVersion" in fields:
        version = int(fields["subVersion"])
        wanted = find(fields["consumerGroup"], fields["topic"], version)
        fields["subscription"] = wanted.sub_string
        fields["expressionType"] = wanted.expression_type
        fields["sysFlag"] = str(flags | _HAS_SUBSCRIPTION)


def item_ask(
    code: int, fields: Mapping[str, str], item: MappingItem, offset: int | None = None
) -> Ask:
    """The request to an item's broker, about its physical queue. offset: a physical one."""
    row = ROWS[code]
    asked = {**fields, row.queue: str(item.queue_id), row.broker: item.bname, "lo": "false"}
    if offset is not None:
        asked[row.offset] = str(offset)
    return Ask(item.bname, code, asked)
