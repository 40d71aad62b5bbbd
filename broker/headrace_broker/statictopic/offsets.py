"""Offsets of logic queues: coroutines that ask the physical queues of a chain.

Source: docs/static-topics.md "Offsets"; tests/broker/statictopic/test_static_offsets.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.statictopic.answer import Answer
from headrace_broker.statictopic.rows import item_ask
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import NEXT_ITEM
from headrace_protocol.statictopic.offsets import decided, extent_of, offset_delta

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from headrace_broker.peers.peers import Ask
    from headrace_protocol.statictopic.mapping import Chain, MappingItem

    # Asks the broker of an item.
    AskBroker = Callable[[Ask], Awaitable[Answer]]

_NO_OFFSET: Final = Answer(ResponseCode.SUCCESS, fields={"offset": -1})
_NO_TIME: Final = Answer(ResponseCode.SUCCESS, fields={"timestamp": -1})


def _at(item: MappingItem, answer: Answer) -> int:
    """The offset of an answer, as a static one."""
    return answer.number("offset") + offset_delta(item)


def offset_answer(static: int) -> Answer:
    """The answer with an offset."""
    return Answer(ResponseCode.SUCCESS, fields={"offset": static})


async def query_offset(ask: AskBroker, chain: Chain, fields: Mapping[str, str]) -> Answer:
    """QUERY_CONSUMER_OFFSET: the leader's first, then that of the newest item that has one."""
    answer = await committed_offset(ask, chain, fields)
    if answer.code != ResponseCode.QUERY_NOT_FOUND:
        return answer
    return await first_offset(ask, chain, fields)


async def committed_offset(ask: AskBroker, chain: Chain, fields: Mapping[str, str]) -> Answer:
    """The offset that a group has committed; QUERY_NOT_FOUND if there is none."""
    for index, item in reversed([*enumerate(decided(chain))]):
        code = RequestCode.QUERY_CONSUMER_OFFSET
        answer = await ask(item_ask(code, {**fields, "setZeroIfNotFound": "false"}, item))
        if answer.code == ResponseCode.SUCCESS:
            return offset_answer(_at(item, answer))
        if answer.code != ResponseCode.QUERY_NOT_FOUND:
            return _away(chain, index, answer)
    return _NOT_FOUND


async def first_offset(ask: AskBroker, chain: Chain, fields: Mapping[str, str]) -> Answer:
    """The start of a group without a committed offset; QUERY_NOT_FOUND if it chooses one."""
    items = decided(chain)
    if not items or items[0].logic_offset > 0:
        return _NOT_FOUND
    # It depends on the earliest messages.
    return await ask(item_ask(RequestCode.QUERY_CONSUMER_OFFSET, fields, items[0]))


def away(broker: str, start: int, stop: int, reason: object) -> Answer:
    """The answer to a request that needs an item whose broker does not answer.

    start, stop: static offsets; stop is negative if the item has no end yet.
    """
    to = f"to {stop}" if stop >= 0 else "on"
    return Answer(
        ResponseCode.SYSTEM_ERROR,
        f"the offsets from {start} {to} are on broker {broker}: {reason}",
        {NEXT_ITEM: stop} if stop >= 0 else {},
    )


def _away(chain: Chain, index: int, answer: Answer) -> Answer:
    stop = chain[index + 1].logic_offset if index + 1 < len(chain) else -1
    return away(chain[index].bname, chain[index].logic_offset, stop, answer.remark)


_NOT_FOUND: Final = Answer(
    ResponseCode.QUERY_NOT_FOUND, "Not found: the queue has no offsets yet, choose where to begin"
)


async def max_offset(ask: AskBroker, chain: Chain, fields: Mapping[str, str]) -> Answer:
    """GET_MAX_OFFSET: the end of the newest item with static offsets."""
    code = RequestCode.GET_MAX_OFFSET
    items = decided(chain)
    if not items:
        return _no_offsets(chain)
    answer = await ask(item_ask(code, fields, items[-1]))
    if answer.code != ResponseCode.SUCCESS:
        return answer
    return offset_answer(_end(chain, len(items) - 1, answer))


def _end(chain: Chain, index: int, answer: Answer) -> int:
    """The static end of an item. answer: the end of its physical queue."""
    return extent_of(chain, index, 0, answer.number("offset")).end


def _no_offsets(chain: Chain) -> Answer:
    item = chain[-1]
    return Answer(
        ResponseCode.SYSTEM_ERROR,
        f"the static offsets of physical queue {item.queue_id} on broker {item.bname} are "
        "undecided: wait until the change of the topic ends, or run `headrace topic repair`",
    )


async def min_offset(ask: AskBroker, chain: Chain, fields: Mapping[str, str]) -> Answer:
    """GET_MIN_OFFSET: the beginning of the earliest item; -1 while that is undecided.

    Its first offset, which may have expired, while its broker is away.
    """
    first = chain[0]
    if first.logic_offset < 0:
        return _NO_OFFSET
    answer = await ask(item_ask(RequestCode.GET_MIN_OFFSET, fields, first))
    # Not more than the true one, so a reader that begins there misses nothing.
    return offset_answer(
        _at(first, answer) if answer.code == ResponseCode.SUCCESS else first.logic_offset
    )


async def earliest_time(ask: AskBroker, chain: Chain, fields: Mapping[str, str]) -> Answer:
    """GET_EARLIEST_MSG_STORETIME: of the earliest item that has messages."""
    for item in chain:
        answer = await ask(item_ask(RequestCode.GET_EARLIEST_MSG_STORETIME, fields, item))
        if answer.code != ResponseCode.SUCCESS or answer.number("timestamp") >= 0:
            return answer
    return _NO_TIME


async def search_offset(ask: AskBroker, chain: Chain, fields: Mapping[str, str]) -> Answer:
    """SEARCH_OFFSET_BY_TIMESTAMP, through the items, up to the first that has the offset."""
    if (fields.get("boundaryType") or "LOWER").upper() == "UPPER":
        return await _search_upper(ask, chain, fields)
    return await _search_lower(ask, chain, fields)


async def _search_lower(ask: AskBroker, chain: Chain, fields: Mapping[str, str]) -> Answer:
    code, items = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, decided(chain)
    timestamp = int(fields.get("timestamp") or 0)
    for index, item in enumerate(items):
        is_last = index == len(items) - 1
        if 0 <= item.time_of_end < timestamp and not is_last:
            continue
        answer = await ask(item_ask(code, fields, item))
        if answer.code != ResponseCode.SUCCESS:
            return _away(chain, index, answer)
        found = _at(item, answer)
        if is_last:
            return offset_answer(found)
        end = await ask(item_ask(RequestCode.GET_MAX_OFFSET, fields, item))
        if end.code != ResponseCode.SUCCESS:
            return _away(chain, index, end)
        if found < _end(chain, index, end):
            return offset_answer(found)
    return _no_offsets(chain)


async def _search_upper(ask: AskBroker, chain: Chain, fields: Mapping[str, str]) -> Answer:
    """The last message at or before the time: the one before the first message after it."""
    code, items = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, decided(chain)
    after = {"timestamp": str(int(fields.get("timestamp") or 0) + 1), "boundaryType": "LOWER"}
    for item in reversed(items):
        answer = await ask(item_ask(code, {**fields, **after}, item))
        if answer.code != ResponseCode.SUCCESS:
            return answer
        lowest = await ask(item_ask(RequestCode.GET_MIN_OFFSET, fields, item))
        if lowest.code != ResponseCode.SUCCESS:
            return lowest
        if answer.number("offset") > lowest.number("offset"):
            return offset_answer(_at(item, answer) - 1)
    return offset_answer(0)
