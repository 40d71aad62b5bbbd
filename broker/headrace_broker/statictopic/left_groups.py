"""Groups whose progress is in an item that clean-up drops: they continue at the next item.

Their offset goes with the item. A group without one begins anew, by default at the end, and would
skip what it has not read.
Source: docs/static-topics.md "Clean-up"; tests/broker/test_static_cleanup.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace_broker.statictopic.rows import ROWS, physical_fields
from headrace_protocol.bodies import GroupList
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.fastjson import MalformedJson

if TYPE_CHECKING:
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.statictopic.remote import Answer
    from headrace_protocol.statictopic.mapping import MappingItem

# Asks another broker: its name, the request, and its fields. None without an answer.
AskOther = Callable[[str, RequestCode, Mapping[str, str]], Awaitable["Answer | None"]]


class _Unknown(Exception):
    """A broker does not answer."""


class LeftGroups:
    """Moves groups from the first item of a chain to the next."""

    def __init__(self, broker_name: str, offsets: ConsumerOffsets) -> None:
        self._broker_name = broker_name
        self._offsets = offsets

    async def move(self, topic: str, items: Sequence[MappingItem], ask: AskOther) -> bool:
        """Move the groups whose newest offset is in the first of the items.

        items: decided ones. Returns False if a broker that must be asked does not answer.
        """
        first, following, *_ = items
        try:
            for group in sorted(await self._groups(topic, first, ask)):
                if await self._newest(group, topic, items, ask) is first:
                    await self._commit(group, topic, following, ask)
        except _Unknown:
            return False
        return True

    async def _groups(self, topic: str, item: MappingItem, ask: AskOther) -> Sequence[str]:
        if item.bname == self._broker_name:
            return [*self._offsets.groups_of(topic)]
        code = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO
        answer = await ask(item.bname, code, {"topic": topic, "lo": "false"})
        if answer is None or answer.code != ResponseCode.SUCCESS:
            raise _Unknown
        try:
            return GroupList.decode(b"".join(answer.body)).group_list
        except MalformedJson as error:
            raise _Unknown from error

    async def _newest(
        self, group: str, topic: str, items: Sequence[MappingItem], ask: AskOther
    ) -> MappingItem | None:
        """The newest item that has an offset of a group."""
        for item in reversed(items):
            if item.bname == self._broker_name:
                if self._offsets.query(group, topic, item.queue_id) is not None:
                    return item
                continue
            answer = await self._ask_offset(
                RequestCode.QUERY_CONSUMER_OFFSET, group, topic, item, ask
            )
            if answer.code == ResponseCode.SUCCESS:
                return item
            if answer.code != ResponseCode.QUERY_NOT_FOUND:
                raise _Unknown
        return None

    async def _commit(self, group: str, topic: str, item: MappingItem, ask: AskOther) -> None:
        if item.bname == self._broker_name:
            self._offsets.commit(group, topic, item.queue_id, item.start_offset)
            return
        code = RequestCode.UPDATE_CONSUMER_OFFSET
        answer = await self._ask_offset(code, group, topic, item, ask, item.start_offset)
        if answer.code != ResponseCode.SUCCESS:
            raise _Unknown

    async def _ask_offset(
        self,
        code: RequestCode,
        group: str,
        topic: str,
        item: MappingItem,
        ask: AskOther,
        offset: int | None = None,
    ) -> Answer:
        fields = {"consumerGroup": group, "topic": topic, "setZeroIfNotFound": "false"}
        fields = physical_fields(ROWS[code], fields, item.bname, item.queue_id, offset)
        answer = await ask(item.bname, code, fields)
        if answer is None:
            raise _Unknown
        return answer
