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

from typing import TYPE_CHECKING

from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic.rows import item_ask
from headrace_protocol.bodies import GroupList
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.fastjson import MalformedJson

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_broker.statictopic.answer import Answer
    from headrace_broker.statictopic.work import Workers
    from headrace_protocol.statictopic.mapping import MappingItem


class LeftOffsets:
    """The groups of the brokers of several items, and their offsets there.

    names: of the groups. offsets: logic queue, group and its physical offset. problem: the answer
    to a request that needs all of them, if a broker does not tell.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.offsets: list[tuple[int, str, int]] = []
        self.problem: Exception | None = None


async def find_left(workers: Workers, topic: str, items: Mapping[int, MappingItem]) -> LeftOffsets:
    """Ask the brokers of items, by logic queue, at the same time."""
    left, fields = LeftOffsets(), {"topic": topic, "lo": "false"}
    brokers = sorted({item.bname for item in items.values()})
    answers = await workers.ask_many(
        [Ask(broker, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, fields) for broker in brokers]
    )
    pairs: list[tuple[int, str]] = []
    for broker, answer in zip(brokers, answers, strict=True):
        try:
            groups = _groups(topic, broker, answer)
        except (RequestError, MalformedJson) as error:
            left.problem = error
            continue
        left.names.update(groups)
        queues = [queue for queue, item in items.items() if item.bname == broker]
        pairs += [(queue, group) for group in groups for queue in queues]
    asks = [_ask_offset(topic, group, items[queue]) for queue, group in pairs]
    for (queue, group), answer in zip(pairs, await workers.ask_many(asks), strict=True):
        try:
            if answer.code == ResponseCode.SUCCESS:
                left.offsets.append((queue, group, answer.number("offset")))
            elif answer.code != ResponseCode.QUERY_NOT_FOUND:
                raise _unknown(topic, items[queue].bname, answer)
        except RequestError as error:
            left.problem = error
    return left


def _groups(topic: str, broker: str, answer: Answer) -> list[str]:
    if answer.code != ResponseCode.SUCCESS:
        raise _unknown(topic, broker, answer)
    return GroupList.decode(b"".join(answer.body)).group_list


def _ask_offset(topic: str, group: str, item: MappingItem) -> Ask:
    code = RequestCode.QUERY_CONSUMER_OFFSET
    named = {"consumerGroup": group, "topic": topic, "setZeroIfNotFound": "false"}
    return item_ask(code, named, item)


def _unknown(topic: str, broker: str, answer: Answer) -> RequestError:
    return RequestError(
        ResponseCode.SYSTEM_ERROR,
        f"broker {broker} does not tell the offsets of groups in its empty queues of the static "
        f"topic {topic}: {answer.remark}; once it does, run `headrace topic repair {topic}`",
    )
