"""Messages that waited for this broker, to the leader of their queue at the moment they are due.

A message waits with its physical queue, as Apache's broker has it. No physical queue is used twice,
so the chains give its logic queue.
Source: docs/static-topics.md "Delayed messages"; tests/broker/statictopic/test_static_deliver.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from headrace_broker.inner.writer import DeliverLater
from headrace_broker.peers.callers import DELIVERIES
from headrace_broker.peers.peers import Ask
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.message import TRANSACTION_MASK

if TYPE_CHECKING:
    from headrace_broker.inner.writer import Deliver, InnerMessage
    from headrace_broker.peers.peers import Peers
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_broker.statictopic.own_queues import OwnQueues

_STORED: Final = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    }
)
# A message with these properties was not sent as it should be read, however often it is sent.
_REFUSED: Final = frozenset({ResponseCode.MESSAGE_ILLEGAL, ResponseCode.NO_PERMISSION})
# What made the message wait must not make it wait again at the leader.
_WAITED: Final = (b"DELAY\x01", b"TIMER_", b"TRAN_MSG\x01", b"REAL_TOPIC\x01", b"REAL_QID\x01")
_SENDER: Final = "CID_HEADRACE_STATIC"


class Deliveries:
    """Finds the leaders of due messages, and writes to those on other brokers."""

    def __init__(self, leaders: Leaders, own_queues: OwnQueues, peers: Peers) -> None:
        self._leaders = leaders
        self._own_queues = own_queues
        self._peers = peers

    def find_target(self, topic: str, queue_id: int) -> int | Deliver:
        """The target of a message for a queue of this broker; see ``FindTarget``."""
        mapping = self._leaders.mappings.get(topic)
        logic_queue = self._own_queues.logic_queue(mapping, queue_id) if mapping else None
        if logic_queue is None:
            return queue_id
        leader = self._leaders.mappings.leads(topic, logic_queue)
        return partial(self._deliver, topic, logic_queue) if leader is None else leader

    async def _deliver(self, topic: str, logic_queue: int, message: InnerMessage) -> str:
        """Write a message to the leader; see ``Deliver``."""
        leader = self._leaders.leader_of(topic, logic_queue)
        if leader is None or leader == self._leaders.mappings.broker_name:
            raise DeliverLater
        fields = _fields(leader, logic_queue, message)
        ask = Ask(leader, RequestCode.SEND_MESSAGE, fields, message.body)
        try:
            answer = (await self._peers.ask(DELIVERIES, ask)).command
        except HeadraceError as error:
            raise DeliverLater from error
        if answer.code not in _STORED | _REFUSED:
            raise DeliverLater
        return "" if answer.code in _STORED else f"broker {leader}: {answer.remark}"


def _fields(leader: str, logic_queue: int, message: InnerMessage) -> dict[str, str]:
    """The fields of SEND_MESSAGE. A topic that the leader lacks is not created."""
    items = message.properties.split(b"\x02")
    properties = b"\x02".join(item for item in items if not item.startswith(_WAITED))
    return {
        "producerGroup": _SENDER,
        "topic": message.topic,
        "defaultTopic": "",
        "defaultTopicQueueNums": "1",
        "queueId": str(logic_queue),
        "sysFlag": str(message.sys_flag & ~TRANSACTION_MASK),
        "bornTimestamp": str(message.born_timestamp),
        "flag": str(message.flag),
        "properties": properties.decode(errors="replace"),
        "reconsumeTimes": str(message.reconsume_times),
        "unitMode": "false",
        "batch": "false",
        "bname": leader,
    }
