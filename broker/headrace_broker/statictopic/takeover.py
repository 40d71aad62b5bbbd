"""The groups of a leader whose queue moves on: where they continue at the new leader.

Two items must not have one logicOffset, so an empty leader is dropped when its queue moves on
without a gap. Its broker still has the offsets of groups there, and may be the only one that has
any: a group without one begins anew, by default at the end. So the new leader asks for them before
it opens. The old one is closed, so they don't change any more.

A group at the end of an old leader that stays in the chain is at the start of the new one. The new
leader asks for these, too, so that they need nobody else from then on, and for all others, so that
it keeps its messages for them until they arrive; it opens without an answer.
Source: docs/static-topics.md "What a remap costs";
tests/broker/statictopic/test_static_takeover.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic.answer import MalformedField
from headrace_broker.statictopic.rows import ROWS, physical_fields
from headrace_protocol.bodies import GroupList
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.fastjson import MalformedJson

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace_broker.statictopic.answer import Answer
    from headrace_broker.statictopic.work import Workers
    from headrace_protocol.serving import Request
    from headrace_protocol.statictopic.mapping import MappingItem

    Then = Callable[[Exception | None], None]


class LeftOffsets:
    """Finds the groups of the brokers of several items, and their offsets there.

    names: of the groups. offsets: logic queue, group and its physical offset, in the order of the
    answers.
    """

    def __init__(
        self, workers: Workers, request: Request, topic: str, items: Mapping[int, MappingItem]
    ) -> None:
        """request: on whose behalf the brokers are asked. items: by logic queue."""
        self.names: set[str] = set()
        self.offsets: list[tuple[int, str, int]] = []
        self._workers = workers
        self._request = request
        self._topic = topic
        self._items = items
        self._asked_count = 0
        self._problem: Exception | None = None
        self._then: Then

    def find(self, then: Then) -> None:
        """Ask the brokers of the items; call back at the end, or with why one did not answer."""
        self._then = then
        code, fields = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": self._topic, "lo": "false"}
        brokers = sorted({item.bname for item in self._items.values()})
        self._ask([(Ask(broker, code, fields), partial(self._named, broker)) for broker in brokers])

    def _named(self, broker: str, answer: Answer) -> None:
        """A broker has named the groups of the topic: ask for their offsets in its items."""
        if answer.code != ResponseCode.SUCCESS:
            self._fail(broker, answer)
            return
        code = RequestCode.QUERY_CONSUMER_OFFSET
        asks: list[tuple[Ask, Callable[[Answer], None]]] = []
        groups = GroupList.decode(b"".join(answer.body)).group_list
        self.names.update(groups)
        for group in groups:
            named = {"consumerGroup": group, "topic": self._topic, "setZeroIfNotFound": "false"}
            for queue, item in self._items.items():
                if item.bname == broker:
                    fields = physical_fields(ROWS[code], named, broker, item.queue_id)
                    asks.append((Ask(broker, code, fields), partial(self._found, queue, group)))
        self._ask(asks)

    def _found(self, queue: int, group: str, answer: Answer) -> None:
        if answer.code == ResponseCode.SUCCESS:
            self.offsets.append((queue, group, answer.number("offset")))
        elif answer.code != ResponseCode.QUERY_NOT_FOUND:
            self._fail(self._items[queue].bname, answer)

    def _ask(self, asks: Sequence[tuple[Ask, Callable[[Answer], None]]]) -> None:
        self._asked_count += len(asks)
        for ask, then in asks:
            self._workers.ask(ask, self._request, partial(self._answered, then))

    def _answered(self, then: Callable[[Answer], None], answer: Answer) -> None:
        try:
            then(answer)
        except (MalformedJson, MalformedField) as error:
            self._problem = error
        self._asked_count -= 1
        if not self._asked_count:
            self._then(self._problem)

    def _fail(self, broker: str, answer: Answer) -> None:
        self._problem = RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"broker {broker} does not tell the offsets of groups in its empty queues of the "
            f"static topic {self._topic}: {answer.remark}; once it does, run `headrace topic "
            f"repair {self._topic}`",
        )
